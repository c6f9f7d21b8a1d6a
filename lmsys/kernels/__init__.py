"""Code that all Triton and Gluon kernels share: how they are launched, and how they become custom operators."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
