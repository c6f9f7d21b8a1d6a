"""benchmarks/model/llama.py: Hugging Face's Llama with our model's weights is the same function as our model.

`Llama` is transformers' model with SDPA. `LlamaTuned` gives SDPA `is_causal` in place of a mask. `ShardedLlama` does
too, compiles its layers one by one, and runs them again in the backward, as `checkpoint_blocks` says.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="pip install transformers to compare with Llama")

from benchmarks.bench_model import Model  # noqa: E402
from benchmarks.model.cases import model_of  # noqa: E402
from benchmarks.model.llama import Llama, LlamaTuned, ShardedLlama  # noqa: E402
from lmsys.attention.compiled import why_no_compiler  # noqa: E402
from lmsys.config import ModelConfig  # noqa: E402
from lmsys.model import TransformerLM  # noqa: E402
from lmsys.testing import error_ratio  # noqa: E402
from tests.support.harness import cases_of  # noqa: E402

LLAMA_STEP = {"size": ("tiny",), "context": (16,), "mode": ("step",), "attention": ("llama",)}


def pair(kv_heads: int = 2, layers: int = 2) -> tuple[TransformerLM, torch.Tensor, torch.Tensor]:
    """(our model, tokens, targets)"""
    config = ModelConfig(32, 48, layers, 4, kv_heads, vocab_size=61, context_length=16, attention="naive")
    return TransformerLM(config), *torch.randint(61, (2, 2, 16))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**16),
    kv_heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
    model=st.sampled_from([Llama, LlamaTuned]),
)
def test_logits_loss_and_gradients_equal_llamas_with_mapped_weights(
    seed: int, kv_heads: int, layers: int, model: type[Llama]
) -> None:
    torch.manual_seed(seed)
    ours, tokens, targets = pair(kv_heads, layers)
    theirs = model(ours.config).take_weights(ours)
    reference = TransformerLM(ours.config).double()
    reference.load_state_dict(ours.state_dict())
    assert error_ratio(theirs(tokens), reference(tokens).detach(), ours(tokens)) <= 1
    losses = [model.loss(tokens, targets) for model in (theirs, reference, ours)]
    assert error_ratio(losses[0], losses[1].detach(), losses[2]) <= 1
    for loss in losses:
        loss.backward()
    found = theirs.as_ours({name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None})
    assert found.keys() == dict(ours.named_parameters()).keys()
    for name, weight in ours.named_parameters():
        exact = reference.get_parameter(name).grad
        assert exact is not None and weight.grad is not None
        assert error_ratio(found[name], exact, weight.grad) <= 1, name


def test_a_second_model_of_shared_weights_needs_no_memory() -> None:
    ours, tokens, targets = pair()
    (case,) = cases_of(Model(), **LLAMA_STEP, compile=("eager",))
    theirs = model_of(case, ours, shared=True)
    assert {id(x) for x in theirs.parameters()} == {id(x) for x in ours.parameters()}
    theirs.loss(tokens, targets).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in ours.parameters())


@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
@pytest.mark.parametrize("row", ["llama", "llama_tuned"])
def test_it_compiles_whole(row: str) -> None:
    ours, tokens, targets = pair()
    cases = cases_of(Model(), **LLAMA_STEP | {"attention": (row,)}, compile=("compiled", "eager"))
    compiled, eager = (model_of(case, ours, shared=False) for case in cases)
    torch.testing.assert_close(compiled.loss(tokens, targets), eager.loss(tokens, targets))


def test_tuned_llama_hands_sdpa_no_mask_where_it_is_compiled() -> None:
    """Plain Llama, compiled by a torch before 2.14, gives SDPA its mask as a tensor, which no fast kernel takes."""
    ours, tokens, _ = pair()
    masks: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        attentions = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") for node in attentions)
        return graph.forward

    theirs = LlamaTuned(ours.config).take_weights(ours)
    theirs.wrapped.compile(backend=backend)
    theirs(tokens)
    assert masks == [None] * ours.config.num_layers


class Products(TorchDispatchMode):
    """A mode that counts matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    # What layers keep for their backward; how many of its seven matmuls each layer computes again. "attention" computes
    # W1 x and W3 x. "whole" does all but the last one, with W2, whose result only goes on to the next layer.
    ("levels", "again"),
    [("none", [0, 0]), ("matmuls", [0, 0]), ("attention", [2, 2]), ("whole", [6, 6]), ("attention*1,none*1", [2, 0])],
)
def test_a_layer_computes_only_those_matmuls_again_that_it_does_not_keep(levels: str, again: list[int]) -> None:
    ours, tokens, targets = pair()
    theirs = ShardedLlama(replace(ours.config, checkpoint_blocks=levels)).take_weights(ours)
    plain = Llama(ours.config).take_weights(ours)
    for model in (theirs, plain):
        with Products() as forward:
            loss = model.loss(tokens, targets)
        with Products() as backward:
            loss.backward()
        # Two layers of seven matrices and the head: 15 matmuls forward, and two for each of these backward.
        assert (forward.count, backward.count) == (15, 30 + sum(again) * (model is theirs))
    for a, b in zip(theirs.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_another_theta_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_theta=500000.0"):
        Llama(ModelConfig(32, 48, 1, 4, rope_theta=500_000.0))
