"""The state of the machine that is recorded with each time (`Conditions`), and which parts of it count as disturbances.

The modules under test are lmsys/measure/sensors.py (the reasons why a GPU limits its clock, as bits of a mask) and
lmsys/measure/host.py (the load that other programs put on the CPU, and memory: how much can be allocated, how much a
process holds, and who was killed). A "stranger" is a process on the device that does not belong to this run.

Sensors are those of a GPU, from NVML's answers, and of a CPU, from Linux's files. NVML is NVIDIA's library for the
state of GPUs. `FakeNvml(**H200)` answers as it does for an H200, and `FakeNvml()` as for a GPU that reports nothing.
"""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench import Settings
from lmsys.bench.instruments import Instruments
from lmsys.measure import host, sensors
from lmsys.measure.host import BUSY
from lmsys.measure.sensors import EXPECTED, REASONS, Conditions, Cpu, Gpu, Reading, disturbance, in_words, sensors_of
from tests.support.device import FakeDevice, FakeNvml


@given(st.lists(st.integers(0, 2**12 - 1), min_size=1, max_size=5))
def test_a_clock_is_flagged_for_each_reason_but_the_expected(masks: list[int]) -> None:
    record = Conditions(FakeDevice(), os.getpid()).record([Reading(reasons=mask) for mask in masks])
    seen = {bit for bit in (1 << place for place in range(12)) if any(mask & bit for mask in masks)}
    unexpected = seen - {0x1, 0x2, 0x4}  # idle, set by a user, power cap
    assert (record["disturbed"] is None) == (not unexpected)
    for bit in seen - {0x1}:  # an idle device is not reported
        assert in_words([bit]) in record["clock_reasons"]
        if bit in unexpected:
            assert in_words([bit]) in record["disturbed"]


def test_the_power_cap_and_idling_are_expected_and_all_slowdowns_are_not() -> None:
    assert {word for bit, word in REASONS.items() if bit & EXPECTED} == {
        "idle", "clocks that a user has set", "power cap",
    }  # fmt: skip
    assert disturbance([0x4, 0x40], None, None) == "the device was throttled (thermal slowdown by hardware)"
    assert in_words([0x800]) == "reason 0x800"


@pytest.mark.parametrize(
    ("strangers", "share", "flagged"),
    [(None, None, None), (0, BUSY, None), (1, 0.0, "1 other process had the device, too"),
     (2, 0.5, "2 other processes had the device, too; other programs took 50% of the CPU or more")],
)  # fmt: skip
def test_strangers_are_flagged(strangers: int | None, share: float | None, flagged: str | None) -> None:
    assert disturbance([], strangers, share) == flagged


@pytest.mark.parametrize("by_host", [True, False])
def test_load_on_the_cpu_flags_times_that_depend_on_it(by_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "others_share", lambda *_: 0.5)
    record = Conditions(FakeDevice(), os.getpid(), by_host).record([])
    assert record["others_cpu_share"] == 0.5 and bool(record["disturbed"]) == by_host


@pytest.mark.parametrize(("device", "apart"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_times_of_a_cpu_and_of_rows_in_own_processes_depend_on_it(
    device: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 16 busy loops on 16 cores, calls of 0.6 ms in processes of their own took up to 9 ms by a GPU's clock."""
    monkeypatch.setattr(host, "others_share", lambda *_: 0.5)
    instruments = Instruments(Settings(device=device, apart=apart))
    vars(instruments).update(clocks={}, sensors=FakeDevice())
    assert bool(instruments.conditions().record([])["disturbed"]) == (device == "cpu" or apart)


def test_readings_are_summed_up() -> None:
    device = FakeDevice()
    readings = [Reading(1700, 2619, None, 50, 600), Reading(1500, 2619, None, 60, 700), Reading(1600, 2619, None, 55)]
    record = Conditions(device, os.getpid()).record(readings)
    assert [record[name] for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")] == [
        1600, 2619, 60, 650,
    ]  # fmt: skip


def test_processes_of_this_run_are_no_strangers() -> None:
    """This process and its child are of this run; its parent is not."""
    device = FakeDevice()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        device.others = [os.getpid(), child.pid]
        assert Conditions(device, os.getpid()).record([])["other_processes"] == 0
        device.others.append(os.getppid())
        assert Conditions(device, os.getpid()).record([])["other_processes"] == 1
        child.communicate(b"\n")


def test_where_process_ids_cannot_be_compared_a_surplus_is_strangers() -> None:
    """In a container, the driver's process ids are not ours, so that only the numbers of processes can be compared."""
    ours = len(host.family_of(os.getpid(), host.processes_in(Path("/proc"))))
    for surplus in (0, 2):
        device = FakeDevice()
        device.others = [2**30 + number for number in range(ours + surplus)]
        assert Conditions(device, os.getpid()).record([])["other_processes"] == surplus


def write(root: Path, files: dict[str, object]) -> None:
    """Write files below `root`: {relative path: content}."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def write_proc(root: Path, busy: int, **ticks: tuple[int, int, int]) -> None:
    """Write a /proc below `root`, in which the first core that we may use was busy for `busy` ticks.

    `ticks` maps a process ("p7" is process 7) to (its parent, its own ticks, the ticks of its ended children).
    """
    core = min(os.sched_getaffinity(0))
    files: dict[str, object] = {"stat": f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{core} {busy - 6} 1 2 900 800 1 1 1 70 0"}
    for name, (parent, own_ticks, ended_ticks) in ticks.items():
        files[f"{name[1:]}/stat"] = f"7 (a (b) c) S {parent} 1 1 1 1 1 1 1 1 1 {own_ticks} 1 {ended_ticks} 2 20 0"
    write(root / "proc", files)


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


GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 9 * GIB), (8 * GIB, 8 * GIB - 3 * GIB + GIB), (64 * GIB, 9 * GIB)]
)
def test_the_least_of_the_machine_and_of_its_container_counts(limit: object, expected: int, tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {9 * 2**20} kB"})
    limits = {"memory.max": limit, "memory.current": 3 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}"}
    write(tmp_path / "sys/fs/cgroup", limits)
    assert host.available_bytes(tmp_path) == expected


def test_nothing_is_known_on_a_machine_without_proc(tmp_path: Path) -> None:
    assert host.available_bytes(tmp_path) == float("inf") and host.oom_kills(tmp_path) == 0
    assert host.load(7, tmp_path) is None


def test_what_a_process_holds() -> None:
    with mmap.mmap(-1, 2**26) as fresh:  # not a bytearray: Python might reuse memory that the process holds already
        before = host.resident_bytes()
        fresh.write(bytes(2**26))
        assert host.resident_bytes() - before > 0.9 * len(fresh)
    assert host.resident_bytes(2**30) == 0


def test_the_kernel_counts_whom_it_killed(tmp_path: Path) -> None:
    """`oom_kills` is Linux's count of processes that it has killed because memory ran out."""
    write(tmp_path, {"proc/vmstat": "nr_free_pages 5\noom_kill 3"})
    assert host.oom_kills(tmp_path) == 3


H200 = {
    "ClockInfo_sm": 1755, "ClockInfo_memory": 3201, "Temperature": 54, "PowerUsage": 512_000,
    "TotalEnergyConsumption": 7_500, "EnforcedPowerLimit": 700_000, "CurrentClocksEventReasons": 0x4,
    "EccMode": (1, 1), "MigMode": (0, 0), "PersistenceMode": 1, "MaxClockInfo_sm": 1980, "MaxClockInfo_memory": 3201,
    "ComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=8)],
    "FieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=510_000))],
}  # fmt: skip


def test_nvml_has_the_functions_that_are_called() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: python -m pip install nvidia-ml-py")
    names = re.findall(r"\b(nvml(?:Device|System)\w+|NVML_\w+)", Path(sensors.__file__).read_text())
    assert len(names) > 12 and not [name for name in names if not hasattr(pynvml, name)]


def test_the_state_of_a_gpu_is_read() -> None:
    gpu = Gpu(FakeNvml(**H200), "handle")
    assert gpu.read() == Reading(1755, 3201, None, 54, 510, 0x4)
    assert (gpu.why_no_joules, gpu.joules(), gpu.limit_w, gpu.processes()) == (None, 7.5, 700, [7, 8])
    assert gpu.settings() == {
        "ecc": "on", "mig": "off", "persistence": "on", "power_limit_w": 700, "power_sensor": "instant",
        "max_sm_mhz": 1980, "max_memory_mhz": 3201,
    }  # fmt: skip


def test_a_gpu_without_a_sensor_of_instant_power_has_the_mean() -> None:
    gpu = Gpu(FakeNvml(**H200 | {"FieldValues": [SimpleNamespace(nvmlReturn=3)]}), "handle")
    assert gpu.watts() == 512 and gpu.settings()["power_sensor"] == "mean of a second"


def test_what_a_gpu_does_not_report_is_none() -> None:
    gpu = Gpu(FakeNvml(), "handle")
    assert gpu.read() == Reading() and gpu.processes() is None and gpu.settings().keys() == {"power_sensor"}
    assert "no counter of energy" in (gpu.why_no_joules or "")


def write_rapl(root: Path, *packages: tuple[int, int]) -> list[Path]:
    """Writes the counters of these CPU packages, and returns their folders.

    packages  for each CPU in its socket: (microjoules used, the largest value, after which the counter begins at 0)

    The counter of a part of the first package is written, too. It must not be added.
    """
    folders = [root / f"sys/class/powercap/intel-rapl:{n}" for n in range(len(packages))]
    part = root / "sys/class/powercap/intel-rapl:0:0"  # its energy is counted in that of package 0 already
    for folder, (used, limit) in zip([*folders, part], [*packages, (10**9, 10**9)], strict=True):
        counter = {"energy_uj": used, "max_energy_range_uj": limit, "constraint_0_power_limit_uw": 250_000_000}
        write(folder, counter)
    return folders


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 4999)), max_size=8))
def test_counters_of_packages_add_up_and_may_begin_again_at_0(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    used, limits = [990, 10], [1000, 5000]
    folders = write_rapl(root := tmp_path_factory.mktemp("rapl"), *zip(used, limits, strict=True))
    cpu = Cpu(root)
    assert cpu.why_no_joules is None and cpu.limit_w == 500 and cpu.watts() is None
    for done, step in enumerate(steps, start=1):
        for place, folder in enumerate(folders):
            used[place] += step[place]
            (folder / "energy_uj").write_text(f"{used[place] % (limits[place] + 1)}\n")
        assert cpu.joules() == pytest.approx(sum(map(sum, steps[:done])) / 1e6)


def test_a_cpu_without_counters_says_why(tmp_path: Path) -> None:
    assert "shows no counters of a CPU's energy" in (Cpu(tmp_path).why_no_joules or "")
    (folder,) = write_rapl(tmp_path, (1, 1000))
    (folder / "energy_uj").unlink()  # stands for a counter that only root may read
    assert "energy cannot be read: [Errno 2]" in (Cpu(tmp_path).why_no_joules or "")


def test_the_clock_and_the_governor_of_a_cpu_are_read(tmp_path: Path) -> None:
    assert Cpu(tmp_path).read() == Reading() and Cpu(tmp_path).settings() == {}
    for core in range(64):
        facts = {"scaling_cur_freq": 2_400_000, "scaling_governor": "powersave"}
        write(tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq", facts)
    assert Cpu(tmp_path).read() == Reading(cpu_clock_mhz=2400) and Cpu(tmp_path).settings() == {"governor": "powersave"}


@pytest.mark.gpu
def test_the_state_of_this_gpu_is_read() -> None:
    gpu = sensors_of("cuda")
    reading, settings = gpu.read(), gpu.settings()
    assert reading.sm_clock_mhz and reading.memory_clock_mhz and reading.temperature_c and reading.power_w
    assert 0 < reading.sm_clock_mhz <= settings["max_sm_mhz"] and 0 < reading.power_w < 2 * settings["power_limit_w"]
    assert settings["ecc"] in ("on", "off") and gpu.why_no_joules is None and gpu.joules() > 0
    assert gpu.processes() is not None
