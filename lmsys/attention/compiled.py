"""torch.compile for functions that meet many shapes: one static graph for each, and never a silent fallback.

Rows that compile call `compile_for`; their `supports` asks `why_no_compiler`.
"""

import importlib.util
import os
import shutil
import types
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch


def layout_key(*tensors: torch.Tensor) -> Hashable:
    """A key of everything that a static graph of these tensors is specialised on: shapes, strides, dtypes and so on."""
    return tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)


@cache
def compile_for(function: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    """`function`, compiled for the one case that `key` describes. The result is cached, and compiles on its first call.

    Dynamo counts recompilations of each code object, and past a limit it runs eagerly without a message. Here each case
    has a copy of the function with a code object of its own, which cannot reach the limit.
    """
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, dynamic=False, fullgraph=True)


@cache
def why_no_compiler(device: str) -> str | None:
    """None if torch.compile can compile for `device` ("cpu" or "cuda"), else the reason."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile on CUDA needs triton, which is not installed"
    no_compiler = device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))
    return "torch.compile on CPU needs a C++ compiler: no CXX, g++ or clang++ was found" if no_compiler else None
