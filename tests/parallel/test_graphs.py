"""Random modules, trained in random ways: every strategy trains them as one process does, or refuses them.

A module is a graph of calls of blocks (tests/support/graphs.py), and a way is a kind of training step (players.py
there). A case that was wrong once is added to FOUND. Thousands of cases are drawn on request:

python -m pytest -m on_request -k thousands tests/parallel/test_graphs.py     # an hour
LMSYS_DRAWN=100 python -m pytest -m on_request -k "thousands and zero1" tests/parallel --hypothesis-seed 7
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.testing import error_ratio
from tests.parallel.kinds import KINDS, OURS, PLAIN, REFUSED, RIGHT, chain, outcome
from tests.support.graphs import BLOCKS, HOLDERS, OPS, RETURNS, Call, Graph
from tests.support.parallel_faults import play_with
from tests.support.players import TWICE, WAYS, RaisedApart, ops_of, play, play_alone
from tests.support.variants import few_by_default

STRATEGIES = OURS
OVERLAPPED = STRATEGIES[2:-1]
RUN_S = 60  # deadline of one training on the ranks, in seconds
DRAWN = int(os.environ.get("LMSYS_DRAWN", "1250"))  # for each strategy: 10,000 in all
# The beginnings of the errors that `may_refuse` allows.
APART = "RuntimeError: ranks have not made the same forwards since they last finished"
FROZEN = "ValueError: on rank 0 the parameter "
COUNTS = "RuntimeError: no rank had used a parameter of shape"

places = st.integers(-3, 3)
calls = st.builds(
    Call,
    st.sampled_from(["call"] * 4 + [*OPS]),
    places,
    st.tuples(places, places) | st.just((-1,)),
    st.sampled_from(["tensor"] * 4 + [*RETURNS]),
)
programs = st.lists(calls, min_size=1, max_size=6).map(tuple)
in_order = st.lists(
    st.builds(Call, st.sampled_from(["own", "call", "checkpoint"]), st.integers(0, 4)), min_size=1, max_size=6
).map(lambda calls: tuple(sorted(calls, key=lambda call: call.block)))
graphs = st.builds(
    Graph,
    st.lists(programs, min_size=1, max_size=3).map(tuple),
    st.lists(st.sampled_from(["mlp"] * 3 + BLOCKS), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["list"] * 3 + HOLDERS),
    st.booleans(),
    st.sampled_from([True, True, False]),
    st.sampled_from(["tensor"] * 3 + ["pair", "dict", "object"]),
    st.just(""),
    st.sampled_from(["sgd"] * 3 + ["momentum", "dampened", "adamw", "grouped"]),
)
# Graphs whose programs, one for each rank in turn, may leave out blocks, but call the others in one order.
uneven = st.builds(Graph, st.lists(in_order, min_size=1, max_size=3).map(tuple), st.just(("mlp",) * 5))
RARE = ["compile_blocks", "freeze", "unfreeze"]  # ways that take long, or are mostly refused
trainings = st.lists(st.sampled_from([*["step"] * 3, *WAYS] * 3 + RARE), min_size=1, max_size=5) | st.builds(
    lambda way, count: [way] * count, st.sampled_from(["step", "accumulate", "two_forwards"]), st.integers(3, 6)
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of reentrant checkpoints whose inputs need no gradient
        yield


def trains_as_one_process(
    ranks: WorkerGroup, strategy: str, graph: Graph, ways: Sequence[str], fault: str = ""
) -> None:
    """AssertionError unless both ranks see what one process sees, or refuse the case by an error of `may_refuse`.

    fault  one of tests/support/parallel_faults.py, which the strategy has; "": none
    """
    try:
        exact, plain = (play_alone(graph, ways, dtype) for dtype in (torch.float64, torch.float32))
    except RuntimeError:  # torch itself refuses: the loss depends on no trained parameter, or checkpointing fails
        assume(False)
    if amplifies_rounding(graph, ways, exact):
        assume(False)
    try:
        answers = ranks.run(play_with, fault, strategy, graph, ways, timeout_s=RUN_S)[:2]
    except WorkerError as error:
        raised = error.failure[1].partition(f"{RaisedApart.__name__}: ")[2]
        assert raised and may_refuse(strategy, graph, ways, raised), f"{strategy}, {graph}, {ways}: {error}"
        return
    for seen in answers:
        if isinstance(seen, str):
            assert may_refuse(strategy, graph, ways, seen), seen
            continue
        for values, right, rounded in zip(seen, exact, plain, strict=True):
            assert values.keys() == right.keys()
            for name, x in values.items():
                assert error_ratio(x, right[name].double(), rounded[name].float()) <= 1, name
    assert isinstance(answers[0], str) == isinstance(answers[1], str), answers


LEAVING_OUT = [
    ["closure"] * 4,
    ["step", "fail_in_closure", "step", "step"],
    ["ask_for_optimizer_state", "step", "step", "step"],
    ["step", "resume", "step", "step"],
    ["step", "step", "resume", "step", "step"],
    ["step", "zero_the_module", "step", "step"],
    ["step", "leave_out_a_gradient", "step"],
]
# In some steps, from the first on or later, no rank uses block 1, which may lie beside others in a flat part of fsdp.
MODULES = [*product([(chain(0, 2), PLAIN), (PLAIN, chain(0, 2))], ["attributes", "list"])]


@pytest.mark.parametrize(
    ("number", "ways", "optimizer"),
    few_by_default(
        [(number, *case) for number, case in enumerate(product(LEAVING_OUT, ["grouped", "dampened", "adamw"]))],
        one_in=2,
    ),
)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_weight_that_some_steps_use_is_left_out_by_the_others(
    ranks: WorkerGroup, strategy: str, number: int, ways: list[str], optimizer: str
) -> None:
    """Each way and optimizer trains one module of MODULES, and with the other strategy another one."""
    programs, holder = MODULES[(number + 2 * (strategy == "fsdp")) % len(MODULES)]
    trains_as_one_process(ranks, strategy, Graph(programs, holder=holder, optimizer=optimizer), ways)


def amplifies_rounding(graph: Graph, ways: Sequence[str], exact: Sequence[dict[str, Tensor]]) -> bool:
    """True if another rounding of the first weights alone changes what float64 sees, `exact`, by more than the budget.

    So does a training that diverges, at the latest where float32 has no such large numbers. Two float32 trainings that
    add in other orders, as GPUs and CPUs do, then differ by chance, and neither shows how much the other may lose.
    """
    nudged = play_alone(graph, ways, torch.float64, nudge=torch.finfo(torch.float32).eps / 2)
    for seen, values in zip(nudged, exact, strict=True):
        for name, x in seen.items():
            right, rounded = values[name].double(), values[name].float()
            if not rounded.isfinite().all() or error_ratio(x, right, rounded) > 1:
                return True
    return False


def may_refuse(strategy: str, graph: Graph, ways: Sequence[str], error: str) -> bool:
    """True if the strategy may refuse this case with this error."""
    ops = ops_of(graph)
    if {"freeze", "unfreeze"} & {*ways} and error.startswith(FROZEN):
        return True
    if strategy == "fsdp" and error.startswith(COUNTS):
        return graph.optimizer in ("adamw", "dampened")
    if error.startswith(APART):
        return may_be_apart(strategy, graph, ways)
    reentrant = "checkpoint_all_reentrant" in ways or "reentrant" in ops
    return strategy in OVERLAPPED and error.startswith(TWICE) and reentrant


def may_be_apart(strategy: str, graph: Graph, ways: Sequence[str]) -> bool:
    """True if ranks may gather blocks in other orders, each its own."""
    recomputed = any(way.startswith("checkpoint_all") for way in ways)  # each rank recomputes other blocks
    return strategy == "fsdp" and bool({"own", "apart"} & ops_of(graph)) and (recomputed or not _in_order(graph))


def may_wait(strategy: str, graph: Graph, ways: Sequence[str]) -> bool:
    """True if on GPUs a collective may wait for ever, or a refusal may come only after the last step."""
    return may_be_apart(strategy, graph, ways) or bool({"freeze", "unfreeze"} & {*ways})


def _in_order(graph: Graph) -> bool:
    """True if every rank calls blocks in the order of their list, leaving out some, as in the graphs of `uneven`."""
    ops = ops_of(graph)
    orders = [[call.block % len(graph.blocks) for call in program] for program in graph.programs]
    plain = ops <= {"own", "call", "checkpoint"} and graph.holder == "list" and set(graph.blocks) == {"mlp"}
    return plain and all(order == sorted(order) for order in orders)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(strategy=st.sampled_from(STRATEGIES), graph=graphs | uneven, ways=trainings)
def test_a_drawn_module_is_trained_as_by_one_process(
    ready_ranks: Callable[[], WorkerGroup], strategy: str, graph: Graph, ways: list[str]
) -> None:
    trains_as_one_process(ready_ranks(), strategy, graph, ways)


ONE_ORDER = (
    "step evaluate_between infer_between look drop finish_twice zero_in_place two_optimizers checkpoint_all".split()
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=4)
@given(
    order=st.permutations(range(4)),
    ops=st.lists(st.sampled_from(["call", "call", "checkpoint", "method"]), min_size=4, max_size=4),
    blocks=st.lists(st.sampled_from(["mlp", "deep", "frozen", "half", "lstm", "normed"]), min_size=4, max_size=4),
    holder=st.sampled_from(HOLDERS),
    optimizer=st.sampled_from(["sgd", "momentum", "adamw"]),
    ways=st.lists(st.sampled_from(ONE_ORDER), min_size=1, max_size=4),
)
def test_each_parameter_used_once_has_the_bits_of_one_process(
    ready_ranks: Callable[[], WorkerGroup],
    strategy: str,
    order: list[int],
    ops: list[str],
    blocks: list[str],
    holder: str,
    optimizer: str,
    ways: list[str],
) -> None:
    """Its gradient is a sum of two terms, one from each rank: their order does not change the bits."""
    program = tuple(Call(op, number) for op, number in zip(ops, order, strict=True))
    graph = Graph((program,), tuple(blocks), holder, optimizer=optimizer)
    plain = play_alone(graph, ways, torch.float32)
    for seen in ready_ranks().run(play, strategy, graph, ways):
        assert not isinstance(seen, str), seen
        for values, right in zip(seen, plain, strict=True):
            assert all(torch.equal(x, right[name]) for name, x in values.items())


TWO_FLATS = Graph(  # trained and frozen parameters outside of all blocks
    ((Call("call", 0), Call("reentrant", 1, returns="pair"), Call("call", 1)),), ("mlp", "frozen"), "attributes", True
)
COMPLEX = Graph(((Call("call", 0), Call("call", 1)),), ("complex", "complex"))
# Ranks find themselves apart within a forward, at whose end one of them would gather more blocks than the other.
APART_IN_A_FORWARD = Graph(
    (
        (Call("call", 0),),
        (Call("own", -3), Call("call", -1), Call("call", -3, (2,), "stored"), Call("call")),
        (Call("reentrant", -3), Call("reentrant", 3, (-2,)), Call("detach", 2)),
    ),
    ("normed", "deep", "half", "half"),
    holder="reversed",
    outside=False,
)
FOUND = (  # (strategy, graph, ways) of cases that were wrong once
    ("overlapped", Graph(((Call("own", 0), Call("reentrant", 0)),), ("mlp",), tied=True), ["step", "step"]),
    ("fsdp", Graph(((Call("twice", 0), Call("twice", 1)),)), ["step", "step"]),
    ("fsdp", Graph(((Call("own", 2), Call("call", 4)),), ("mlp",) * 5), ["two_forwards"]),
    ("fsdp", Graph(((Call("own", 0), Call("own", 0)),), ("mlp",) * 5), ["step"]),
    ("fsdp", Graph(((Call("own", 0), Call("call", 1), Call("own", 1), Call("call", 2)),)), ["step", "penalty"]),
    ("fsdp", Graph(((Call("call", 1), Call("method", 1), Call("call", 2), Call("read", 2)),)), ["step", "late_look"]),
    ("fsdp", TWO_FLATS, ["two_backwards"]),
    ("fsdp", Graph(((Call("call", 0), Call("call", 1, (0,))),), ("mlp",) * 2, outside=False), ["two_forwards"]),
    ("zero1", Graph(((Call("twice", 0),), (Call("call", 1),))), ["two_finishes", "accumulate_behind_a_finish"]),
    ("zero1", Graph(((Call("call", 0), Call("detach", 1)),)), ["two_backwards", "late_look", "sync_then_not"]),
    ("zero1", Graph((PLAIN,)), ["compile_the_wrapper"] * 3),  # from the second step on
    ("naive", COMPLEX, ["step"]),
    ("fsdp", Graph(((Call("call", 1),),), ("complex",)), ["clip"]),
    ("zero1", Graph((PLAIN,)), ["fail_to_ask_for_inputs_gradients", "step"]),
    ("overlapped", COMPLEX, ["step"]),
    ("fsdp", APART_IN_A_FORWARD, ["sync_then_not"]),
    # A block of which a step that fails leaves out a part, and the next one all.
    ("fsdp", Graph((chain(0, 2), PLAIN), ("spare",) * 3), ["fail_in_closure", "step"]),
    # The order that is learnt ends with a block that comes twice in it, and the next forward calls it once: then the
    # block's parameters were freed without a mark, and reading one read no memory.
    (
        "fsdp",
        Graph(
            (
                (Call("call", 0), Call("segment", 1)),
                (Call("call", 1), Call("call", 0), Call("call", 1, (1, -3))),
                (Call("read", 0),),
            ),
            ("mlp",) * 2,
        ),
        ["step"] * 5,
    ),
    # A forward that fails leaves a block gathered, whose parameters the next forward reads outside of the block.
    (
        "fsdp",
        Graph(
            ((Call("call", 1),), (Call("segment", 0),), (Call("method", 0), Call("own", 0))),
            ("mlp",) * 2,
            "reversed",
            outside=False,
        ),
        ["step", "fail_in_forward", "step"],
    ),
)


@pytest.mark.parametrize(("strategy", "graph", "ways"), FOUND)
def test_what_was_wrong_once_is_right(
    ready_ranks: Callable[[], WorkerGroup], strategy: str, graph: Graph, ways: list[str]
) -> None:
    trains_as_one_process(ready_ranks(), strategy, graph, ways)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_and_loss_scaling_are_as_on_one_process(ready_ranks: Callable[[], WorkerGroup], strategy: str) -> None:
    graph = Graph((PLAIN,), optimizer="adamw")
    trains_as_one_process(ready_ranks(), strategy, graph, ["clip", "scale", "clip"])


SEEN = "gradient summed, not averaged", "gradients rounded to bfloat16", "bucket boundary off by one"


@pytest.mark.parametrize("strategy", ["bucketed", "zero1", "copy_engine_zero1"])
@pytest.mark.parametrize("fault", ["", *SEEN])
def test_a_fault_is_wrong_in_a_training_that_is_right_without(
    ready_ranks: Callable[[], WorkerGroup], fault: str, strategy: str
) -> None:
    with pytest.raises(AssertionError) if fault else nullcontext():
        trains_as_one_process(ready_ranks(), strategy, Graph((PLAIN,)), ["step", "accumulate"], fault)


GROWS = Graph(  # its weights grow from 0.5 to 6 in three steps, and to 720 in the fourth
    ((Call("call", 0), Call("call", 1, (1,)), *(Call("call", n) for n in (1, 0)), Call("call", 0, returns="stored")),),
    ("mlp", "mlp"),
)


@pytest.mark.parametrize(("steps", "left_out"), [(2, False), (4, True)])
def test_a_training_that_amplifies_rounding_is_left_out(steps: int, left_out: bool) -> None:
    exact = play_alone(GROWS, ["step"] * steps, torch.float64)
    assert amplifies_rounding(GROWS, ["step"] * steps, exact) is left_out


@pytest.mark.on_request
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=DRAWN, derandomize=False, suppress_health_check=[*HealthCheck])
@given(graph=graphs | uneven, ways=trainings)
def test_so_are_thousands(ready_ranks: Callable[[], WorkerGroup], strategy: str, graph: Graph, ways: list[str]) -> None:
    trains_as_one_process(ready_ranks(), strategy, graph, ways)


# Where one rank fails, the other waits for it, and the case ends only after RUN_S: so no smaller case is searched for.
@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=40, suppress_health_check=[*HealthCheck], phases=[Phase.explicit, Phase.generate])
@given(graph=graphs | uneven, ways=trainings)
@example(graph=COMPLEX, ways=["step", "step"])
def test_so_are_some_on_gpus(
    ready_gpus: Callable[[], WorkerGroup], strategy: str, graph: Graph, ways: list[str]
) -> None:
    assume(not may_wait(strategy, graph, ways))
    trains_as_one_process(ready_gpus(), strategy, graph, ways)


# Kinds of tests/parallel/kinds.py that take seconds: without preparation and torch.compile.
QUICK = [name for name, (graph, ways) in KINDS.items() if not graph.prepared and "compile" not in "".join(ways)]


def are_right_or_refused(ready_ranks: Callable[[], WorkerGroup], strategy: str, names: Sequence[str]) -> None:
    """AssertionError unless the strategy trains each of these KINDS as one process does, or refuses it."""
    outcomes = {name: outcome(ready_ranks(), strategy, KINDS[name]) for name in names}
    other = {name: result for name, result in outcomes.items() if result[0] not in (RIGHT, REFUSED)}
    assert not other


@pytest.mark.parametrize(("strategy", "names"), [("zero1", QUICK[::2]), ("fsdp", QUICK[1::2])])
def test_each_kind_is_right_or_refused(ready_ranks: Callable[[], WorkerGroup], strategy: str, names: list[str]) -> None:
    """Each of two strategies that shard trains half of the kinds. On request, all strategies train all kinds."""
    are_right_or_refused(ready_ranks, strategy, names)


@pytest.mark.on_request
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_kind_is_right_or_refused_by_all(ready_ranks: Callable[[], WorkerGroup], strategy: str) -> None:
    are_right_or_refused(ready_ranks, strategy, [*KINDS])
