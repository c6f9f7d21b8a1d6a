"""The right results of a whole model, at its full size: our blocks, eager, with attention as it is written on paper.

One sequence is run at a time, and of it one block of layers is held: the backward makes each block again. So it fits
wherever the weights do, and where few sequences decide what is looked at, no others are run.

Legend: B batch, S sequence length, M d_model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from benchmarks.arithmetic import AUTOCAST, LOSS_SCALE, autocast, matmuls, widened
from benchmarks.models import Batch
from lmsys.attention.naive import naive
from lmsys.model import TransformerLM
from lmsys.model.linear import linear
from lmsys.testing import BLOCK_SCORES

EMBEDDINGS, HEAD = "token_embeddings.weight", "lm_head.weight"
Meant = Callable[[str, Tensor], Tensor]


class Reference:
    """`base`'s function of its weights as they are now: exact, or in the precision that is tested.

    exact  in float32, and where that is tested in float64
    meant  gives, by its name, a weight as ours must have it to be the function that is tested
    narrow the residual stream is, unless exact, rounded to the dtype that matmuls read
    """

    def __init__(self, base: TransformerLM, precision: str, exact: bool, meant: Meant, narrow: bool = False):
        self.base, self.meant, self.exact = base, meant, exact
        self.stream = AUTOCAST[precision] if narrow and not exact else None
        self.device, self.parameters = base.lm_head.weight.device.type, dict(base.named_parameters())
        self.precision = "fp32" if exact else precision
        self.dtype = torch.float64 if exact and precision == "fp32" else torch.float32
        self.leaves: dict[str, Tensor] = {}  # weights whose gradients are asked for

    @torch.no_grad()
    def states(self, tokens: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states (P, M) and logits (P, V) of one sequence (S) at these positions, of which none sees more."""
        with self._arithmetic():
            hidden = self._hidden(self._embedded(tokens[: max(positions) + 1]))[positions]
            return hidden, self._logits(hidden)

    @torch.no_grad()
    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token (B S), from hidden states (B, S, M) that somebody else has made."""
        with self._arithmetic():
            logits = (self._logits(one.to(self.dtype) if self.exact else one) for one in hidden)
            found = [F.cross_entropy(widened(x), y, reduction="none") for x, y in zip(logits, targets, strict=True)]
        return torch.cat(found)

    def gradients(self, data: Batch, sequences: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
        """By name, what these sequences add to the gradients of the mean loss: of the embeddings, and of `names`."""
        scale = LOSS_SCALE if self.precision == "fp16" else 1.0
        self.leaves = {name: self._weight(name).requires_grad_() for name in names}
        total = {name: torch.zeros_like(self._weight(name)) for name in (EMBEDDINGS, *names)}
        for tokens, targets in ((data.tokens[one], data.targets[one]) for one in sequences):
            x = self._embedded(tokens).requires_grad_()
            with self._arithmetic():
                logits = widened(self._logits(self._hidden(x)))
                loss = F.cross_entropy(logits, targets, reduction="sum") / data.targets.numel()
                found = torch.autograd.grad(loss * scale, (x, *self.leaves.values()))
            total[EMBEDDINGS].index_add_(0, tokens, found[0])
            for name, gradient in zip(names, found[1:], strict=True):
                total[name] += gradient
        self.leaves = {}
        return {name: x / scale for name, x in total.items()}

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.exact:
                stack.enter_context(matmuls("fp32"))
            stack.enter_context(autocast(self.precision, self.device))
            yield

    def _weight(self, name: str) -> Tensor:
        return self.parameters[name].detach().to(self.dtype)

    def _used(self, name: str) -> Tensor:
        """As our model has to have it: a gradient goes back to what the tested one has."""
        return self.meant(name, self.leaves[name] if name in self.leaves else self._weight(name))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.parameters[EMBEDDINGS].detach()[tokens].to(self.dtype)

    def _hidden(self, x: Tensor) -> Tensor:
        """(S, M) -> (S, M), what the head reads."""
        x = x[None].to(self.stream or x.dtype)
        for index in range(len(self.base.layers)):
            x = checkpoint(self._block, index, x, use_reentrant=False, preserve_rng_state=False)
        return functional_call(self.base.ln_final, {"weight": self._used("ln_final.weight")}, (x,))[0]

    def _block(self, index: int, x: Tensor) -> Tensor:
        layer = self.base.layers[index]
        weights = {name: self._used(f"layers.{index}.{name}") for name, _ in layer.named_parameters()}
        found: Tensor = functional_call(layer, weights, (x, attend, self.base.rope, None))
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._used(HEAD))


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """`naive` in blocks of query rows, each of which the backward makes again where there are several."""
    assert causal, "a language model's attention is"
    length = q.shape[2]
    rows = max(1, BLOCK_SCORES[q.device.type] // (q.shape[1] * length))
    if rows >= length:
        return naive(q, k, v, causal=True)

    def block(first: int) -> Tensor:
        end = min(first + rows, length)
        return naive(q[:, :, first:end], k[:, :, :end], v[:, :, :end], causal=True, first_query=first)

    starts = range(0, length, rows)
    return torch.cat([checkpoint(block, one, use_reentrant=False, preserve_rng_state=False) for one in starts], dim=2)
