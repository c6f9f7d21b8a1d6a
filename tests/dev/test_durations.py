"""The committed seconds of each group of cases: `dev.durations` makes them of results, and the sweep has the groups."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweeps import SWEEPS
from dev import durations
from lmsys.bench import Grid, Settings
from lmsys.bench.runner import Runner
from lmsys.verify import benchmarks_in


def result(path: Path, **machine: Any) -> Path:
    """A result file without records, with `machine` as what it says of its machine and run."""
    content = {"schema": 2, "machine": machine, "fields": {}, "layouts": {}, "rows": {}, "records": []}
    path.write_text(json.dumps({"lmsys": content}))
    return path


def test_a_group_of_several_results_has_the_geometric_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"a x": 1.23456, "a y": 2.0, "gone": 5.0}, {"a x": 1.23456, "a y": 1.0, "b": 300.4}
    names = [
        str(result(tmp_path / f"{at}.json", device="cpu", sweep="default", took_s=one)) for at, one in enumerate(took)
    ]
    monkeypatch.setattr(durations, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["durations", *names])
    durations.main()
    made = json.loads((tmp_path / "durations_cpu.json").read_text())
    # In three digits; "gone" is no group of the last result.
    assert made == {"a x": 1.23, "a y": 1.41, "b": 300.0}


@pytest.mark.parametrize("machine", [{"sweep": "smoke", "took_s": {"a": 1.0}}, {"sweep": "default"}])
def test_results_of_another_sweep_or_without_times_are_refused(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = result(tmp_path / "out.json", device="cpu", **machine)
    monkeypatch.setattr(sys, "argv", ["durations", str(path)])
    with pytest.raises(SystemExit, match="2"):
        durations.main()
    assert f"{path}: it must be of the default sweep" in capsys.readouterr().err


def test_the_sweep_ships_seconds_of_its_own_groups() -> None:
    """If this fails, the sweep has other groups: make the file again, as `dev/durations.py` says."""
    sweep, runner = SWEEPS["default"]["cpu"], Runner(Settings(device="cpu", timed=False))
    groups = set[str]()
    for name, benchmark in benchmarks_in(Path("benchmarks")).items():
        cases, _ = runner.collect(benchmark, sweep.grids.get(name, (Grid("default"),)), {})
        groups |= {f"{name} {case.group}" for case in cases.values()}
    assert sweep.took_s.keys() <= groups and len(sweep.took_s) > 0.8 * len(groups)
