"""Activation checkpointing: what each block keeps for its backward, and which blocks are run again. Imports no torch.

This module reads the setting `checkpoint_blocks` of a `ModelConfig`, which gives each block of a Transformer a *level*.
The model acts on the levels (`lmsys.model.selective`), and `lmsys.cost.memory` predicts the memory. The more a block
keeps, the less it recomputes. A new level is a name in LEVELS with a first letter of its own, which ids of benchmarks
show; a paragraph below and in docs/training.md; and a case in these two modules, in `benchmarks.model.llama`
(KEPT_MATMULS) and in benchmarks/layouts.py (KEPT). The feed-forward of a block is W2 (silu(W1 x) · W3 x). A block of
the level

none       keeps all that its backward reads
matmuls    keeps its input, q, k, v, what the attention kernel keeps beside them (o and the log-sum-exp), the output of
           the attention's last projection, W1 x and W3 x; it recomputes its norms and silu(W1 x) · W3 x
attention  is as matmuls, but recomputes W1 x and W3 x too
whole      keeps its input, and recomputes everything
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from lmsys import values

LEVELS = ("none", "matmuls", "attention", "whole")  # from the least to the most that is recomputed
FIT = "fit"  # the setting that `lmsys.cost.memory.fit` replaces by levels
RUN = re.compile(rf"({'|'.join(LEVELS)})\*([1-9][0-9]{{0,8}})")  # a level and a number of blocks, up to nine digits


class Group(NamedTuple):
    """The blocks `first` to `stop` - 1, of one level. At the level "whole" only the first block's input is kept."""

    first: int
    stop: int
    level: str


def groups_of(checkpoint_blocks: int | str, num_layers: int) -> list[Group]:
    """The groups of a model's blocks, in order, by the setting `checkpoint_blocks` (see `ModelConfig`).

    ValueError for a wrong setting, and for "fit", which `lmsys.cost.memory.fit` must replace first.
    """
    # runs: [(the level, the number of blocks, how many of these blocks make a group)], in the order of the blocks
    if isinstance(checkpoint_blocks, int):
        values.hold(
            (
                0 <= checkpoint_blocks <= num_layers,
                f"{checkpoint_blocks=} must lie in 0 to {num_layers} layers",
            )
        )
        # 0: one group of all blocks, of the level "none"
        runs = [("whole" if checkpoint_blocks else "none", num_layers, checkpoint_blocks or num_layers)]
    else:
        text = f"{checkpoint_blocks}*{num_layers}" if checkpoint_blocks in LEVELS else checkpoint_blocks
        matches = [RUN.fullmatch(run) for run in text.split(",")]
        runs = [(run[1], int(run[2]), 1 if run[1] == "whole" else int(run[2])) for run in matches if run]
        values.hold(
            (
                checkpoint_blocks != FIT,
                "checkpoint_blocks='fit' is no level yet: lmsys.cost.memory.fit(config, ...) chooses them",
            ),
            (
                all(matches) and sum(count for _, count, _ in runs) == num_layers,
                f"{checkpoint_blocks=} must be a number of blocks, {FIT}, one of {', '.join(LEVELS)}, or several of"
                f" these with numbers that add up to {num_layers} layers, as attention*12,matmuls*22 does to 34",
            ),
        )
    groups: list[Group] = []  # torch.compile traces this function, and cannot trace `list[Group]()`
    first = 0
    for level, count, size in runs:
        stop = first + count
        groups += [Group(start, min(start + size, stop), level) for start in range(first, stop, size)]
        first = stop
    return groups


def for_fewer(checkpoint_blocks: int | str, num_layers: int, fewer: int) -> int | str:
    """The setting for a model with `fewer` blocks in place of `num_layers`. Levels stay at the same relative depth.

    Benchmarks check their models with fewer blocks. ValueError as from `groups_of`.
    """
    if isinstance(checkpoint_blocks, int):
        groups_of(checkpoint_blocks, num_layers)  # ValueError for a wrong number
        return min(checkpoint_blocks, fewer)
    levels = [group.level for group in groups_of(checkpoint_blocks, num_layers) for _ in range(group.first, group.stop)]
    return setting_of(levels[round(place * (num_layers - 1) / max(1, fewer - 1))] for place in range(fewer))


def setting_of(levels: Iterable[str]) -> str:
    """The setting that gives the blocks these levels, in order: "attention*12,matmuls*22"."""
    return ",".join(f"{level}*{len(list(blocks))}" for level, blocks in groupby(levels))
