"""The pages: every command is accepted, every option is documented, every link, name and path leads somewhere."""

import argparse
import ast
import importlib.util
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lmsys
from benchmarks.axes import NAMED
from benchmarks.sweeps import SWEEPS
from lmsys.attention import ATTENTION, AttentionCase
from lmsys.bench.options import OPTIONS as BENCH_OPTIONS
from lmsys.parallel import STRATEGIES
from lmsys.training import __main__ as training
from tests.support.collected import collect, strays
from tests.support.pages import PAGES, anchors, blocks, commands, links, module_of, spans, waits_for_a_gpu, without
from tests.support.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FIRST = """```sh
python3 -m pip install nox && python3 -m nox -s bench    # measure this machine, CPU or GPU; prints the path of a report
```"""
TOOLS = {"", "venv", "ruff", "mypy", "build", "mkdocs"}  # modules that are no part of this repository
ALL = [(page, *module_of(words)) for page in PAGES for words in commands(page)]
ELSEWHERE = {"lmsys/attention/exp2.py", "tests/adapters.py"}  # an example of CONTRIBUTING.md, a file of CS336
OPTIONS = {  # file that declares options: page that documents them
    "lmsys/bench/__main__.py": "docs/options.md",
    "lmsys/check/__main__.py": "docs/check.md",
    "lmsys/reports/__main__.py": "docs/report.md",
    "lmsys/verify.py": "docs/threats.md",
}


def test_readme_is_short_and_begins_with_a_command() -> None:
    readme = PAGES["README.md"]
    assert readme.count("\n") <= 150
    assert readme[readme.index("```sh") :].startswith(FIRST) and FIRST in PAGES["docs/install.md"]


def test_changelog_and_citation_are_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[([^]]+)\] - ([0-9-]{10})$", changelog, re.MULTILINE)
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert released is not None
    assert [lmsys.__version__, cited["date-released"]] == [*released.groups()] and cited["version"] == lmsys.__version__


@pytest.mark.parametrize("page", PAGES)
def test_a_merge_is_finished(page: str) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?:$| .*)", PAGES[page], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for path, anchor in links(page):
        assert (ROOT / path).exists(), f"there is no {path}"
        assert not anchor or anchor in anchors((ROOT / path).read_text()), f"{path} has no heading #{anchor}"


def test_every_page_is_in_the_site_and_linked_from_the_first() -> None:
    first = {path for path, _ in links("docs/index.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES.keys() - {"README.md", "docs/index.md"}:
        assert page in first and f": {page.removeprefix('docs/')}\n" in navigation, page


@pytest.mark.parametrize("page", PAGES)
def test_names_and_paths_are_there(page: str) -> None:
    mentioned = [*spans(page), *re.findall(r"^::: (\S+)$", PAGES[page], re.MULTILINE)]
    for name in [text for text in mentioned if re.fullmatch(r"lmsys(\.\w+)+", text)]:
        parts = name.split(".")
        length = next(n for n in range(len(parts), 0, -1) if is_module(".".join(parts[:n])))
        value: Any = importlib.import_module(".".join(parts[:length]))
        for part in parts[length:]:
            value = getattr(value, part)
    folders = r"(lmsys|benchmarks|dev|tests|docs|\.github)/[\w./]+"
    for path in [text for text in mentioned if re.fullmatch(folders, text)]:
        assert (ROOT / path).exists() or path in ELSEWHERE, path


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_trainings_divide_their_batch_among_the_ranks_that_pages_launch() -> None:
    launched = [words for page in PAGES for words in commands(page) if {"torchrun", "lmsys.training"} <= {*words}]
    checked = 0
    for words in launched:
        start = words.index("lmsys.training") + 1
        launch, asked = words[:start], training.parser().parse_args(words[start:])
        options = [option for option in ("--nproc-per-node", "--nnodes") if option in launch]
        ranks = math.prod(int(launch[launch.index(option) + 1]) for option in options)
        if asked.config is None:  # tests/test_cs336.py reads the config files of pages
            assert training.read_config(asked).train.accumulation(ranks) >= 1
            checked += 1
    assert checked >= 2


@pytest.mark.long
def test_every_documented_command_of_pytest_selects_tests() -> None:
    """pytest collects for each command of the pages that names a path; without one it is the whole suite, as now.

    tests/test_cs336.py runs the commands of docs/cs336.md.
    """
    documented = [arguments for page, module, arguments in ALL if module == "pytest" and page != "docs/cs336.md"]
    # Names that a reader's folder would have, and a row of the reader's own: what stands in for them here.
    stand_ins = {name: f"docs/examples/{name}" for name in ("mine.py", "bench_matmul.py", "bench_norm.py")}
    stand_ins |= {"exp2": "naive", "reverse": "flat"}
    asked = []
    for arguments in documented:
        words = [word for word in without(arguments, "--benchmark-json", "-n") if word != "--nvtx"]  # that needs a GPU
        for name, stand_in in stand_ins.items():
            words = [re.sub(rf"(?<![\w/]){re.escape(name)}", stand_in, word) for word in words]
        if any("/" in word or word == "benchmarks" for word in words) and words not in asked:
            asked.append(words)
    assert len(asked) > 15
    for words, collected in zip(asked, collect(asked), strict=True):
        # pytest's exit codes: 0 is success, 5 means that no test is left, as where all of them wait for a GPU.
        assert collected["code"] in (0, 5), f"{words}: {collected['said']}"
        assert collected["ids"] or waits_for_a_gpu(words), f"{words} selects nothing"
        others = strays(words, collected["ids"])
        assert not others, f"{words} also selects {others[:3]}"


class Parsed(Exception):
    """The arguments were accepted."""


OTHER_COMMANDS = [command for command in ALL if command[1] not in {"pytest", *TOOLS}]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import")
@pytest.mark.parametrize(
    ("page", "module", "arguments"),
    OTHER_COMMANDS,
    ids=[f"{page}-{module}-{i}" for i, (page, module, _) in enumerate(OTHER_COMMANDS)],
)
def test_other_documented_commands_are_accepted(
    page: str, module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "nox":
        sessions = [node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if is_function(node)]
        named = [arguments[place + 1] for place, word in enumerate(arguments) if word == "-s"]
        assert set(named) <= set(sessions) and (named or not arguments)
    elif module == "pip":
        check_requirements(arguments)
    else:
        assert is_module(module), f"{page}: there is no module {module}"
        words = [word for word in (argument.strip("[]") for argument in arguments) if word != "..."]
        if not words:
            return
        parse = argparse.ArgumentParser.parse_args

        def parsed(*given: Any, **options: Any) -> None:
            parse(*given, **options)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            run_as_main(module)


def run_as_main(module: str) -> None:
    """Runs a module, or the `__main__` of a package, as `python -m` does.

    `runpy.run_module` cannot run modules whose asserts pytest rewrites.
    """
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None and spec.origin is not None, module
    names = {"__name__": "__main__", "__package__": spec.parent, "__file__": spec.origin}
    exec(compile(Path(spec.origin).read_text(), spec.origin, "exec"), names)


def is_function(node: ast.AST) -> bool:
    """True for a function with a decorator, which a session of nox has."""
    return isinstance(node, ast.FunctionDef) and bool(node.decorator_list)


def check_requirements(arguments: list[str]) -> None:
    """The extras and dependency groups that `pip install` is given exist."""
    assert arguments[0] == "install"
    for extra in ",".join(re.findall(r"(?:lmsys|^\.)\[(.*)\]", " ".join(arguments[1:]).replace("-e ", ""))).split(","):
        assert not extra or extra in PROJECT["project"]["optional-dependencies"]
    for place, word in enumerate(arguments):
        assert word != "--group" or arguments[place + 1] in PROJECT["dependency-groups"]


@pytest.mark.parametrize("source", OPTIONS)
def test_every_option_is_documented(source: str) -> None:
    text = (ROOT / source).read_text()
    declared = re.findall(r"add(?:option|_argument)\(\s*(?:\"-\w\", )?\"(--[\w-]+)\"", text)
    declared += re.findall(r"^    \"(?:-\w )?(--[\w-]+)\": {(?!\"type\": partial)", text, re.MULTILINE)  # in a table
    assert declared and all(f"`{option}" in PAGES[OPTIONS[source]] for option in declared)


def test_every_axis_setting_and_section_is_documented() -> None:
    options = PAGES["docs/options.md"]
    assert not [name for name in BENCH_OPTIONS if f"`--{name}" not in options]
    assert not [axis.option for axis in NAMED if axis.option and f"`{axis.option}" not in options]
    settings = re.findall(r"(--[\w-]+)", training.parser().format_help())
    assert not [option for option in {*settings} - {"--help"} if f"`{option}" not in PAGES["docs/training.md"]]
    for benchmark, section in sorted({*named_sections()}):
        begin = f"| `benchmarks/bench_{benchmark}.py`"
        (line,) = (line for line in options.splitlines() if line.startswith(begin))
        assert section == "smoke" or f"`{section}`" in line, f"{benchmark}: {section}"


def named_sections() -> Iterator[tuple[str, str]]:
    """(benchmark, name of a grid), for each grid of each sweep."""
    for devices in SWEEPS.values():
        for sweep in devices.values():
            yield from ((benchmark, grid.name) for benchmark, grids in sweep.grids.items() for grid in grids)


def test_every_row_that_needs_more_than_torch_is_documented() -> None:
    """A kernel in plain PyTorch is added in two places, and needs no third one here."""
    case = AttentionCase(1, 1, 1, 16, 16, 64, "float32", grad=True)
    rows = (line.split("|")[1] for line in PAGES["docs/install.md"].splitlines() if line.startswith("| `"))
    first_cells = "".join(rows)
    needing = [name for name, row in ATTENTION.items() if row.extra or row.install or row.why_not(case)]
    assert len(needing) >= 9  # those of Triton, CUDA and other packages
    assert not [name for name in needing if f"`{name}`" not in first_cells]


def test_every_strategy_is_documented() -> None:
    assert not [name for name in STRATEGIES if f"`{name}`" not in PAGES["docs/strategy.md"]]


def test_python_in_pages_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # No session of nox installs TensorBoard; tests/training/test_training.py runs the page's use of it.
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=None))
    for page in PAGES.keys() - {"docs/cs336.md"}:
        for code in blocks(page, "python"):
            tree = ast.parse(code)
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            # Other pages' code takes minutes, or has names that a reader must define: only its imports run.
            body = tree.body if page == "docs/kernel.md" else imports
            exec(compile(ast.Module(body, []), page, "exec"), {})


def test_a_clone_in_which_the_pages_commands_were_run_is_as_it_was() -> None:
    """Otherwise results say "with local changes"; during a run that holds for the lock beside its result, too."""
    options = {"-o", "--output", "--benchmark-json", "--traces", "--html", "--measure"}
    asked = [words for page in PAGES for words in commands(page) if words[0] not in ("nsys", "ncu")]
    written = {word for words in asked for option, word in pairwise(words) if option in options and not word.isupper()}
    written |= {Path(word).name for words in asked if words[0] == "cp" and words[-1] == "." for word in words[1:-1]}
    written = {name if Path(name).suffix else f"{name}/" for name in written}
    names = written | {f"{name}{end}" for name in written if name.endswith(".json") for end in (".lock", ".partial")}
    line = ["git", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(line, input="\n".join(names), cwd=ROOT, capture_output=True, text=True)
    assert len(names) > 100 and names - {*done.stdout.splitlines()} == set()
