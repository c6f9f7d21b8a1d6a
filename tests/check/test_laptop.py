"""`lmsys check` on a kernel for GPUs where there is no GPU (lmsys/check/laptop.py).

While the check lasts, Triton's interpreter runs the kernel and `Laptop` makes PyTorch pretend that there is a GPU. The
verdict says both. TRITON is a file as a student may write it, with all that must be pretended: devices, events,
autotuning, a matmul in bfloat16.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from lmsys.attention.compiled import why_no_compiler
from lmsys.check import laptop
from lmsys.check.__main__ import main
from lmsys.check.kinds import RIGHT
from lmsys.processes import in_own_process

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
TRITON = """
import torch
import triton
import triton.language as tl
from triton.language import load as fetch, program_id

from project_of_mine.names import SCALE

DEVICE = triton.runtime.driver.active.get_active_torch_device()
torch.zeros(1, device=DEVICE)


@triton.autotune([triton.Config({"BLOCK": 4096}), triton.Config({"BLOCK": 1024})], key=["count"])
@triton.jit
def scaled(x, y, count, scale, negative, BLOCK: tl.constexpr):
    halves = tl.full((16, 16), 0.5, tl.float32).to(tl.bfloat16)
    scale *= tl.max(tl.max(tl.dot(halves, halves), 1), 0) / 4  # the matmul in bfloat16: 16 * 0.5 * 0.5 / 4 is 1
    if negative:
        scale = -scale
    at = program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, fetch(x + at, mask=at < count) * scale, mask=at < count)


def attend(q, k, v, causal):
    assert q.is_cuda and q.device.type == "cuda" and torch.cuda.is_available() and torch.cuda.current_device() == 0
    with torch.cuda.device(q.device.index), torch.cuda.nvtx.range("attention"):
        y = torch.empty(q.shape, device="cuda", dtype=q.dtype)
        grid = lambda meta: (triton.cdiv(q.numel(), meta["BLOCK"]),)
        scaled[grid](q.contiguous(), y, q.numel(), q.shape[-1] ** SCALE, False)
    start = torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream())
    assert start.elapsed_time(torch.cuda.Event(enable_timing=True)) == 0.0
    scores = y @ k.mT
    if causal:
        seen = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return attend(q, k, v, is_causal)

    @staticmethod
    def backward(ctx, do):
        assert do.is_cuda
        q, k, v = ctx.saved_tensors
        seen = torch.ones(q.shape[-2], k.shape[-2], device="cuda", dtype=torch.bool).tril()
        scores = (q @ k.mT * q.shape[-1] ** SCALE).masked_fill(~seen & ctx.is_causal, -torch.inf)
        p, dp = scores.softmax(-1), do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** SCALE
        return ds @ k, ds.mT @ q, p.mT @ do, None
"""


def test_a_kernel_for_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    package = tmp_path / "project_of_mine"  # TRITON imports from it: the folder of pyproject.toml must be found
    package.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (package / "__init__.py").touch()
    (package / "names.py").write_text("SCALE = -0.5\n")
    folder = package / "kernels"
    folder.mkdir()
    (folder / "mine.py").write_text(TRITON)
    assert (
        main([f"{folder / 'mine.py'}:Attention", "--head-dim", "16", "--dtype", "float32,bfloat16", "--json"]) == RIGHT
    )
    *lines, last = map(json.loads, capfd.readouterr().out.splitlines())
    assert {record["reason"] for record in lines if "bfloat16" in record["case"]} == {laptop.NO_BFLOAT16}
    (note,) = [record["reason"] for record in lines if record["case"] == "on a GPU"]
    assert note == laptop.INTERPRETED + laptop.PRETENDED
    assert {*last["holds"]["full mask"]["backward"]} == {"right"} == {*last["holds"]["causal mask"]["forward"]}
    assert BackwardCFunction.apply is laptop._apply  # nothing stays replaced in this process


def test_a_cpu_is_reported_as_a_gpu() -> None:
    """In `Laptop`, tensors on the CPU say that they are on a GPU, and tensors that are made on a GPU are on the CPU."""
    x = torch.zeros(2)
    with laptop.Laptop():
        assert x.is_cuda and x.device == laptop.GPU and x.cuda() is x
        tensors = [
            torch.ones(2, device="cuda:0"),
            torch.empty(1, device=x.device),
            x.to("cuda"),
            x.new_zeros(3, device="cuda"),
        ]
    assert not x.is_cuda and all(y.device.type == "cpu" for y in tensors)


def compiled() -> float:
    """The derivative of 2 x, which is 2, computed by torch.compile while PyTorch pretends that there is a GPU."""
    laptop.install()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (2 * x).sum())(x).backward()
    assert x.grad is not None
    return float(x.grad[0])


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_compiler("cpu")), reason="torch.compile needs a compiler of C++")
def test_torch_compile_works_while_a_gpu_is_pretended() -> None:
    assert in_own_process(compiled, timeout_s=300.0) == 2.0
