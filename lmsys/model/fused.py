"""Transformer blocks in which everything between two matmuls is one kernel, forward and backward, without a compiler.

`TransformerLM.fuse_blocks` makes the model call `run` in place of its blocks. The kernels are in fused_triton.py.
`lmsys.training.possible` calls `why_not` and `check_levels` before a training, and rotary.py uses `kernels` and
`needs_plain_torch`. `add_norm` and `swiglu` have two versions, by kernels and in plain PyTorch, which must compute the
same: if you change one version, change the other, too.

A block ends in an addition, and the next block begins with a norm of the sum. Here both are one function, `add_norm`.
It reads the residual stream and the branch (the output of attention or feed-forward) once, and writes the sum and the
norm that the next matmuls read. Its backward writes the gradient of the sum twice in one pass: in the residual stream's
dtype, and for the branch in the matmuls' dtype. Autograd and a compiler need two passes. If a training step with these
blocks is captured as a CUDA graph, it needs no compiler.

Queries and keys are rotated in place, where their projection has written them. Under autocast one matmul writes gate
and value of SwiGLU side by side. The backward of SwiGLU writes their gradients side by side, too, so that one matmul
gives the gradient of its input, and one matmul the gradients of w1 and w3.

On a CPU, in float64 and without Triton, plain PyTorch computes the same functions.

Legend: B batch, S sequence length, M d_model, F d_ff.
"""

from typing import Any

import torch

from lmsys import autograd, values
from lmsys.config import ModelConfig
from lmsys.kernels import HAS_TRITON
from lmsys.measure.profile import part
from lmsys.model import functions, linear


def kernels() -> Any:
    """The module of the kernels. It imports Triton, so it is imported when the first kernel runs."""
    from lmsys.model import fused_triton

    return fused_triton


def add_norm(x: torch.Tensor, branch: torch.Tensor | None, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + branch, its RMSNorm in the dtype that matmuls read), each (..., M); the sum is x where branch is None.

    norm  an `RMSNorm` of transformer.py
    The sum has x's dtype, which may be wider than the branch's. Differentiable once.
    """
    if torch.compiler.is_compiling() or needs_plain_torch(x):
        total = x if branch is None else x + branch
        return total, norm(total)
    with part("norms"):
        return _AddNorm.apply(x.contiguous(), branch, norm.weight, norm.eps, linear.matmul_dtype(x))


def swiglu(halves: torch.Tensor) -> torch.Tensor:
    """silu(gate) · value (..., F), from gate and value side by side in `halves` (..., 2 F).

    Kernels compute in float32. Differentiable once.
    """
    if torch.compiler.is_compiling() or needs_plain_torch(halves):
        gate, value = halves.chunk(2, dim=-1)
        return functions.silu(gate) * value
    return _SwiGLU.apply(halves.contiguous())


def why_not(device: torch.device) -> str:
    """Why the kernels cannot run on this device, for an error; empty: they can."""
    if device.type != "cuda":
        return f"fused blocks are kernels for a CUDA device, and this is {device.type}"
    return "" if HAS_TRITON else "fused blocks are kernels in Triton: pip install triton"


def check_levels(config: ModelConfig) -> None:
    """ValueError for a model with activation checkpointing: fused blocks keep all that their backward reads.

    Checkpointing divides the blocks into groups of neighbours. The `level` of a group says what its blocks keep
    (`lmsys.checkpointing`); at the level "none" they keep all that their backward reads.
    """
    values.hold(
        (
            all(group.level == "none" for group in config.groups),
            f"fused blocks keep what their backward reads: checkpoint_blocks={config.checkpoint_blocks!r} must be 0",
        )
    )


def run(layers: list[Any], last: Any, x: torch.Tensor, attend: list[Any], rope: Any, positions: Any) -> torch.Tensor:
    """All blocks and the last norm: x (B, S, M) -> (B, S, M), in the dtype that matmuls read.

    It computes what `Block.forward` does: a change there is a change here. `TransformerLM.fuse_blocks` lists the
    weights that share a matmul here.

    layers           the `Block`s
    last             the `RMSNorm` behind them
    attend           for each block its attention function, as in `Attention.mix`
    rope, positions  as in `Attention.mix`
    Blocks are not called as modules, so their hooks do not run; nor do those of their attention, their feed-forward
    and, on CUDA, of their norms.
    """
    branch = None
    for layer, attend_here in zip(layers, attend, strict=True):
        x, normalised = add_norm(x, branch, layer.ln1)
        branch = layer.attn.mix(layer.attn.project(normalised), attend_here, rope, positions, in_place=True)
        x, normalised = add_norm(x, branch, layer.ln2)
        with part("feed-forward"):
            # One matmul for w1 and w3, by the module that also serves q, k and v. Its `forward` is called directly, as
            # hooks of this module expect q, k and v.
            branch = layer.ffn.w2(swiglu(layer.attn.qkv.forward(normalised, layer.ffn.w1, layer.ffn.w3)))
    return add_norm(x, branch, last)[1]


def needs_plain_torch(x: torch.Tensor) -> bool:
    """True where plain PyTorch must compute on x: off CUDA, in float64, without Triton, or inside of torch.func."""
    return not (HAS_TRITON and x.is_cuda and x.dtype != torch.float64) or autograd.is_transformed()


class _AddNorm(torch.autograd.Function):
    """`add_norm` by the kernels. dtype: that of the normalised result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat, other = (None if t is None else t.contiguous().view(-1, x.shape[-1]) for t in (x, branch))
        total, normalised, rstd = kernels().add_norm(flat, other, weight, eps, dtype)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.branch, ctx.shape = None if branch is None else branch.dtype, x.shape
        return (x if branch is None else total.view(x.shape)), normalised.view(x.shape)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        total, weight, rstd = ctx.saved_tensors
        # None: nothing has read this result.
        d_total, d_normalised = (None if g is None else g.contiguous().view(total.shape) for g in grads)
        d_normalised = torch.zeros_like(total) if d_normalised is None else d_normalised
        dx, d_branch, d_weight = kernels().add_norm_backward(d_normalised, d_total, total, weight, rstd, ctx.branch)
        dx, d_branch = (None if t is None else t.view(ctx.shape) for t in (dx, d_branch))
        return dx, d_branch, d_weight.to(weight.dtype), None, None  # None: of eps and dtype


class _SwiGLU(torch.autograd.Function):
    """`swiglu` by the kernels."""

    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(halves)
        return kernels().swiglu(halves)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return kernels().swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)
