"""`lmsys verify` on a result of one H200: alterations of the file are found, and what cannot be judged is said.

The result is eight cases of reports/results/nvidia-h200_20261126_default.json.gz, sealed as a file of their own; most
tests use `content`, two forwards of it. A seal is a digest that a record or the file has of its content: an alteration
must be found by the seal that it breaks, and, if it is sealed again, by contradicting something else in the file,
except for those in CANNOT. To add an alteration, write a function with @alteration, or an entry of FACTORS or VALUES.
`tests/test_forged_results.py` has more.
"""

import copy
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmsys import verify
from lmsys.bench.record import others_seal, seal, summarize
from lmsys.files import read_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reports" / "results"
RESULT = Path(__file__).parent / "data" / "attention_h200.json"
SCALED = ("mean_s", "std_s", "p20_s", "p80_s", "min_s", "time_s")
Content = dict[str, Any]
Alteration = Callable[[Content], None]
ALTERATIONS: dict[str, Alteration] = {}
CANNOT = {"all_figures_scaled_alike", "another_machine"}  # alterations that are not found once they are sealed again


def alteration(function: Alteration) -> Alteration:
    """Register a function that alters the content of a result file."""
    ALTERATIONS[function.__name__] = function
    return function


def records(content: Content) -> list[Content]:
    """The records with a time, which may be changed."""
    timed: list[Content] = [record for record in content["lmsys"]["records"] if record.get("samples_s")]
    return timed


def entry(content: Content, record: Content) -> Content:
    """pytest-benchmark's entry of a record."""
    (entry_of_record,) = [
        candidate for candidate in content["benchmarks"] if candidate["extra_info"]["id"] == record["id"]
    ]
    return entry_of_record


def first_call(content: Content) -> Content:
    """The first checked call of the first record."""
    call: Content = records(content)[0]["proof"]["calls"][0]
    return call


def put(place: Callable[[Content], Content], values: Content, content: Content) -> None:
    """Puts values into a part of a file's content, by field."""
    place(content).update(values)


def first_record(content: Content) -> Content:
    return records(content)[0]


FACTORS = {  # of a field of the first record
    "time_scaled": ("time_s", 0.9),
    "rate_improved": ("flops_per_s", 1.1),
    "share_of_the_ceiling_improved": ("matmul_ceiling_fraction", 1.1),
    "work_enlarged": ("flops", 2),
    "heads_doubled": ("heads", 2),
}
VALUES = {  # of fields of the first record, or of its first checked call
    "error_ratio_improved": (first_record, {"error_ratio": 0.001}),
    "wrong_made_ok": (first_record, {"error_ratio": 3.0}),
    "another_dtype": (first_record, {"dtype": "float16"}),
    "forward_said_to_be_a_backward": (first_record, {"direction": "bwd"}),
    "said_to_repeat": (
        first_record,
        {
            "same_bits": {"calls": 3, "differ": {"dq": 1e-3}, "elements": [], "alone": {}, "failure": None},
            "repeatable": True,
        },
    ),
    "another_draw": (first_call, {"draw": 1}),
    "another_key": (first_call, {"key": 1}),
    "another_call": (first_call, {"call": 10**6}),
    "no_errors": (first_call, {"error_ratios": {}}),
}


def scale(name: str, factor: float, content: Content) -> None:
    first_record(content)[name] *= factor


ALTERATIONS |= {name: partial(scale, *factor) for name, factor in FACTORS.items()}
ALTERATIONS |= {name: partial(put, *values) for name, values in VALUES.items()}


@alteration
def statistics_scaled(content: Content) -> None:
    for name in SCALED:
        records(content)[0][name] *= 0.9


@alteration
def sample_dropped(content: Content) -> None:
    records(content)[0]["samples_s"].remove(max(records(content)[0]["samples_s"]))


@alteration
def sample_lowered(content: Content) -> None:
    records(content)[0]["samples_s"][0] *= 0.5


@alteration
def slow_samples_dropped_everywhere(content: Content) -> None:
    record = records(content)[0]
    record["samples_s"] = sorted(record["samples_s"])[: len(record["samples_s"]) // 2]
    record |= summarize(record["samples_s"])


@alteration
def samples_and_statistics_scaled(content: Content) -> None:
    record = records(content)[0]
    record["samples_s"] = [0.9 * sample for sample in record["samples_s"]]
    record |= summarize(record["samples_s"])


@alteration
def all_figures_scaled_alike(content: Content) -> None:
    record = records(content)[0]
    for name in (*SCALED, "flops_per_s", "bytes_per_s", "matmul_ceiling_fraction", "copy_ceiling_fraction"):
        record[name] = record[name] / 0.96 if name.endswith(("per_s", "fraction")) else record[name] * 0.96
    record["samples_s"] = [0.96 * sample for sample in record["samples_s"]]
    entry(content, record)["stats"]["data"] = record["samples_s"]
    entry(content, record)["extra_info"] |= {name: record[name] for name in entry(content, record)["extra_info"]}


@alteration
def rows_swapped(content: Content) -> None:
    first, second = records(content)[:2]
    first["impl"], second["impl"] = second["impl"], first["impl"]


@alteration
def samples_of_another_row(content: Content) -> None:
    first, second = records(content)[:2]
    first["samples_s"] = second["samples_s"]


@alteration
def error_ratios_improved_everywhere(content: Content) -> None:
    record = records(content)[0]
    record["error_ratio"] = 0.001
    for call in record["proof"]["calls"]:
        call["error_ratios"] = dict.fromkeys(call["error_ratios"], 0.001)


@alteration
def another_seed(content: Content) -> None:
    records(content)[0]["proof"]["seed"] += 1


@alteration
def other_values(content: Content) -> None:
    part = first_call(content)["parts"][0]
    part["values"] = first_call(content)["parts"][1]["values"]


@alteration
def error_of_a_row_improved(content: Content) -> None:
    first_call(content)["parts"][0]["error"] *= 0.1


@alteration
def budget_enlarged(content: Content) -> None:
    first_call(content)["parts"][0]["budget"] *= 10


@alteration
def mask_left_out(content: Content) -> None:
    records(content)[0]["causal"] = not records(content)[0]["causal"]


@alteration
def no_proof(content: Content) -> None:
    del records(content)[0]["proof"]


@alteration
def no_calls_proved(content: Content) -> None:
    records(content)[0]["proof"]["calls"] = []


@alteration
def one_call_less(content: Content) -> None:
    records(content)[0]["proof"]["calls"].pop()


@alteration
def one_part_left_out(content: Content) -> None:
    first_call(content)["parts"].pop()


@alteration
def record_left_out(content: Content) -> None:
    content["lmsys"]["records"].remove(records(content)[0])


@alteration
def record_twice(content: Content) -> None:
    content["lmsys"]["records"].append(copy.deepcopy(records(content)[0]))


@alteration
def ceiling_lowered(content: Content) -> None:
    content["lmsys"]["machine"]["ceilings"]["matmul_flops_per_s"]["bfloat16"] *= 0.8


@alteration
def another_machine(content: Content) -> None:
    content["lmsys"]["machine"]["name"] = "another"


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, Any]:
    """The benchmarks of the repository, by name, which verify needs to judge calls again."""
    return verify.benchmarks_in(ROOT / "benchmarks")


@pytest.fixture
def whole() -> Content:
    """The content of the whole result file."""
    file_content: Content = json.loads(RESULT.read_text())
    return file_content


@pytest.fixture
def content(whole: Content, benchmarks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Content:
    """Two forwards of `whole`, sealed, with two checked calls each, and the benchmark is told to expect two."""
    monkeypatch.setattr(type(benchmarks["attention"]), "num_proofs", 2)
    kept = records(whole)[:2]
    for record in kept:
        del record["proof"]["calls"][2:]
    whole["lmsys"]["records"] = kept
    whole["benchmarks"] = [entry(whole, record) for record in kept]
    seal_again(whole)
    return whole


def wrong_in(content: Content, folder: Path, benchmarks: dict[str, Any]) -> list[str]:
    """The faults that verify finds in a file of this content."""
    path = folder / "result.json"
    path.write_text(json.dumps(content))
    _, faults = verify.verify(path, benchmarks)
    return faults


def seal_again(content: Content) -> None:
    """Renew all seals, after pytest-benchmark's entries have been made to agree with the records."""
    for record in content["lmsys"]["records"]:
        record["seal"] = seal(record)
    for timing in content["benchmarks"]:
        known = {record["id"]: record for record in content["lmsys"]["records"]}
        if record := known.get(timing["extra_info"].get("id")):
            timing["extra_info"] |= {name: record[name] for name in timing["extra_info"]}
            timing["stats"]["data"] = record["samples_s"]
    seal_file(content)


def seal_file(content: Content) -> None:
    """Renew the seals of the file, not those of its records."""
    content["lmsys"]["others"] = others_seal(content)
    content["lmsys"]["seal"] = seal(content["lmsys"])


def test_what_nobody_altered_passes(whole: Content, tmp_path: Path, benchmarks: dict[str, Any]) -> None:
    """The whole file passes, in which are forwards and backwards."""
    assert wrong_in(whole, tmp_path, benchmarks) == []
    checked = [record for record in records(whole) if record["proof"]["calls"]]
    assert len(checked) == len(records(whole)) >= 8


def test_a_time_without_all_of_its_proofs_is_not_proved(
    path: Path, content: Content, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in such a file contradicts itself, but the exit code is 1, and the output counts it as not proved."""
    for alter in (no_calls_proved, one_call_less, one_part_left_out):
        altered = copy.deepcopy(content)
        alter(altered)
        seal_again(altered)
        path.write_text(json.dumps(altered))
        assert verify.main([str(path)]) == 1
        assert capsys.readouterr().out.endswith(f"nothing is wrong, 1 not proved\n{verify.NO_FILE_PROVES}\n")


def test_sizes_are_looked_at_before_memory_is_taken(content: Content, tmp_path: Path) -> None:
    tracemalloc.start()
    for name, size in [("batch", 10**9), ("keys", 10**12), ("queries", 10**12), ("head_dim", 10**12)]:
        altered = copy.deepcopy(content)
        records(altered)[0][name] = size
        assert wrong_in(altered, tmp_path, verify.benchmarks_in(ROOT / "benchmarks"))
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


def test_what_is_left_of_it_passes(content: Content, tmp_path: Path, benchmarks: dict[str, Any]) -> None:
    assert wrong_in(content, tmp_path, benchmarks) == []


def test_a_budget_may_be_larger_than_here_but_excuses_no_error(
    content: Content, tmp_path: Path, benchmarks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch, whose error makes the budget, may lose more on a GPU than on this CPU."""
    first_call(content)["parts"][0]["budget"] *= 3
    seal_again(content)
    assert wrong_in(content, tmp_path, benchmarks) == []
    monkeypatch.setattr("benchmarks.attention.check.BUDGET_RTOL", -1.0)  # as if the oracle's budget were 0
    assert any("more than its budget should be" in fault for fault in wrong_in(content, tmp_path, benchmarks))


@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_is_altered_is_found(name: str, content: Content, tmp_path: Path, benchmarks: dict[str, Any]) -> None:
    ALTERATIONS[name](content)
    assert wrong_in(content, tmp_path, benchmarks)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_is_sealed_again_contradicts_itself(
    name: str, content: Content, tmp_path: Path, benchmarks: dict[str, Any]
) -> None:
    """This holds for all alterations but those of CANNOT, after which the file still agrees with itself."""
    ALTERATIONS[name](content)
    seal_again(content)
    faults = wrong_in(content, tmp_path, benchmarks)
    assert bool(faults) == (name not in CANNOT), faults


@pytest.fixture
def path(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a file of `content`; the command is run in the repository's folder."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    return path


def test_the_command_says_so_and_exits_so(
    path: Path, content: Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([str(path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    ALTERATIONS["time_scaled"](content)
    path.write_text(json.dumps(content))
    assert verify.main([str(path)]) == 1
    assert "time_s is" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_file_that_takes_long_says_how_far_it_is(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify.main([str(path)]) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(verify, "TOLD_S", 0.0)
    assert verify.main([str(path)]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{path}: 0 of 2 records"
    assert re.fullmatch(rf"{re.escape(str(path))}: 1 of 2 records, about \d+ s left", second)


def test_an_interrupt_ends_it_with_a_sentence(content: Content, tmp_path: Path) -> None:
    """The interrupt comes in the second file: what was found in the first is printed, and the exit code is 130."""
    paths = tmp_path / "whole.json", tmp_path / "cut.json"
    paths[0].write_text(json.dumps(content))
    paths[1].write_text(json.dumps(content | {"cut": True}))
    interrupting = """
import signal, sys
from benchmarks.bench_attention import Attention
from lmsys import verify
Attention.num_proofs = 2  # as many as the files have
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have been told to ignore it
of_entries = verify._of_entries
def interrupted(file):
    if "cut" in file:
        signal.raise_signal(signal.SIGINT)
    return of_entries(file)
verify._of_entries = interrupted
sys.exit(verify.main())
"""
    command = [sys.executable, "-c", interrupting, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 130
    judged = "4 timed calls judged again by 512 elements"
    assert done.stdout == f"{paths[0]}: 2 records, {judged}, nothing is wrong\n"
    assert done.stderr.startswith("lmsys verify: interrupted") and done.stderr.count("\n") == 1


def test_without_folders_it_finds_the_benchmark_of_every_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    known = verify.benchmarks_in(*verify.FOLDERS)
    named = {
        name for path in RESULTS.rglob("*.json*") for name in re.findall(r'"benchmark": ?"(\w+)"', read_text(path))
    }
    assert {"attention", "plans", "short_plans"} <= named <= known.keys()


def test_in_a_folder_without_benchmarks_those_of_the_checkout_judge(tmp_path: Path, content: Content) -> None:
    (tmp_path / "out.json").write_text(json.dumps(content))
    (tmp_path / "benchmarks").mkdir()
    command = [sys.executable, "-m", "lmsys", "verify", "out.json"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "there is no benchmark 'attention' here" not in said and "0 timed calls judged again" not in said


def test_every_folder_that_is_named_is_looked_in(
    tmp_path: Path, content: Content, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(content))
    for folders in (["benchmarks", str(tmp_path)], [str(tmp_path), "benchmarks"]):
        named = [word for folder in folders for word in ("--benchmarks", str(ROOT / folder))]
        assert verify.main([*named, str(path)]) == 0
        assert verify.NOT_RECOMPUTED not in capsys.readouterr().out


def test_without_the_benchmarks_it_says_what_it_left_out(tmp_path: Path, content: Content) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    done, faults = verify.verify(path, verify.benchmarks_in(tmp_path))
    assert (done.records, done.calls) == (2, 0)
    assert len(faults) == 2 and all("not proved: there is no benchmark 'attention' here" in fault for fault in faults)
    assert verify.main(["--benchmarks", str(tmp_path), str(path)]) == 1


def test_entries_of_other_tests_are_not_looked_at(content: Content, tmp_path: Path, benchmarks: dict[str, Any]) -> None:
    content["benchmarks"].append({"name": "test_plain", "extra_info": {}, "stats": {}})
    seal_again(content)
    assert wrong_in(content, tmp_path, benchmarks) == []


def test_entries_may_be_missing(content: Content, tmp_path: Path, benchmarks: dict[str, Any]) -> None:
    """An interrupt leaves the last comparison without entries, and files that are kept have none: records suffice."""
    for left in content["benchmarks"][1:], []:
        content["benchmarks"] = left
        seal_again(content)
        assert wrong_in(content, tmp_path, benchmarks) == []


def test_a_number_beyond_every_float_is_a_difference_told_shortly(
    content: Content, tmp_path: Path, benchmarks: dict[str, Any]
) -> None:
    content["benchmarks"][0]["extra_info"]["time_s"] = 10**400
    seal_file(content)
    (fault,) = wrong_in(content, tmp_path, benchmarks)
    assert "by pytest-benchmark it is 1000" in fault and len(fault) < 400


def test_the_journal_of_a_run_that_was_killed_is_verified(content: Content, tmp_path: Path) -> None:
    ours = content["lmsys"]
    lines = [{name: value for name, value in ours.items() if name not in ("records", "seal")}, *ours["records"]]
    (tmp_path / "out.json.partial").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("out.json.partial", "out.json"):
        done, faults = verify.verify(tmp_path / name, {})
        assert done.records == 2 and any("has no seal" in line for line in done.left_out)
        assert all("not proved: there is no benchmark" in fault for fault in faults)


@pytest.mark.parametrize(
    ("name", "value"),
    [("proof", None), ("proof", 3), ("proof", {"calls": [{}]}), ("rounds", None), ("dtype", "x"), ("head_dim", None)],
)
def test_a_record_that_no_run_has_written_is_wrong(
    name: str, value: object, content: Content, tmp_path: Path, benchmarks: dict[str, Any]
) -> None:
    records(content)[0][name] = value
    seal_again(content)
    assert any("it cannot be recomputed: " in fault for fault in wrong_in(content, tmp_path, benchmarks))
