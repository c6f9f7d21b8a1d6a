"""`lmsys`, the command with all others as subcommands: its help, and what it says where something is missing.

Without arguments (lmsys/here.py) it lists the rows, implementations, that run on this machine, and for the others a
remedy, such as a package to install; each remedy once. The last part is about `lmsys bench`, which turns its arguments
into a command line of pytest.
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lmsys.course.__main__ as course
import lmsys.reports.__main__ as reports
from lmsys import commands, here, leaderboard
from lmsys.bench.__main__ import line_of, main
from lmsys.here import USES, evidence, remedy
from lmsys.registry import Entry
from tests.support.processes import ENVIRONMENT, PATIENCE_S, ROOT


def supports(case: SimpleNamespace) -> str | None:
    """The reason of a row for Hopper alone, which needs a package that is not installed."""
    if case.device != "cuda":
        return "runs on CUDA"
    if case.capability != (9, 0):
        return f"is for 9.0; this GPU has {case.capability}"
    raise ImportError("No module named 'absent'")


def later(case: SimpleNamespace) -> str | None:
    """The reason of a row for Hopper and later GPUs."""
    if case.device != "cuda":
        return "runs on CUDA only"
    return None if case.capability >= (9, 0) else f"needs (9, 0); this GPU has {case.capability}"


def anywhere(case: SimpleNamespace) -> str | None:
    """The reason of a row for any GPU, whose question to torch raises an error if there is none."""
    if case.device != "cuda":
        return "runs on CUDA only"
    raise RuntimeError("no CUDA device is here")


MAINS = {"course": course.main, "leaderboard": leaderboard.main, "report": reports.main}
PIP = "needs a package that is not here (No module named 'absent'); python -m pip install absent --now brings it"
# (row's function, its reason on this machine, this machine's device, the remedy that must be found)
CASES = [
    ("supports", "runs on CUDA", "cpu", f"a GPU of compute capability 9.0; {PIP}"),
    ("supports", "is for 9.0; this GPU has (8, 0)", "cuda", f"a GPU of compute capability 9.0; {PIP}"),
    ("supports", f"row {PIP}", "cuda", PIP),
    ("later", "runs on CUDA only", "cpu", "a GPU of compute capability 9.0 or later"),
    ("later", "needs (9, 0); this GPU has (8, 0)", "cuda", "a GPU of compute capability 9.0 or later"),
    ("anywhere", "runs on CUDA only", "cpu", "a GPU"),
    ("anywhere", "torch.compile on CPU needs a C++ compiler", "cpu", "torch.compile on CPU needs a C++ compiler"),
    ("anywhere", "torch: no such case", "cuda", "torch: no such case"),
]


@pytest.mark.parametrize(("row", "reason", "device", "expected"), CASES)
def test_a_remedy_is_the_reason_of_a_row_on_other_machines(row: str, reason: str, device: str, expected: str) -> None:
    entry = Entry("row", "operator:add", supports=f"{__name__}:{row}", install="absent --now")
    assert remedy(entry, reason, device, SimpleNamespace) == expected


def test_only_gpus_that_were_timed_count_as_measured() -> None:
    assert "measured" in evidence("cuda", (9, 0))
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert "never timed" in evidence("cuda", capability)


def test_every_row_is_listed_and_each_remedy_once(capsys: pytest.CaptureFixture[str]) -> None:
    here.main()
    output = capsys.readouterr().out
    (auto,) = (part for part in output.split("\n\n") if part.startswith('impl="auto"'))
    assert [line.rpartition("  ")[0].strip() for line in auto.splitlines()[1:]] == list(USES)
    table, _, brings = output.partition("\nwhat would bring the others\n")
    missing = [line.split()[0] for line in table.splitlines() if "  no: " in line or " take bucketed" in line]
    lines = [line.strip().partition(": ") for line in brings.splitlines() if not line.startswith("  for a GPU")]
    assert sorted(missing) == sorted(name for names, _, _ in lines for name in names.split(", "))
    remedies = [remedy_text for _, _, remedy_text in lines]
    assert len(set(remedies)) == len(remedies)
    if not torch.cuda.is_available():
        assert "pip install flash-attn --no-build-isolation" in brings and "compute capability 9.0" in brings


@pytest.mark.parametrize(
    "words",
    [
        ["report", "result.json", "-o", ""],
        ["leaderboard", "results", "--output="],
        ["course", "checkout", "--measure", ""],
        ["course", "checkout", "--html="],
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a shell's variable that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        MAINS[words[0]](words[1:])
    assert "it is empty; to name the current folder, write ." in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_closed_pipe_gives_no_traceback() -> None:
    line = f"{sys.executable} -u -m lmsys | head -n 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("name") and "Traceback" not in done.stderr and not done.stderr.strip(), done.stderr


def test_a_check_ends_where_standard_files_are_closed() -> None:
    """The connection to its process took their numbers, and it waited for ever."""
    line = f"exec {sys.executable} -m lmsys check naive --dtype float32 --forward --head-dim 16 <&- >&-"
    assert subprocess.run(line, shell=True, cwd=ROOT, env=ENVIRONMENT, timeout=PATIENCE_S).returncode == 0


# A program that runs `lmsys` with each of several lists of words, as if some packages were not installed, and prints
# what each run returns, prints, and writes to stderr. One process for all: it imports torch at most once.
RUNS = """
import contextlib, io, json, sys
from lmsys.__main__ import main

lines, without = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(without))
for words in lines:
    sys.argv, printed, errors = ["lmsys", *words], io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            status = main()
    except SystemExit as end:
        status = end.code
    print(json.dumps([status, printed.getvalue(), errors.getvalue()]))
"""


def runs(*lines: Sequence[str], without: Sequence[str] = ()) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of `lmsys` with the words of each line, as if these packages were not installed."""
    command = [sys.executable, "-W", "ignore", "-c", RUNS, json.dumps(lines), json.dumps(without)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_without_torch_there_is_help_and_what_is_missing_is_told_in_a_sentence() -> None:
    listing = ["bench", "attention", "--collect-only", "-q"]  # with torch installed, pytest would list the tests
    lines = [["--help"], ["chek"], [], ["check", "naive"], ["train"], ["report", "a.json"], listing]
    with_help, unknown, *others = runs(*lines, without=("torch", "matplotlib"))
    assert with_help[0] == 0 and all(command.about in with_help[1] for command in commands.COMMANDS.values())
    assert unknown[0] == 2 and "invalid choice: 'chek'" in unknown[2]
    for words, run in zip(lines[2:], others, strict=True):
        name, package = " ".join(["lmsys", *words[:1]]), "matplotlib" if words[:1] == ["report"] else "torch"
        assert run == (2, "", commands.missing(name, package) + "\n")
        assert run[2].startswith(f"{name} needs {package}, which is not installed here: ") and run[2].count("\n") == 1


def test_the_help_of_each_command_has_its_examples() -> None:
    helps = runs(*([name, "--help"] for name in commands.COMMANDS))
    for (_, output, _), (name, command) in zip(helps, commands.COMMANDS.items(), strict=True):
        assert output.startswith(f"usage: lmsys {name} "), output
        assert command.examples
        assert all(example.startswith(f"lmsys {name}") and example in output for example in command.examples), output


def test_the_package_installs_one_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lmsys": "lmsys.__main__:main"}


def test_bench_runs_a_command_line_of_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is printed, then run. It works in any folder, as long as lmsys is installed from a checkout."""
    mine = ROOT / "docs" / "examples" / "mine.py"
    monkeypatch.chdir(tmp_path)
    words = ["attention", "--row", f"{mine}:my_attention", "--dtype", "bfloat16", "-k", "causal"]
    line = line_of(words)
    assert (tmp_path / line[2]).resolve() == ROOT / "benchmarks" / "bench_attention.py"
    (rows,) = (word.partition("=")[2].split(",") for word in line if word.startswith("--attention="))
    assert rows[-1] == words[2] and "sdpa" in rows and line[-4:] == words[-4:]
    assert line[line.index("--benchmark-json") + 1] == "attention.json"
    loss = line_of(["loss", "--row", "chunked", "-o", "x.json"])
    assert "--axis=row=eager,compiled,chunked" in loss and "x.json" in loss and "attention.json" not in loss
    for resume in (["--resume", "x.json"], ["--resume=x.json"], ["--lmsys-resume", "x.json"]):
        # The resumed file is also the output, so no other output is added.
        assert line_of(["attention", *resume])[-len(resume) - 1 :] == ["--benchmark-only", *resume]
        other = line_of(["attention", "-o", "y.json", *resume])
        assert other[-len(resume) - 2 :] == ["--benchmark-json", "y.json", *resume]
    (tmp_path / "bench_own.py").touch()
    assert line_of(["bench_own.py"])[2] == "bench_own.py"
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, line: ran.append(line))
    monkeypatch.setattr(sys, "argv", ["lmsys bench", *words])
    main()
    assert ran == [[sys.executable, *line]] and capsys.readouterr().out == f"python {shlex.join(line)}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["atention"], "did you mean attention?"),
        (["bench_absent.py"], "there is no file 'bench_absent.py' here"),
        ([], "required: BENCHMARK"),
    ],
)
def test_what_bench_cannot_find_is_reported_in_a_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        line_of(words)
    assert message in capsys.readouterr().err


def test_outside_of_a_checkout_bench_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        line_of(["attention"])
    assert "only a clone of lmsys has its benchmarks/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        ({"url": "https://host/lmsys.git", "vcs_info": {"vcs": "git"}}, "'lmsys[report] @ git+https://host/lmsys.git'"),
        ({"url": "file:///a/lmsys", "dir_info": {}}, "'lmsys[report] @ file:///a/lmsys'"),
        (None, "'lmsys[report]'"),
    ],
)
def test_an_extra_is_installed_from_where_lmsys_was(
    origin: object, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commands.with_extra("report") == f"python -m pip install -e '{ROOT}[report]'"
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    distribution = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [distribution])
    assert commands.with_extra("report") == f"python -m pip install {named}"


def test_python_may_leave_out_docstrings() -> None:
    ended = subprocess.run(
        [sys.executable, "-OO", "-m", "lmsys", "--help"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "lmsys COMMAND --help" in ended.stdout and "None" not in ended.stdout


def test_a_report_can_be_made_where_the_locale_is_not_utf_8() -> None:
    plain = ENVIRONMENT | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", "from lmsys.reports.page import html; html([], [])"], env=plain, check=True)
