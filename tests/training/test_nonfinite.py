"""`first_nonfinite` names the first module whose result is NaN or infinite."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.config import ModelConfig
from lmsys.model import TransformerLM
from lmsys.training.loop import first_nonfinite
from tests.support.variants import by_default_all_but

CONFIG = ModelConfig(32, 48, 2, 4, vocab_size=31, context_length=8, attention="naive")
PARTS = [name for name, module in TransformerLM(CONFIG).named_modules() if getattr(module, "weight", None) is not None]


@settings(max_examples=10)
@given(part=st.sampled_from([name for name in PARTS if name != "lm_head"]), value=st.sampled_from(["nan", "inf"]))
def test_the_first_module_that_gave_it_is_named(part: str, value: str) -> None:
    model, tokens = TransformerLM(CONFIG), torch.arange(8)[None]
    model.get_submodule(part).weight.data[:] = float(value)
    module = re.sub("[qkv]_proj$", "qkv", part)  # the three projections run as one module
    message = first_nonfinite(model, lambda: model.loss(tokens, tokens))
    assert message is not None and message.startswith(f"{module} (")
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_finite_loss_is_no_error() -> None:
    model, tokens = TransformerLM(CONFIG), torch.arange(8)[None]
    assert first_nonfinite(model, lambda: model(tokens)) is None


@pytest.mark.parametrize("together", by_default_all_but([1, 2], 1))
def test_compiled_blocks_are_looked_into_as_well(together: int) -> None:
    model, tokens = TransformerLM(CONFIG), torch.arange(8)[None]
    model.compile_blocks(together, backend="eager").loss(tokens, tokens).backward()
    model.layers[1].ffn.w2.weight.data[:] = float("nan")
    assert first_nonfinite(model, lambda: model(tokens)) == "layers.1.ffn.w2 (Linear)"
