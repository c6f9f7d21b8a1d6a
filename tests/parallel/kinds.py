"""A table of docs/strategy.md: which kinds of modules and trainings each strategy trains as one process does.

python -m tests.parallel.kinds            # prints the table, on two processes of this machine
python -m tests.parallel.kinds --write    # writes it into docs/strategy.md
python -m tests.parallel.kinds --write --only AdamW,momentum    # renews only rows with one of these words in the kind

A cell says "right", "refused" or what else happens. A kind is a module and how it is trained. A new one is an entry in
KINDS: a graph, which says what blocks the module has and how it calls them (tests/support/graphs.py), and its ways, one
name for each training step (players.py there). `Call(op, block, sources)` is a step of a forward: it computes a value
by the operation `op` from earlier values, of which -1 is the last, and by the block of this number.
tests/parallel/test_graphs.py trains all kinds, too.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.testing import error_ratio
from tests.support.graphs import Call, Graph
from tests.support.players import play, play_alone

OURS = ("naive", "flat", "overlapped", "bucketed", "copy_engine", "zero1", "copy_engine_zero1", "fsdp")
PEERS = ("torch_ddp", "torch_fsdp2")
PAGE = Path(__file__).parents[2] / "docs" / "strategy.md"
BEGIN, END = "<!-- kinds -->\n", "<!-- end of kinds -->\n"
RIGHT, REFUSED, WRONG, ERROR, HANGS = "right", "refused", "**wrong**", "error", "hangs"
RUN_S, PEERS_RUN_S = 120, 10  # deadlines in seconds; short for peers, some of which hang
REFUSALS = (  # the beginnings of our strategies' messages that refuse a kind
    "a backward was not followed by finish_gradient_synchronization()",
    "a second gradient of one parameter in a backward",
    "a parameter of shape",
    "backward(create_graph=True) makes gradients",
    "on rank 0 the parameter",
    "one of parameters() was frozen",
    "no rank had used a parameter of shape",
    "ranks have not made the same forwards",
    "the module returned nothing that tells when a backward begins",
    "blocks.0.up.weight is on the meta device",
    "first.weight is on the meta device",
    "blocks.0.table makes sparse gradients",
    "blocks.0.norm normalizes by each rank's own batch",
)
TWO_STEPS = ("step", "step")
Kind = tuple[Graph, Sequence[str]]


def chain(*blocks: int, op: str = "call", returns: str = "tensor") -> tuple[Call, ...]:
    """A program that calls these blocks in turn, each on the result of the last."""
    return tuple(Call(op, block, (-1,), returns) for block in blocks)


def make_kind(program: tuple[Call, ...], *blocks: str, ways: Sequence[str] = TWO_STEPS, **options: object) -> Kind:
    """The kind of a module with a single program, by default of three MLP blocks and trained for two steps.

    options  other fields of `Graph`
    """
    return Graph((program,), blocks or ("mlp",) * 3, **options), ways  # type: ignore[arg-type]


PLAIN = chain(0, 1, 2)
U_NET = (*PLAIN, Call("add", 0, (2, -1)), Call("call", 3), Call("add", 0, (1, -1)), Call("call", 4))
OTHER_ORDERS = Graph((PLAIN, chain(2, 0, 1), chain(1, 2, 0)))
KINDS: dict[str, Kind] = {
    "blocks of a list in order": make_kind(PLAIN),
    "a list in reverse": make_kind(PLAIN, holder="reversed"),
    "two zipped lists": make_kind(chain(0, 1, 2, 3), *("mlp",) * 4, holder="zipped"),
    "a list of lists": make_kind(chain(0, 1, 2, 3), *("mlp",) * 4, holder="nested"),
    "a dictionary of blocks": make_kind(PLAIN, holder="dict"),
    "a Sequential of blocks": make_kind(PLAIN, holder="sequential"),
    "blocks as attributes": make_kind(PLAIN, holder="attributes"),
    "nothing but blocks": make_kind(PLAIN, outside=False),
    "a U-Net": make_kind(U_NET, *("mlp",) * 5),
    "an encoder and a decoder": make_kind(
        (*chain(0, 1), Call("call", 2, (0,)), Call("add", 0, (2, 3)), Call("call", 3)), *("mlp",) * 4
    ),
    "blocks in another order than the list's": make_kind(chain(2, 0, 1)),
    "another order in each step": (OTHER_ORDERS, ["step"] * 6),
    "heads that exit early": (Graph((chain(0, 1, 2), chain(0), chain(0, 1))), ["step"] * 6),
    "two branches of one input": make_kind(
        (Call("call", 0), Call("call", 1, (0,)), Call("add", 0, (1, 2)), Call("call", 2))
    ),
    "a block that runs twice in a row": make_kind((Call("twice", 0), Call("twice", 1))),
    "blocks that run in two rounds": make_kind(chain(0, 1, 2, 0, 1, 2)),
    "a single block": make_kind(chain(0), "mlp"),
    "a block that nobody calls": make_kind(chain(0, 2)),
    "a block that rank 0 alone calls": make_kind((Call("call", 0), Call("own", 1), Call("call", 2))),
    "two blocks that rank 0 alone calls": make_kind(
        (Call("call", 0), Call("own", 1), Call("own", 2), Call("call", 3)), *("mlp",) * 4
    ),
    "blocks of which the last is rank 0's alone": make_kind((Call("call", 0), Call("call", 1), Call("own", 2))),
    "two blocks that ranks call in other orders": make_kind((Call("apart", 0), Call("call", 2))),
    "two blocks of other sizes that ranks call in other orders": make_kind(
        (Call("call", 0), Call("apart", 1), Call("call", 3)), "mlp", "mlp", "deep", "mlp"
    ),
    "blocks that ranks call in one order, and then in others": (
        Graph((PLAIN, PLAIN, PLAIN, PLAIN, (Call("apart", 0), Call("call", 2)))),
        ["step"] * 5,
    ),
    "a block's method other than forward": make_kind((Call("call", 0), Call("method", 1), Call("call", 2))),
    "a forward that uses a block again on one rank alone": (
        Graph(((Call("own", 1), Call("call", 2), Call("own", 1)), chain(0, 2)), optimizer="sgd"),
        ["step", "look"],
    ),
    "a weight of a block read from outside": make_kind((Call("read", 0), *PLAIN)),
    "a weight of a block read after it": make_kind((*PLAIN, Call("read", 2), Call("read", 0))),
    # They return nothing: the result replaces the input in its list.
    "blocks that take lists of dictionaries": make_kind(chain(0, 1, 2, returns="nothing")),
    "blocks that return dictionaries": make_kind(chain(0, 1, 2, returns="dict")),
    "blocks that return pairs": make_kind(chain(0, 1, 2, returns="pair")),
    "blocks that return objects": make_kind(chain(0, 1, 2, returns="object")),
    "blocks that return objects within objects": make_kind(chain(0, 1, 2, returns="deep-object")),
    "blocks that store a term of the loss": make_kind(chain(0, 1, 2, returns="stored")),
    "a module that returns a pair": make_kind(PLAIN, returns="pair"),
    "a module that returns a dictionary": make_kind(PLAIN, returns="dict"),
    "a module that returns an object": make_kind(PLAIN, returns="object"),
    "a module that returns objects within objects": make_kind(PLAIN, returns="deep-object"),
    "a block under no_grad": make_kind((Call("no_grad", 0), Call("call", 1), Call("call", 0))),
    "a detached input of a block": make_kind((Call("call", 0), Call("detach", 1), Call("call", 2))),
    "tied weights": make_kind(PLAIN, tied=True),
    "frozen blocks": make_kind(PLAIN, "frozen", "mlp", "frozen"),
    "the first blocks frozen": make_kind(PLAIN, "frozen", "frozen", "mlp", outside=False),
    "frozen weights within blocks": make_kind(PLAIN, *("half",) * 3),
    "LSTMs": make_kind(PLAIN, *("lstm",) * 3),
    "complex parameters": make_kind(PLAIN, "complex", "mlp", "complex"),
    "float32 and float64 in one block": make_kind(PLAIN, *("mixed",) * 3),
    "weight norm as a parametrization": make_kind(PLAIN, *("normed",) * 3),
    "blocks within blocks": make_kind(PLAIN, *("deep",) * 3),
    "a parameter that nobody uses": make_kind(PLAIN, *("spare",) * 3),
    "a parameter that nobody uses, AdamW with decay": make_kind(PLAIN, *("spare",) * 3, optimizer="adamw"),
    "a block that nobody calls, AdamW with decay": make_kind(chain(0, 2), optimizer="adamw"),
    "a block that not every step calls, momentum": (
        Graph((PLAIN, chain(0, 2)), optimizer="momentum"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, momentum": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="momentum"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, momentum and decay": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="grouped"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, dampened momentum": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="dampened"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, AdamW": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="adamw"),
        ["step"] * 4,
    ),
    "parameters that read no input": make_kind(PLAIN, *("branch",) * 3),
    "batch norm that is trained later": make_kind(PLAIN, *("batch-norm",) * 3, prepared="eval", ways=["train_all"]),
    "batch norm": make_kind(PLAIN, *("batch-norm",) * 3),
    "sparse gradients": make_kind(PLAIN, "sparse", "mlp", "mlp"),
    "a module on the meta device": make_kind(PLAIN, prepared="meta"),
    "checkpoints of blocks": make_kind(chain(0, 1, 2, op="checkpoint")),
    "checkpoints of blocks, reentrant": make_kind(chain(0, 1, 2, op="reentrant")),
    "checkpoints of a block that runs twice": make_kind(chain(0, 1, 0, op="checkpoint")),
    "checkpoints of a block that runs twice, reentrant": make_kind(chain(0, 1, 0, op="reentrant")),
    "a checkpoint of two blocks": make_kind((Call("segment", 0), Call("segment", 2)), *("mlp",) * 4),
    "a checkpoint of the whole": make_kind(PLAIN, ways=["checkpoint_all", "step"]),
    "a checkpoint of the whole, reentrant": make_kind(PLAIN, ways=["checkpoint_all_reentrant", "step"]),
    "a checkpoint of blocks in a checkpoint": make_kind(
        chain(0, 1, 2, op="checkpoint"), ways=["checkpoint_all", "step"]
    ),
    "compiled blocks": make_kind(PLAIN, prepared="compiled"),
    "blocks compiled after wrapping": make_kind(PLAIN, ways=["compile_blocks"]),
    "torch.compile of the wrapper": make_kind(PLAIN, ways=["compile_the_wrapper", "step"]),
    "momentum": make_kind(PLAIN, optimizer="momentum", ways=["step"] * 3),
    "AdamW": make_kind(PLAIN, optimizer="adamw", ways=["step"] * 3),
    "accumulation under no_sync()": make_kind(PLAIN, ways=["accumulate"] * 2),
    "two forwards and one backward": make_kind(PLAIN, ways=["two_forwards"] * 2),
    "two forwards and two backwards": make_kind(PLAIN, ways=["two_backwards"] * 2),
    "two forwards and two backwards in reverse": make_kind(PLAIN, ways=["two_backwards_in_reverse"] * 2),
    "two forwards and two backwards of other blocks": (OTHER_ORDERS, ["two_backwards"] * 3),
    "a backward, and another under no_sync()": make_kind(PLAIN, ways=["sync_then_not"] * 2),
    "two backwards of one loss (retain_graph)": make_kind(PLAIN, ways=["retain"] * 2),
    "a loss in chunks": make_kind(PLAIN, ways=["chunks"] * 2),
    "evaluation between a forward and its backward": make_kind(PLAIN, ways=["evaluate_between"] * 2),
    "inference mode between a forward and its backward": make_kind(PLAIN, ways=["infer_between"] * 2),
    "evaluation between a backward and its finish": make_kind(PLAIN, ways=["forward_before_finish"]),
    "a forward that no backward follows": make_kind(PLAIN, ways=["look", "step"]),
    "a forward between a finish and its step": make_kind(PLAIN, ways=["late_look", "step"]),
    "finish twice": make_kind(PLAIN, ways=["finish_twice", "step"]),
    "two steps' gradients added": make_kind(PLAIN, ways=["two_finishes", "step"]),
    "accumulation behind a finish": make_kind(PLAIN, ways=["accumulate_behind_a_finish", "step"]),
    "zero_grad(set_to_none=False)": make_kind(PLAIN, ways=["zero_in_place", "step"]),
    "a step that is skipped": make_kind(PLAIN, ways=["drop", "step"]),
    "a gradient penalty over blocks": make_kind(PLAIN, ways=["penalty"] * 2),
    "gradients of inputs before a step": make_kind(PLAIN, ways=["ask_for_inputs_gradients", "step"]),
    "backward(create_graph=True)": make_kind(PLAIN, ways=["create_graph"]),
    "a forgotten finish": make_kind(PLAIN, ways=["forget_finish", "step"]),
    "an exception in a backward, then finish": make_kind(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["step", "fail", "step"]
    ),
    "an exception in a backward": make_kind(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["fail_and_forget_finish", "step"]
    ),
    "an exception in a backward of rank 0, then finish": make_kind(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["step", "fail_on_one_rank", "step"]
    ),
    "an exception in a forward": make_kind(PLAIN, ways=["fail_in_forward", "step", "step"]),
    "functional_call of the module": make_kind(PLAIN, ways=["functional_call"]),
    "a call of the module, not of the wrapper": make_kind(PLAIN, ways=["call_the_module"]),
    "parameters that are read after a step": make_kind(PLAIN, ways=["step", "read_parameters"]),
    "a parameter frozen later": make_kind(PLAIN, ways=["step", "freeze"]),
    "one of parameters() frozen later": make_kind(PLAIN, ways=["step", "freeze_parts", "step"]),
    "a parameter unfrozen later": make_kind(PLAIN, "frozen", "mlp", "mlp", ways=["step", "unfreeze"]),
    "a parameter replaced": make_kind(PLAIN, ways=["step", "replace"]),
    "a GAN": make_kind(PLAIN, ways=["gan"]),
    "a teacher and a student": make_kind(PLAIN, ways=["teach", "teach"]),
}


def outcome(group: WorkerGroup, strategy: str, kind: Kind) -> tuple[str, str]:
    """(RIGHT, REFUSED, WRONG, ERROR or HANGS; the error message, or how large the error of the result is)"""
    exact, plain = (play_alone(*kind, dtype) for dtype in (torch.float64, torch.float32))
    try:
        # Two ranks train; others, if the group has more, answer None.
        answers = group.run(play, strategy, *kind, timeout_s=PEERS_RUN_S if strategy in PEERS else RUN_S)[:2]
    except WorkerError as error:  # no answer in time, a rank that died, or RaisedApart; other exceptions are answers
        return HANGS, str(error)
    errors = [seen for seen in answers if isinstance(seen, str)]
    if errors:
        ours = all(seen.partition(": ")[2].startswith(REFUSALS) for seen in errors)
        return REFUSED if ours and len(errors) == 2 else ERROR, errors[0]
    worst = max(
        error_ratio(x, right[name].double(), rounded[name].float())
        for seen in answers
        for values, right, rounded in zip(seen, exact, plain, strict=True)
        for name, x in values.items()
        if "running" not in name and "num_batches" not in name  # statistics of a rank's own batches
    )
    return RIGHT if worst <= 1 else WRONG, f"{worst:.1f} of what is allowed"


def ready() -> WorkerGroup:
    """Two ranks that have already run a kind, so that imports and compilation count against no deadline."""
    group = WorkerGroup(2, "gloo")
    outcome(group, "fsdp", KINDS["blocks compiled after wrapping"])
    return group


def table(kept: dict[str, str]) -> str:
    """The table in Markdown. `kept`: {kind: a row that is taken as it is}."""
    rows = [f"| Kind | {' | '.join(f'`{name}`' for name in (*OURS, *PEERS))} |", f"|{'---|' * (1 + len(OURS + PEERS))}"]
    group = ready()
    for name, kind in KINDS.items():
        if name in kept:
            rows.append(kept[name])
            continue
        cells = []
        for strategy in (*OURS, *PEERS):
            if group.ended:
                group = ready()
            result, message = outcome(group, strategy, kind)
            cells.append(result)
            if result not in (RIGHT, REFUSED):
                print(f"{strategy}, {name}: {result}: {message[-400:]}", file=sys.stderr, flush=True)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    group.close()
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parallel.kinds", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}, not on the terminal")
    parser.add_argument("--only", metavar="WORDS", help="these kinds; the page's rows stay for others")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, rest = PAGE.read_text().split(BEGIN)
    written, after = rest.split(END)
    by_kind = {row.split(" | ")[0].removeprefix("| "): row for row in written.splitlines()}
    renewed = [name for name in KINDS if args.only is None or any(word in name for word in args.only.split(","))]
    if not renewed:
        parser.error(f"--only {args.only}: no kind has one of these words in its name")
    made = table({name: row for name, row in by_kind.items() if name not in renewed})
    if args.write:
        PAGE.write_text(before + BEGIN + made + END + after)
    else:
        print(made)


if __name__ == "__main__":
    main()
