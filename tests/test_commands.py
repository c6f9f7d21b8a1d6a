"""The commands of the documentation's pages are run: those of a page in their order, in a fresh copy of the repository.

Options make them small (SMALL), words that stand for a reader's own are replaced (OWN), and some are not run (NOT_RUN,
with the reason). A new command on a page is run without further ado; if it takes long, add a pattern to SMALL.
python -m pytest -n 2 -m on_request tests/test_commands.py      # a quarter of an hour
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from tests.support.pages import PAGES, blocks, commands, waits_for_a_gpu, with_files
from tests.support.processes import ENVIRONMENT, ROOT

LIMIT_S = 600
NOTHING_SELECTED = 5  # pytest's exit code
# What is not run, as a pattern of the whole command, and why.
NOT_RUN = {
    r"(python3? -m )?pip install .*": "installs packages; sessions of nox install the same groups and extras",
    r"(python3 -m nox|nox|uv run noxfile.py)( .*)?": "a session of nox: run it by itself",
    r"python3 -m venv .venv|\. \S+/activate": "makes an environment; the Python of this test has one",
    r"python -m (ruff|mypy)( .*)?": "the session `lint` has these packages",
    r"python -m mkdocs .*": "the session `docs` has this package",
    r"python -m build .*": "the session `package` has this package",
    r"python -m pytest( -n 2)?|PYTHONPATH=\S+ python -m pytest": "a whole suite: `nox -s tests`, or the course's own",
    r"\S+ -m pytest (-\S+ \w+ )*tests/.*": "tests of the suite: `nox -s tests` runs them, and `-m on_request` some",
    r"python -m pytest -k exp2": "the suite's tests of a row that the reader adds",
    r"python -m pytest (.* )?-m gpu( .*)?": "needs a GPU: `nox -s gpu`",
    r"LMSYS_FUZZ=100000 .*": "takes an hour: `nox -s fuzz`; with fewer files it is run",
    r"python -m lmsys.attention.flash_cuda": "compiles for minutes where there is nvcc: `nox -s gpu`",
    r"lmsys train .*train.graph=true.*": "needs a GPU: tests/training has it, with `nox -s gpu`",
    r"python -m dev.steps .*graphed.*": "needs a GPU; the command for a CPU is run",
    r"python -m dev\.durations .*": "needs a result of the whole default sweep; tests/dev has it for made-up ones",
    r"lmsys check --all": "takes minutes: tests/check has it for a few rows",
    r"python -m tests\.museum.*": "takes a quarter of an hour: by hand, when an exhibit is added",
    r"git clone .*|cd .*|cp docs/examples/adapters.py .*": "the course's repositories, from a network",
    r"(\w+=\S+ )?torchrun --nnodes .*": "needs several machines",
    r"(nsys|ncu) .*": "needs a GPU and NVIDIA's profilers",
}  # fmt: skip
# Words of a page that a reader replaces by something of his own, and what replaces them here.
OWN = {"exp2": "vectorized", "ROW": "naive", "RESULT.json": "out.json", "FILE": "out.json", "DIR": "site"}
OWN["LMSYS_FUZZ=1000"] = "LMSYS_FUZZ=3"
OWN["data.valid=TinyStoriesV2-GPT4-valid.txt"] = "data.valid=CONTRIBUTING.md"
# Options that make commands small, by a pattern that is searched in the whole command; the options of every pattern
# that is found are added.
MODEL = "--size tiny --context 32 --batch 2"
SMALL = {
    r"pytest (benchmarks|dev|bench_)|lmsys bench ": "--benchmark-max-time 0.005",
    r"pytest benchmarks( |$)": "--sweep smoke --precision fp32",
    r"bench[_ ]attention": "--length 64 --head-dim 16 --batch 1 --heads 1 --dtype float32",
    r"bench[_ ]attention(?!.*(--attention|compiled|--row))": "--attention naive,sdpa,flash_triton",
    r"bench[_ ]model(?!.*-k).*--compile compiled": "--compile eager",
    r"bench[_ ]model(?!.*--mode)": "--mode forward,backward",
    r"bench_data_parallel.*--compile compiled": "--strategy none,fsdp,torch_fsdp2",
    r"bench[_ ](model|anatomy|data_parallel|steps|training)": MODEL,
    r"bench[_ ](?!steps)(model|anatomy|data_parallel|training)(?!.*--residual)": "--precision fp32",
    r"bench[_ ]training": "--epochs 2 --train-tokens 512 --val-tokens 256",
    r"bench[_ ]training.*-k matrix": "--attention naive_compiled,sdpa_cudnn --strategy none,naive,zero1",
    r"bench[_ ]collectives": "--world-size 2 --axis megabytes=1",
    r"bench[_ ]tokenizer": "--axis text_bytes=100000 --axis vocab_size=500 --axis rounds=1",
    r"compare-fail": "--benchmark-compare-fail median:100000%",  # samples are few
    r"--against HEAD": "--margin 1",
    r"dev.steps": MODEL,
    r"lmsys(.training| train)(?!.*--print-config)": "--size tiny --corpus README.md --set model.vocab_size=300"
    " --set model.context_length=32 --set train.steps=4 --set train.warmup_steps=1 --set generate.max_new_tokens=4",
    r"--nproc-per-node": "--nproc-per-node 2",
}
# Commands that neither read nor write files of a page: only the first page that has them runs them.
ALONE = re.compile(r"\S+ -m (reports|lmsys|lmsys check naive)")
ON_ANY_PAGE: list[list[str]] = []
# Files that a reader writes, from the first block of a kind.
FILES = {
    "docs/cs336.md": ("leaderboard.json", "json"),
    "docs/strategy.md": ("train.py", "python"),
    "docs/targets.md": ("mine.py", "python"),
}
# Makes out.json for a page that reads it and does not make it, as the page before does.
FIRST = "python -m pytest benchmarks/bench_attention.py --sweep smoke --attention naive --benchmark-json out.json"


def why_not_run(words: list[str]) -> str:
    """The reason of NOT_RUN for a command; "" if it is run."""
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, " ".join(words))), "")


def made_small(words: list[str]) -> list[str]:
    """The command with the options of SMALL: in place of those that it has already, otherwise at its end."""
    line = " ".join(words)
    for options in [options for pattern, options in SMALL.items() if re.search(pattern, line)]:
        pairs = options.split()
        for option, value in zip(pairs[::2], pairs[1::2], strict=True):
            name = "" if option not in ("--axis", "--set") else value.partition("=")[0] + "="
            places = [i for i, word in enumerate(words[:-1]) if word == option and words[i + 1].startswith(name)]
            for place in reversed(places):
                words = [*words[:place], option, value, *words[place + 2 :]]
            words = words if places else [*words, option, value]
    return words


def as_run(words: list[str], folder: Path) -> Iterator[str]:
    """The words of a command as they are run: small, by this Python, with the names of files in this folder."""
    programs = {"torchrun": "torch.distributed.run", "pytest-benchmark": "pytest_benchmark"}
    for word in made_small([re.sub(r"^\[|\]$", "", word) for word in words]):
        if re.fullmatch(r"(\.nox/\w+/bin/)?lmsys", word) and words[0] == word:
            yield from (sys.executable, "-m", "lmsys")
        elif word in programs:
            yield from (sys.executable, "-m", programs[word])
        elif re.fullmatch(r"(\.nox/\w+/bin/)?python3?", word):
            yield sys.executable
        elif word != "...":
            replaced = ",".join(OWN.get(part, part) for part in word.split(","))
            yield from sorted(glob(replaced, root_dir=folder)) or [replaced]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the files that git tracks, as they are now, in a repository of one commit."""
    folder = tmp_path / "lmsys"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for line in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm copy"):
        subprocess.run(["git", *line.split()], cwd=folder, check=True)
    return folder


def run(words: list[str], folder: Path, output: str = "") -> None:
    """Run a command, which may begin with variables such as A=1; it must succeed. Its output goes to a file, if named.

    Where pytest selects no test since all of them need a GPU, that is no failure.
    """
    environment = ENVIRONMENT | {"PYTHONPATH": str(folder)}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        environment, words = environment | {name: value}, words[1:]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    nothing = done.returncode == NOTHING_SELECTED and waits_for_a_gpu(words)
    assert done.returncode == 0 or nothing, f"{' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    if output:
        (folder / output).write_text(done.stdout)


@pytest.mark.on_request
@pytest.mark.parametrize("page", [page for page in PAGES if not all(map(why_not_run, commands(page)))])
def test_commands_run(page: str, copy: Path) -> None:
    """Run the commands of one page: first those in its blocks of code, then those between backticks.

    A benchmark that, once made small, is on the page a second time is not run again.
    """
    if page in FILES:
        name, kind = FILES[page]
        (copy / name).write_text(blocks(page, kind)[0])
    done: list[list[str]] = []
    for words, output in with_files(page):
        if why_not_run(words):
            continue
        small = list(as_run(words, copy))
        reads = "out.json" in small and small[small.index("out.json") - 1] not in ("-o", "--benchmark-json")
        if reads and not (copy / "out.json").exists():
            run(list(as_run(FIRST.split(), copy)), copy)
        if sorted(small) not in done + ON_ANY_PAGE:
            run(small, copy, output)
        if {"pytest", "bench"} & {*small}:
            done.append(sorted(small))
        elif ALONE.fullmatch(" ".join(small)):
            ON_ANY_PAGE.append(sorted(small))


def test_what_is_not_run_or_run_otherwise_is_on_a_page() -> None:
    lines = [" ".join(words) for page in PAGES for words in commands(page)]
    patterns = [rf"^(?:{pattern})$" for pattern in NOT_RUN] + [rf"\b{re.escape(word)}\b" for word in OWN] + [*SMALL]
    assert [pattern for pattern in patterns if not any(re.search(pattern, line) for line in lines)] == []
