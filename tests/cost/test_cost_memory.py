"""Predicted memory against what a model, its gradients and its optimizer hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.config import ModelConfig
from lmsys.cost.memory import training_memory
from lmsys.measure.memory import peak_bytes, saved_bytes
from lmsys.model import TransformerLM
from lmsys.training.optimizer import AdamW
from tests.support.variants import some

CONFIGS = st.builds(
    lambda heads, group, dim, **sizes: ModelConfig(
        d_model=heads * group * dim, num_heads=heads * group, num_kv_heads=heads, attention="naive", **sizes
    ),
    heads=st.integers(1, 3),
    group=st.integers(1, 2),
    dim=st.sampled_from([4, 8]),
    d_ff=st.integers(1, 40),
    num_layers=st.integers(1, 3),
    vocab_size=st.integers(2, 50),
    context_length=st.just(8),
)


def bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@settings(max_examples=15)
@given(config=CONFIGS)
def test_parameters_gradients_and_optimizer_are_exact(config: ModelConfig) -> None:
    model = TransformerLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    optimizer.step()
    predicted = training_memory(config, 1, 8, "fp32")
    assert bytes_of(model.parameters()) == predicted.parameters
    assert bytes_of(x.grad for x in model.parameters()) == predicted.gradients
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert bytes_of(moments) == predicted.optimizer


def kept(config: ModelConfig, batch: int, context: int, precision: str, device: str) -> int:
    """Bytes that a forward saves for its backward, without parameters: `saved_bytes` less those that are saved."""
    model = TransformerLM(config, device=device)
    tokens = torch.zeros(batch, context, dtype=torch.int64, device=device)
    parameters = {x.data_ptr(): x.nbytes for x in model.parameters()}
    saved: set[int] = set()

    def note(x: torch.Tensor) -> torch.Tensor:
        saved.add(x.untyped_storage().data_ptr())
        return x

    def forward() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            model.loss(tokens, tokens)

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        forward()
    return saved_bytes(forward) - sum(size for address, size in parameters.items() if address in saved)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_predicted(precision: str, device: str) -> None:
    config = ModelConfig(256, 1024, 3, 4, vocab_size=512, context_length=256, attention="sdpa_flash")
    if device == "cuda":
        config = replace(config, attention="sdpa_efficient" if precision == "fp32" else "sdpa_flash")
    predicted = training_memory(config, 4, 256, precision).activations
    if device == "cpu":  # there torch keeps the normalised input of each RMSNorm as well
        predicted += (2 * config.num_layers + 1) * 4 * 256 * config.d_model * 4
    assert predicted == pytest.approx(kept(config, 4, 256, precision, device), rel=0.03 if device == "cpu" else 0.15)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("precision", some(["fp32", "bf16"], 2))
def test_the_peak_of_a_step_is_predicted(precision: str, batch: int, device: str) -> None:
    """Few activations beside many gradients, and the other way round."""
    if (device, precision) == ("cpu", "bf16"):
        batch = min(batch, 4)  # twice the gradients; with more, a CPU without instructions for it takes a minute
    attention = "sdpa_efficient" if (device, precision) == ("cuda", "fp32") else "sdpa_flash"
    config = ModelConfig(256, 1024, 4, 4, vocab_size=1024, context_length=128, attention=attention)
    model = TransformerLM(config, device=device)
    optimizer, tokens = AdamW(model.parameters()), torch.zeros(batch, 128, dtype=torch.int64, device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(tokens, tokens)
        loss.backward()
        optimizer.step()

    step()
    model.zero_grad(set_to_none=True)
    predicted = training_memory(config, batch, 128, precision)
    if device == "cpu":  # there the optimizer needs room, and the normalised input of each RMSNorm is kept as well
        norms = (2 * config.num_layers + 1) * 4 * batch * 128 * config.d_model
        predicted = replace(
            predicted,
            gradients=predicted.gradients + predicted.parameters,
            activations=predicted.activations + norms,
        )
    measured = peak_bytes(step, device) + predicted.parameters + predicted.optimizer
    assert predicted.peak == pytest.approx(measured, rel=0.15)


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(ValueError, match="precision='int8' must be one of fp32, tf32, bf16, fp16"):
        training_memory(ModelConfig(32, 48, 2, 4), 1, 8, "int8")
