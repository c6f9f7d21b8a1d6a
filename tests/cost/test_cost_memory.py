"""Predicted memory (lmsys/cost/memory.py) against the bytes that a model, its gradients and its optimizer hold.

Parameters, gradients and the optimizer's state are predicted to the byte; activations and peaks, in which libraries
have a part, within a few percent. `fit` chooses what blocks keep, so that a training fits into a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.checkpointing import LEVELS, setting_of
from lmsys.config import ModelConfig
from lmsys.cost.memory import MATMUL_BYTES, fit, training_memory
from lmsys.measure.memory import peak_bytes, saved_bytes
from lmsys.model import TransformerLM
from lmsys.training.optimizer import AdamW
from tests.support.variants import few_by_default

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
    predicted = training_memory(config, batch=1, context=8, precision="fp32")
    assert bytes_of(model.parameters()) == predicted.parameters
    assert bytes_of(x.grad for x in model.parameters()) == predicted.gradients
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert bytes_of(moments) == predicted.optimizer


def config_of(precision: str, device: str, context: int, **sizes: Any) -> ModelConfig:
    """A model of four heads, with a row of attention that `device` has in this precision."""
    attention = "sdpa_efficient" if (device, precision) == ("cuda", "fp32") else "sdpa_flash"
    return ModelConfig(num_heads=4, context_length=context, attention=attention, **sizes)


def step_of(
    config: ModelConfig, batch: int, precision: str, device: str, backward: bool = True
) -> tuple[TransformerLM, Callable[[], None]]:
    """(a model, a function that does its forward and backward on zeros, or only its forward)."""
    model = TransformerLM(config, device=device)
    tokens = torch.zeros(batch, config.context_length, dtype=torch.int64, device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(tokens, tokens)
        if backward:
            loss.backward()

    return model, step


def norms_bytes(config: ModelConfig, batch: int, device: str) -> int:
    """Bytes that torch keeps on a CPU alone: the normalised input of each RMSNorm, in float32."""
    return (2 * config.num_layers + 1) * batch * config.context_length * config.d_model * 4 * (device == "cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_predicted(precision: str, device: str) -> None:
    """They are what a forward saves for its backward, without the parameters among it."""
    config = config_of(precision, device, 256, d_model=256, d_ff=1024, num_layers=3, vocab_size=512)
    model, forward = step_of(config, 4, precision, device, backward=False)
    parameters = {x.data_ptr(): x.nbytes for x in model.parameters()}
    saved: set[int] = set()

    def note(x: torch.Tensor) -> torch.Tensor:
        saved.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        forward()
    measured = saved_bytes(forward) - sum(size for address, size in parameters.items() if address in saved)
    predicted = training_memory(config, 4, 256, precision).activations + norms_bytes(config, 4, device)
    assert predicted == pytest.approx(measured, rel=0.03 if device == "cpu" else 0.15)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("precision", few_by_default(["fp32", "bf16"], one_in=2))
def test_the_peak_of_a_step_is_predicted(precision: str, batch: int, device: str) -> None:
    """A batch of 1 has few activations beside many gradients, and a batch of 16 the other way round."""
    if device == "cpu":
        batch = min(batch, 4)  # has more activations than gradients, too; a CPU may lack instructions for bfloat16
    config = config_of(precision, device, 128, d_model=256, d_ff=1024, num_layers=4, vocab_size=1024)
    model, forward_backward = step_of(config, batch, precision, device)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        forward_backward()
        optimizer.step()

    step()
    model.zero_grad(set_to_none=True)
    memory = training_memory(config, batch, 128, precision)
    predicted = replace(
        memory,
        gradients=memory.gradients + memory.parameters * (device == "cpu"),  # there the optimizer needs room
        activations=memory.activations + norms_bytes(config, batch, device),
    )
    measured = peak_bytes(step, device) + predicted.parameters + predicted.optimizer
    assert predicted.peak == pytest.approx(measured, rel=0.15)


@settings(max_examples=25)
@given(
    config=CONFIGS,
    batch=st.integers(1, 64),
    precision=st.sampled_from([*MATMUL_BYTES]),
    stage=st.integers(0, 3),
    stays=st.booleans(),
    share=st.floats(0, 1.1),
)
def test_fit_computes_the_least_again_that_fits(
    config: ModelConfig, batch: int, precision: str, stage: int, stays: bool, share: float
) -> None:
    """If one more block had the level that recomputes less, it would not fit; too small a device is refused.

    share  where the device's memory lies between the least peak (0) and the largest (1)
    stays  gradients are in memory before the backward
    """

    def peak(levels: Sequence[str]) -> int:
        with_levels = replace(config, checkpoint_blocks=setting_of(levels))
        found = training_memory(with_levels, batch, 8, precision, world_size=2, stage=stage)
        return found.peak + (min(found.gradients, found.activations + found.recomputed) if stays else 0)

    layers = config.num_layers
    least, most = sorted([peak(["whole"] * layers), peak(["none"] * layers)])  # with one layer, "whole" may need more
    memory = least + share * (most - least)
    fitted = partial(fit, replace(config, checkpoint_blocks="fit"), batch, 8, precision)
    chosen = fitted(memory, world_size=2, stage=stage, gradients_stay=stays)
    levels = [group.level for group in chosen.groups for _ in range(group.first, group.stop)]
    assert peak(levels) <= memory and replace(config, checkpoint_blocks=chosen.checkpoint_blocks) == chosen
    assert [*map(LEVELS.index, levels)] == sorted(map(LEVELS.index, levels), reverse=True)
    if levels != ["none"] * layers:  # the last block of the level that recomputes most gets the next lower level
        heaviest = max(map(LEVELS.index, levels))
        last = layers - 1 - [*map(LEVELS.index, levels)][::-1].index(heaviest)
        assert peak([*levels[:last], LEVELS[heaviest - 1], *levels[last + 1 :]]) > memory
    with pytest.raises(ValueError, match="a step needs .* GiB of .* GiB even where whole blocks are run again"):
        fitted(least * 0.5, world_size=2, stage=stage, gradients_stay=stays)


@pytest.mark.parametrize("precision", few_by_default(["fp32", "bf16"], one_in=2))
@pytest.mark.parametrize(("level", "residual"), [("attention", "wide"), ("attention", "narrow"), ("whole", "wide")])
def test_the_peak_with_checkpointing_is_predicted(level: str, residual: str, precision: str, device: str) -> None:
    """The peak of forward and backward, without the weights; in this model it is mostly activations."""
    sizes = {"d_model": 64, "d_ff": 256, "num_layers": 8, "vocab_size": 64}
    config = config_of(precision, device, 128, checkpoint_blocks=level, residual=residual, **sizes)
    batch = 8 if device == "cpu" else 16
    model, forward_backward = step_of(config, batch, precision, device)
    forward_backward()
    model.zero_grad(set_to_none=True)
    memory = training_memory(config, batch, 128, precision)
    predicted = max(memory.gradients, memory.activations + memory.recomputed)
    assert predicted == pytest.approx(peak_bytes(forward_backward, device), rel=0.15)
