"""Makes Triton's interpreter quicker for tests: tests/conftest.py calls `trust_indices` where it interprets kernels."""

from dataclasses import replace

from triton.runtime import interpreter


def trust_indices() -> None:
    """Turns off the check of indices for overflow, which computes each index again in 64 bits.

    Tensors of tests are so small that their indices fit 32 bits.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
