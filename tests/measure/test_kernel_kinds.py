"""Every kernel that the library launches has its kind in a profile (lmsys/measure/profile.py), and is not "other".

The kernels are found in the source: functions with @triton.jit or @gluon.jit, and __global__ functions in .cu files. A
new kernel is expected to have the kind of its folder; to expect another, add its file or its name to the tables below.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lmsys.attention import ATTENTION
from lmsys.measure import profile
from lmsys.measure.profile import KINDS, kind_of, register_kernels
from lmsys.parallel import STRATEGIES
from lmsys.registry import Traits

LIBRARY = Path(__file__).parents[2] / "lmsys"
KINDS_OF_FOLDERS = {"attention": "attention", "parallel": "communication", "training": "elementwise"}
KINDS_OF_KERNELS = {"_whole_squares_kernel": "reduction"}
KINDS_OF_FILES = {
    "model/fused_triton.py": "elementwise",
    "model/loss_triton.py": "reduction",
    "training/muon_triton.py": "matmul",
}


def is_jit(decorator: ast.expr) -> bool:
    """triton.jit or gluon.jit, with arguments or without."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (
        isinstance(called, ast.Attribute) and called.attr == "jit" and ast.unparse(called.value) in ("triton", "gluon")
    )


@cache
def jitted() -> dict[str, list[ast.FunctionDef]]:
    """The functions that Triton or Gluon compiles, by file, relative to lmsys/."""
    by_file = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        by_file[file.relative_to(LIBRARY).as_posix()] = [f for f in functions if any(map(is_jit, f.decorator_list))]
    return {file: functions for file, functions in by_file.items() if functions}


def launched() -> Iterator[tuple[str, str]]:
    """(file, kernel) of each kernel: the compiled functions that no other one calls, and the kernels in CUDA C++.

    A function whose name ends in "_kernel" counts as a kernel, even if another one calls it, too.
    """
    inside = [node for functions in jitted().values() for function in functions for node in ast.walk(function)]
    used = {node.id for node in inside if isinstance(node, ast.Name)}
    for file, functions in jitted().items():
        yield from ((file, f.name) for f in functions if f.name not in used or f.name.endswith("_kernel"))
    for path in sorted(LIBRARY.rglob("*.cu")):
        for name in re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s+)?(\w+)\(", path.read_text()):
            yield path.relative_to(LIBRARY).as_posix(), f"{name}(Problem)"  # as a trace has it


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of all rows are registered, and, by an import, those of the files that register their own."""
    for file in jitted():
        if file.startswith(("model/", "training/")):
            pytest.importorskip("triton")
            importlib.import_module(f"lmsys.{file.removesuffix('.py').replace('/', '.')}")
    monkeypatch.setattr(profile, "_registered", dict(profile._registered))
    for table, kind in ((ATTENTION, "attention"), (STRATEGIES, "communication")):
        for row in table.values():
            register_kernels(Traits.of(row).kernels, kind)
    yield
    kind_of.cache_clear()


def test_kernels_are_found_in_the_source() -> None:
    files = {file for file, _ in launched()}
    assert {"attention/flash_cuda.cu", "attention/flash_triton_kernels.py", "parallel/mean_triton.py"} <= files
    assert {name for file, name in launched() if "flash_gluon" in file} == {
        "forward_kernel", "preprocess_kernel", "backward_kernel", "postprocess_kernel",
    }  # fmt: skip
    assert sum(file.endswith(".cu") for file, _ in launched()) == 3
    assert all(name.partition("(")[0].endswith("_kernel") for _, name in launched())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("file", "name"), [*launched()])
def test_every_kernel_of_the_library_has_its_kind(file: str, name: str) -> None:
    expected_kind = KINDS_OF_FILES.get(file, KINDS_OF_FOLDERS.get(file.partition("/")[0]))
    assert kind_of(name) == KINDS_OF_KERNELS.get(name, expected_kind)


def test_a_profile_knows_no_kernel_of_a_row_until_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_registered", {})
    kind_of.cache_clear()
    of_rows = [name for file, name in launched() if file.startswith(("attention/", "parallel/"))]
    assert {kind_of(name) for name in of_rows} == {"other"}


def test_registered_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_registered", {})
    assert (kind_of("my_gemm_kernel"), kind_of("my_own")) == ("matmul", "other")
    register_kernels("^my_", "attention")
    register_kernels("", "copy")  # a row without kernels of its own
    assert (kind_of("my_gemm_kernel"), kind_of("my_own"), kind_of("own")) == ("attention", "attention", "other")
    kind_of.cache_clear()
    with pytest.raises(ValueError, match=f"kind='convolution' must be one of {KINDS[0]}"):
        register_kernels("^my_", "convolution")
