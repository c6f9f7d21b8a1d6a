"""torch.compile for code that meets many shapes: one static graph for each, and never a silent fallback."""

import importlib.util
import os
import shutil
import types
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch


def layout_key(*tensors: torch.Tensor) -> Hashable:
    """Everything of the tensors that a static graph is specialised on."""
    return tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors)


@cache
def compile_for(function: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    """`function`, compiled for the one case that `key` describes; cached, compiled on its first call.

    Dynamo counts recompilations by code object, and past a limit it runs eagerly without a word. A copy
    with a code object of its own for each case cannot reach the limit.
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
    """None when torch.compile can make code for `device` ("cpu" or "cuda"), else the reason."""
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile on CUDA needs triton, which is not installed"
    lacks = device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))
    return "torch.compile on CPU needs a C++ compiler: no CXX, g++ or clang++ was found" if lacks else None
