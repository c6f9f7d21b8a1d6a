"""Tests of which modules may import which. All but two read the source, and import nothing.

Imports go one way: lmsys imports no benchmarks, measuring imports no kernels, reports import what reads results, and
modules that run without torch import nothing that needs it. A rule is an entry of RULES, or a test. A new module of
lmsys that runs without torch is added to PLAIN.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lmsys.attention import ATTENTION

ROOT = Path(__file__).parents[1]
FILES = sorted(file for room in ("lmsys", "benchmarks", "dev", "reports") for file in (ROOT / room).rglob("*.py"))
PLAIN = (  # modules of lmsys that can be imported without torch
    *"__init__ checkpointing commands config doing files processes registry strict_json traits values".split(),
    "watchdog",
    *"cost/__init__ cost/communication cost/memory cost/operations".split(),
    *"measure/__init__ measure/host measure/step training/config".split(),
    *"bench/__init__ bench/benchmark bench/case bench/checkout bench/fields bench/options bench/plugin".split(),
    *"bench/record bench/results bench/validate bench/verdict".split(),
)
LATE = (
    "bench/benchmark",
    "bench/case",
    "bench/options",
    "bench/plugin",
    "bench/results",
)  # those of PLAIN that import modules which need torch, but only inside of functions
ROWS = "lmsys.attention", "lmsys.parallel"
DATA = "lmsys/files.py", *(f"lmsys/training/{name}.py" for name in ("corpora", "data"))
END_IN_A_PAGE = ("lmsys/course/__main__.py", "lmsys/leaderboard.py")  # commands that write a page; nothing imports them
# The parts of lmsys.reports that the plugin of pytest uses: to try layouts before it measures, and to print findings.
OF_THE_PLUGIN = "lmsys.reports.layout", "lmsys.reports.terminal"
# What the modules may import that the tokenizer's worker processes load.
OF_WORKERS = (
    *(f"lmsys.{name}" for name in "commands config files processes strict_json tokenizer values".split()),
    *(f"lmsys.training.{name}" for name in "config corpora data".split()),
)
# What reports may import of lmsys.
OF_REPORTS = (
    *(f"lmsys.{name}" for name in "commands cost.communication files reports strict_json values".split()),
    *(f"lmsys.bench.{name}" for name in "changes fields record validate verdict".split()),
)


@cache
def imports(file: Path) -> list[str]:
    """Absolute names of what a file imports, anywhere in it: modules, and `module.name` for `from` imports."""
    package, names = file.relative_to(ROOT).parent.parts, []
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def outside(file: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported: not inside of functions, not for type checkers only."""
    for node in ast.parse(file.read_text(), str(file)).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def among(name: str, modules: tuple[str, ...]) -> bool:
    """True where the name is one of the modules, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def within(*folders: str, but: str = "-") -> list[Path]:
    """The files whose path begins with one of these, and not with `but`, by default with which no path begins."""
    names = {file: file.relative_to(ROOT).as_posix() for file in FILES}
    return [file for file, name in names.items() if name.startswith(folders) and not name.startswith(but)]


def violations(files: list[Path], *forbidden: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """A line for each import of a forbidden module that is not in an allowed one."""
    assert files
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if among(name, forbidden) and not among(name, allowed)
    ]


def test_no_circle_of_imports() -> None:
    """lmsys.bench has none, even if imports inside of functions and for type checkers are counted."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in within("lmsys/bench/")}
    graph = {
        module: {part for name in imports(file) for part in (name, name.rpartition(".")[0]) if part in modules}
        for module, file in modules.items()
    }
    TopologicalSorter(graph).prepare()


PLUGIN = within("lmsys/bench/plugin.py")
OTHERS = [file for file in within("lmsys/", but="lmsys/reports/") if file not in [*PLUGIN, *within(*END_IN_A_PAGE)]]
RULES = {  # by rule: (files, modules that they must not import, those of them that they may)
    "the library uses no tools": (within("lmsys/"), ("benchmarks", "dev", "tests", "reports"), ()),
    "only the bench knows pytest": (within("lmsys/", but="lmsys/bench/"), ("pytest",), ()),
    "reports are at the end": (OTHERS, ("pandas", "matplotlib", "lmsys.reports"), ()),
    "the plugin makes no page": (PLUGIN, ("pandas", "matplotlib", "lmsys.reports"), OF_THE_PLUGIN),
    "workers have no torch": (within("lmsys/tokenizer/", *DATA), ("torch", "triton", "lmsys"), OF_WORKERS),
    "measuring names no kernel": (
        within("lmsys/measure/"), (*ROWS, "lmsys.model", "lmsys.testing", "lmsys.registry"), (),
    ),
    "reports know only what a result is": (
        within("lmsys/reports/", "reports/"), ("torch", "benchmarks", "dev", "tests", "pytest", "lmsys"), OF_REPORTS,
    ),
    "no benchmark needs the tools of maintainers": (within("benchmarks/"), ("dev", "tests"), ()),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_modules_import_only_what_they_may(rule: str) -> None:
    files, forbidden, allowed = RULES[rule]
    assert violations(files, *forbidden, allowed=allowed) == []


def test_plain_modules_import_no_torch_and_run_where_there_is_none() -> None:
    plain = {f"lmsys.{name.replace('/', '.')}".removesuffix(".__init__") for name in PLAIN}
    wrong = []
    for name in PLAIN:
        file = ROOT / "lmsys" / f"{name}.py"
        for module in outside(file) if name in LATE else imports(file):
            # `from lmsys.bench import case` reaches a module of that name, or else a name in the module lmsys.bench.
            source = ROOT / module.replace(".", "/")
            reached = module if source.is_dir() or source.with_suffix(".py").exists() else module.rpartition(".")[0]
            reaches = among(module, ("lmsys",)) and reached not in plain
            if reaches or among(module, ("torch", "triton", "numpy", "pandas")):
                wrong.append(f"{name} reaches {module}, which may import torch")
    assert not wrong
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(sorted(plain))}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


SHARED = {"anatomy": "model", "steps": "data_parallel"}  # benchmark: the family whose cases it measures, too


def family_of(file: Path) -> str:
    """The family of a file of benchmarks: the name of its benchmark, or of that whose cases it shares."""
    name = file.relative_to(ROOT / "benchmarks").parts[0].removeprefix("bench_").removesuffix(".py")
    return SHARED.get(name, name)


def test_no_family_of_benchmarks_imports_another() -> None:
    files = within("benchmarks/")
    modules: dict[str, list[str]] = {}
    for file in [*(ROOT / "benchmarks").glob("bench_*.py"), *(ROOT / "benchmarks").glob("*/__init__.py")]:
        name = file.relative_to(ROOT / "benchmarks").parts[0].removesuffix(".py")
        modules.setdefault(family_of(file), []).append(f"benchmarks.{name}")
    assert len(modules) > 5
    for file in files:
        others = [name for family, names in modules.items() if family != family_of(file) for name in names]
        assert not violations([file], *others)


def test_torchs_compiler_comes_with_what_is_compiled() -> None:
    """Importing a benchmark or a row does not import torch._dynamo, which takes as long as importing torch."""
    pytest.importorskip("triton", reason="pip install triton==3.6.0 for the rows that import it")
    modules = [f"benchmarks.{file.stem}" for file in (ROOT / "benchmarks").glob("bench_*.py")]
    modules += [
        "dev.bench_plans",
        "lmsys.training.__main__",
        *{row.target.partition(":")[0] for row in ATTENTION.values() if not row.peer},
    ]
    line = "import sys; [__import__(one) for one in sys.argv[1:]]; sys.exit('torch._dynamo' in sys.modules)"
    without_startup = os.environ | {"PYTHONPATH": ""}  # tests/support/startup would hide an import by a call
    subprocess.run([sys.executable, "-c", line, *modules], cwd=ROOT, check=True, env=without_startup)


def test_the_rules_would_see_a_forbidden_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "lmsys" / "measure" / "clock.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from ..attention import naive\n    import reports.load\n    from . import clock\n")
    assert imports(file) == ["lmsys.attention.naive", "reports.load", "lmsys.measure.clock"]
    assert violations([file], "lmsys.attention", "reports", allowed=("reports.load",)) == [
        "lmsys/measure/clock.py imports lmsys.attention.naive"
    ]
