"""The gate: a language model with some attention row, eager or compiled, must compute what the plain one does.

The reference is the eager model with naive attention in float64, the budget what the same model loses in the precision
that is tested: see `benchmarks.arithmetic.ratio_of`, for the logits of inference, or for the loss and each gradient of
training. Llama is such a row: with the weights of ours, mapped to its own and its gradients back, it is the same
function.

The gate tests NUM_BLOCKS blocks, as many as one compiled graph holds, because all graphs share their code. The context
is the case's, up to MAX_CONTEXT; the batch is smaller where naive's scores would not fit.
"""

import copy
from collections.abc import Sequence
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
            exact = variant(copy.deepcopy(self.base).double(), "naive", compiled=False)
            reference = self.outputs(exact, grad, "fp32")
            del exact
            plain = self.outputs(variant(self.base, "naive", compiled=False), grad)
            for candidate in (one for one in candidates if one.case.grad == grad):
                if found := candidate.attempt(self.outputs, candidate.call, grad):
                    pairs = {name: ratio_of(found[name], x, plain[name], dtype) for name, x in reference.items()}
                    candidate.judge(pairs)

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
        return {"loss": loss.detach()} | {f"gradient of {name}": x / scale for name, x in gradients.items()}
