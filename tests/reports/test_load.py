"""Reading of result files: several files count as one, later runs win, and a bad file ends the report in a line.

WRONG_FIELDS and WRONG_FACTS have bad values of records and of machines, with a part of the message.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmsys.reports.__main__ import main
from lmsys.reports.load import read
from lmsys.reports.page import MANIFEST
from tests.support.processes import ROOT
from tests.support.records import EVERY_PLOT, MACHINE, built, cells, fields_of, record, rows_of, save

STEM = "default-bfloat16-causal-fwd"
PEAK = f"tables/synthetic-gpu-{STEM}-peak.md"


def small() -> list[dict]:
    """Records of three rows at two lengths."""
    impls = ("naive", "flash_triton", "sdpa_flash")
    return [record("attention", impl, queries=s, keys=s) for s in (512, 1024) for impl in impls]


def naive(mib: int, **values: object) -> dict:
    """A record of the row "naive" with this peak memory."""
    return record("attention", "naive", peak_bytes=mib * 2**20, **values)


def test_same_results_same_bytes_without_torch(tmp_path: Path) -> None:
    """The other process has another hash seed, which reorders sets, and cannot import torch, triton or pandas."""
    first = built(tmp_path / "a", save(tmp_path / "r.json", small()), drawn=EVERY_PLOT)
    absent = "import sys; sys.modules['torch'] = sys.modules['triton'] = sys.modules['pandas'] = None; "
    code = f"{absent}from lmsys.reports.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path / "r.json"), "-o", str(tmp_path / "b")]
    environment = {"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "b" / "index.html")
    files = [file for file in (tmp_path / "b").rglob("*") if file.is_file() and file.name != MANIFEST]
    assert {file.relative_to(tmp_path / "b").as_posix(): file.read_bytes() for file in files} == first
    assert any(name.startswith("plots/") for name in first)


def test_split_files_equal_the_whole_in_any_order(tmp_path: Path) -> None:
    records = small()
    whole = built(tmp_path / "whole", save(tmp_path / "whole.json", records[::-1]))
    half = save(tmp_path / "one.json", records[1::2])
    head = json.loads(half.read_text())["lmsys"] | {"records": []}
    journal = tmp_path / "two.json.partial"
    journal.write_text("".join(json.dumps(line) + "\n" for line in [head, *records[::2]]) + '{"id": "cut sho')
    assert built(tmp_path / "split", journal, half) == whole
    assert built(tmp_path / "named-by-result", half, tmp_path / "two.json") == whole


def test_the_later_run_wins_and_machines_stay_apart(tmp_path: Path) -> None:
    first, other = save(tmp_path / "1.json", [naive(1)]), save(tmp_path / "3.json", [naive(4)], name="Other GPU")
    later = save(tmp_path / "2.json", [naive(2)], commit="fedcba", date="2000-01-03")
    undated = save(tmp_path / "4.json", [naive(8)], date=None)
    files = built(tmp_path / "out", undated, first, later, other)
    assert cells(files, f"{STEM}-peak")[0]["naive"] == "2.00"
    assert "| 1,024 | 4.00 |" in files[PEAK.replace("synthetic", "other")].decode()
    assert b"commit fedcba, 2000-01-03" in files[PEAK] and b"0123456789" not in files[PEAK]
    assert built(tmp_path / "reversed", other, later, first, undated) == files


def test_of_one_date_the_file_named_last_wins(tmp_path: Path) -> None:
    first, second = (save(tmp_path / f"{mib}.json", [naive(mib)]) for mib in (1, 2))
    for paths, shown in (((first, second), "2.00"), ((second, first), "1.00")):
        assert cells(built(tmp_path / "out", *paths), f"{STEM}-peak")[0]["naive"] == shown


@pytest.mark.parametrize(("device", "titles"), [("cpu", ["{}, 4 cores", "{}, 8 cores"]), ("cuda", ["{}"])])
def test_a_cpu_is_known_by_its_cores_and_a_gpu_in_whatever_host(device: str, titles: list[str], tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{cores}.json", [naive(1)], cores=cores, device=device) for cores in (4, 8)]
    machines = read(paths)
    assert [machine.title for machine in machines] == [title.format(MACHINE["name"]) for title in titles]
    about = "; ".join(machine.about(machine.records) for machine in machines)
    assert device == "cpu" or "8 CPU cores" in about


def test_what_a_file_says_of_rows_that_it_has_no_cases_of_takes_nothing_away(tmp_path: Path) -> None:
    paths = [save(tmp_path / "1.json", [naive(1)]), save(tmp_path / "2.json", [naive(2)], date="2000-01-03")]
    content = json.loads(paths[1].read_text())
    for row in content["lmsys"]["rows"]["attention"]:
        row.pop("baseline", None)
    paths[1].write_text(json.dumps(content))
    (machine,) = read(paths)
    assert machine.rows == read(paths[:1])[0].rows and any(
        "baseline" in row for row in machine.rows["attention"].values()
    )


def test_a_size_may_be_a_word(tmp_path: Path) -> None:
    sized = record("data_parallel", "bucketed-auto", asked_bucket_mb="auto")
    assert read([save(tmp_path / "r.json", [sized])])[0].records[0]["asked_bucket_mb"] == "auto"


def test_a_second_report_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    full, part = save(tmp_path / "full.json", small()), save(tmp_path / "part.json", [naive(1)])
    built(tmp_path / "out", full)
    assert built(tmp_path / "out", part) == built(tmp_path / "fresh", part)


def test_later_declarations_stand_for_earlier_ones(tmp_path: Path) -> None:
    """Rows and fields that only an older file declares are kept, after those of the newer."""
    paths = [save(tmp_path / f"{n}.json", [naive(n)], date=f"2000-01-0{n}") for n in (1, 2)]
    content = json.loads(paths[0].read_text())
    content["lmsys"]["rows"]["attention"].insert(0, {"name": "older", "label": "the older one", "peer": False})
    content["lmsys"]["fields"]["attention"].append({"name": "gone", "role": "detail"})
    paths[0].write_text(json.dumps(content))
    (machine,) = read(paths)
    assert list(machine.rows["attention"]) == [*rows_of("attention"), "older"]
    assert list(machine.fields["attention"]) == [*fields_of("attention"), "gone"]


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """AssertionError unless the command ends with 2 and prints a single line, which contains `message`."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


FIELDS = {"attention": [field.to_json() for field in fields_of("attention").values()]}
RESULT = {"schema": 2, "machine": {}, "fields": FIELDS, "rows": {}, "records": []}

WRONG_FIELDS = [
    ("peak_bytes", "much", "peak_bytes='much'"),
    ("peak_bytes", 10**400, "peak_bytes=1000"),
    ("error_ratio", True, "error_ratio=True"),
    ("batch", [1, 2], "batch=[1, 2]"),
    ("dtype", ["float32"], "dtype=['float32']"),
    ("samples_s", "x", "samples_s='x' must be a list"),
    ("samples_s", [1e-3, -1.0], "samples_s[1]=-1.0 must be more than 0"),
    ("time_s", -1.0, "time_s=-1.0 must be more than 0"),
    ("time_s", 0, "time_s=0 must be more than 0"),
    ("rounds", {}, "rounds={} must be a finite number"),
    ("p80_s", "x", "p80_s='x' must be a finite number"),
    ("between_runs", "x", "between_runs='x' must be a finite number"),
    ("between_runs", -1, "between_runs=-1 must be more than 0"),
    ("p80_s", 1.6e308, "p80_s=1.6e+308 must be 0 or of a size from 1e-100 to 1e+100"),
    ("time_s", 1e-320, "time_s=1e-320 must be 0 or of a size from 1e-100 to 1e+100"),
    ("impl", 3, "records[0].impl: must be text of at most 1,000 characters; got int"),
    ("label", "x" * 10**5, "label: must be text of at most 1,000 characters; got 100,000"),
    ("x" * 10**5, 1, "must be text of at most 1,000 characters"),
]
WRONG_FACTS = [
    *(("memory_bytes", "x"), ("gpu_count", "2"), ("cores", 10**30), ("ceilings", "x"), ("dirty", "no"), ("name", [1])),
    *(("ceilings", {"copy_bytes_per_s": "x"}), ("ceilings", {"matmul_flops_per_s": {"float32": -1}})),
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not JSON"),
        ("{}", "not a result of this bench"),
        ("[1]", "not"),
        (RESULT | {"schema": 99}, "schema 99"),
        (RESULT | {"records": [1]}, "records[0]: must be an object; got a int"),
        (RESULT | {"machine": []}, "machine: must be an object; got a list"),
        (RESULT | {"fields": {"attention": [{"name": "x", "units": "s"}]}}, "not a result of this bench"),
        (
            RESULT | {"fields": {"attention": [{"name": "x", "role": "hero"}]}},
            "fields.attention[0].role: must be one of axis, metric, outcome, detail; got 'hero'",
        ),
        (
            RESULT | {"fields": {"attention": [{"name": "x_s", "unit": "s", "shown": "parsecs"}]}},
            "result.json: field 'x_s': shown='parsecs' must be one of us, µs, ms, s,",
        ),
        (RESULT | {"rows": {"attention": [{"label": "x"}]}}, "rows.attention[0]={'label': 'x'} has no 'name'"),
        (RESULT, "nothing to report"),
        (RESULT | {"fields": {}, "records": [naive(1)]}, "'attention', and nothing declares their fields"),
        *((RESULT | {"records": [naive(1) | {name: value}]}, message) for name, value, message in WRONG_FIELDS),
        *(
            (RESULT | {"machine": {name: value}, "records": [naive(1)]}, f"machine.{name}")
            for name, value in WRONG_FACTS
        ),
        (RESULT | {"rows": {"attention": [{"name": "x", "label": "x", "color": "red"}]}}, "color such as #2563eb"),
        (RESULT | {"rows": {"attention": [{"name": "x", "label": "x", "rivals": 3}]}}, "rows.attention[0].rivals=3"),
        (
            RESULT | {"fields": {"attention": []}, "records": [naive(1)]},
            "no field 'section' is declared",
        ),
    ],
)
def test_unusable_results_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, message: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"lmsys": content}))
    refused([str(path), "-o", str(tmp_path / "out")], message, capsys)


NEEDED = [
    ("attention", "naive", "heads"),
    ("model", "auto", "context"),
    ("loss", "eager", "d_model"),
    ("anatomy", "auto", "size"),
    ("collectives", "all_reduce", "megabytes"),
    ("data_parallel", "none", "world_size"),
    ("tokenizer", "lmsys", "task"),
    ("training", "none", "batch"),
]
X_SUMS, SPAN = {"accumulator": "float32"}, ["computation", 0.0, "x"]


@pytest.mark.parametrize(
    ("kind", "impl", "name", "value", "place"),
    [
        ("anatomy", "auto", "kernels", [{"name": "k"}], "kernels[0]={'name': 'k'} has no 'kind'"),
        ("anatomy", "auto", "timeline", [{"name": "forward", "points": [[0.0]]}], "timeline[0].points[0]=[0.0]"),
        ("data_parallel", "none", "timeline", [SPAN], "timeline[0][2]='x' must be a finite number"),
        ("training", "none", "curve_losses", ["x"], "curve_losses[0]='x' must be"),
        ("precision", "bfloat16", "sums", X_SUMS, f"sums={X_SUMS} must be a list"),
        *((*needed, value, f"{needed[2]}={value!r}") for needed in NEEDED for value in (None, ["wrong"])),
    ],
)
def test_a_record_without_what_its_chapter_needs_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, impl: str, name: str, value: object, place: str
) -> None:
    result = save(tmp_path / "r.json", [record(kind, impl) | {name: value, "id": "the bad one"}])
    where = f"{kind} record" if value is None else "r.json: record"  # None may be right in other chapters
    refused([str(result), "-o", str(tmp_path / "out")], f"{where} 'the bad one': {place}", capsys)


def test_other_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = str(save(tmp_path / "r.json", [naive(1)]))
    refused([result, "-o", str(tmp_path / "out"), "--baseline", "naiv"], "must be one of naive", capsys)
    refused([result, "-o", f"{result}/site"], "r.json/site", capsys)
    refused([result, "-o", result], result, capsys)
    refused([result, "-o", "/proc/x"], "/proc/x", capsys)
    refused([str(tmp_path / "absent.json")], "absent.json", capsys)
    refused([str(tmp_path)], str(tmp_path), capsys)
    refused([], "name the result files", capsys)


CHAPTERS = (
    "Attention: all rows",
    "Model: all that were run",
    "Head and loss",
    "Where time goes",
    "Mixed precision",
    "Collectives",
    "Data parallel: Everyday sizes",
    "Tokenizers",
    "Training: Everyday sizes",
)


def test_the_page_reports_a_sweep_of_every_benchmark(smoke_result: Path, tmp_path: Path) -> None:
    """In a report of a real run each benchmark has its chapter, and records.csv has every case."""
    files = built(tmp_path / "out", smoke_result)
    records = json.loads(smoke_result.read_text())["lmsys"]["records"]
    assert len(files["tables/records.csv"].decode().splitlines()) == len(records) + 1
    page = files["index.html"].decode()
    assert all(f">{title.replace('Everyday sizes', 'Smoke test')}</h3>" in page for title in CHAPTERS)


def test_every_benchmark_has_its_chapters_in_page_order(everything: dict[str, bytes]) -> None:
    page = everything["index.html"].decode()
    places = [page.index(f">{title}</h3>") for title in (*CHAPTERS[:4], "Where memory goes", *CHAPTERS[4:])]
    assert places == sorted(places)
    header = everything["tables/records.csv"].decode().splitlines()[0].split(",")
    assert "kernels" not in header and "samples_s" not in header and "time_s" in header
