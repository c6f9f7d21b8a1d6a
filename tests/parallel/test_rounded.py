"""fsdp with `compute_dtype` gathers weights rounded; gradients must equal those on ranks that hold whole weights.

fsdp gives each rank a part of each weight, and gathers the whole when a module needs it: here in bfloat16. A weight is
gathered so only if all of its modules read it rounded under autocast (`read_rounded`).
"""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.attention.compiled import why_no_compiler
from lmsys.config import ModelConfig
from lmsys.model import Loss, TransformerLM
from lmsys.model.transformer import Linear
from lmsys.parallel import STRATEGIES
from lmsys.parallel.flat_shard import FlatShard
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import WorkerGroup, device
from lmsys.parallel.structure import flats_by_block, read_rounded
from tests.support.ranks import backward, group_of, on_first

# (strategy, its options): ranks that hold whole weights, and ranks that gather rounded ones.
WHOLE, ROUNDED = ("bucketed", {}), ("fsdp", {"compute_dtype": torch.bfloat16})
Row = tuple[str, dict[str, Any]]


def build(levels: str = "none", attention: str = "sdpa_math", residual: str = "wide") -> tuple[TransformerLM, Tensor]:
    """(model, token ids (ranks, B, S + 1)). The arguments are fields of `ModelConfig`; levels: `checkpoint_blocks`."""
    torch.manual_seed(0)
    chosen = {"attention": attention, "checkpoint_blocks": levels, "residual": residual}
    config = ModelConfig(32, 96, 3, 4, 2, 101, 24, **chosen)
    model, tokens = TransformerLM(config), torch.randint(101, (2, 2, 25))
    return model.to(device()), tokens.to(device())


@on_first(2)
def gradients(group: Any, row: Row, compiled: bool, *chosen: str) -> Any:
    """On a rank: {name: whole gradient, averaged over two ranks} with a strategy. `chosen`: as for `build`."""
    rank = dist.get_rank()
    (name, options), (model, tokens) = row, build(*chosen)
    if compiled:
        model.compile_blocks(backend="aot_eager")
    wrapper = STRATEGIES[name].load()(Loss(model), group, **options)
    with torch.autocast(device().type, torch.bfloat16):
        loss = wrapper(tokens[rank, :, :-1], tokens[rank, :, 1:])
    loss.backward()
    wrapper.finish_gradient_synchronization()
    if name == "fsdp":
        wrapper.unshard()
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def exact() -> dict[str, Tensor]:
    """{name: gradient} of both ranks' tokens together, in float64."""
    model, tokens = build()
    model.double().loss(tokens[..., :-1].flatten(0, 1), tokens[..., 1:].flatten(0, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(gradients: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """{name: relative error in the L2 norm}."""
    return {name: ((gradients[name] - x.cpu()).norm() / x.norm()).item() for name, x in right.items()}


LEVELS = ["none", "whole", "attention*1,matmuls*2"]


@pytest.mark.parametrize(("levels", "residual"), [*((levels, "wide") for levels in LEVELS), ("none", "narrow")])
def test_gradients_have_the_same_bits_as_without_sharding(ranks: WorkerGroup, levels: str, residual: str) -> None:
    options = levels, "sdpa_math", residual
    whole, rounded = (ranks.run(gradients, row, False, *options)[0] for row in (WHOLE, ROUNDED))
    assert rounded.keys() == whole.keys() and all(torch.equal(rounded[name], x) for name, x in whole.items())


@pytest.mark.long
@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_gradients_of_compiled_blocks_have_the_same_bits_as_without_sharding(ranks: WorkerGroup) -> None:
    whole, rounded = (ranks.run(gradients, row, True)[0] for row in (WHOLE, ROUNDED))
    assert all(torch.equal(rounded[name], x) for name, x in whole.items())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_errors_of_gradients_on_gpus_are_no_larger_than_without_sharding(
    gpu_ranks: WorkerGroup, compiled: bool
) -> None:
    """They may be larger by a thousandth, since kernels add in other orders.

    Rounding the gradient would add some per cent to the error.
    """
    whole, rounded = (gpu_ranks.run(gradients, row, compiled, "none", "auto")[0] for row in (WHOLE, ROUNDED))
    right = exact()
    of_whole, of_rounded = errors(whole, right), errors(rounded, right)
    assert all(error <= 1.001 * of_whole[name] for name, error in of_rounded.items()), (of_rounded, of_whole)


def _gathers() -> list[tuple[int, torch.dtype]]:
    """On a rank: (times that a step gathers it, dtype) of each flat tensor with parameters outside of blocks."""
    if dist.get_rank():
        return []
    torch.manual_seed(0)
    model, tokens = build()
    wrapper = Fsdp(Loss(model), group_of(1), compute_dtype=torch.bfloat16)
    with patch.object(FlatShard, "gather", autospec=True, side_effect=FlatShard.gather) as gather:
        backward(wrapper, tokens[0, :, :-1], tokens[0, :, 1:])
    seen = [call.args[0] for call in gather.call_args_list]
    return [(seen.count(flat), flat.whole.dtype) for flat in wrapper._units[0].flats]


def test_flat_tensors_outside_of_blocks_are_gathered_once_a_step(ranks: WorkerGroup) -> None:
    assert sorted(ranks.run(_gathers)[0], key=str) == [(1, torch.bfloat16), (1, torch.float32)]


def test_a_weight_is_gathered_rounded_only_if_all_its_modules_read_it_so() -> None:
    model, _ = build()
    names = {p: name for name, p in model.named_parameters()}
    rounded = {names[p] for p in read_rounded(model)}
    wide = "token_embeddings", "ln1", "ln2", "ln_final"
    assert rounded == {name for name in names.values() if name.split(".")[-2] not in wide}
    model.token_embeddings.weight = model.lm_head.weight  # an embedding reads it as it is
    assert model.lm_head.weight not in read_rounded(model)
    assert not read_rounded(copy.deepcopy(model).double()) and not read_rounded(nn.Linear(2, 2))
    assert all(len({p in read_rounded(model) for p in flat}) == 1 for unit in flats_by_block(model) for flat in unit)


class Stack(nn.Module):
    """A module that has only blocks, which are layers that read rounded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_of_layers_alone_is_gathered_rounded() -> None:
    torch.manual_seed(0)
    module, x = Stack(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    (expected_grad,) = torch.autograd.grad(expected.float().sum(), module.layers[0].weight)
    wrapper = Fsdp(module, compute_dtype=torch.bfloat16)
    y = wrapper(x)
    assert torch.equal(y, expected)
    with pytest.raises(RuntimeError, match="full_state_dict"):
        module.layers[1].weight.sum()  # only the rounded copy has values
    y.float().sum().backward()
    wrapper.finish_gradient_synchronization()
    wrapper.unshard()
    assert torch.equal(module.layers[0].weight.grad, expected_grad)
