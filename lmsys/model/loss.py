"""Cross-entropy, and cross-entropy of a language model's head without the logits of the whole batch.

`TransformerLM.loss_of` calls `linear_cross_entropy`, which is head and loss in one function. For a head that is not
plain (`transformer.plain`) it calls `cross_entropy`. `cross_entropy` is also for users, and `linear_cross_entropy`
calls it inside of torch.func, where all logits are held. Elsewhere `linear_cross_entropy` goes through chunks of
tokens. It computes the logits of a chunk, their loss and, in the same pass and the same memory, their gradient, and
then drops them. So no tensor of size tokens x vocabulary is held. No matmul is done twice either, unless the loss of
each token is asked for or weights of tokens need a gradient: then the backward computes the logits again. The idea:
Wijmans et al. 2024, "Cut Your Losses" (arXiv 2411.09009); Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989).

On CUDA the kernel of `loss_triton.py` turns logits into losses and gradients. On a CPU, in float64 and without Triton
plain PyTorch does so, in `_replace_by_gradient`. A new option of the loss is a field of `LossOptions` and a parameter
of both functions. It is computed in three places: in that kernel, in `_replace_by_gradient` and in `cross_entropy`.

Legend: N tokens, C tokens of a chunk, V vocabulary, M d_model.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmsys import autograd, values
from lmsys.config import IGNORED
from lmsys.kernels import HAS_TRITON
from lmsys.model import functions, linear

CHUNK_LOGITS = 2**28  # logits held at once: 512 MiB in bfloat16
CHUNK_MULTIPLE = 128  # larger chunks are rounded up to a multiple of this many tokens, so that matmuls have whole tiles
MOST_SOFTCAP = 1e30  # the largest softcap that is allowed; the smallest is 1 / MOST_SOFTCAP
REDUCTIONS = "mean", "sum", "none"
STRIDE_MULTIPLE = 16  # the stride between rows of logits is a multiple of this, for wide loads and matmuls


@dataclass(frozen=True)
class LossOptions:
    """The options that `cross_entropy` and `linear_cross_entropy` share; ValueError for values that they cannot have.

    reduction        "mean", "sum" or "none": one loss for each token, in the shape of the targets
    label_smoothing  the target is 1 - label_smoothing at its class, and label_smoothing / V more at every class
    z_loss           a token's loss has z_loss · lse² more, lse the log-sum-exp of its logits (Chowdhery et al. 2022,
                     "PaLM", arXiv 2204.02311, section 5)
    softcap          logits become softcap · tanh(logit / softcap) before anything else is computed
    ignore_index     targets of this value count for nothing, even if the value is a valid class
    """

    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    ignore_index: int = IGNORED

    def __post_init__(self) -> None:
        values.one_of("reduction", self.reduction, REDUCTIONS)
        values.finite("label_smoothing", self.label_smoothing, least=0, most=1)
        values.finite("z_loss", self.z_loss, least=0)
        values.finite(
            "softcap", 1.0 if self.softcap is None else self.softcap, least=1 / MOST_SOFTCAP, most=MOST_SOFTCAP
        )
        values.whole("ignore_index", self.ignore_index)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
) -> Any:
    """The mean of -log softmax(logits)[target]: logits (..., V), targets (...) of class indices -> a scalar.

    Targets of `ignore_index` count for nothing. The result has the dtype of the logits, at least float32. ValueError
    when shapes do not fit, and on a CPU for other targets outside 0 to V - 1. All options are as in
    `linear_cross_entropy`, which computes the logits too, and holds only some of them at once.
    """
    values.hold(
        (
            values.instance("logits", logits, Tensor).dim() >= 1,
            "logits (..., V) must have at least one dimension; got a scalar",
        )
    )
    options = LossOptions(reduction, label_smoothing, z_loss, softcap, ignore_index)
    functions.check_ids(
        "targets", targets, "class indices", [tuple(logits.shape[:-1])], logits.shape[-1], but=ignore_index
    )
    wide = functions.widened(logits).reshape(-1, logits.shape[-1])
    counts = counts_of(token_weights, targets, options, wide.dtype)
    wide = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    losses = nn.functional.cross_entropy(
        wide,
        targets.flatten().long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counted = targets.flatten() != ignore_index
    z_losses = z_loss * wide.logsumexp(dim=-1).square().where(counted, 0) if z_loss else torch.zeros_like(losses)
    loss = reduced(losses + z_losses, counts, reduction)
    return (
        (loss, reduced(z_losses, counts, reduction).detach()) if values.flag("return_z_loss", return_z_loss) else loss
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    *,
    reduction: str = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
) -> Any:
    """The mean over tokens of cross_entropy(hidden weightᵀ, targets): a scalar in float32, differentiable once.

    hidden (..., M), weight (V, M), targets (...) of class indices. Matmuls run in the autocast dtype when autocast is
    on, else in hidden's; the loss is computed in float32. ValueError when shapes do not fit, and on a CPU for targets
    outside 0 to V - 1 other than `ignore_index`; on a GPU, which the host does not wait for, such a target gives NaN.

    chunk          tokens at once; None: as many as keep the logits at about CHUNK_LOGITS, in even shares
    token_weights  (...) factors of the tokens' losses. The mean is the weighted sum over the sum of the weights of
                   tokens that count. torch's weights of classes are token_weights=class_weights[targets]
    return_z_loss  True: the result is (loss, z), where z is the part that `z_loss` adds to the loss. It is reduced as
                   the loss is, and has no gradient
    The other options are those of `LossOptions`.

    Gradients are computed in the forward. With reduction "none", or `token_weights` that need a gradient themselves,
    they are computed in the backward, from logits that are computed again: one matmul more. Inside of torch.func plain
    PyTorch computes all logits at once, and their loss by `cross_entropy`.
    """
    values.hold(
        (
            values.instance("weight", weight, Tensor).dim() == 2
            and values.instance("hidden", hidden, Tensor).dim() >= 1
            and hidden.shape[-1] == weight.shape[-1],
            (
                "hidden (..., M) and weight (V, M) must fit together;"
                f" got shapes {tuple(hidden.shape)}, {tuple(weight.shape)}"
            ),
        )
    )
    options = LossOptions(reduction, label_smoothing, z_loss, softcap, ignore_index)
    functions.check_ids("targets", targets, "class indices", [tuple(hidden.shape[:-1])], len(weight), but=ignore_index)
    chunk = _even_chunk(targets.numel(), len(weight)) if chunk is None else values.whole("chunk", chunk, least=1)
    dtype = linear.matmul_dtype(hidden)
    if autograd.is_transformed():
        return cross_entropy(
            nn.functional.linear(hidden.to(dtype), weight.to(dtype)),
            targets,
            token_weights=token_weights,
            return_z_loss=return_z_loss,
            **asdict(options),
        )
    counts = counts_of(token_weights, targets, options, torch.promote_types(dtype, torch.float32))
    loss, z_losses = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        linear.rounded(weight, dtype),
        targets.flatten().long(),
        counts.detach().flatten(),
        *(options, chunk, dtype),
        reduction != "none" and not counts.requires_grad,  # at_once
        torch.is_grad_enabled(),  # recorded: under no_grad, too, a Function sees that weights need gradients
        token_weights is not None,  # weighted
    )
    loss = reduced(loss, counts, reduction)
    return (
        (loss, reduced(z_losses, counts, reduction).detach()) if values.flag("return_z_loss", return_z_loss) else loss
    )


def counts_of(token_weights: Tensor | None, targets: Tensor, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """The factor by which each token counts, in the targets' shape: 0 where it is ignored, else its weight or 1.

    `counts` are these factors, and the mean divides by their sum. ValueError for weights of another shape, device or
    kind.
    """
    counted, x, shape = targets != options.ignore_index, token_weights, tuple(targets.shape)
    if x is None:
        return counted.to(dtype)
    if not (
        isinstance(x, Tensor) and x.is_floating_point() and x.shape == targets.shape and x.device == targets.device
    ):
        raise ValueError(
            f"token_weights must be floating-point numbers beside targets, {shape}; got {values.shortly(x)}"
        )
    return x.to(dtype).where(counted, 0)


def reduced(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Losses (N,) of tokens, weighted by `counts` (...) and reduced. `losses` may also be their weighted sum, a scalar.

    Where no token counts, or the weights add up to 0, the mean is NaN and its gradients are 0, as in torch.
    """
    if losses.dim():
        losses = losses.view(counts.shape) * counts
        losses = losses if reduction == "none" else losses.sum()
    if reduction != "mean":
        return losses
    amount = counts.sum()
    is_empty = amount == 0
    return (losses / amount.masked_fill(is_empty, 1)).masked_fill(is_empty, math.nan)


def _even_chunk(tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk: all tokens divided evenly among as few chunks as CHUNK_LOGITS allows, and rounded up."""
    chunk = max(1, math.ceil(tokens / max(1, math.ceil(tokens * vocabulary / CHUNK_LOGITS))))
    return chunk if chunk <= CHUNK_MULTIPLE else math.ceil(chunk / CHUNK_MULTIPLE) * CHUNK_MULTIPLE


class _LinearCrossEntropy(torch.autograd.Function):
    """(the loss, the z-losses (N,)) of tokens. The loss is (N,), or with `at_once` the scalar sum of losses · factors.

    source    the values of the weight, or their copy in a narrow dtype
    factors   (N,) the `counts` of `counts_of`, flat and without a graph
    at_once   the forward computes the gradients, if they are `recorded`; else the backward does
    recorded  autograd records the call
    weighted  factors may be other numbers than 0 and 1
    Other arguments are as in `_by_chunks`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        source: Tensor,
        targets: Tensor,
        factors: Tensor,
        options: LossOptions,
        chunk: int,
        dtype: torch.dtype,
        at_once: bool,
        recorded: bool,
        weighted: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:2] if at_once and recorded else (False, False)
        # `shares` are the factors divided by the largest of them, `top`, by which `backward` multiplies the gradients.
        # Factors that are only 0 and 1 say no more than the targets do, and a kernel that reads them takes longer.
        shares, top = _shares(factors) if weighted else (None, None)
        ctx.how = options, chunk, dtype
        losses, z_losses, *gradients = _by_chunks(needs, shares, hidden, weight, source, targets, *ctx.how)
        ctx.save_for_backward(*((top, *gradients) if at_once else (hidden, weight, source, targets)))
        ctx.mark_non_differentiable(z_losses)
        if at_once:  # not by torch.dot, whose inputs autocast would cast
            losses = (losses * factors if weighted else losses).sum()
        return losses, z_losses

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The factor 1 / N and the loss scale come last: earlier, float16 would round small gradients to zero.
        if grads[0].dim():  # not at_once: the factors are the gradients of the tokens' losses
            shares, factor = _shares(grads[0])
            _, _, *gradients = _by_chunks(ctx.needs_input_grad[:2], shares, *ctx.saved_tensors, *ctx.how)
        else:
            top, *gradients = ctx.saved_tensors
            factor = grads[0] if top is None else top * grads[0]
        return *(x if x is None else _times(x, factor) for x in gradients), *[None] * 9  # None: of all other arguments


def _by_chunks(
    needs: tuple[bool, ...],
    factors: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    source: Tensor,
    targets: Tensor,
    options: LossOptions,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(losses (N,), z-losses (N,), d_hidden, d_weight), computed chunk by chunk.

    needs    (True if d_hidden is to be computed, the same for d_weight); a gradient that is not needed is None. They
             are the gradients of the sum of losses · factors
    factors  (N,) the `shares` of the caller: factors divided by the largest; None: 1 for each token that is not ignored
    source   the weight, or its copy in the narrow dtype; the matmuls read it
    chunk    tokens of a chunk
    dtype    that of the matmuls
    """
    with torch.autocast(hidden.device.type, enabled=False):
        operand = source.detach().to(dtype)  # (V, M)
        losses, z_losses = torch.zeros(
            2, len(hidden), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device
        )
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        d_weight = weight.new_zeros(weight.shape) if needs[1] else None
        room = _rows(min(chunk, len(hidden)), len(weight), operand)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            # shares: the factors of this chunk's tokens
            rows, labels, shares = hidden[part].to(dtype), targets[part], None if factors is None else factors[part]
            logits = torch.mm(rows, operand.mT, out=room[: len(rows)])  # (C, V)
            losses[part], lses = _replace_by_gradient(logits, labels, shares, options, gradient=any(needs))
            if options.z_loss:
                z_losses[part] = lses.square().mul_(options.z_loss)
            if d_hidden is not None:
                d_hidden[part] = logits @ operand
            if d_weight is not None:
                _add_product(d_weight, logits.mT, rows)
    return (losses + z_losses if options.z_loss else losses), z_losses, d_hidden, d_weight


def _shares(factors: Tensor) -> tuple[Tensor, Tensor]:
    """(factors / the largest, the largest).

    With the first of the two, whose largest is 1, gradients in float16 are about as large as without factors. "The
    largest" is by absolute value, and at least float32's smallest normal number, since all factors may be 0.
    """
    top = nn.functional.pad(factors.abs(), (0, 1), value=torch.finfo(torch.float32).tiny).amax()
    return factors / top, top


def _rows(num_rows: int, width: int, like: Tensor) -> Tensor:
    """An unwritten tensor (num_rows, width) in the dtype of `like`; rows begin at multiples of STRIDE_MULTIPLE.

    Between the rows there are zeros: bfloat16 matmuls of oneDNN with AMX read these elements, and zero times whatever
    was in fresh memory may be NaN (https://github.com/uxlfoundation/oneDNN/issues/5717).
    """
    rows = like.new_empty(num_rows, math.ceil(width / STRIDE_MULTIPLE) * STRIDE_MULTIPLE)
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
    """gradient · factor, computed in place unless the graph is used again: a second d_weight needs much memory.

    The product is computed in the wider dtype of the two. torch.compile calls the same function of torch to decide if a
    backward may write over what its forward has saved.
    """
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    return torch.mul(gradient, factor[None], out=torch.empty_like(gradient) if again else gradient)


def _replace_by_gradient(
    logits: Tensor, labels: Tensor, factors: Tensor | None, options: LossOptions, gradient: bool
) -> tuple[Tensor, Tensor]:
    """(the cross-entropy, the log-sum-exp) of each row of the logits, (C,) each; 0 for rows that are ignored.

    Read the log-sum-exp only with a z-loss: without one the kernel of loss_triton.py does not write it.

    factors   (C,); None: 1 for each row
    gradient  True: the logits (C, V) are overwritten by the gradient of the sum of losses · factors, where losses
              include z-losses
    """
    if logits.is_cuda and logits.dtype != torch.float64 and HAS_TRITON:
        from lmsys.model.loss_triton import replace_by_gradient

        return replace_by_gradient(logits, labels, factors, options, gradient)
    wide = functions.widened(logits)  # float32 and float64: the logits themselves
    counted = (labels != options.ignore_index)[:, None]
    label = labels[:, None].where(counted, 0)
    smoothing, softcap = options.label_smoothing, options.softcap
    if softcap is not None:
        capped = torch.tanh(wide / softcap)
        wide = capped * softcap
    mean = wide.mean(dim=-1, keepdim=True) if smoothing else 0.0
    top = wide.amax(dim=-1, keepdim=True)
    wide.sub_(top)
    shifted = wide.gather(1, label)  # (C, 1)
    total = wide.exp_().sum(dim=-1, keepdim=True)
    log_p, lse = shifted - total.log(), top + total.log()
    if gradient:
        # The derivative of a token's loss by its log-sum-exp is 1 from the cross-entropy and `of_lse` from the z-loss.
        of_lse, factor = 2 * options.z_loss * lse, 1.0 if factors is None else factors[:, None]
        wide.mul_((1 + of_lse) * factor / total)
        # At the label 1 - smoothing is taken away. expm1 gives p - 1 without cancellation where p is near 1.
        wide.scatter_(1, label, (log_p.expm1() + smoothing + of_lse * log_p.exp()) * factor)
        if smoothing:
            wide.sub_(smoothing / wide.shape[1] * factor)
        if softcap is not None:
            wide.mul_(1 - capped.square())
        logits.copy_(wide.masked_fill_(~counted, 0))
    return ((smoothing - 1) * log_p + smoothing * (lse - mean)).where(counted, 0)[:, 0], lse.where(counted, 0)[:, 0]
