"""Cross-entropy of a language model's head, without the logits of the whole batch.

The head and the loss are one function here: for a chunk of tokens it makes the logits, their loss and, in the same
pass and the same memory, their gradient, and forgets them. Nothing of size tokens x vocabulary is ever held, and no
matmul is made twice. The idea: Wijmans et al. 2024, "Cut Your Losses" (arXiv 2411.09009); Hsu et al. 2024, "Liger
Kernel" (arXiv 2410.10989).

From the logits on, a kernel of ours does it on CUDA (`loss_triton.py`); plain PyTorch does on a CPU, in float64, and
where Triton is not installed.

Legend: N tokens, C tokens of a chunk, V vocabulary, M d_model.
"""

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmsys.autograd import once_differentiable
from lmsys.config import IGNORED
from lmsys.model.ids import check_ids
from lmsys.model.linear import rounded

CHUNK_LOGITS = 2**28  # at once: 512 MiB in bfloat16
CHUNK_MULTIPLE = 128  # tokens: tiles of matmuls come out even
STRIDE_MULTIPLE = 16  # logits: rows begin where wide loads and matmuls like them to


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """mean over tokens of cross_entropy(hidden weightᵀ, targets): a scalar in float32, differentiable once.

    hidden (..., M), weight (V, M), targets (...) of class indices, those of IGNORED left out. Matmuls run in the
    autocast dtype when autocast is on, else in hidden's; the loss in float32. `chunk`: tokens at once, by default as
    many as keep the logits at about CHUNK_LOGITS, in even shares. ValueError when the shapes do not fit, and on a
    CPU for any other target outside 0 to V - 1; on a GPU, which would have to be waited for, such a target gives NaN.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}"
        raise ValueError(f"hidden (..., M) and weight (V, M) must fit together; got shapes {shapes}")
    check_ids("targets", targets, "class indices", [tuple(hidden.shape[:-1])], len(weight), but=IGNORED)
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be at least one token")
    chunk = chunk or _even_chunk(targets.numel(), len(weight))
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    source = rounded(weight, dtype)  # of its values
    if not torch.is_grad_enabled():  # a Function is told that leaves need gradients all the same
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, source, targets.flatten().long(), chunk, dtype)


def _even_chunk(tokens: int, vocabulary: int) -> int:
    """The tokens of a chunk, where as few as CHUNK_LOGITS allows share them evenly."""
    num_chunks = max(1, math.ceil(tokens * vocabulary / CHUNK_LOGITS))
    chunk = max(1, math.ceil(tokens / num_chunks))
    return chunk if chunk <= CHUNK_MULTIPLE else math.ceil(chunk / CHUNK_MULTIPLE) * CHUNK_MULTIPLE


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, source: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            operand = source.detach().to(dtype)  # (V, M)
            total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
            d_hidden = torch.empty_like(hidden) if needs_hidden else None
            d_weight = weight.new_zeros(weight.shape) if needs_weight else None
            room = _rows(min(chunk, len(hidden)), len(weight), operand)
            for start in range(0, len(hidden), chunk):
                rows, labels = hidden[start : start + chunk].to(dtype), targets[start : start + chunk]
                logits = torch.mm(rows, operand.mT, out=room[: len(rows)])  # (C, V)
                total += _replace_by_gradient(logits, labels).sum()
                if d_hidden is not None:
                    d_hidden[start : start + chunk] = logits @ operand
                if d_weight is not None:
                    _add_product(d_weight, logits.mT, rows)
            count = (targets != IGNORED).sum().to(total.dtype)
        scale = count.clamp(min=1).reciprocal()
        ctx.save_for_backward(scale, *(x for x in (d_hidden, d_weight) if x is not None))
        return total / count  # of a batch without targets the mean is NaN and its gradients are 0, as in torch

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Only here do 1 / N and a loss scale meet the gradients: before, float16 would round the small ones to zero.
        scale, *gradients = ctx.saved_tensors
        kept = iter([_times(x, scale * grads[0]) for x in gradients])
        return *(next(kept) if need else None for need in ctx.needs_input_grad[:2]), *[None] * 4


def _rows(num_rows: int, width: int, like: Tensor) -> Tensor:
    """(num_rows, width) in the dtype of `like`, each row from a multiple of STRIDE_MULTIPLE on.

    Between the rows there are zeros: bfloat16 products of oneDNN with AMX read on there, and zero times what was in
    fresh memory may be NaN (https://github.com/uxlfoundation/oneDNN/issues/5717).
    """
    stride = math.ceil(width / STRIDE_MULTIPLE) * STRIDE_MULTIPLE
    rows = like.new_empty(num_rows, stride)
    rows[:, width:] = 0
    return rows[:, :width]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, on CUDA accumulated in total's dtype also where a and b are narrower."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient · factor, multiplied in the wider dtype of the two: in place, unless the graph is to be used again.

    A second gradient of the weight would be the most that a backward needs. The query is the one by which
    torch.compile decides whether it may write over what a forward has saved.
    """
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    return torch.mul(gradient, factor[None], out=torch.empty_like(gradient) if again else gradient)


def _replace_by_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row (C,), and in the place of the logits (C, V) the gradient of their sum."""
    if logits.is_cuda and logits.dtype != torch.float64 and _has_triton():
        from lmsys.model.loss_triton import replace_by_gradient

        return replace_by_gradient(logits, labels, IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float32 and float64: the logits themselves
    counted = (labels != IGNORED)[:, None]
    label = labels[:, None].where(counted, 0)
    wide.sub_(wide.amax(dim=-1, keepdim=True))
    shifted = wide.gather(1, label)  # (C, 1)
    total = wide.exp_().sum(dim=-1, keepdim=True)
    log_p = shifted - total.log()
    wide.div_(total).scatter_(1, label, log_p.expm1())
    logits.copy_(wide.masked_fill_(~counted, 0))
    return log_p.neg().where(counted, 0)[:, 0]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
