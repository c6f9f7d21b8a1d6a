"""Kernels written for a GPU on a machine without one: Triton's interpreter runs them, told that there is a GPU.

A wrapper may assert that its tensors are on a GPU, ask for the current device or the active driver, and allocate with
device="cuda". What it allocates lies in the host's memory. The interpreter computes bfloat16 wrongly, knows no threads,
and takes the first configuration of an autotuner.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import ContextDecorator, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_map

GPU = torch.device("cuda", 0)  # as code is told; there is none
NO_BFLOAT16, NO_THREADS = (f"Triton's interpreter {x}" for x in ("computes bfloat16 wrongly", "runs no two threads"))
INTERPRETED = "Triton's interpreter ran its kernels, an autotuner's first configuration alone: a GPU runs other code. "
PRETENDED = "It asks for a GPU, and was told that its tensors are on one"
running: list[Any] = []  # the row that runs in `Laptop`, whose backward then does
_apply = BackwardCFunction.apply


class Laptop(TorchFunctionMode, ContextDecorator):
    """Code that runs in it is told that tensors are on a GPU, and gets memory of the host for that of a GPU.

    It decorates functions, too: they run in it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = {Tensor.is_cuda.__get__: True, Tensor.device.__get__: GPU, Tensor.get_device: 0}.get(function)
        if told is not None:
            return told
        if function in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if kwargs and isinstance(kwargs.get("device"), int):  # as torch.cuda.current_device() names it
            kwargs = kwargs | {"device": GPU}
        args, kwargs = tree_map(_on_host, (args, kwargs or {}))
        return function(*args, **kwargs)


def _on_host(x: Any) -> Any:
    """A device of the host where x is a GPU; else x itself."""
    return torch.device("cpu") if isinstance(x, str | torch.device) and str(x).partition(":")[0] == "cuda" else x


class Done:
    """An event or a stream where none is needed: all of it is done, and takes no time."""

    def __init__(self, *_: Any, **__: Any):
        """An event may be asked for with timing, and a stream by its device."""

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0


def install() -> None:
    """Answers what torch and Triton refuse without a GPU, in this process; NVTX does nothing.

    A package of the course that is not installed, but lies on the path, has a version.
    """
    importlib.metadata.version = version
    if torch.cuda.is_available() or BackwardCFunction.apply is _backward:
        return
    vars(torch.cuda).update(
        is_available=lambda: isinstance(_get_current_function_mode(), Laptop),
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
        device=nullcontext,
        device_of=nullcontext,
        get_device_capability=lambda *_: (8, 0),  # of a card that every kernel of a course knows
        get_device_properties=lambda *_: SimpleNamespace(name="", multi_processor_count=1, gcnArchName=""),
        stream=nullcontext,
        current_stream=Done,
        Event=Done,
        Stream=Done,
    )
    vars(torch.cuda.nvtx).update(
        dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), lambda *_: None)
    )
    BackwardCFunction.apply = _backward
    if importlib.util.find_spec("triton") is not None:
        _install_in_triton()


def version(distribution_name: str) -> str:
    """The version of a distribution; a package of the course needs none."""
    of_course = distribution_name.startswith("cs336") and not any(
        importlib.metadata.distributions(name=distribution_name)
    )
    return "0" if of_course else importlib.metadata.distribution(distribution_name).version


def _install_in_triton() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner

    import lmsys.kernels.launch  # noqa: F401  it mends the interpreter for new versions of numpy

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_current_target=lambda: GPUTarget("cuda", 80, 32),
            get_active_torch_device=lambda: GPU,
            get_device_interface=lambda: torch.cuda,
            utils=SimpleNamespace(
                get_device_properties=lambda *_: {"multiprocessor_count": 1, "max_shared_mem": 101376}
            ),
        )
    )
    _mend_interpreter()
    run = Autotuner.run

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = first


def _mend_interpreter() -> None:
    """Products of bfloat16, whose bits the interpreter would multiply, flags of Python, and imports by name."""
    import numpy as np
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._implicit_cvt

    def wide(x: Any) -> Any:
        """bfloat16 is kept as the upper half of float32."""
        if x.dtype.scalar != language.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def converted(x: Any) -> Any:
        if not isinstance(x, bool):
            return convert(x)
        return language.tensor(interpreter.TensorHandle(np.array([x]), language.int1), language.int1)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *args: dot(self, wide(a), wide(b), *args)
    interpreter._implicit_cvt = converted
    patch = interpreter._patch_lang

    def by_name(function: Any) -> Any:
        """The interpreter replaces functions in the module: those that a file imports by name are looked up there."""
        function.__globals__.update(
            {name: partial(_of_language, x.__name__) for name, x in function.__globals__.items() if is_builtin(x)},
            triton_language=language,
        )
        return patch(function)

    interpreter._patch_lang = by_name


def _of_language(name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of a function of Triton as it is now."""
    return getattr(sys.modules["triton.language"], name)(*args, **kwargs)


def _backward(self: Any, *gradients: Any) -> Any:
    """The backward of an autograd Function, in `Laptop` where forwards are."""
    with Laptop() if running else nullcontext():
        return _apply(self, *gradients)


def fitting(row: Callable[..., Tensor], score: Callable[[Any], int]) -> Callable[..., Tensor]:
    """The row itself, or in `Laptop` where its score is higher so: it gives more results, or launches more kernels.

    Where nobody has called `install` it is the row itself.
    """

    if BackwardCFunction.apply is not _backward:
        return row
    call = Laptop()(row)
    running.clear()
    plain = score(row)
    running.append(row)
    if score(call) > plain:
        return call
    running.clear()
    return row
