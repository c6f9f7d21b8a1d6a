"""The gate: a language model with some attention row, eager or compiled, must compute what the plain one does.

The reference is the eager model with naive attention in float64, the budget what the same model loses in the precision
that is tested: see `benchmarks.arithmetic.ratio_of`, for the logits of inference, or for the loss and each gradient of
training. Llama is such a row: with the weights of ours, mapped to its own and its gradients back, it is the same
function.

A row with a narrow residual stream is held to the budget of plain PyTorch with one, which rounds the same sums. How far
its gradients are from float64 is in the record, as it is of every row.

The gate tests NUM_BLOCKS blocks, as many as one compiled graph holds, because all graphs share their code. The context
is the case's, up to MAX_CONTEXT; the batch is smaller where naive's scores would not fit.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.arithmetic import LOSS_SCALE, ROUNDING, autocast, ratio_of
from benchmarks.model.cases import ModelTest
from benchmarks.models import MAX_SCORES, NUM_BLOCKS, Batch, build, variant
from lmsys.bench import Candidate
from lmsys.measure.compare import release_memory
from lmsys.model import TransformerLM

MAX_CONTEXT = 2048
GRADIENT = "gradient of"  # begins the names of gradients among outputs


class Gate:
    """A model of a few blocks and a batch; `check` judges all rows of a group by one reference."""

    def __init__(self, case: ModelTest, seed: int):
        config, context = case.config, min(case.context, MAX_CONTEXT)
        small = replace(config, num_layers=min(config.num_layers, NUM_BLOCKS), context_length=context)
        self.base = build(small, case.device, seed)
        self.precision, self.seed = case.precision, seed
        self._draw(max(1, min(case.batch, MAX_SCORES // (config.num_heads * context**2))))

    def _draw(self, batch: int) -> None:
        self.batch = batch
        self.data = Batch.draw(self.base.config, batch, self.base.lm_head.weight.device.type, self.seed)

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
        dtype = ROUNDING[self.precision]
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
                            {name: ratio_of(found[name], x, plain[name], dtype) for name, x in reference.items()}
                        )
                        candidate.notes["gradient_error"] = gradient_error(found, reference) if grad else None

    def outputs(self, model: nn.Module, grad: bool, precision: str = "") -> dict[str, Tensor]:
        """The logits, or the loss and the gradient of every parameter, by its name in our model."""
        data, precision = self.data, precision or self.precision
        with torch.set_grad_enabled(grad), autocast(precision, data.tokens.device.type):
            if not grad:
                return {"logits": model(data.tokens)}
            loss = model.loss(data.tokens, data.targets)
        scale = LOSS_SCALE if precision == "fp16" else 1.0
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss * scale, parameters), strict=True))
        if not isinstance(model, TransformerLM):
            gradients = model.as_ours(gradients)
        return {"loss": loss.detach()} | {f"{GRADIENT} {name}": x / scale for name, x in gradients.items()}


def gradient_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float | None:
    """The error of all gradients as one vector, as a share of its length; None where it is no number."""
    names = [name for name in reference if name.startswith(GRADIENT)]
    off = sum((found[name].double() - reference[name]).square().sum().item() for name in names)
    share = math.sqrt(off / sum(reference[name].square().sum().item() for name in names))
    return share if math.isfinite(share) else None
