"""Selective activation checkpointing: a block in pieces, each of which keeps its inputs and is run again later.

Each piece ends in matmuls and the attention row is in none, so that neither is computed again. As the cuts are between
modules rather than between operators, any row does, whatever it launches.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

MATMUL = torch.ops.aten.mm.default


def run_selectively(block: Any, level: str, x: Tensor, *attend: Any) -> Tensor:
    """A `Block` of (x, *attend) that keeps what `level` says: "matmuls" or "attention" of `lmsys.checkpointing`."""
    attn, ffn = block.attn, block.ffn

    def up(x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + mixed
        return y, *ffn.up(block.ln2(y))

    def feed(x: Tensor, mixed: Tensor) -> Tensor:
        y, gate, value = up(x, mixed)
        return y + _up_to_matmuls(ffn.down, gate, value)

    mixed = attn.mix(_up_to_matmuls(lambda x: attn.project(block.ln1(x)), x), *attend)
    if level == "attention":
        return run_again(feed, x, mixed)
    y, gate, value = _up_to_matmuls(up, x, mixed)
    return y + _up_to_matmuls(ffn.down, gate, value)


def run_again(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """function(*inputs), which keeps its inputs and is run again in the backward; a model draws no random numbers."""
    if torch.compiler.is_compiling():
        options.setdefault("context_fn", _saved_nothing)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _up_to_matmuls(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Like `run_again`, but the second run skips the final matmuls: their backward needs only their inputs."""
    return run_again(
        function,
        *inputs,
        context_fn=_saved_matmuls if torch.compiler.is_compiling() else lambda: (nullcontext(), _WithoutMatmuls()),
    )


# A compiler keeps of the results that it may not compute again those that the backward reads. Left to itself, torch
# 2.11 also keeps what an autograd.Function computes; a policy it asks about every operator.
_saved_matmuls = partial(create_selective_checkpoint_contexts, [MATMUL])
_saved_nothing = partial(create_selective_checkpoint_contexts, [])


class _WithoutMatmuls(torch.utils._python_dispatch.TorchDispatchMode):
    """Leaves matmuls out. Autograd by itself would stop before the last one, but not before that of a Function."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].new_empty(args[0].shape[0], args[1].shape[1])  # nobody reads it
            if func is MATMUL
            else func(*args, **(kwargs or {}))
        )
