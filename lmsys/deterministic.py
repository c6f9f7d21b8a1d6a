"""torch's deterministic mode, in which kernels give the same bits for the same inputs, or raise an error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# A workspace of a size that no call changes. torch reads it at the first matmul on a GPU: after that it is too late.
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def mode() -> list[bool]:
    """[enabled, warns in place of errors, fills memory that nobody has written]."""
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    ]


def set_mode(parts: list[bool]) -> None:
    enabled, warns, filled = parts
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """Inside it is on, with errors, and fills nothing. It also asks for `CUBLAS_WORKSPACE`."""
    before = mode()
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    set_mode([True, False, False])
    try:
        yield
    finally:
        set_mode(before)
