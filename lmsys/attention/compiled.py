"""torch.compile for functions that are called with many shapes: one static graph for each, and no silent eager calls.

Attention rows that use torch.compile (`naive.py`, `peers.py`, `flash_torch.py`) call `compile_for`, and ask
`why_no_compiler` in the functions that say which cases they support. Benchmarks and tests ask it, too.
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
    """A key for `compile_for`, with all facts about these tensors by which torch.compile specialises a static graph."""
    return tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)


@cache
def compile_for(function: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    """`function`, compiled for the one case that `key` describes. The result is cached, and compiles on its first call.

    Dynamo, which traces functions for torch.compile, counts the compilations of each code object. Past a limit it runs
    the function eagerly (uncompiled), without a message. Here each case has a copy of the function with its own code
    object, so no code object reaches the limit.

    key  tells cases apart, such as `layout_key` of the tensors: calls with one key must have equal shapes and layouts
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
    """The reason why torch.compile cannot compile for `device` ("cpu" or "cuda") on this machine, or None."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile on CUDA needs triton, which is not installed"
    no_compiler = device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))
    return "torch.compile on CPU needs a C++ compiler: no CXX, g++ or clang++ was found" if no_compiler else None
