"""Activation checkpointing: what each block keeps for its backward, and which blocks are run again. Imports no torch.

The more is kept, the less is computed again. A block of the level

none       keeps all that its backward reads
matmuls    keeps its input, q, k, v, what the attention row keeps beside them (o and the log-sum-exp), the attention's
           projection and what W1 and W3 give; it computes its norms and silu(W1 x) · W3 x again
attention  as matmuls, but computes W1 and W3 again too
whole      keeps its input, and computes everything again
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from lmsys import values

LEVELS = ("none", "matmuls", "attention", "whole")  # from the least to the most that is computed again
FIT = "fit"
RUN = re.compile(rf"({'|'.join(LEVELS)})\*([1-9][0-9]{{0,8}})")  # so many blocks of a level


class Group(NamedTuple):
    """The blocks from `first` to before `stop`; those of a group of the level "whole" keep one input together."""

    first: int
    stop: int
    level: str


def groups_of(checkpoint_blocks: int | str, num_layers: int) -> list[Group]:
    """The groups that a setting means, in order: `checkpoint_blocks` of a `ModelConfig`.

    ValueError for a setting that means none, and for "fit", which means what `lmsys.cost.memory.fit` makes of it.
    """
    if isinstance(checkpoint_blocks, int):
        values.hold(
            (
                0 <= checkpoint_blocks <= num_layers,
                f"{checkpoint_blocks=} must lie in 0 to {num_layers} layers",
            )
        )
        return _in_steps(0, num_layers, checkpoint_blocks or num_layers, "whole" if checkpoint_blocks else "none")
    values.hold(
        (
            checkpoint_blocks != FIT,
            "checkpoint_blocks='fit' is no level yet: lmsys.cost.memory.fit(config, ...) chooses them",
        )
    )
    if checkpoint_blocks in LEVELS:
        checkpoint_blocks = f"{checkpoint_blocks}*{num_layers}"
    runs = [RUN.fullmatch(run) for run in checkpoint_blocks.split(",")]
    groups, first = list[Group](), 0
    if sum(int(run[2]) if run else num_layers + 1 for run in runs) == num_layers:
        for run in filter(None, runs):
            level, count = run[1], int(run[2])
            groups += _in_steps(first, first + count, 1 if level == "whole" else count, level)
            first += count
        return groups
    raise ValueError(
        f"{checkpoint_blocks=} must be a number of blocks, {FIT}, one of {', '.join(LEVELS)}, or several of these with"
        f" numbers that add up to {num_layers} layers, as attention*12,matmuls*22 does to 34"
    )


def for_fewer(checkpoint_blocks: int | str, num_layers: int, fewer: int) -> int | str:
    """The setting as a model of `fewer` blocks has it: its first block and its last are of the levels of these.

    ValueError as from `groups_of`.
    """
    if isinstance(checkpoint_blocks, int):
        groups_of(checkpoint_blocks, num_layers)
        return min(checkpoint_blocks, fewer)
    levels = [group.level for group in groups_of(checkpoint_blocks, num_layers) for _ in range(group.first, group.stop)]
    return setting_of(levels[round(place * (num_layers - 1) / max(1, fewer - 1))] for place in range(fewer))


def setting_of(levels: Iterable[str]) -> str:
    """The setting that gives the blocks these levels, in order: "attention*12,matmuls*22"."""
    return ",".join(f"{level}*{len(list(blocks))}" for level, blocks in groupby(levels))


def _in_steps(first: int, stop: int, step: int, level: str) -> list[Group]:
    return [Group(start, min(start + step, stop), level) for start in range(first, stop, step)]
