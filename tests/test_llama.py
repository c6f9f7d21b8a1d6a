"""Our model and Hugging Face's Llama are one function of the same weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="pip install transformers to compare with Llama")

from benchmarks.llama import Llama  # noqa: E402
from lmsys.config import ModelConfig  # noqa: E402
from lmsys.model import TransformerLM  # noqa: E402
from lmsys.testing import error_ratio  # noqa: E402


@settings(max_examples=5)
@given(seed=st.integers(0, 2**16), kv_heads=st.sampled_from([1, 2, 4]), layers=st.integers(1, 3))
def test_logits_equal_llamas_with_mapped_weights(seed: int, kv_heads: int, layers: int) -> None:
    config = ModelConfig(32, 48, layers, 4, kv_heads, vocab_size=61, context_length=16, attention="naive")
    torch.manual_seed(seed)
    ours, tokens = TransformerLM(config), torch.randint(61, (2, 16))
    theirs = Llama(config).take_weights(ours)
    reference = TransformerLM(config).double()
    reference.load_state_dict(ours.state_dict())
    assert error_ratio(theirs(tokens), reference(tokens).detach(), ours(tokens)) <= 1
    shifted = ours.loss(tokens[:, :-1], tokens[:, 1:])
    assert error_ratio(theirs.loss(tokens, tokens), shifted.detach().double(), shifted) <= 1


def test_another_theta_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_theta=500000.0"):
        Llama(ModelConfig(32, 48, 1, 4, rope_theta=500_000.0))
