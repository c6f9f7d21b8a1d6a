"""A test bench for language-model systems: verify, measure and report kernels and parallel strategies."""

__version__ = "0.1.0"
