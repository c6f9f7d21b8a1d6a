"""The gate: a language model with some attention row, eager or compiled, must compute what the plain one does.

The reference is the eager model with naive attention in float64, the budget what the same model loses in the precision
that is tested: see `lmsys.testing.ratio_of`, for the logits of inference, or for the loss and each gradient of
training. Llama is such a row: with the weights of ours, mapped to its own and its gradients back, it is the same
function.

A row with a narrow residual stream is held to the budget of plain PyTorch with one, which rounds the same sums. How far
its gradients are from float64 is in the record, as it is of every row.

Some embeddings are zero, huge or have an outlier channel, and some gates are saturated: `lmsys.extremes.model`. Their
gradients, and the logits of their tokens, are judged apart from the others, which have a budget of their own: at zero a
gradient may be many times as large as any other, at a huge row as small.

The gate tests NUM_BLOCKS blocks, as many as one compiled graph holds, because all graphs share their code. The context
is the case's, up to MAX_CONTEXT; the batch is smaller where naive's scores would not fit.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.model.cases import ModelTest
from benchmarks.models import (
    LOSS_SCALE,
    MAX_SCORES,
    NUM_BLOCKS,
    ROUNDING,
    Batch,
    autocast,
    build,
    ratio_by_group,
    variant,
)
from lmsys.bench import Candidate
from lmsys.extremes.model import EMBEDDINGS, FIRST_ID, ROWS, group_of, write_model
from lmsys.measure.compare import release_memory
from lmsys.model import TransformerLM
from lmsys.testing import ratio_of

MAX_CONTEXT = 2048
LOGITS, GRADIENT = "logits", "gradient of"  # an output; what begins the names of gradients among outputs


class Gate:
    """A model of a few blocks and a batch; `check` judges all rows of a group by one reference."""

    def __init__(self, case: ModelTest, seed: int):
        config, context = case.config, min(case.context, MAX_CONTEXT)
        small = replace(config, num_layers=min(config.num_layers, NUM_BLOCKS), context_length=context)
        self.base = build(small, case.device, seed)
        write_model(dict(self.base.named_parameters()))
        self.precision, self.seed = case.precision, seed
        self._draw(max(1, min(case.batch, MAX_SCORES // (config.num_heads * context**2))))

    def _draw(self, batch: int) -> None:
        self.batch = batch
        self.data = Batch.draw(self.base.config, batch, self.base.lm_head.weight.device.type, self.seed)
        self.data.tokens[:, 0] = FIRST_ID
        kinds = torch.arange(1, len(ROWS) + 1)  # ids of extreme embeddings, of each kind the first
        self.data.tokens[0, 1 : len(kinds) + 1] = kinds.to(self.data.tokens)[: self.data.tokens.shape[1] - 1]

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Judges each; on half the batch, and half again, where it is the gate's own reference that has no room."""
        while True:
            try:
                return self.judge([one for one in candidates if one.outcome == "ok"])
            except (torch.OutOfMemoryError, MemoryError):
                if self.batch == 1:
                    raise
            release_memory()  # only here is the traceback gone, which held the reference's tensors
            self._draw(self.batch // 2)

    def judge(self, candidates: Sequence[Candidate]) -> None:
        for grad in sorted({one.case.grad for one in candidates}):
            exact = variant(copy.deepcopy(self.base).double(), "eager", attention="naive")
            reference = self.outputs(exact, grad, "fp32")
            del exact
            for residual in sorted({one.case.residual for one in candidates}):
                rows = [one for one in candidates if (one.case.grad, one.case.residual) == (grad, residual)]
                stream = {} if residual == "wide" else {"residual": residual}
                model = variant(self.base, "eager", attention="naive", **stream)
                plain = self.outputs(model, grad) if rows else {}
                for candidate in rows:
                    if found := candidate.attempt(self.outputs, candidate.call, grad):
                        candidate.judge(
                            {name: self.ratio(name, found[name], x, plain[name]) for name, x in reference.items()}
                        )
                        candidate.notes["gradient_error"] = self.gradient_error(found, reference) if grad else None

    def ratio(self, name: str, found: Tensor, reference: Tensor, plain: Tensor) -> float:
        """The error over its budget: of rows of a gradient, and of the logits of tokens, by groups."""
        dtype = ROUNDING[self.precision]
        if not reference.dim():
            return ratio_of(found, reference, plain, dtype)
        group = self.group(name, reference)
        found, reference, plain = (x.reshape(-1, x.shape[-1]) for x in (found, reference, plain))
        return ratio_by_group(found, reference, plain, dtype, group)

    def group(self, name: str, x: Tensor) -> Tensor:
        """A number for each row of an output: 0 where it is ordinary."""
        if name == LOGITS:
            return group_of(EMBEDDINGS, self.base.config.vocab_size)[self.data.tokens.flatten().cpu()]
        return group_of(name.removeprefix(f"{GRADIENT} "), x.numel() // x.shape[-1])

    def outputs(self, model: nn.Module, grad: bool, precision: str = "") -> dict[str, Tensor]:
        """The logits, or the loss and the gradient of every parameter, by its name in our model."""
        data, precision = self.data, precision or self.precision
        with torch.set_grad_enabled(grad), autocast(precision, data.tokens.device.type):
            if not grad:
                return {LOGITS: model(data.tokens)}
            loss = model.loss(data.tokens, data.targets)
        scale = LOSS_SCALE if precision == "fp16" else 1.0
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss * scale, parameters), strict=True))
        if not isinstance(model, TransformerLM):
            gradients = model.as_ours(gradients)
        return {"loss": loss.detach()} | {f"{GRADIENT} {name}": x / scale for name, x in gradients.items()}

    def gradient_error(self, found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float | None:
        """The error of the ordinary rows of all gradients as one vector, as a share of its length; None where it is no
        number."""
        off = size = 0.0
        for name, x in reference.items():
            if name.startswith(GRADIENT):
                ordinary = (self.group(name, x) == 0).to(x.device) if x.dim() > 1 else slice(None)
                off += (found[name].double() - x)[ordinary].square().sum().item()
                size += x[ordinary].square().sum().item()
        share = math.sqrt(off / size)
        return share if math.isfinite(share) else None
