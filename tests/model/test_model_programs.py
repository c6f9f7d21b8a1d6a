"""The model in users' programs: compiled and exported whole, in torch.func, copied, saved, built on the meta device.

A row is an implementation of attention, by its name. Results must equal those of the eager model but for rounding:
their errors against the model in float64 are compared.
"""

import copy
import io
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from lmsys.attention import Documents
from lmsys.config import model_config
from lmsys.model import Loss, TransformerLM
from lmsys.model.linear import linear
from lmsys.model.loss import linear_cross_entropy
from lmsys.model.rotary import RotaryEmbedding
from lmsys.model.transformer import RMSNorm
from lmsys.testing import error_ratio
from tests.support.variants import by_default_all_but

ROWS = ("flash_torch", "auto", "sdpa_math", "naive")


def model(row: str = "flash_torch", device: str = "cpu", **changes: Any) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(model_config("tiny", attention=row, **changes), device=device)


def ids(length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(model_config("tiny").vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def outcome(module: nn.Module, value: Any) -> list[Tensor]:
    """[a value that the module has computed, its gradients with respect to the module's parameters]"""
    return [value.detach(), *torch.autograd.grad(value, list(module.parameters()))]


def assert_equal_up_to_rounding(tested: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """AssertionError if an error of `tested` is larger than the error of `eager` allows; exact: in float64."""
    for x, usual, right in zip(tested, eager, exact, strict=True):
        assert error_ratio(x, right, usual) <= 1


@pytest.mark.parametrize("row", by_default_all_but(ROWS, "auto", "sdpa_math", "naive"))
@pytest.mark.parametrize("packed", by_default_all_but([False, True], False))
def test_a_whole_model_compiles_once_without_a_break(row: str, packed: bool) -> None:
    torch.compiler.reset()
    tested, exact = model(row, num_layers=1), model(row, num_layers=1).double()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def hidden(tokens: Tensor, documents: Documents | None) -> Tensor:
        return tested.hidden(tokens, documents=documents)

    compiled, counted = torch.compile(hidden, fullgraph=True, dynamic=True, backend=counter), []
    for length in (11, 13, 10):
        tokens, targets = ids(length), ids(length, 1)
        documents = Documents([[3, length - 3], [5, length - 5]]) if packed else None
        of_compiled = outcome(tested, tested.loss_of(compiled(tokens, documents), targets))
        eager, right = (outcome(each, each.loss(tokens, targets, documents)) for each in (tested, exact))
        assert_equal_up_to_rounding(of_compiled, eager, right)
        counted.append(counter.frame_count)
    assert counted[0] == counted[-1]


@pytest.mark.long
def test_compiled_blocks_are_not_compiled_again_for_other_document_lengths() -> None:
    torch.compiler.reset()
    tested, exact, eager = model(), model().double(), model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    tested.compile_blocks(backend=counter)
    for first in range(1, 11):
        documents = Documents([[first, 12 - first], [12 - first, first]])
        of_compiled, usual, right = (outcome(x, x.loss(ids(), ids(12, 1), documents)) for x in (tested, eager, exact))
        assert_equal_up_to_rounding(of_compiled, usual, right)
    assert counter.frame_count == 1


@pytest.mark.parametrize("row", by_default_all_but(["flash_torch", "auto"], "auto"))
def test_a_model_is_exported_for_any_length(row: str) -> None:
    tested, exact = model(row), model(row).double()
    exported = torch.export.export(tested, (ids(),), dynamic_shapes=({1: torch.export.Dim("length", min=3, max=16)},))
    assert error_ratio(exported.module()(ids(9)), exact(ids(9)).detach(), tested(ids(9)).detach()) <= 1


@pytest.mark.parametrize("row", ["flash_torch", "naive"])
def test_gradients_of_each_sequence_by_torch_func(row: str) -> None:
    loss, exact = Loss(model(row)), Loss(model(row).double())
    weights, tokens, targets = dict(loss.named_parameters()), ids(), ids(12, 1)

    def loss_of_one(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
        return torch.func.functional_call(loss, weights, (tokens[None], targets[None]))

    each = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(weights, tokens, targets)
    for number in range(2):
        sequence = tokens[number, None], targets[number, None]
        _, *usual = outcome(loss, loss(*sequence))
        _, *right = outcome(exact, exact(*sequence))
        assert_equal_up_to_rounding([x[number] for x in each.values()], usual, right)


@pytest.mark.parametrize("row", by_default_all_but(ROWS, "auto", "sdpa_math", "naive"))
def test_a_model_is_copied_and_saved_after_a_forward(row: str) -> None:
    tested = model(row).compile_blocks(2, backend="eager")
    with torch.inference_mode():
        expected = tested(ids())
    file = io.BytesIO()
    torch.save(tested, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(tested)):
        assert torch.equal(other(ids()), model(row)(ids()))
        outcome(other, other.loss(ids(), ids(12, 1)))
    assert torch.equal(expected, tested(ids()))


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_that_was_built_on_the_meta_device_trains_as_any_other(assign: bool) -> None:
    """The tables of rotary angles must be computed again: no state dict has them, and `to_empty` leaves them unset."""
    usual, other = model(), model(device="meta")
    names = list(usual.state_dict())
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(usual.state_dict(), assign=assign)
    assert list(other.state_dict()) == names and not any("rope" in name for name in names)
    losses = ([*outcome(each, each.loss(ids(), ids(12, 1)))] for each in (usual, other))
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_tables_of_a_wrapped_model_survive_to_empty() -> None:
    wrapped = Loss(model()).to_empty(device="cpu")
    assert torch.equal(wrapped.model.rope.cos, model().rope.cos)
    assert model().to(torch.bfloat16).rope.sin.dtype == torch.bfloat16


def test_a_norm_without_weights() -> None:
    x = torch.randn(3, 8)
    norm = RMSNorm(8, elementwise_affine=False)
    assert error_ratio(norm(x), F.rms_norm(x.double(), (8,), None, norm.eps), F.rms_norm(x, (8,), None, norm.eps)) <= 1


def test_negative_positions_are_refused_where_they_can_be_read() -> None:
    rope = RotaryEmbedding(8, 16, 10000.0)
    with pytest.raises(ValueError, match="positions in the context from 0 to 15; got -1"):
        rope(torch.randn(1, 3, 24), 1, torch.tensor([0, -1, 2]))


def test_products_under_autocast_are_differentiable_once() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight)
        inside = torch.func.grad(lambda x: linear(x, weight).float().sum())(x)
    with pytest.raises(RuntimeError, match="NarrowLinear is differentiable once"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert inside.shape == x.shape


def test_the_loss_in_torch_func_has_second_derivatives() -> None:
    hidden, weight, targets = torch.randn(3, 4).double(), torch.randn(5, 4).double(), torch.tensor([0, -100, 4])

    def plain(hidden: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.mT, targets)

    hessian = torch.func.hessian(lambda hidden: linear_cross_entropy(hidden, weight, targets))(hidden)
    expected = torch.func.hessian(plain)(hidden)
    assert error_ratio(hessian, expected, expected) <= 1


class LowRank(nn.Module):
    """A layer in whose place it stands, and a product of two small ones beside it, as LoRA has it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 3, bias=False)
        self.up = nn.Linear(3, layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:  # as PEFT's layers have it: that of the layer alone
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("level", ["none", "matmuls", "attention"])
@pytest.mark.parametrize("name", ["layers.0.attn.q_proj", "layers.1.ffn.w1", "layers.0.ffn.w2", "lm_head"])
def test_a_module_in_the_place_of_a_layer_is_called(name: str, level: str) -> None:
    """LoRA beside a query's projection or the head was left out of the loss, and had no gradient. Beside w1 and w2 its
    gradients were what happened to be in memory, under a level that skips matmuls in the second run."""
    torch.manual_seed(0)
    config = model_config("tiny", vocab_size=40, context_length=16, num_layers=2, checkpoint_blocks=level)
    tested, merged = (TransformerLM(config) for _ in range(2))
    merged.load_state_dict(tested.state_dict())
    parent, _, last = name.rpartition(".")
    added = LowRank(tested.get_submodule(name))
    setattr(tested.get_submodule(parent), last, added)
    weight = merged.get_submodule(name).weight
    with torch.no_grad():
        weight += added.up.weight @ added.down.weight
    tokens, targets = torch.randint(40, (2, 2, 16))
    losses = [model.loss(tokens, targets) for model in (tested, merged)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(tested(tokens), merged(tokens))
    torch.testing.assert_close(added.layer.weight.grad, weight.grad)
    torch.testing.assert_close(added.up.weight.grad, weight.grad @ added.down.weight.mT)
    torch.testing.assert_close(added.down.weight.grad, added.up.weight.mT @ weight.grad)


@pytest.mark.parametrize("name, hooked", [
    ("attn.v_proj", False), ("ln1", False), ("ffn", False), ("ln2", True), ("attn", True), ("attn.qkv", True),
    ("ffn", True),
])  # fmt: skip
@pytest.mark.parametrize("level", ["matmuls", "attention", "whole", 2])
def test_what_runs_again_draws_the_same_random_numbers(level: Any, name: str, hooked: bool) -> None:
    """With dropout in a layer's place, as in LoRA, or in a norm's, gradients were those of other numbers than the loss.
    Under "matmuls" and "attention", hooks of attention and feed-forward did not run."""
    gradients = []
    for checkpoint_blocks in ("none", level):
        torch.manual_seed(0)
        config = model_config(
            "tiny", vocab_size=40, context_length=16, num_layers=2, checkpoint_blocks=checkpoint_blocks
        )
        tested = TransformerLM(config)
        for layer in tested.layers:
            part = layer.get_submodule(name)
            if hooked:
                part.register_forward_hook(lambda _, __, output: F.dropout(output))
            else:
                layer.set_submodule(name, nn.Sequential(part, nn.Dropout(0.5)))
        tested.loss(*torch.randint(40, (2, 2, 16))).backward()
        gradients.append([p.grad for p in tested.parameters()])
    torch.testing.assert_close(*gradients)


def test_fused_blocks_call_a_module_in_the_place_of_a_layer() -> None:
    tested = model()
    for layer in tested.layers:
        layer.attn.q_proj, layer.ffn.w1 = LowRank(layer.attn.q_proj), LowRank(layer.ffn.w1)
    expected = outcome(tested, tested.loss(ids(), ids(12, 1)))
    torch.testing.assert_close(outcome(tested.fuse_blocks(), tested.loss(ids(), ids(12, 1))), expected)


@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize("name", ["ln1", "attn", "ffn"])
def test_fused_blocks_refuse_a_part_that_they_would_not_call(name: str, of_class: bool) -> None:
    """A forward of its own, of a class derived from ours or of the part alone, was left out of the loss."""
    tested = model()
    part = tested.layers[1].get_submodule(name)
    forward = type(part).forward
    if of_class:
        part.__class__ = type("Mine", (type(part),), {"forward": lambda self, *args: forward(self, *args)})
    else:
        part.forward = lambda *args: forward(part, *args)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"its own that a {type(part).__name__} of this model has"):
        tested.fuse_blocks()


@pytest.mark.parametrize("name", ["attn.q_proj", "ffn.w2"])
def test_fused_blocks_refuse_a_module_without_a_weight(name: str) -> None:
    """It ended in an AttributeError of the first call."""
    tested = model()
    tested.layers[1].set_submodule(name, nn.Sequential(tested.layers[1].get_submodule(name)))
    with pytest.raises(ValueError, match="read the weight of each layer, and a Sequential of this model has none"):
        tested.fuse_blocks()


def test_fused_blocks_read_the_weight_of_a_parametrized_norm() -> None:
    """A parametrization gives the norm another class, but no other forward."""
    tested = model()
    nn.utils.parametrize.register_parametrization(tested.layers[1].ln1, "weight", nn.Tanh())
    expected = outcome(tested, tested.loss(ids(), ids(12, 1)))
    torch.testing.assert_close(outcome(tested.fuse_blocks(), tested.loss(ids(), ids(12, 1))), expected)


@pytest.mark.parametrize("name", ["layers.0.attn.k_proj", "layers.0.ffn.w1", "lm_head"])
def test_hooks_of_a_layer_run_once_in_each_call(name: str) -> None:
    """Those of q, k and v never ran: so weights that were pruned stayed as they were when others were loaded."""
    tested, calls = TransformerLM(model_config("tiny", vocab_size=40, context_length=16)), []
    layer = tested.get_submodule(name)
    prune.random_unstructured(layer, "weight", 0.5)
    tested.load_state_dict({key: x * (2 if key.endswith("_orig") else 1) for key, x in tested.state_dict().items()})
    layer.register_forward_hook(lambda *_: calls.append(1))
    for number in (1, 2):
        tested.loss(*torch.randint(40, (2, 2, 16))).backward()
        assert len(calls) == number and torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)
