"""`DirectKernel` gives a kernel the same arguments as Triton's own launch does, in every call and at any address."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to test how kernels are launched")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from lmsys.attention import flash_triton  # noqa: E402
from lmsys.kernels import launch  # noqa: E402
from lmsys.kernels.tritons import KNOWN_TRITON, is_known  # noqa: E402
from tests.support.processes import compiling  # noqa: E402
from tests.support.variants import few_by_default  # noqa: E402

SHAPES = [(1, 4, 4, 256, 64), (2, 4, 2, 100, 64), (1, 4, 4, 256, 64), (1, 4, 4, 255, 64), (2, 2, 2, 100, 20)]


@pytest.mark.long
@pytest.mark.skipif(not is_known(), reason=f"pip install triton=={KNOWN_TRITON[0]}, whose launcher is called directly")
@pytest.mark.parametrize("capability", few_by_default([90, 80], one_in=2))
def test_both_launchers_give_the_driver_equal_parameters(capability: int, tmp_path: Path) -> None:
    """Kernels are compiled for a GPU with TMA and for one without, and launched into a stub of the CUDA driver.

    The parameters that `DirectKernel` and `PublicKernel` pass to it are compared byte by byte.
    """
    if shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Triton builds its launcher with gcc and Python.h: install gcc and Python's headers")
    found = compiling("tests.support.launches", capability, TRITON_CACHE_DIR=str(tmp_path))
    names = {f"_{name}_kernel" for name in ("fwd", "dq", "dkdv", "split_keys", "combine", "rotate", "symmetric")}
    assert names <= {line["kernel"] for line in found}
    gluon = {f"{name}_kernel" for name in ("forward", "preprocess", "backward", "postprocess")}
    assert gluon <= {line["kernel"] for line in found} or capability == 80
    for line in found:
        assert line["same"], line
        if line["kernel"] == "_fwd_kernel":
            assert line["bytes"] >= 4 * (128 + 48 if capability == 90 else 8 + 16), "parameters were left out"
            assert line["descriptors"] <= line["most"]


def test_a_launch_is_kept_by_its_precision_and_their_number_is_bounded(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a switch to TF32 the kernel for "ieee" is not launched again."""
    kept: dict[tuple[Any, ...], Any] = {}
    monkeypatch.setattr(flash_triton, "_launches", kept)
    monkeypatch.setattr(flash_triton, "MAX_LAUNCHES", 3)
    if device == "cpu" and not flash_triton.INTERPRETED:
        pytest.skip("on a CPU this needs Triton's interpreter: TRITON_INTERPRET=1")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            forward(*drawn(1, 2, 2, 24, 16, device, torch.float32))
            assert {key[-3] for key in kept} == {"ieee", precision}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    for length in range(17, 23):  # few queries take kernels of their own
        forward(*drawn(1, 2, 2, length, 16, device, torch.float32))
        assert 1 <= len(kept) <= 3


def drawn(
    batch: int, heads: int, kv_heads: int, length: int, head_dim: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k, v, do; k as a view of (B, S, H, D) memory."""
    sizes = [(batch, h, length, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (torch.randn(size, device=device).to(dtype) for size in sizes)
    return q, k.transpose(1, 2).contiguous().transpose(1, 2), v, do


def forward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    return flash_triton._forward(q, k, v, True, 0.125)


def both(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """[o, lse, dq, dk, dv] of `flash_triton`."""
    o, lse = forward(q, k, v, do)
    return [o, lse, *flash_triton._backward(q, k, v, o, lse, do, True, 0.125)]


def forget(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Empties the caches of kernels and descriptors, as in a new process; `changes` are set in `flash_triton`."""
    monkeypatch.setattr(launch, "_descriptors", {})
    for name, value in {"_launches": {}, "_kernels": {}, **changes}.items():
        monkeypatch.setattr(flash_triton, name, value)


@pytest.mark.gpu
def test_calls_of_many_shapes_and_addresses_equal_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are freed and allocated, so that later ones of other shapes lie at addresses of earlier ones.

    The expected results are those of Triton's own launch.
    """
    forget(monkeypatch)
    inputs = [drawn(*shape, "cuda", dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)]
    kept: list[list[Tensor]] = []
    held: list[Tensor] = []
    for turn in range(3):
        for i, x in enumerate(inputs):
            found = [y.clone() for y in both(*(y.clone(memory_format=torch.preserve_format) for y in x))]
            held.append(torch.empty(1000 * (turn + 1) * (i + 1), device="cuda"))  # moves what is allocated next
            if turn == 0:
                kept.append(found)
            assert all(torch.equal(one, other) for one, other in zip(found, kept[i], strict=True)), (turn, i)
    forget(monkeypatch, Kernel=launch.PublicKernel)
    for i, x in enumerate(inputs):
        assert all(torch.equal(one, other) for one, other in zip(both(*x), kept[i], strict=True)), i


@pytest.mark.gpu
def test_a_tile_chosen_while_a_graph_is_captured_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(*SHAPES[0], "cuda", torch.bfloat16)
    expected = both(*x)  # compiles
    torch.cuda.synchronize()
    monkeypatch.setattr(flash_triton, "_launches", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(*x)
    assert not flash_triton._launches
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
