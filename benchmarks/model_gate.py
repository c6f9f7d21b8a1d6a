"""Whether a language model with some attention row, eager or compiled, computes what the plain one does.

The reference is the eager model with naive attention in float64, the budget what the same model loses in the precision
that is tested: `lmsys.testing.error_ratio`, for the logits of inference, or for the loss and each gradient of training.
Gradients are small and the rule has absolute terms, so each tensor is judged in units of its reference's largest value;
all but the loss, which is one number, are held in root mean square too, as attention rows without a float32 form are.

Llama is such a row: with the weights of ours, mapped to its own and its gradients back, it is the same function.

As many blocks as make one compiled graph stand for all, since graphs share their code; the batch and context are the
case's where naive's scores fit.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks import trial
from benchmarks.attention_gate import interpreted_kernels
from benchmarks.model_cells import LLAMA
from benchmarks.trial import verdict
from lmsys.config import ModelConfig
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import attempt
from lmsys.model import BLOCKS_PER_GRAPH, TransformerLM
from lmsys.testing import error_ratio, norm_rms, rms_budget

NUM_BLOCKS = BLOCKS_PER_GRAPH
MAX_CONTEXT = 2048
MAX_SCORES = 2**28  # of naive attention in one block: 2 GiB in float64
RECOMPILE_LIMIT = 64  # every row makes graphs of the same block
LOSS_SCALE = 2.0**12  # keeps float16 gradients above its smallest value
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = AUTOCAST | {"fp32": torch.float32, "tf32": torch.float16}  # by length of the mantissa


@dataclass
class Contender(trial.Contender):
    """A row, eager or compiled, with or without gradients, and what has been found out about it.

    attention  a row of the attention table in our model; LLAMA's name: that model
    """

    attention: str
    compiled: bool
    grad: bool
    loss: float | None = None  # on the case's own batch, after timing

    def model(self, base: TransformerLM, shared: bool) -> nn.Module:
        """The row's model with the weights of `base`: shared, or such that it is the same function."""
        if self.attention != LLAMA.name:
            return variant(base, self.attention, self.compiled)
        llama = LLAMA.load()(base.config, base.lm_head.weight.device).take_weights(base, shared)
        return llama.compile_blocks() if self.compiled else llama

    def check_after(self, forward: Callable[[], Tensor]) -> None:
        """After timing: the logits, or the loss, which is kept, must be finite still."""
        result, failure = attempt(lambda: forward().detach())
        if failure:
            self.failed(*failure)
        elif not result.isfinite().all():
            self.failed("wrong", "the loss or the logits hold NaN or inf after timing, and did not before")
        elif self.grad:
            self.loss = result.item()


@dataclass(frozen=True)
class Batch:
    """Random token ids and what comes after each, both (B, S)."""

    tokens: Tensor
    targets: Tensor

    @classmethod
    def draw(cls, config: ModelConfig, batch: int, device: str, seed: int) -> "Batch":
        generator = torch.Generator(device).manual_seed(seed)
        shape = (batch, config.context_length + 1)
        tokens = torch.randint(config.vocab_size, shape, device=device, generator=generator)
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """As `matmuls`. What is compiled meanwhile is dropped."""
    try:
        with matmuls(precision), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """Float32 matmuls in TF32 or, for every other precision, in full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: str) -> torch.autocast:
    return torch.autocast(device, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def build(config: ModelConfig, device: str, seed: int) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(config, device)


def variant(base: TransformerLM, attention: str, compiled: bool) -> TransformerLM:
    """`base`, which has not run yet, with another attention row, eager or compiled: all have one set of parameters."""
    shared = {id(x): x for x in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    model.config = replace(base.config, attention=attention)
    return model.compile_blocks(BLOCKS_PER_GRAPH) if compiled else model


def gate(contenders: list[Contender], config: ModelConfig, batch: int, precision: str, device: str, seed: int) -> None:
    """Fails each contender that cannot run or is wrong; its first call, with compiling and tuning, is `compile_s`."""
    context = min(config.context_length, MAX_CONTEXT)
    batch = max(1, min(batch, MAX_SCORES // (config.num_heads * context**2)))
    num_layers = min(config.num_layers, NUM_BLOCKS)
    base = build(replace(config, num_layers=num_layers, context_length=context), device, seed)
    data = Batch.draw(base.config, batch, device, seed)
    for grad in sorted({one.grad for one in contenders}):
        exact = variant(copy.deepcopy(base).double(), "naive", compiled=False)
        reference = _outputs(exact, data, "fp32", grad)
        del exact
        plain = _outputs(variant(base, "naive", compiled=False), data, precision, grad)
        for contender in (one for one in contenders if one.grad == grad):
            _judge(contender, base, data, precision, reference, plain)


def _judge(
    contender: Contender,
    base: TransformerLM,
    data: Batch,
    precision: str,
    reference: dict[str, Tensor],
    plain: dict[str, Tensor],
) -> None:
    def answer() -> dict[str, Tensor]:
        model = contender.model(base, shared=False)
        start = time.perf_counter()
        with interpreted_kernels() as launched:
            found = _outputs(model, data, precision, contender.grad)
        synchronize(data.tokens.device.type)
        contender.compile_s, contender.interpreted = time.perf_counter() - start, bool(launched)
        return found

    found, failure = attempt(answer)
    if failure:
        contender.failed(*failure)
        return
    ratios = {name: ratio_of(found[name], reference[name], plain[name], ROUNDING[precision]) for name in reference}
    contender.error_ratio, wrong = verdict(ratios, precision)
    if wrong:
        contender.failed(*wrong)


def _outputs(model: nn.Module, data: Batch, precision: str, grad: bool) -> dict[str, Tensor]:
    """The logits, or the loss and the gradient of every parameter, by its name in our model."""
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


def ratio_of(found: Tensor, reference: Tensor, plain: Tensor, dtype: torch.dtype) -> float:
    _, exponent = math.frexp(reference.abs().max().item())
    found, reference, plain = (x.double() / 2.0**exponent for x in (found, reference, plain))
    ratio = error_ratio(found, reference, plain.to(dtype))
    return max(ratio, norm_rms(found - reference) / rms_budget(reference, plain)) if found.dim() else ratio
