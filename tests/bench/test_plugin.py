"""The pytest plugin (`lmsys.bench.plugin`) serves benchmarks in any folder.

Most tests copy the example, docs/examples/bench_matmul.py, into an empty folder, and run pytest there. A new bad option
is added to BAD, with the message that it must give.
"""

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.axes import NAMED
from lmsys.bench import record
from lmsys.bench.options import OPTIONS, claim_writable, wants_tables
from lmsys.bench.plugin import RecordedTimer
from lmsys.bench.record import seal
from lmsys.files import claim
from tests.bench.test_results import result_of
from tests.support.collected import RUN, collect
from tests.support.processes import ENVIRONMENT, PATIENCE_S, PYTEST, ROOT

EXAMPLE = ROOT / "docs" / "examples" / "bench_matmul.py"
SMALL = (
    "bench_matmul.py",
    "--lmsys-axis",
    "size=16,17",
    "--lmsys-axis",
    "dtype=float32",
    "--benchmark-max-time",
    "0.01",
)

QUICK = "--benchmark-max-time", "0.01", "--lmsys-no-isolation"  # without a worker process, which starts slowly


def command(*options: object, plugin: bool = True) -> list[str]:
    loaded = ["-p", "lmsys.bench.plugin"] if plugin else []  # as the entry point of an installed package does
    return [*PYTEST, *loaded, *map(str, options)]


def run(folder: Path, *options: object, plugin: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    line = command(*options, plugin=plugin)
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that contains only the example."""
    shutil.copy(EXAMPLE, tmp_path)
    return tmp_path


def test_a_benchmark_of_a_new_kind_is_one_small_file() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 50


def test_it_is_measured_in_any_folder_and_refused_when_it_is_wrong(folder: Path) -> None:
    """Also without pytest's own plugin that captures output."""
    text = (folder / "bench_matmul.py").read_text()
    (folder / "bench_matmul.py").write_text(text.replace("linear(a, b.T)", "linear(a, b.T) * 1.001"))
    options = "-p", "no:capture", "--benchmark-only", "--lmsys-fail-on", "error,wrong"
    ended = run(folder, *SMALL, *options, "--benchmark-json", "out.json")
    assert ended.returncode == 1 and "--lmsys-fail-on: 2 wrong" in ended.stdout, ended.stdout + ended.stderr
    assert "wrong default-16-float32-mine (error ratio" in ended.stdout
    assert "wrong, which fails the run, as a peer's would not: mine" in ended.stdout
    assert "matmul: 4 of 4 that ran" in ended.stdout and "wrong result\n" in ended.stdout
    assert "lmsys check" not in ended.stdout  # that command knows no matmul
    assert sorted(path.name for path in folder.glob("out*")) == ["out.json"]
    result = record.load(folder / "out.json")
    for case in result["records"]:
        if case["impl"] == "mine":
            assert case["outcome"] == "wrong" and case["error_ratio"] > 1 and "time_s" not in case
        else:
            flops = 2 * case["size"] ** 3
            assert case["outcome"] == "ok" and case["flops_per_s"] == pytest.approx(flops / case["time_s"])
    declared = {field["name"]: field for field in result["fields"]["matmul"]}
    assert declared["flops_per_s"]["unit"] == "FLOP/s" and declared["flops_per_s"]["role"] == "metric"
    assert [row["name"] for row in result["rows"]["row"]] == ["matmul", "mine"]


FUNCTIONS = """
import time

import pytest


def test_sleep(lmsys_device_benchmark):
    assert lmsys_device_benchmark(lambda: time.sleep(0.002) or 7) == 7


def test_raises(lmsys_device_benchmark):
    with pytest.raises(ZeroDivisionError):
        lmsys_device_benchmark(lambda: 1 / 0)
"""


WRONG = """
def row(q, k, v, *, causal=False, scale=None):
    return v.new_ones(*q.shape[:-1], v.shape[-1]) * q.sum()
"""


@pytest.mark.long
def test_what_an_interrupted_run_measured_is_kept_and_resumed(folder: Path) -> None:
    lengths = ("--lmsys-axis", f"size={','.join(map(str, range(16, 48)))}", "--lmsys-axis", "dtype=float32,float16")
    line = command("bench_matmul.py", *lengths, "--benchmark-max-time", "0.02", "--benchmark-json", "out.json")
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a background process ignores SIGINT
    process = subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, preexec_fn=heed,
    )  # fmt: skip
    partial = folder / "out.json.partial"
    while process.poll() is None and (not partial.is_file() or partial.read_text().count("\n") < 6):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=PATIENCE_S)
    # pytest itself sometimes fails to show the place: in Python 3.11 an interrupt may fall between two lines.
    assert process.returncode == 2 or "self._rawentry.tb_lineno - 1" in errors, printed + errors
    assert "was not used at all" not in printed
    before = {case["id"]: case for case in record.load(folder / "out.json")["records"]}
    assert 5 <= len(before) < 32 * 2 * 2

    fewer = ("--lmsys-axis", "size=16,47", "--lmsys-axis", "dtype=float32", *QUICK)
    resumed = run(folder, "bench_matmul.py", *fewer, "--lmsys-resume", "out.json", "--benchmark-json", "more.json")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = {case["id"]: case for case in record.load(folder / "more.json")["records"]}
    assert {case["size"] for case in after.values()} >= {16, 47} and not (folder / "more.json.partial").exists()
    assert all(after[name] == case for name, case in before.items())


@pytest.mark.long
def test_a_full_disk_ends_the_run_with_a_sentence_and_what_was_measured(folder: Path) -> None:
    """A limit on the size of files stands in for the full disk."""
    sizes = ("--lmsys-axis", f"size={','.join(map(str, range(16, 30)))}", "--lmsys-axis", "dtype=float32")
    fill = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # noqa: E731 - bytes: some ten records
    quickly = (*QUICK, "--benchmark-json", "out.json")
    asked = shlex.join(command("bench_matmul.py", *sizes, *quickly)[3:])
    before = result_of([], command=f"python -m pytest {asked}")
    (folder / "out.json").write_text(before)
    ended = run(folder, "bench_matmul.py", *sizes, *quickly, preexec_fn=fill)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout + ended.stderr, ended.stdout + ended.stderr
    assert "out.json.partial cannot be written: File too large; what it holds stands" in ended.stdout
    assert "cannot write the result to out.json: File too large; out.json.partial holds the records" in ended.stdout
    assert (folder / "out.json").read_text() == before and not list(folder.glob("*.tmp"))
    assert len(record.load(folder / "out.json.partial")["records"]) > 5


def test_what_another_run_writes_is_neither_made_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run may end at any moment, and leave its result: here just before this run claims the file."""
    output, release = tmp_path / "out.json", claim(tmp_path / "out.json")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"process {os.getpid()} is writing it"):
        patch.setattr(Path, "unlink", lambda path, **_: pytest.fail(f"{path} is removed"))
        claim_writable(output)
    release()

    def ends_first(path: Path) -> Any:
        path.write_text("its result")
        return claim(path)

    with monkeypatch.context() as patch:
        patch.setattr("lmsys.bench.options.claim", ends_first)
        claim_writable(output)()
    assert output.read_text() == "its result" and list(tmp_path.iterdir()) == [output]


def test_a_claim_to_what_cannot_be_written_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, no_folder = tmp_path / "out.json", tmp_path / "no_folder"
    no_folder.write_text("")
    output.symlink_to(no_folder / "out.json")
    with pytest.raises(ValueError, match="cannot write the result to .*out.json: File exists"):
        claim_writable(output)
    output.unlink()
    output.write_text("")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot write .*/out.json: Permission denied"):
        patch.setattr(os, "access", lambda path, mode: False)  # root may write all files
        claim_writable(output)
    claim(output)()


def test_the_folder_that_a_link_leads_to_is_made(tmp_path: Path) -> None:
    (tmp_path / "out.json").symlink_to(tmp_path / "new" / "out.json")
    claim_writable(tmp_path / "out.json")()
    assert (tmp_path / "new").is_dir() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.on_request
def test_wide_tables_are_for_those_who_ask(folder: Path) -> None:
    """pytest-benchmark's tables leave out our cases, and keep other tests. Saved and compared results have all."""
    (folder / "test_plain.py").write_text("def test_plain(benchmark):\n    benchmark(lambda: None)\n")
    quickly = ("--benchmark-min-rounds", "10", "--lmsys-no-isolation")
    both = (*SMALL, "test_plain.py", *quickly, "--benchmark-autosave", "--benchmark-json")
    printed = run(folder, *both, "out.json").stdout
    assert "3 tests" not in printed and "test_matmul[" not in printed and "matmul: 4 of 4 that ran" in printed, printed
    assert "benchmark: 1 tests" in printed and "test_plain " in printed, printed
    assert len(json.loads((folder / "out.json").read_text())["benchmarks"]) == 5
    (saved,) = (folder / ".benchmarks").rglob("0001_*.json")
    assert len(record.load(saved)["records"]) == 4  # `lmsys report --before` takes it as it is
    for path in (saved, folder / "out.json"):
        content = json.loads(path.read_text())
        assert content["lmsys"]["seal"] == record.seal(content["lmsys"])
        assert content["lmsys"]["others"] == record.others_seal(content), "of all that pytest-benchmark has written"
    compared = run(folder, *both, "last.json", "--benchmark-compare").stdout
    assert "test_matmul[default-16-float32-mine] (NOW)" in compared and "(0001_" in compared, compared
    assert "matmul: 4 of 4 that ran" in compared and "test_plain (NOW)" in compared, compared


@pytest.mark.on_request
def test_repeats_say_what_runs_differ_by(folder: Path) -> None:
    ended = run(folder, *SMALL, "--lmsys-axis", "size=16", "--lmsys-repeat", "2", "--benchmark-json", "out.json")
    assert ended.returncode == 0 and "  again, 2 of 2" in ended.stdout, ended.stdout
    for case in record.load(folder / "out.json")["records"]:
        assert case["outcome"] == "ok" and case["rounds"] >= 10 and case["seal"] == seal(case)


@pytest.mark.parametrize("where", ["command line", "addopts", "PYTEST_ADDOPTS"])
def test_any_option_about_tables_asks_for_them(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(*words: str) -> bool:
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(words) if where == "PYTEST_ADDOPTS" else "")
        given = SimpleNamespace(args=words if where == "command line" else ())
        config: Any = SimpleNamespace(getini=lambda _: words if where == "addopts" else (), invocation_params=given)
        return wants_tables(config)

    assert wanted("-q", "--benchmark-sort=min") and wanted("--benchmark-columns", "min")
    assert not wanted("-vv", "--benchmark-only", "--benchmark-autosave", "--benchmark-json=out.json")


TIMER = RecordedTimer()


@pytest.mark.benchmark(timer=TIMER)
def test_replayed_samples_are_the_stats(benchmark: Any) -> None:
    samples = [0.1, 1 / 3, 2e-7, 1e-9, 123.456, 0.1 + 0.2]
    TIMER.replay(benchmark, samples)
    if benchmark.enabled:
        assert benchmark.stats.stats.data == samples


BAD = {
    "--benchmark-timer=time.time": "--benchmark-timer is not for these benchmarks",
    "--attention naive,flash_torhc": "did you mean flash_torch",
    "--benchmark-group-by func,param:lenght": "--benchmark-group-by param:lenght: must be one of ",
    "--attention=": "unknown attention ''",
    "--benchmark-min-rounds 3": "--benchmark-min-rounds 3: a median needs at least 10 samples",
    "--benchmark-min-rounds 1000000000": "a result holds at most 100,000 samples of a case",
    f"--benchmark-json {'a' * 300}": "File name too long",
    "--resume pyproject.toml": "--resume pyproject.toml: not JSON",
    "--benchmark-max-time nan": "--benchmark-max-time 'NaN': must be a finite number of seconds",
    "--benchmark-max-time -1": "--benchmark-max-time '-1': must be a finite number of seconds",
    "--repeat 0": "--repeat=0 must be",
    "--repeat 2 --no-isolation": "--repeat 2 needs fresh processes",
    "--own-process --no-isolation": "--own-process cannot be with --no-isolation",
    "--fail-on wrogn": "--fail-on 'wrogn': must be one of oom, unsupported, wrong, error; did you mean wrong",
    "--benchmark-json tests": "cannot write the result to tests: it is there, and it is no file",
    "--benchmark-json pyproject.toml/x": "cannot write the result to pyproject.toml/x: File exists",
    "--benchmark-json /proc/x": "cannot write the result to /proc/x: No such file or directory",
    "--sweep fulll": "--sweep 'fulll': must be one of smoke, default, full; did you mean full",
    "--length 0": "--length '0': must be a positive whole number",
    "--attention llama": "--attention llama: what is selected has no case for these values",  # it is for models
    "--precision bf16": "--precision bf16: attention has no such axis",
    "--axis lenght=3": "--axis lenght=3: must be one of",
    "--axis length": "--axis 'length': must read NAME=A,B",
    "--memory-limit 24GiB": "this machine has no CUDA device",
    "--nvtx": "--nvtx marks the kernels of a GPU for nsys and ncu, and this machine has no CUDA device",
}


PATCH = """
import torch

elapsed_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, end: elapsed_time(self, end) / 10


def row(q, k, v, *, causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""


LAYOUT = {"chapters": [{"title": "Products", "blocks": [{"lead": [["pivot", ["tme_s"], ["size"]]]}]}]}
RUNS = {  # {name: words of a run; {} is the folder of `answers`, and {}.json the result}
    "without a terminal": (
        "-p lmsys.bench.plugin {0}/bench_right.py {0}/test_mine.py -p no:terminal " + " ".join((*SMALL[1:], *QUICK))
    ),
    "a wrong row": (
        "benchmarks/bench_attention.py --attention sdpa_math,{0}/wrong.py:row --length 64 --sweep smoke"
        " -k 'smoke and float32-full-fwd-' --benchmark-only --no-isolation"
    ),
    "no case": "benchmarks/bench_attention.py --attention sdpa_math,{0}/wrong.py:row --sweep smoke -k nothing",
    "a bad layout": "-p lmsys.bench.plugin {0}/bench_layout.py " + " ".join(SMALL[1:]),
}
Answers = dict[str, tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """{arguments: (the message that they must give, the answer of `collect`)}, {a name in RUNS: (its result, answer)}.

    The arguments are those in BAD, a result that another run is writing, a file that patches the clock when it is
    imported, two of the example in a folder of its own (where pygal is as not installed), and --help.
    """
    folder = tmp_path_factory.mktemp("folder")
    text = EXAMPLE.read_text()
    line = text[: text.index("in grid.product(")].count("\n") + 1
    files = {"mine.py": PATCH, "wrong.py": WRONG, "test_mine.py": FUNCTIONS, "bench_right.py": text}
    files["bench_matmul.py"] = text.replace("in grid.product(", "in grid.no_product(")
    files["bench_layout.py"] = text.replace("\n    def cases(", f"\n    layout = {LAYOUT}\n\n    def cases(", 1)
    files["conftest.py"] = "import sys\nsys.modules['pygal'] = None\n"
    for name, content in files.items():
        (folder / name).write_text(content)
    output = folder / "out.json"
    asked = BAD | {
        f"--benchmark-json {output}": f"process {os.getpid()} is writing it; wait for its end, or write elsewhere",
        f"--attention sdpa_math,{folder}/mine.py:row": "replaces Event.elapsed_time when it is imported",
        "--help": "usage: ",
    }
    of_example = f"-p lmsys.bench.plugin {folder}/bench_matmul.py"
    asked = {f"benchmarks/bench_attention.py {options}": message for options, message in asked.items()} | {
        of_example: f" 'no_product' (bench_matmul.py, line {line}: for",
        f"{of_example} --benchmark-histogram": "which is not installed: python -m pip install pygal",
    }
    results = {name: f"{folder}/{name.replace(' ', '_')}.json" for name in RUNS}
    runs = [f"{RUN} {words.format(folder)} --benchmark-json {results[name]}" for name, words in RUNS.items()]
    release = claim(output)
    collected = collect([shlex.split(arguments) for arguments in (*asked, *runs)])
    release()
    return {words: (told, answer) for (words, told), answer in zip((asked | results).items(), collected, strict=True)}


def test_it_is_measured_without_a_terminal(answers: Answers) -> None:
    result, answer = answers["without a terminal"]
    assert answer["code"] == 0, answer["said"]
    assert [case["outcome"] for case in record.load(Path(result))["records"]] == ["ok"] * 4


def test_a_function_is_timed_by_the_devices_clock(answers: Answers) -> None:
    entries = json.loads(Path(answers["without a terminal"][0]).read_text())["benchmarks"]
    (entry,) = [entry for entry in entries if entry["name"] == "test_sleep"]
    assert 0.002 <= entry["stats"]["median"] < 0.1 and entry["extra_info"]["clock"] in ("perf_counter", "cuda_event")


def test_a_wrong_row_of_a_file_comes_with_the_command_that_asks_why(answers: Answers) -> None:
    result, answer = answers["a wrong row"]
    assert answer["code"] == 1, answer["said"]
    file = Path(result).with_name("wrong.py")
    command = f"lmsys check {file}:row --kind=attention --head-dim=32 --dtype=float32"
    assert f"why row was wrong: {command}" in answer["said"], answer["said"]
    assert f"the report of it: lmsys report {result}" in answer["said"]
    (wrong,) = [case for case in record.load(Path(result))["records"] if case["outcome"] == "wrong"]
    assert wrong["reason"] in answer["said"]


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("no case", 5, "-k 'nothing' selects no case. There are, by sections, attention: smoke"),
        ("a bad layout", 4, "ERROR: the layout of 'matmul', section default, step 'pivot': no field 'tme_s'"),
    ],
)
def test_a_run_that_can_measure_nothing_ends_before_the_machine_is_measured(
    name: str, code: int, sentence: str, answers: Answers
) -> None:
    """The runs have a worker process. Once, the machine was measured before a row from a file was collected."""
    result, answer = answers[name]
    assert answer["code"] == code and sentence in answer["said"] and "Traceback" not in answer["said"], answer["said"]
    assert "measuring what this machine reaches" not in answer["said"] and not Path(result).exists()


def test_a_bad_run_ends_with_one_line(answers: Answers) -> None:
    right_on_a_gpu = ("--memory-limit", "--nvtx")
    for words, (message, answer) in answers.items():
        is_right = any(option in words for option in right_on_a_gpu) and os.path.exists("/dev/nvidia0")
        if is_right or words in RUNS or "--help" in words:
            continue
        assert answer["code"] == pytest.ExitCode.USAGE_ERROR, f"{words}: {answer['said']}"
        assert message in answer["said"] and "Traceback" not in answer["said"], f"{words}: {answer['said']}"


def test_every_option_is_shown_in_the_help_of_a_checkout(answers: Answers) -> None:
    """Options of a run are there by the long name, which they have everywhere, and by the short one."""
    _, answer = answers["benchmarks/bench_attention.py --help"]
    named = [f"{dashes}{name}" for name in OPTIONS for dashes in ("--", "--lmsys-")]
    assert all(f"  {option}" in answer["said"] for option in (*named, *(axis.option for axis in NAMED)))
