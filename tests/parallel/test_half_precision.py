"""Fsdp in half precision on two ranks: its weights equal those of one process that computes both halves of a batch.

Parameters are rounded to half precision for a forward. A module with `reads_own_dtype` (here `Norm`) reads its own
parameters unrounded.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import WorkerGroup
from lmsys.parallel.sharded_optimizer import whole_state
from tests.support.modules import divided
from tests.support.ranks import on_first

RANKS, STEPS, EXAMPLES, WORDS, WIDTH = 2, 4, 10, 100, 64  # EXAMPLES of a rank; WORDS of the vocabulary


class Norm(nn.Module):
    """Computes in float32, with a weight in its own precision; the result has the dtype of the input."""

    reads_own_dtype = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (F.normalize(x.float(), dim=-1) * WIDTH**0.5 * self.weight).to(x.dtype)


def _narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters are rounded, except those of `Norm`."""
    made = copy.deepcopy(model)
    for child in made.modules():
        for p in child.parameters(recurse=False):
            if not isinstance(child, Norm):
                p.data = p.data.to(dtype)
    return made


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float(), labels)


@on_first(RANKS)
def _differences(group: Any, where: str, dtype: torch.dtype) -> list[float]:
    """On a rank: after each step, the largest difference of a weight from that of one process. where: the device."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WORDS)
    reference = nn.Sequential(nn.Embedding(WORDS, WIDTH), Norm(), *layers).to(where)
    fsdp = Fsdp(copy.deepcopy(reference), group, compute_dtype=dtype)
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.5) for module in (fsdp, reference))
    largest = []
    for _ in range(STEPS):
        ids, labels = torch.randint(WORDS, (2, RANKS, EXAMPLES)).to(where)
        _loss(fsdp, ids[rank], labels[rank]).backward()
        fsdp.finish_gradient_synchronization()
        ours.step()
        ours.zero_grad()
        parts = [_narrow(reference, dtype) for _ in range(RANKS)]
        for number, part in enumerate(parts):
            _loss(part, ids[number], labels[number]).backward()
        for p, *halves in zip(reference.parameters(), *(part.parameters() for part in parts), strict=True):
            p.grad = torch.stack([half.grad.float() for half in halves]).sum(0) / RANKS
        theirs.step()
        whole = fsdp.full_state_dict()
        largest.append(max(float((whole[name] - x).abs().max()) for name, x in reference.state_dict().items()))
    return largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_have_the_weights_of_one_process(ranks: WorkerGroup, where: str, dtype: torch.dtype) -> None:
    """Bits are equal: matmuls are the same, and gradients are sums of two terms.

    On "cuda" both ranks share a GPU, and gloo sends gradients by way of the host.
    """
    largest = ranks.run(_differences, where, dtype)
    assert largest[:RANKS] == [[0.0] * STEPS] * RANKS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_gpus_have_the_weights_of_one_process(gpu_ranks: WorkerGroup, dtype: torch.dtype) -> None:
    assert gpu_ranks.run(_differences, "cuda", dtype) == [[0.0] * STEPS] * RANKS


def test_an_optimizers_state_is_divided_among_ranks_and_joined_again() -> None:
    """It is equal afterwards. If `reads_own_dtype` of a module has changed since, joining raises an error."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm())
    model = nn.Sequential(Norm(), nn.ModuleList([block]))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    shares = divided(optimizer, model, RANKS)
    block[1].reads_own_dtype = False
    with pytest.raises(ValueError, match="of 3 flat parts, and the module has 2: .* reads_own_dtype"):
        whole_state(shares, model, [list(model.parameters())])
