"""Communication in a profiler's trace (`read_overlap`, lmsys/measure/profile.py): how long, and beside computation.

The traces are made here, so that the union and the overlap of their intervals are known.
"""

from typing import Any

import pytest

from lmsys.measure.profile import merged, read_overlap

STEP_US = 1000.0


def test_intervals_are_united() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]
    assert merged([(0.0, 1.0), (1.5, 2.0)], gap=0.6) == [(0.0, 2.0)]


@pytest.mark.parametrize(("device", "category"), [("cpu", "cpu_op"), ("cuda", "kernel")])
def test_time_of_communication_and_its_overlap_are_those_of_the_trace(device: str, category: str) -> None:
    """Each of three steps of 1 ms has a matmul from 0 to 600 us and transfers from 450 to 650 us and 550 to 750 us.

    So something communicates for 300 us of a step, and for half of this time something computes, too. Two events of the
    trace count as neither: the call on the host that issues an all-reduce, and an event of metadata.
    """
    sends = {"cpu": ("user_annotation", "gloo:all_reduce"), "cuda": ("kernel", "ncclDevKernel_AllReduce")}[device]
    issuing: dict[str, Any] = {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 0.0, "dur": STEP_US}
    events = [issuing, {"ph": "M", "name": "meta"}]
    for number in range(3):
        start = 10.0 + number * STEP_US
        events.append({"cat": category, "name": "aten::mm", "ts": start, "dur": 600.0})
        events.append({"cat": sends[0], "name": sends[1], "ts": start + 450, "dur": 200.0})
        events.append({"cat": sends[0], "name": sends[1], "ts": start + 550, "dur": 200.0})
    overlap = read_overlap(events, device, steps=3)
    assert overlap.time_s == pytest.approx(300e-6) and overlap.overlap_fraction == pytest.approx(0.5)
    assert {what for what, _, _ in overlap.timeline} == {"communication", "computation"}
    longest = max(end for _, _, end in overlap.timeline)
    assert 0 < longest <= STEP_US / 1e6


def test_a_step_that_sends_nothing_has_no_overlap() -> None:
    overlap = read_overlap([{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0}], "cpu", steps=1)
    assert (overlap.time_s, overlap.overlap_fraction) == (0.0, None)
    assert read_overlap([], "cpu", steps=1).timeline == []
