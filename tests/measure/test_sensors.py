"""Sensors (lmsys/measure/sensors.py) of a GPU, from NVML's answers, and of a CPU, from Linux's files.

NVML is NVIDIA's library for the state of GPUs. `FakeNvml(**H200)` answers as it does for an H200, and `FakeNvml()` as
for a GPU that reports nothing. `write_rapl` writes the files in which Linux shows the counters of a CPU's energy.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.measure import sensors
from lmsys.measure.sensors import Cpu, Gpu, Reading, sensors_of
from tests.support.device import FakeNvml

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
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "energy_uj").write_text(f"{used}\n")
        (folder / "max_energy_range_uj").write_text(f"{limit}\n")
        (folder / "constraint_0_power_limit_uw").write_text("250000000\n")
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
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text("2400000\n")
        (folder / "scaling_governor").write_text("powersave\n")
    assert Cpu(tmp_path).read() == Reading(cpu_clock_mhz=2400) and Cpu(tmp_path).settings() == {"governor": "powersave"}


@pytest.mark.gpu
def test_the_state_of_this_gpu_is_read() -> None:
    gpu = sensors_of("cuda")
    reading, settings = gpu.read(), gpu.settings()
    assert reading.sm_clock_mhz and reading.memory_clock_mhz and reading.temperature_c and reading.power_w
    assert 0 < reading.sm_clock_mhz <= settings["max_sm_mhz"] and 0 < reading.power_w < 2 * settings["power_limit_w"]
    assert settings["ecc"] in ("on", "off") and gpu.why_no_joules is None and gpu.joules() > 0
    assert gpu.processes() is not None
