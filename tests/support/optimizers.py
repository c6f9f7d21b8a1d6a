"""Helpers for tests of optimizers: `saved` writes a state and reads it, `step_alike` compares steps of matrices."""

import io
from typing import Any

import torch
from torch import Tensor

from lmsys.training.muon import Muon


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, written to a file and read again."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step_alike(x: Tensor, grads: Tensor, **options: Any) -> None:
    """AssertionError unless Muon steps matrices alike alone and beside one another; `options` of Muon.

    Each matrix is orthogonalized by itself.
    """
    together, alone = ([row.clone().requires_grad_() for row in x] for _ in range(2))
    for p, q, grad in zip(together, alone, grads, strict=True):
        p.grad, q.grad = grad, grad.clone()
        Muon([q], batched=False, **options).step()
    Muon(together, batched=False, **options).step()
    assert all(map(torch.equal, together, alone)) and not torch.equal(x[0], alone[0])
