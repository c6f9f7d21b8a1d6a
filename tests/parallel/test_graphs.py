"""Modules drawn as graphs of calls and trained in drawn ways: every strategy does what one process does, or refuses."""

import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lmsys.parallel.group import WorkerGroup
from lmsys.testing import error_ratio
from tests.support.graphs import BLOCKS, HOLDERS, OPS, RETURNS, WAYS, Call, Graph, play, play_alone

STRATEGIES = ("naive", "flat", "overlapped", "bucketed", "zero1", "copy_engine", "copy_engine_zero1", "fsdp")
OVERLAPPED = STRATEGIES[2:-1]
RUN_S = 60
TWICE = "RuntimeError: a second gradient of one parameter in a backward, whose first is on its way: checkpoint what"
APART = "RuntimeError: ranks have not made the same forwards since they last finished"

places = st.integers(-3, 3)
calls = st.builds(
    Call,
    st.sampled_from(["call"] * 4 + [op for op in OPS if op != "own"]),
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
)
uneven = st.builds(Graph, st.lists(in_order, min_size=1, max_size=3).map(tuple), st.just(("mlp",) * 5))
trainings = st.lists(st.sampled_from(["step"] * 3 + WAYS), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # reentrant checkpoints of what needs no gradient
        yield


def trains_as_one_process(ranks: WorkerGroup, strategy: str, graph: Graph, ways: Sequence[str]) -> None:
    try:
        exact, plain = (play_alone(graph, ways, dtype) for dtype in (torch.float64, torch.float32))
    except RuntimeError:  # of torch: nothing that is trained has made the loss, or checkpointing does not know this
        assume(False)
    assume(all(x.abs().max() < 1e3 for seen in exact for x in seen.values()))  # it has diverged
    found = ranks.run(play, strategy, graph, ways, timeout_s=RUN_S)[:2]
    for seen in found:
        if isinstance(seen, str):
            assert may_refuse(strategy, graph, ways, seen), seen
            continue
        for one, right, rounded in zip(seen, exact, plain, strict=True):
            assert one.keys() == right.keys()
            for name, x in one.items():
                assert error_ratio(x, right[name].double(), rounded[name].float()) <= 1, name
    assert isinstance(found[0], str) == isinstance(found[1], str), found


def may_refuse(strategy: str, graph: Graph, ways: Sequence[str], told: str) -> bool:
    ops = {call.op for program in graph.programs for call in program}
    if strategy == "fsdp" and "own" in ops:  # ranks that run other blocks again
        return told.startswith(APART) and any(way.startswith("checkpoint_all") for way in ways)
    reentrant = "checkpoint_all_reentrant" in ways or "reentrant" in ops
    return strategy in OVERLAPPED and told.startswith(TWICE) and reentrant


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much])
@given(graph=graphs | uneven, ways=trainings)
def test_a_drawn_module_is_trained_as_by_one_process(
    ranks: WorkerGroup, strategy: str, graph: Graph, ways: list[str]
) -> None:
    trains_as_one_process(ranks, strategy, graph, ways)
