"""`--against`: a sweep measures each row beside an earlier state of it, and says what became slower or broke.

A row is an implementation in a benchmark's table. The state is a git reference or a folder (`lmsys.bench.checkout`);
one process runs it, another runs the rows of today, and both take turns (`lmsys.bench.paired`). The fixture `folder` is
a repository whose rows differ in known ways from those that were committed.

The last tests are of verdicts on real runs: code that did not change is "same", and a planted slowdown is found. They
take minutes, so they run on request:

    python -m pytest tests/bench/test_paired.py -m on_request -s                # on the CPU
    python -m pytest tests/bench/test_paired.py -m "on_request and gpu" -s      # on a GPU, some 16 minutes

LMSYS_PAIRS sets how many pairs of fresh processes are measured; the default is 5. Each pair prints its counts, what
changed, and what stayed unclear. tests/support/planted.py makes the slow rows.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bench_collectives import Collectives
from benchmarks.bench_data_parallel import DataParallel
from benchmarks.bench_training import Training
from lmsys.bench import Benchmark, Entry, Settings, options
from lmsys.bench.changes import BAD, FASTER, MARGIN, SAME, SLOWER, UNCLEAR, Change, compare, lines
from lmsys.bench.fields import Record
from lmsys.bench.paired import check_rows
from lmsys.bench.record import load, today
from lmsys.bench.results import MARGIN_IN_TURNS, Session
from lmsys.registry import load_target
from lmsys.reports.__main__ import main
from lmsys.verify import verify
from tests.bench.test_checkout import config, git, write
from tests.bench.test_plugin import EXAMPLE, command
from tests.support.harness import Telling
from tests.support.planted import PLANTED, changes, plant, records
from tests.support.processes import ENVIRONMENT, PATIENCE_S, ROOT

ROWS = """
import os
import time

import torch

calls = iter(range(10**9))


def steady(a, b):
    return a @ b


def slower(a, b):
    until = time.perf_counter() + {seconds}
    while time.perf_counter() < until:
        pass
    return a @ b


def mended(a, b):
    return a @ b * {factor}


def crashes(a, b):
    if {crashes} and next(calls) == 12 and not os.path.exists("crashed"):
        open("crashed", "x")  # only once
        os._exit(3)
    return a @ b
"""
NAMES = "steady", "slower", "mended", "crashes", "moved", "added"
# Arguments of pytest: the benchmark with a single case, and the file that gets its records.
SMALL = ("bench_matmul.py", "--lmsys-axis", "size=32", "--lmsys-axis", "dtype=float32", "--benchmark-max-time", "0.05")
WRITTEN = ("--benchmark-only", "--benchmark-json", "out.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with the example's benchmark, and the rows of ROWS in place of its own.

    In the committed state "slower" is faster, "mended" is wrong, "crashes" ends its process once, "moved" is in another
    file, and "added" does not exist.
    """
    text = re.sub("^ROWS = .*$", "from table import ROWS", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = text.replace(
        'name, case_type = "matmul", Product', 'name, case_type, tables = "matmul", Product, {"row": ROWS}'
    )
    folder = tmp_path / "repository"
    write(folder, "bench_matmul.py", text=text)
    write(folder, "table.py", text=table({name: f"rows:{name}" for name in NAMES[:4]} | {"moved": "rows:steady"}))
    write(folder, "rows.py", text=ROWS.format(seconds=1e-3, factor=1.01, crashes=True))
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    write(folder, "table.py", text=table({name: f"rows:{name}" for name in NAMES} | {"moved": "elsewhere:row"}))
    text = ROWS.format(seconds=3e-2, factor=1.0, crashes=False)
    write(folder, "rows.py", text=f"{text}\n\nadded = steady\n")
    write(folder, "elsewhere.py", text="from rows import steady as row\n")
    return folder


def table(rows: dict[str, str]) -> str:
    """The text of a module with a table of these rows, {name: target}."""
    entries = ", ".join(f'Entry("{name}", "{target}")' for name, target in rows.items())
    return f'from lmsys.bench import Entry, Table\n\nROWS = Table("matmul", [{entries}])\n'


@pytest.mark.long
def test_a_sweep_says_what_became_slower_and_what_broke(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ENVIRONMENT | {"LMSYS_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    line = command(*SMALL, *WRITTEN, "--lmsys-against", "HEAD")
    ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    commit = git(folder, "rev-parse", "HEAD").strip()
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "against HEAD, in turns; ROW@" in ended.stdout and "--lmsys-against: 1 slower" in ended.stdout, ended.stdout
    slower = r"^slower +\d+\.\d+ +\d+\.\d+ to \d+\.\d+  default-32-float32-slower(?:: disturbed .*)?$"
    assert re.search(slower, ended.stdout, re.MULTILINE)  # a busy machine disturbs it
    assert re.search(r"^mended +default-32-float32-mended: product is .* the allowed error", ended.stdout, re.MULTILINE)
    added = r"^only now +default-32-float32-added: the earlier state cannot run it: .* rows defines no 'added'"
    assert re.search(added, ended.stdout, re.MULTILINE)
    assert not list(tmp_path.glob("lmsys-against-*")), "the earlier state was left behind"

    records = load(folder / "out.json")["records"]
    earlier = {record["impl"]: record for record in map(today, records) if record.get("against")}
    now = {record["impl"]: record for record in records if not record.get("against")}
    assert set(earlier) == set(now) == set(NAMES) and {record["outcome"] for record in now.values()} == {"ok"}
    assert earlier["mended"]["outcome"] == "wrong" and earlier["crashes"]["outcome"] == "error"
    assert earlier["added"]["outcome"] == "unsupported"
    assert "exit code 3" in earlier["crashes"]["reason"] and earlier["crashes"]["crashed"]
    for row in ("steady", "slower", "moved"):
        assert earlier[row]["against"] == {"name": commit[:10], "commit": commit, "margin": 0.02}
        assert earlier[row]["comparison"] == now[row]["comparison"] and earlier[row]["rounds"] == now[row]["rounds"]
        sources = [record[row]["proof"]["source"]["sha256"] for record in (earlier, now)]
        assert sources[0] != sources[1], "both sides ran one code"
    assert 1e-3 <= earlier["slower"]["time_s"] < now["slower"]["time_s"]

    benchmarks = {"matmul": load_target(f"{folder}/bench_matmul.py:Matmul")()}
    done, faults = verify(folder / "out.json", benchmarks)
    unkept = "not recomputed: matmul: a record keeps no results of timed calls"
    assert done.records == 12 and faults == [] and set(done.left_out) == {unkept}
    monkeypatch.setattr("lmsys.reports.plots.to_svg", lambda *_: '<svg width="1pt" height="1pt"></svg>')
    pages = [tmp_path / name for name in ("one", "two")]
    assert [main(["--before", str(folder / "out.json"), "-o", str(page)]) for page in pages] == [1, 1]
    assert (pages[0] / "index.html").read_bytes() == (pages[1] / "index.html").read_bytes()


@pytest.mark.gpu
def test_two_processes_take_turns_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    only = {"batch": "2", "heads": "4", "head_dim": "64", "dtype": "bfloat16", "causal": "yes", "direction": "fwd,bwd"}
    verdicts = changes("cuda", 0.05, str(ROOT), attention="sdpa,flash_triton", length="512", **only)
    assert len(verdicts) == 4  # two rows, forward and backward
    assert not any(change.is_changed for change in verdicts)
    for change in verdicts:
        assert (
            len(change.old["samples_s"]) == len(change.new["samples_s"]) >= 10 and change.new["clock"] == "cuda_event"
        )


@pytest.mark.parametrize(
    ("given", "on_ranks", "sentence"),
    [
        ({"no_isolation": True}, False, "--against HEAD: --no-isolation cannot be with it"),
        ({}, True, "--against HEAD: torchrun cannot be with it"),
        ({"nvtx": True}, False, "--nvtx cannot be with it"),
        ({"repeat": 2}, False, "--repeat cannot be with it"),
        ({"against": None, "margin": "0.1"}, False, "--margin 0.1 is of verdicts: name what to compare by --against"),
    ],
)
def test_options_that_exclude_each_other_are_refused(given: dict[str, Any], on_ranks: bool, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        options.checkout(config(lambda cleanup: cleanup(), **given), on_ranks)


@pytest.mark.parametrize("text", ["0", "2", "nan", "much"])
def test_a_margin_must_be_a_share(text: str) -> None:
    assert options.margin(None) == 0.02 and options.margin("0.1") == 0.1
    with pytest.raises(ValueError, match=f"--margin '{text}': must be a share above 0 and of at most 1"):
        options.margin(text)


# A stand-in for an earlier state: what the user has named, and the name in ids of its cases.
STATE: Any = SimpleNamespace(text="v1", name="0123456789")


@pytest.mark.parametrize("cls", [Collectives, DataParallel, Training])
def test_benchmarks_that_do_not_sample_their_rows_in_one_process_are_refused(cls: type[Benchmark]) -> None:
    with pytest.raises(ValueError, match=f"--against v1: not for the benchmark '{cls.name}': its rows take no turns"):
        Session(Settings(), checkout=STATE).add(cls)


def test_a_row_in_the_file_of_its_benchmark_is_refused() -> None:
    """The file of a benchmark is never taken from the earlier state, so its row would be compared with itself."""
    cases = {"a": SimpleNamespace(entry=Entry("mine", f"{Telling.__module__}:mine"), impl="mine")}
    with pytest.raises(ValueError, match="--against v1: the row 'mine' stands in the file of its benchmark"):
        check_rows(STATE, Telling, cases)


def test_a_case_is_measured_with_its_earlier_state_or_not_at_all() -> None:
    """The second of two pairs has a record from before for one of its cases only: both are measured."""
    session = Session(Settings(), checkout=STATE)
    ids = session.add(Telling)
    assert ids[1] == f"{ids[0]}@0123456789" and len(ids) == 4
    keys = [("telling", name) for name in ids]
    with pytest.raises(ValueError, match=f"--against v1: select {ids[1]}, too, beside {ids[0]}"):
        session.select(keys[:1])
    session.carried = dict.fromkeys(keys[:3], {"outcome": "ok"})
    session.carried_entries = [{"extra_info": {"id": name}} for name in ids[:3]]
    session.select(keys)
    assert [timing["extra_info"]["id"] for timing in session.entries_of_carried] == ids[:2]
    assert [*session.carried] == keys[:2] and [case.id for group in session._groups.values() for case in group] == [
        ids[2]
    ]


# Verdicts on real runs take minutes: see the text at the top.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAIRS = int(os.environ.get("LMSYS_PAIRS", "5"))
OPTIONS = {  # of the benchmark of attention, by device, for 60 cases
    "cpu": {
        "attention": "naive,vectorized,sdpa_math,sdpa_flash,flash_torch", "length": "64,96,128,192",
        "batch": "1", "heads": "4", "head_dim": "32", "dtype": "float32", "causal": "yes",
        "direction": "fwd,bwd,fwdbwd",
    },
    "cuda": {
        "attention": "flash_triton,sdpa,sdpa_flash,sdpa_cudnn,sdpa_efficient", "length": "512,1024,2048",
        "batch": "4", "heads": "16", "head_dim": "64,128", "dtype": "bfloat16", "causal": "yes", "direction": "fwd,bwd",
    },
}  # fmt: skip
SHAPE = {"cpu": {"length": "256", "batch": "1"}, "cuda": {"length": "4096", "batch": "4"}}
COMMON = {"heads": "8", "head_dim": "64", "causal": "no", "direction": "fwd"}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
SECONDS = {"cpu": 0.2, "cuda": 0.1}  # of sampling, for each row
# {device: (share by which rows are slowed down, margin beyond which a verdict must say "slower")}
PLANTS = {"cuda": (0.02, 0.01), "cpu": (1.0, MARGIN_IN_TURNS)}
ACROSS_FILES = {"cuda": 0.06, "cpu": 1.0}  # {device: that share, if two files are compared}


@pytest.mark.on_request
@pytest.mark.parametrize("device", DEVICES)
def test_unchanged_code_is_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is compared with itself. A busy CPU leaves much unclear; on a GPU nearly all must be the same."""
    monkeypatch.chdir(ROOT)
    pair = partial(changes, device, SECONDS[device], str(ROOT), **OPTIONS[device])
    counts = counts_of(f"{device}, A/A in turns", MARGIN_IN_TURNS, pair)
    assert counts.total() == 60 * PAIRS
    false = sum(counts[verdict] for verdict in (*BAD, FASTER))
    assert false <= (0.01 * counts.total() if device == "cuda" else 0)
    assert device == "cpu" or counts[SAME] >= 0.95 * counts.total()


@pytest.mark.on_request
@pytest.mark.parametrize("device", DEVICES)
def test_a_planted_slowdown_is_found_in_turns(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, margin = PLANTS[device]
    earlier = plant(tmp_path / "earlier", 0.0)
    monkeypatch.chdir(plant(tmp_path / "today", share))
    options = SHAPE[device] | COMMON | {"attention": PLANTED, "dtype": DTYPE[device]}
    pair = partial(changes, device, SECONDS[device], str(earlier), margin, **options)
    check_planted(device, counts_of(f"{device}, {share:.0%} planted, in turns", margin, pair))


@pytest.mark.on_request
@pytest.mark.parametrize("device", DEVICES)
def test_a_planted_slowdown_is_found_across_files(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = ACROSS_FILES[device]
    options = SHAPE[device] | COMMON | {"attention": f"{PLANTED},sdpa_flash", "dtype": DTYPE[device]}

    def pair() -> list[Change]:
        runs: list[list[Record]] = []
        for name, planted in (("earlier", 0.0), ("today", share)):
            monkeypatch.chdir(plant(tmp_path / name, planted))
            runs.append(records(device, SECONDS[device], **options))
        return [change for change in compare(runs[0], runs[1]) if not change.new["peer"]]

    check_planted(device, counts_of(f"{device}, {share:.0%} planted, across files", MARGIN, pair))


def counts_of(title: str, margin: float, pair: Callable[[], list[Change]]) -> Counter[str]:
    """{verdict: number} of all pairs. Each pair's verdicts are printed when it has ended."""
    counts: Counter[str] = Counter()
    for number in range(1, PAIRS + 1):
        verdicts = pair()
        print(f"{title}, pair {number} of {PAIRS}:", *lines(verdicts, margin), sep="\n")
        for change in verdicts:
            if change.verdict == UNCLEAR:
                print(f"unclear: {change.new['id']} {change.interval}")
        counts += Counter(change.verdict for change in verdicts)
    return counts


def check_planted(device: str, counts: Counter[str]) -> None:
    """AssertionError unless a GPU finds nearly all slow rows. A busy CPU may leave some unclear, but none "same"."""
    assert counts.total() == 8 * PAIRS
    assert counts[SLOWER] >= (0.95 * counts.total() if device == "cuda" else 1)
    assert not counts[SAME] and not counts[FASTER]
