"""torch's deterministic mode, in which kernels give the same bits for the same inputs, or raise an error.

Reproducible training and benchmarks of deterministic cases run in this mode. `lmsys.bench.guard` also checks, by `mode`
and `set_mode`, that no implementation that is measured changes the mode.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The environment variable that gives cuBLAS a fixed workspace, and its value: without it cuBLAS is not deterministic.
# torch reads it only at the first matmul on a GPU, so conftest.py sets it before.
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def mode() -> list[bool]:
    """The current mode: [it is on, it warns instead of raising errors, it fills memory that is allocated]."""
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    ]


def set_mode(parts: list[bool]) -> None:
    """Sets the mode. `parts` is a list as `mode` returns it."""
    enabled, warns, filled = parts
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """A context in which the mode is on, raises errors and fills no memory. Sets CUBLAS_WORKSPACE if it is not set."""
    before = mode()
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    set_mode([True, False, False])
    try:
        yield
    finally:
        set_mode(before)
