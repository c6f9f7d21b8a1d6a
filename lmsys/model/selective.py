"""Selective activation checkpointing: runs a block in pieces, each of which keeps its inputs and is run again later.

`lmsys.checkpointing` says what each level keeps, and what a new level needs. At the levels "matmuls" and "attention"
`Block.forward` of transformer.py calls `run_selectively`, or `run_again` if a part of the block is not plain
(`Block.has_plain_parts`). Pieces end in matmuls, which a second run skips, and attention itself is in no piece. So
neither matmuls nor attention are computed again, except the feed-forward's first two matmuls at the level "attention".
Since pieces are made of modules and not of operators, any implementation of attention can be used, whatever kernels it
launches. `TransformerLM.hidden` calls `run_again` for the level "whole".

`Block.forward`, `run_selectively` and `run` of fused.py compute the same block: a change of one is a change of all.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

MATMUL = torch.ops.aten.mm.default


def run_selectively(block: Any, level: str, x: torch.Tensor, *mixing: Any) -> torch.Tensor:
    """The output of a `Block` for x (B, S, M). It keeps for its backward what `level`, "matmuls" or "attention", says.

    mixing  the arguments of `Attention.mix` after the projections: attend, rope, positions
    """
    attn, ffn = block.attn, block.ffn

    def up(x: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(y = x + mixed; W1 ln2(y); W3 ln2(y)): `mixed` is the result of attention."""
        y = x + mixed
        return y, *ffn.up(block.ln2(y))

    def feed(x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """All of the block that comes after attention."""
        y, gate, value = up(x, mixed)
        return y + _up_to_matmuls(ffn.down, gate, value)

    mixed = attn.mix(_up_to_matmuls(lambda x: attn.project(block.ln1(x)), x), *mixing)
    if level == "attention":
        return run_again(feed, x, mixed)
    y, gate, value = _up_to_matmuls(up, x, mixed)
    return y + _up_to_matmuls(ffn.down, gate, value)


def run_again(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """function(*inputs), of which only the inputs are kept: the function runs again in the backward.

    options  options of torch's `checkpoint`. If the function draws random numbers, give `preserve_rng_state=True`
    """
    if torch.compiler.is_compiling():
        options.setdefault("context_fn", _saved_nothing)
    return checkpoint(function, *inputs, use_reentrant=False, **{"preserve_rng_state": False} | options)


def _up_to_matmuls(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Like `run_again`, but the second run skips the final matmuls: their backward needs only their inputs."""
    return run_again(
        function,
        *inputs,
        context_fn=_saved_matmuls if torch.compiler.is_compiling() else lambda: (nullcontext(), _WithoutMatmuls()),
    )


# Contexts for compiled code: of the results that a backward reads, the compiler keeps those of the listed operators.
# Without a list torch 2.11 also keeps the results of autograd Functions.
_saved_matmuls = partial(create_selective_checkpoint_contexts, [MATMUL])
_saved_nothing = partial(create_selective_checkpoint_contexts, [])


class _WithoutMatmuls(torch.utils._python_dispatch.TorchDispatchMode):
    """Skips matmuls in the second run. torch itself skips only the last one, and not one in an autograd Function."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].new_empty(args[0].shape[0], args[1].shape[1])  # nothing reads the result
            if func is MATMUL
            else func(*args, **(kwargs or {}))
        )
