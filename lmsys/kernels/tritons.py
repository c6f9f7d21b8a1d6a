"""The versions of Triton that our kernels were tested on. Some kernels use undocumented parts of Triton, which change.

`lmsys/kernels/launch.py` launches kernels directly on versions in KNOWN_TRITON. On a version that is not in ON_GPUS,
`flash_gluon` is first tried (`lmsys/kernels/trial.py`). `nox -s tritons` tests all of KNOWN_TRITON: add a version there
once that session passes with it, and to ON_GPUS once `nox -s gpu` passes with it.
"""

import triton

KNOWN_TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # what torch 2.11, 2.13, 2.14 and 2.15 bring
ON_GPUS = "3.6.0", "3.7.1"  # versions with which the GPU tests have passed


def is_known() -> bool:
    return version() in KNOWN_TRITON


def version() -> str:
    return triton.__version__.split("+")[0]
