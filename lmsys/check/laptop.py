"""Runs code that was written for a GPU on a machine without one: torch and Triton pretend that there is a GPU.

`install` patches both in this process; `kinds.py`, `trained.py` on each rank, `lmsys/course` and `dev/targets` call it.
Inside the context `Laptop` tensors say that they are on a GPU, and Triton's interpreter runs the kernels.
`attention.py` calls `fitting`, which finds out if a row (an implementation that is checked) needs this context. The
Python code around kernels may assert that its tensors are on a GPU, ask for the current device or the active driver,
and allocate with device="cuda"; such memory is the host's. If such code asks for something else, add it to `install`.

The limits of the interpreter: it computes bfloat16 wrongly (of this only products of matrices are mended here), it
cannot run in two threads at once, and it runs only the first configuration of an autotuner.
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

GPU = torch.device("cuda", 0)  # the device that tensors say they are on; it does not exist
# Reasons for which `attention.questions` leaves out some cases of a row whose kernels are interpreted.
NO_BFLOAT16, NO_THREADS = (f"Triton's interpreter {x}" for x in ("computes bfloat16 wrongly", "runs no two threads"))
# The last lines of a check of attention: the first if kernels were interpreted, the second if a row ran in `Laptop`.
INTERPRETED = "Triton's interpreter ran its kernels, an autotuner's first configuration alone: a GPU runs other code. "
PRETENDED = "It asks for a GPU, and was told that its tensors are on one"
running: list[Any] = []  # holds the row, if it runs in `Laptop`: as long as there is an item, backwards run there, too
_apply = torch.autograd.function.BackwardCFunction.apply  # the original of the function that `install` replaces


class Laptop(torch.overrides.TorchFunctionMode, ContextDecorator):
    """A context in which tensors say that they are on a GPU, and memory for a GPU is allocated on the host.

    As a decorator, `Laptop()(function)`, it returns a function that runs in the context.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a function of torch. torch calls this in place of the function, inside the context."""
        answer = {torch.Tensor.is_cuda.__get__: True, torch.Tensor.device.__get__: GPU, torch.Tensor.get_device: 0}.get(
            function
        )
        if answer is not None:
            return answer
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs and isinstance(kwargs.get("device"), int):  # a GPU by its number, as current_device() returns it
            kwargs = kwargs | {"device": GPU}
        args, kwargs = torch.utils._pytree.tree_map(
            lambda x: (
                torch.device("cpu") if isinstance(x, str | torch.device) and str(x).partition(":")[0] == "cuda" else x
            ),
            (args, kwargs or {}),
        )
        return function(*args, **kwargs)


class Done:
    """Stands for a CUDA event or stream: each of its methods does nothing and returns 0.0, also as elapsed time."""

    def __init__(self, *_: Any, **__: Any):
        """Takes the arguments of an event or a stream, and ignores them."""

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0


def install() -> None:
    """Patches this process, if it has no GPU, so that torch and Triton do not refuse to run. NVTX then does nothing.

    On any machine, packages of the course CS336 that lie on the path but are not installed get the version "0", since
    they ask for their own version when they are imported. A second call changes nothing.
    """
    importlib.metadata.version = version
    if torch.cuda.is_available() or torch.autograd.function.BackwardCFunction.apply is _backward:
        return
    vars(torch.cuda).update(
        # True inside of the context.
        is_available=lambda: isinstance(torch.overrides._get_current_function_mode(), Laptop),
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
        device=nullcontext,
        device_of=nullcontext,
        get_device_capability=lambda *_: (8, 0),  # an A100's, which all kernels written for a course support
        get_device_properties=lambda *_: SimpleNamespace(name="", multi_processor_count=1, gcnArchName=""),
        stream=nullcontext,
        current_stream=Done,
        Event=Done,
        Stream=Done,
    )
    vars(torch.cuda.nvtx).update(
        dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), lambda *_: None)
    )
    torch.autograd.function.BackwardCFunction.apply = _backward
    if importlib.util.find_spec("triton") is not None:
        _install_in_triton()


def version(distribution_name: str) -> str:
    """The version of a distribution; "0" for a package of the course CS336 that is not installed."""
    is_of_course = distribution_name.startswith("cs336") and not any(
        importlib.metadata.distributions(name=distribution_name)
    )
    return "0" if is_of_course else importlib.metadata.distribution(distribution_name).version


def _install_in_triton() -> None:
    """Makes Triton's driver report a GPU and autotuners take their first configuration; mends the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner

    import lmsys.kernels.launch  # noqa: F401  it mends the interpreter for new versions of numpy

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_current_target=lambda: GPUTarget("cuda", 80, 32),  # compute capability 8.0, 32 threads in a warp
            get_active_torch_device=lambda: GPU,
            get_device_interface=lambda: torch.cuda,
            utils=SimpleNamespace(
                get_device_properties=lambda *_: {"multiprocessor_count": 1, "max_shared_mem": 101376}  # 99 KiB
            ),
        )
    )
    _mend_interpreter()
    run = Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = run_first


def _mend_interpreter() -> None:
    """Mends three faults of Triton's interpreter.

    It reads the bits of bfloat16 operands of a dot as whole numbers, it refuses a Python bool as a tensor, and it does
    not replace functions of Triton that a file has imported by name.
    """
    import numpy as np
    from triton import language
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._implicit_cvt

    def wide(x: Any) -> Any:
        """x in float32 if it is bfloat16, which is stored as the upper half of float32."""
        if x.dtype.scalar != language.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def converted(x: Any) -> Any:
        """`_implicit_cvt` of x, also for a bool."""
        if not isinstance(x, bool):  # Triton's own function refuses a bool
            return convert(x)
        return language.tensor(interpreter.TensorHandle(np.array([x]), language.int1), language.int1)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *args: dot(self, wide(a), wide(b), *args)
    interpreter._implicit_cvt = converted
    patch = interpreter._patch_lang  # the interpreter calls it for each kernel that it runs

    def by_name(function: Any) -> Any:
        """Makes functions that a file has imported from triton.language call those that the interpreter puts there.

        `_patch_lang` refuses a file that has no name for the module triton.language, so the file gets one.
        """
        function.__globals__.update(
            {name: partial(_of_language, x.__name__) for name, x in function.__globals__.items() if is_builtin(x)},
            triton_language=language,
        )
        return patch(function)

    interpreter._patch_lang = by_name


def _of_language(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function of this name that triton.language has at the moment."""
    return getattr(sys.modules["triton.language"], name)(*args, **kwargs)


def _backward(self: Any, *gradients: Any) -> Any:
    """Runs the backward of an autograd Function, in `Laptop` if its forward ran there. autograd calls this.

    It enters `Laptop` itself, because the forward's context has ended when autograd calls the backward.
    """
    with Laptop() if running else nullcontext():
        return _apply(self, *gradients)


def fitting(row: Callable[..., torch.Tensor], score: Callable[[Any], int]) -> Callable[..., torch.Tensor]:
    """The row as it is, or, if it then gets a higher score, a function that calls the row in `Laptop`.

    `score(row)` calls the row and returns a number, which is higher if the row returns results, if these have no fault,
    and if the row launches kernels. Where `install` has patched nothing, as on a machine with a GPU, the row is
    returned as it is.
    """

    if torch.autograd.function.BackwardCFunction.apply is not _backward:
        return row
    call = Laptop()(row)
    running.clear()
    plain = score(row)
    running.append(row)
    if score(call) > plain:
        return call
    running.clear()
    return row
