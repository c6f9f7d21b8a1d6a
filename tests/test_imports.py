"""Data flows one way: who may import whom, read off the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for room in ("lmsys", "benchmarks", "reports") for file in (ROOT / room).rglob("*.py"))
NO_TORCH = [
    "registry",
    "config",
    "strict_json",
    "processes",
    "cost/operations",
    "cost/memory",
    "cost/communication",
    "measure/record",
    "training/config",
]  # of lmsys; config comes with the model
PLAIN_PACKAGES = tuple(f"lmsys/{name}__init__.py" for name in ("", "measure/", "training/", "cost/"))
ROWS = "lmsys.attention", "lmsys.parallel"
DATA = tuple(f"lmsys/training/{name}.py" for name in ("corpora", "data", "download", "tokens"))


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


@pytest.mark.parametrize("file", within("lmsys/"), ids=name_of)
def test_the_library_imports_neither_benchmarks_nor_tests_nor_reports(file: Path) -> None:
    assert not imports_of(file, "benchmarks", "tests", "reports", "pytest", "pandas", "matplotlib")


@pytest.mark.parametrize("file", [f for f in within("lmsys/") if name_of(f)[6:-3] in NO_TORCH], ids=name_of)
def test_plain_modules_import_no_torch(file: Path) -> None:
    assert not imports_of(file, "torch", "triton", "numpy")
    reached = [f for f in within("lmsys/") if name_of(f)[6:-3] not in NO_TORCH]
    others = [name_of(f)[:-3].replace("/", ".") for f in reached if f.name != "__init__.py"]
    assert not imports_of(file, *others, *ROWS), "a plain module reaches one that imports torch"


@pytest.mark.parametrize("file", within(*PLAIN_PACKAGES), ids=name_of)
def test_packages_on_the_way_to_a_plain_module_import_nothing(file: Path) -> None:
    assert not imports_of(file, "torch", "lmsys")


@pytest.mark.parametrize("file", within("lmsys/tokenizer/", *DATA), ids=name_of)
def test_what_workers_load_has_no_torch(file: Path) -> None:
    assert not imports_of(file, "torch", "triton")
    allowed = [
        "lmsys.processes",
        "lmsys.tokenizer",
        "lmsys.training.config",
        *(path.removesuffix(".py").replace("/", ".") for path in DATA),
    ]
    assert sorted(imports_of(file, "lmsys")) == sorted(imports_of(file, *allowed))


@pytest.mark.parametrize("file", within("lmsys/measure/"), ids=name_of)
def test_measuring_names_no_kernel(file: Path) -> None:
    assert not imports_of(file, *ROWS, "lmsys.model", "lmsys.testing", "lmsys.registry")


@pytest.mark.parametrize("file", within("reports/"), ids=name_of)
def test_reports_know_only_the_record(file: Path) -> None:
    assert not imports_of(file, "torch", "benchmarks", "tests", "pytest")
    ours = imports_of(file, "lmsys")
    assert all(found.startswith("lmsys.measure.record") or found == "lmsys.measure.record" for found in ours), ours


def test_the_rules_would_see_a_forbidden_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_imports.ROOT", tmp_path)
    file = tmp_path / "lmsys" / "measure" / "clock.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from ..attention import naive\n    import reports.load\n    from . import record\n")
    assert list(imports(file)) == ["lmsys.attention.naive", "reports.load", "lmsys.measure.record"]
