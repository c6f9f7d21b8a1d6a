"""The versions of Triton on which `nox -s tritons` runs the kernels that use more of it than is documented."""

import triton

KNOWN_TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # what torch 2.11, 2.13, 2.14 and 2.15 bring
ON_GPUS = "3.6.0", "3.7.1"  # those on which the GPU tests have passed


def is_known() -> bool:
    return version() in KNOWN_TRITON


def version() -> str:
    return triton.__version__.split("+")[0]
