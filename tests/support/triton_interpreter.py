"""Triton's interpreter for tests."""

from dataclasses import replace

from triton.runtime import interpreter


def trust_indices() -> None:
    """Sums and products of indices are not made again in 64 bits: memory of tests is small."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
