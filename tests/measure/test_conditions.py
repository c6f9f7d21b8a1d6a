"""The state of the machine that is recorded with each time (`Conditions`), and which parts of it count as disturbances.

The modules under test are lmsys/measure/sensors.py (the reasons why a GPU limits its clock, as bits of a mask) and
lmsys/measure/host.py (the load that other programs put on the CPU). A "stranger" is a process on the device that does
not belong to this run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.measure import host
from lmsys.measure.host import BUSY
from lmsys.measure.sensors import EXPECTED, REASONS, Conditions, Reading, disturbance, told
from tests.support.device import FakeDevice


@given(st.lists(st.integers(0, 2**12 - 1), min_size=1, max_size=5))
def test_a_clock_is_flagged_for_each_reason_but_the_expected(masks: list[int]) -> None:
    record = Conditions("cuda", FakeDevice(), os.getpid()).record([Reading(reasons=mask) for mask in masks])
    seen = {bit for bit in (1 << place for place in range(12)) if any(mask & bit for mask in masks)}
    unexpected = seen - {0x1, 0x2, 0x4}  # idle, set by a user, power cap
    assert (record["disturbed"] is None) == (not unexpected)
    for bit in seen - {0x1}:  # an idle device is not reported
        assert told([bit]) in record["clock_reasons"]
        if bit in unexpected:
            assert told([bit]) in record["disturbed"]


def test_the_power_cap_and_idling_are_expected_and_all_slowdowns_are_not() -> None:
    assert {word for bit, word in REASONS.items() if bit & EXPECTED} == {
        "idle", "clocks that a user has set", "power cap",
    }  # fmt: skip
    assert disturbance([0x4, 0x40], None, None) == "the device was throttled (thermal slowdown by hardware)"
    assert told([0x800]) == "reason 0x800"


@pytest.mark.parametrize(
    ("strangers", "share", "flagged"),
    [(None, None, None), (0, BUSY, None), (1, 0.0, "1 other process had the device, too"),
     (2, 0.5, "2 other processes had the device, too; other programs took 50% of the CPU or more")],
)  # fmt: skip
def test_strangers_are_flagged(strangers: int | None, share: float | None, flagged: str | None) -> None:
    assert disturbance([], strangers, share) == flagged


def test_load_on_the_cpu_flags_times_of_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "others_share", lambda *_: 0.5)
    for device, is_flagged in (("cpu", True), ("cuda", False)):
        record = Conditions(device, FakeDevice(), os.getpid()).record([])
        assert record["others_cpu_share"] == 0.5 and bool(record["disturbed"]) == is_flagged


def test_readings_are_summed_up() -> None:
    device = FakeDevice()
    readings = [Reading(1700, 2619, None, 50, 600), Reading(1500, 2619, None, 60, 700), Reading(1600, 2619, None, 55)]
    record = Conditions("cuda", device, os.getpid()).record(readings)
    assert [record[name] for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")] == [
        1600, 2619, 60, 650,
    ]  # fmt: skip


def test_processes_of_this_run_are_no_strangers() -> None:
    """This process and its child are of this run; its parent is not."""
    device = FakeDevice()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        device.others = [os.getpid(), child.pid]
        assert Conditions("cuda", device, os.getpid()).record([])["other_processes"] == 0
        device.others.append(os.getppid())
        assert Conditions("cuda", device, os.getpid()).record([])["other_processes"] == 1
        child.communicate(b"\n")


def test_where_process_ids_cannot_be_compared_a_surplus_is_strangers() -> None:
    """In a container, the driver's process ids are not ours, so that only the numbers of processes can be compared."""
    ours = len(host.family_of(os.getpid(), host.processes_in(Path("/proc"))))
    for surplus in (0, 2):
        device = FakeDevice()
        device.others = [2**30 + number for number in range(ours + surplus)]
        assert Conditions("cuda", device, os.getpid()).record([])["other_processes"] == surplus


def write_proc(root: Path, busy: int, **ticks: tuple[int, int, int]) -> None:
    """Write a /proc below `root`, in which the first core that we may use was busy for `busy` ticks.

    `ticks` maps a process ("p7" is process 7) to (its parent, its own ticks, the ticks of its ended children).
    """
    core = min(os.sched_getaffinity(0))
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{core} {busy - 6} 1 2 900 800 1 1 1 70 0\n")
    for name, (parent, own_ticks, ended_ticks) in ticks.items():
        folder = root / "proc" / name.removeprefix("p")
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"7 (a (b) c) S {parent} 1 1 1 1 1 1 1 1 1 {own_ticks} 1 {ended_ticks} 2 20 0\n")


ticks = st.integers(0, 100)


@given(own=ticks, of_child=ticks, of_ended=ticks, others=ticks)
def test_the_cpu_that_others_took_is_what_neither_we_nor_our_children_used(
    tmp_path_factory: pytest.TempPathFactory, own: int, of_child: int, of_ended: int, others: int
) -> None:
    root, per_s, cores = tmp_path_factory.mktemp("root"), os.sysconf("SC_CLK_TCK"), len(os.sched_getaffinity(0))
    write_proc(root, 10, p7=(8, 5, 0), p8=(9, 6, 0), p9=(1, 1, 0), p10=(1, 4, 0))
    before = host.load(9, root)
    busy, ended = 10 + own + of_child + of_ended + others, (9, 6 + own, of_ended)
    write_proc(root, busy, p7=(8, 5 + of_child, 0), p8=ended, p9=(1, 1, 0), p10=(1, 4 + others, 0))
    after = host.load(9, root)
    assert before and after and host.family_of(9, host.processes_in(root / "proc")) == {7, 8, 9}
    after = host.Load(before.at_s + 2.0, after.busy_s, after.own_s)
    assert host.others_share(before, after) == pytest.approx(min(others / per_s / 2 / cores, 1))
    assert host.others_share(before, before) is None and host.others_share(None, after) is None


def test_a_machine_without_proc_has_no_load(tmp_path: Path) -> None:
    assert host.load(7, tmp_path) is None
