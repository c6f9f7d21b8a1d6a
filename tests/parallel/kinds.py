"""A table of docs/strategy.md: which kinds of modules and trainings each strategy trains as one process does.

python -m tests.parallel.kinds            # prints the table, on two processes of this machine
python -m tests.parallel.kinds --write    # writes it into docs/strategy.md
python -m tests.parallel.kinds --write --only AdamW,momentum    # renews only rows with one of these words in the kind

A cell says "right", "refused" or what else happens. A new kind is an entry in KINDS: a graph and its ways of training
(tests/support/graphs.py).
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.testing import error_ratio
from tests.support.graphs import Call, Graph, play, play_alone

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


def one(program: tuple[Call, ...], *blocks: str, ways: Sequence[str] = TWO_STEPS, **options: object) -> Kind:
    """The kind of a module with a single program, by default of three MLP blocks and trained for two steps.

    options  other fields of `Graph`
    """
    return Graph((program,), blocks or ("mlp",) * 3, **options), ways  # type: ignore[arg-type]


PLAIN = chain(0, 1, 2)
U_NET = (*PLAIN, Call("add", 0, (2, -1)), Call("call", 3), Call("add", 0, (1, -1)), Call("call", 4))
OTHER_ORDERS = Graph((PLAIN, chain(2, 0, 1), chain(1, 2, 0)))
KINDS: dict[str, Kind] = {
    "blocks of a list in order": one(PLAIN),
    "a list in reverse": one(PLAIN, holder="reversed"),
    "two zipped lists": one(chain(0, 1, 2, 3), *("mlp",) * 4, holder="zipped"),
    "a list of lists": one(chain(0, 1, 2, 3), *("mlp",) * 4, holder="nested"),
    "a dictionary of blocks": one(PLAIN, holder="dict"),
    "a Sequential of blocks": one(PLAIN, holder="sequential"),
    "blocks as attributes": one(PLAIN, holder="attributes"),
    "nothing but blocks": one(PLAIN, outside=False),
    "a U-Net": one(U_NET, *("mlp",) * 5),
    "an encoder and a decoder": one(
        (*chain(0, 1), Call("call", 2, (0,)), Call("add", 0, (2, 3)), Call("call", 3)), *("mlp",) * 4
    ),
    "blocks in another order than the list's": one(chain(2, 0, 1)),
    "another order in each step": (OTHER_ORDERS, ["step"] * 6),
    "heads that exit early": (Graph((chain(0, 1, 2), chain(0), chain(0, 1))), ["step"] * 6),
    "two branches of one input": one((Call("call", 0), Call("call", 1, (0,)), Call("add", 0, (1, 2)), Call("call", 2))),
    "a block that runs twice in a row": one((Call("twice", 0), Call("twice", 1))),
    "blocks that run in two rounds": one(chain(0, 1, 2, 0, 1, 2)),
    "a single block": one(chain(0), "mlp"),
    "a block that nobody calls": one(chain(0, 2)),
    "a block that rank 0 alone calls": one((Call("call", 0), Call("own", 1), Call("call", 2))),
    "two blocks that rank 0 alone calls": one(
        (Call("call", 0), Call("own", 1), Call("own", 2), Call("call", 3)), *("mlp",) * 4
    ),
    "blocks of which the last is rank 0's alone": one((Call("call", 0), Call("call", 1), Call("own", 2))),
    "two blocks that ranks call in other orders": one((Call("apart", 0), Call("call", 2))),
    "two blocks of other sizes that ranks call in other orders": one(
        (Call("call", 0), Call("apart", 1), Call("call", 3)), "mlp", "mlp", "deep", "mlp"
    ),
    "blocks that ranks call in one order, and then in others": (
        Graph((PLAIN, PLAIN, PLAIN, PLAIN, (Call("apart", 0), Call("call", 2)))),
        ["step"] * 5,
    ),
    "a block's method other than forward": one((Call("call", 0), Call("method", 1), Call("call", 2))),
    "a weight of a block read from outside": one((Call("read", 0), *PLAIN)),
    "a weight of a block read after it": one((*PLAIN, Call("read", 2), Call("read", 0))),
    "blocks that take lists of dictionaries": one(chain(0, 1, 2, returns="nothing")),
    "blocks that return dictionaries": one(chain(0, 1, 2, returns="dict")),
    "blocks that return pairs": one(chain(0, 1, 2, returns="pair")),
    "blocks that return objects": one(chain(0, 1, 2, returns="object")),
    "blocks that return objects within objects": one(chain(0, 1, 2, returns="deep-object")),
    "blocks that store a term of the loss": one(chain(0, 1, 2, returns="stored")),
    "a module that returns a pair": one(PLAIN, returns="pair"),
    "a module that returns a dictionary": one(PLAIN, returns="dict"),
    "a module that returns an object": one(PLAIN, returns="object"),
    "a module that returns objects within objects": one(PLAIN, returns="deep-object"),
    "a block under no_grad": one((Call("no_grad", 0), Call("call", 1), Call("call", 0))),
    "a detached input of a block": one((Call("call", 0), Call("detach", 1), Call("call", 2))),
    "tied weights": one(PLAIN, tied=True),
    "frozen blocks": one(PLAIN, "frozen", "mlp", "frozen"),
    "the first blocks frozen": one(PLAIN, "frozen", "frozen", "mlp", outside=False),
    "frozen weights within blocks": one(PLAIN, *("half",) * 3),
    "LSTMs": one(PLAIN, *("lstm",) * 3),
    "complex parameters": one(PLAIN, "complex", "mlp", "complex"),
    "float32 and float64 in one block": one(PLAIN, *("mixed",) * 3),
    "weight norm as a parametrization": one(PLAIN, *("normed",) * 3),
    "blocks within blocks": one(PLAIN, *("deep",) * 3),
    "a parameter that nobody uses": one(PLAIN, *("spare",) * 3),
    "a parameter that nobody uses, AdamW with decay": one(PLAIN, *("spare",) * 3, optimizer="adamw"),
    "a block that nobody calls, AdamW with decay": one(chain(0, 2), optimizer="adamw"),
    "a block that not every step calls, momentum": (
        Graph((PLAIN, chain(0, 2)), optimizer="momentum"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, momentum": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="momentum"),
        ["step"] * 4,
    ),
    "a weight that not every step uses, AdamW": (
        Graph((PLAIN, chain(0, 2)), holder="attributes", optimizer="adamw"),
        ["step"] * 4,
    ),
    "parameters that read no input": one(PLAIN, *("branch",) * 3),
    "batch norm that is trained later": one(PLAIN, *("batch-norm",) * 3, prepared="eval", ways=["train_all"]),
    "batch norm": one(PLAIN, *("batch-norm",) * 3),
    "sparse gradients": one(PLAIN, "sparse", "mlp", "mlp"),
    "a module on the meta device": one(PLAIN, prepared="meta"),
    "checkpoints of blocks": one(chain(0, 1, 2, op="checkpoint")),
    "checkpoints of blocks, reentrant": one(chain(0, 1, 2, op="reentrant")),
    "checkpoints of a block that runs twice": one(chain(0, 1, 0, op="checkpoint")),
    "checkpoints of a block that runs twice, reentrant": one(chain(0, 1, 0, op="reentrant")),
    "a checkpoint of two blocks": one((Call("segment", 0), Call("segment", 2)), *("mlp",) * 4),
    "a checkpoint of the whole": one(PLAIN, ways=["checkpoint_all", "step"]),
    "a checkpoint of the whole, reentrant": one(PLAIN, ways=["checkpoint_all_reentrant", "step"]),
    "a checkpoint of blocks in a checkpoint": one(chain(0, 1, 2, op="checkpoint"), ways=["checkpoint_all", "step"]),
    "compiled blocks": one(PLAIN, prepared="compiled"),
    "blocks compiled after wrapping": one(PLAIN, ways=["compile_blocks"]),
    "torch.compile of the wrapper": one(PLAIN, ways=["compile_the_wrapper", "step"]),
    "momentum": one(PLAIN, optimizer="momentum", ways=["step"] * 3),
    "AdamW": one(PLAIN, optimizer="adamw", ways=["step"] * 3),
    "accumulation under no_sync()": one(PLAIN, ways=["accumulate"] * 2),
    "two forwards and one backward": one(PLAIN, ways=["two_forwards"] * 2),
    "two forwards and two backwards": one(PLAIN, ways=["two_backwards"] * 2),
    "two forwards and two backwards in reverse": one(PLAIN, ways=["two_backwards_in_reverse"] * 2),
    "two forwards and two backwards of other blocks": (OTHER_ORDERS, ["two_backwards"] * 3),
    "a backward, and another under no_sync()": one(PLAIN, ways=["sync_then_not"] * 2),
    "two backwards of one loss (retain_graph)": one(PLAIN, ways=["retain"] * 2),
    "a loss in chunks": one(PLAIN, ways=["chunks"] * 2),
    "evaluation between a forward and its backward": one(PLAIN, ways=["evaluate_between"] * 2),
    "inference mode between a forward and its backward": one(PLAIN, ways=["infer_between"] * 2),
    "evaluation between a backward and its finish": one(PLAIN, ways=["forward_before_finish"]),
    "a forward that no backward follows": one(PLAIN, ways=["look", "step"]),
    "a forward between a finish and its step": one(PLAIN, ways=["late_look", "step"]),
    "finish twice": one(PLAIN, ways=["finish_twice", "step"]),
    "two steps' gradients added": one(PLAIN, ways=["two_finishes", "step"]),
    "accumulation behind a finish": one(PLAIN, ways=["accumulate_behind_a_finish", "step"]),
    "zero_grad(set_to_none=False)": one(PLAIN, ways=["zero_in_place", "step"]),
    "a step that is skipped": one(PLAIN, ways=["drop", "step"]),
    "a gradient penalty over blocks": one(PLAIN, ways=["penalty"] * 2),
    "gradients of inputs before a step": one(PLAIN, ways=["ask_for_inputs_gradients", "step"]),
    "backward(create_graph=True)": one(PLAIN, ways=["create_graph"]),
    "a forgotten finish": one(PLAIN, ways=["forget_finish", "step"]),
    "an exception in a backward, then finish": one(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["step", "fail", "step"]
    ),
    "an exception in a backward": one(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["fail_and_forget_finish", "step"]
    ),
    "an exception in a backward of rank 0, then finish": one(
        (Call("call", 0), Call("boom", 1), Call("call", 2)), ways=["step", "fail_on_one_rank", "step"]
    ),
    "an exception in a forward": one(PLAIN, ways=["fail_in_forward", "step", "step"]),
    "functional_call of the module": one(PLAIN, ways=["functional_call"]),
    "a call of the module, not of the wrapper": one(PLAIN, ways=["call_the_module"]),
    "parameters that are read after a step": one(PLAIN, ways=["step", "read_parameters"]),
    "a parameter frozen later": one(PLAIN, ways=["step", "freeze"]),
    "one of parameters() frozen later": one(PLAIN, ways=["step", "freeze_parts", "step"]),
    "a parameter unfrozen later": one(PLAIN, "frozen", "mlp", "mlp", ways=["step", "unfreeze"]),
    "a parameter replaced": one(PLAIN, ways=["step", "replace"]),
    "a GAN": one(PLAIN, ways=["gan"]),
    "a teacher and a student": one(PLAIN, ways=["teach", "teach"]),
}


def outcome(group: WorkerGroup, strategy: str, kind: Kind) -> tuple[str, str]:
    """(RIGHT, REFUSED, WRONG, ERROR or HANGS; the error message, or how large the error of the result is)"""
    exact, plain = (play_alone(*kind, dtype) for dtype in (torch.float64, torch.float32))
    try:
        answers = group.run(play, strategy, *kind, timeout_s=PEERS_RUN_S if strategy in PEERS else RUN_S)[:2]
    except WorkerError as error:
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
