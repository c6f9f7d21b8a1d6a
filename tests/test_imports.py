"""Data flows one way: who may import whom, read off the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmsys.attention import ATTENTION

ROOT = Path(__file__).parents[1]
FILES = sorted(file for room in ("lmsys", "benchmarks", "dev", "reports") for file in (ROOT / room).rglob("*.py"))
PLAIN = (  # of lmsys: what a machine without torch can import
    *(
        "__init__",
        "commands",
        "registry",
        "config",
        "files",
        "strict_json",
        "values",
        "processes",
        "doing",
        "watchdog",
        "measure/__init__",
        "measure/step",
        "training/config",
    ),
    "checkpointing",
    *("cost/__init__", "cost/operations", "cost/memory", "cost/communication"),
    *(
        f"bench/{name}"
        for name in ("__init__ benchmark checkout fields options plugin record results validate").split()
    ),
)
LATE = (
    "bench/benchmark",
    "bench/options",
    "bench/plugin",
    "bench/results",
    "bench/__main__",
)  # import what needs torch inside of functions
ROWS = "lmsys.attention", "lmsys.parallel"
DATA = "lmsys/files.py", *(f"lmsys/training/{name}.py" for name in ("corpora", "data"))
END_IN_A_PAGE = ("lmsys/course/__main__.py", "lmsys/leaderboard.py")  # commands that nothing imports
TERMINAL = "lmsys.reports.terminal"  # by which a run tells its answers, in the report's words
OF_REPORTS = (
    *(
        "lmsys.reports",
        "lmsys.commands",
        "lmsys.files",
        "lmsys.strict_json",
        "lmsys.values",
        "lmsys.cost.communication",
    ),
    *(f"lmsys.bench.{name}" for name in ("changes", "fields", "record", "validate", "verdict")),
)


def imports(file: Path) -> Iterator[str]:
    """Absolute names of what a file imports, anywhere in it: modules, and `module.name` for `from` imports."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(file: Path, *names: str) -> list[str]:
    return [found for found in imports(file) if any(found == name or found.startswith(f"{name}.") for name in names)]


def within(*folders: str) -> list[Path]:
    return [file for file in FILES if file.relative_to(ROOT).as_posix().startswith(folders)]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def outside(file: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported: not inside of functions, not for type checkers only."""
    tree = ast.parse(file.read_text(), str(file))
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", within("lmsys/"), ids=name_of)
def test_the_library_imports_neither_benchmarks_nor_tests(file: Path) -> None:
    assert not imports_of(file, "benchmarks", "dev", "tests", "reports")
    if not within_room(file, "reports"):
        found = imports_of(file, "pandas", "matplotlib", "lmsys.reports")
        if name_of(file) not in END_IN_A_PAGE:
            assert set(found) <= ({TERMINAL} if name_of(file) == "lmsys/bench/plugin.py" else set())
    if not within_room(file, "bench"):
        assert not imports_of(file, "pytest")


def within_room(file: Path, room: str) -> bool:
    return name_of(file).startswith(f"lmsys/{room}/")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_import_no_torch(name: str) -> None:
    file = ROOT / "lmsys" / f"{name}.py"
    found = list(outside(file)) if name in LATE else list(imports(file))
    plain = {f"lmsys.{one.replace('/', '.').removesuffix('.__init__')}" for one in PLAIN} | {"lmsys"}
    for one in found:
        assert one.partition(".")[0] not in ("torch", "triton", "numpy", "pandas")
        if one.partition(".")[0] == "lmsys":
            assert one in plain or one.rpartition(".")[0] in plain, f"{name} reaches {one}, which may import torch"


@pytest.mark.parametrize("file", within("lmsys/tokenizer/", *DATA), ids=name_of)
def test_what_workers_load_has_no_torch(file: Path) -> None:
    assert not imports_of(file, "torch", "triton")
    allowed = [
        "lmsys.processes",
        "lmsys.config",
        "lmsys.strict_json",
        "lmsys.values",
        "lmsys.tokenizer",
        "lmsys.training.config",
        *(path.removesuffix(".py").replace("/", ".") for path in DATA),
    ]
    assert sorted(imports_of(file, "lmsys")) == sorted(imports_of(file, *allowed))


@pytest.mark.parametrize("file", within("lmsys/measure/"), ids=name_of)
def test_measuring_names_no_kernel(file: Path) -> None:
    assert not imports_of(file, *ROWS, "lmsys.model", "lmsys.testing", "lmsys.registry")


@pytest.mark.parametrize("file", within("lmsys/reports/", "reports/"), ids=name_of)
def test_reports_know_only_what_a_result_is(file: Path) -> None:
    assert not imports_of(file, "torch", "benchmarks", "dev", "tests", "pytest")
    assert sorted(imports_of(file, "lmsys")) == sorted(imports_of(file, *OF_REPORTS))


@pytest.mark.parametrize("file", within("benchmarks/"), ids=name_of)
def test_no_family_of_benchmarks_imports_another(file: Path) -> None:
    families = {one.stem.removeprefix("bench_") for one in (ROOT / "benchmarks").glob("bench_*.py")}
    families |= {one.name for one in (ROOT / "benchmarks").iterdir() if one.is_dir() and one.name != "__pycache__"}
    own = SHARED.get(family_of(file), family_of(file))
    for one in imports_of(file, "benchmarks"):
        family = one.split(".")[1].removeprefix("bench_")
        assert family not in families or SHARED.get(family, family) == own, f"{name_of(file)} imports {one}"


@pytest.mark.parametrize("file", within("benchmarks/"), ids=name_of)
def test_no_benchmark_needs_the_tools_of_maintainers(file: Path) -> None:
    assert not imports_of(file, "dev", "tests")


SHARED = {"anatomy": "model", "steps": "data_parallel"}  # the same cases, other questions


def family_of(file: Path) -> str:
    return file.relative_to(ROOT / "benchmarks").parts[0].removeprefix("bench_").removesuffix(".py")


def test_torchs_compiler_comes_with_what_is_compiled() -> None:
    """Its import takes as long as torch's own."""
    pytest.importorskip("triton", reason="pip install triton==3.6.0 for the rows that import it")
    modules = [f"benchmarks.{one.stem}" for one in (ROOT / "benchmarks").glob("bench_*.py")]
    modules += [
        "dev.bench_plans",
        "lmsys.training.__main__",
        *{one.target.partition(":")[0] for one in ATTENTION.values() if not one.peer},
    ]
    line = "import sys; [__import__(one) for one in sys.argv[1:]]; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", line, *modules], cwd=ROOT, check=True)


def test_the_rules_would_see_a_forbidden_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "lmsys" / "measure" / "clock.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from ..attention import naive\n    import reports.load\n    from . import clock\n")
    assert list(imports(file)) == ["lmsys.attention.naive", "reports.load", "lmsys.measure.clock"]
