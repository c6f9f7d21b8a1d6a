"""Finds and undoes what a row has changed in the process that judges it: replaced functions, and global state.

A *row* is an implementation under test. It runs in the process that judges it, so Python lets it replace any function.
`Guard` remembers the functions that judge and measure before the first row's file is imported. After calls of rows,
`Guard.mend` compares them and puts them back. `State` does the same for the process's own state, such as torch's
default dtype, after each call of a row.

The runner and `Trial` use the guard of `lmsys.bench.instruments`, `lmsys.bench.watch` uses a `State`, and ranks use
both (`lmsys.bench.ranks.on_part`). To protect the functions of one more module, add it to OWNERS; to protect one more
piece of state, add a `Part` to PARTS. docs/threats.md lists changes that neither `Guard` nor `State` can see.
"""

import builtins
import gc
import json
import math
import operator
import os
import random
import re
import signal
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.backends import cuda

from lmsys import deterministic
from lmsys.measure.compare import Lost
from lmsys.measure.step import Failed
from lmsys.processes import Outputs

PACKAGES = "lmsys", "benchmarks", "dev"  # all of their functions and classes are remembered
# Modules and classes of other packages. Only the functions and classes in these namespaces themselves are remembered,
# not those of submodules.
OWNERS = (
    builtins,
    json,
    math,
    operator,
    random,
    statistics,
    time,
    sys,
    random.Random,
    random.SystemRandom,
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.Event,
    torch.cuda.Stream,
    torch.autograd,
    torch.linalg,
    torch.nn.functional,
    torch.profiler,
)
# No attribute may be added to these classes, since it would hide one that they inherit.
CLOSED = torch.cuda.Event, torch.cuda.Stream, torch.Tensor, random.SystemRandom
# Names that are not remembered, and may change. torch.compile replaces torch.manual_seed when it is first imported,
# torch.distributed sets sys.excepthook, and interactive shells set sys.displayhook.
IGNORED = {"__dict__", "__weakref__", "__builtins__", "__cached__", "displayhook", "excepthook", "manual_seed"}
COMPILED = "__compiled_fn_", "__resume_at_"  # names that torch.compile adds to modules that it compiles, and removes
# Matches the names under which torch.library registers a Python function in place of a public operator of torch, such
# as "aten/sub.Tensor/CPU".
IS_REPLACED_KERNEL = re.compile("aten/[^_].*/(CPU|CUDA)").fullmatch
# Of other packages only values of these types are remembered; of PACKAGES also constants (`_names`).
KINDS: Any = types.FunctionType | types.BuiltinFunctionType | type | property | staticmethod | classmethod


class Guard:
    """Remembers the functions and classes of each *owner* (a module or a class) as they are when the guard is made.

    For PACKAGES it also remembers constants, and the functions' code and defaults.
    """

    def __init__(self) -> None:
        # torch replaces the method `step` of an optimizer's class when it makes the first object of that class. Have
        # torch do so now: later it would look like tampering.
        for cls in _classes(_modules()):
            if issubclass(cls, torch.optim.Optimizer):
                cls._patch_step_function(cls.__new__(cls))
        owners = {owner: _names(owner) for owner in (*OWNERS, *_modules(), *_classes(_modules()))}
        functions = {id(f): f for names in owners.values() for f in map(_function, names.values()) if f is not None}
        self._code = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions.values()]
        dicts = {f"the defaults of {f.__qualname__}": f.__kwdefaults__ for f in functions.values() if f.__kwdefaults__}
        dicts |= {
            f"{owner.__name__}.{name}": value
            for owner, names in owners.items()
            for name, value in names.items()
            if type(value) is dict and not name.startswith("_")  # modules fill private ones, such as caches
        }
        # (name of the owner or dict, its live content, a function that puts a value back, the content as it was)
        self._remembered = [
            (owner.__name__, vars(owner), partial(setattr, owner), names) for owner, names in owners.items()
        ]
        self._remembered += [
            (place, values, partial(operator.setitem, values), {**values}) for place, values in dicts.items()
        ]
        self._closed = [(cls, IGNORED | vars(cls).keys()) for cls in CLOSED]
        # All names of kernels that torch.library has registered.
        self._kernels = set(filter(IS_REPLACED_KERNEL, torch.library._impls))

    def mend(self) -> list[str]:
        """Puts back what has been replaced. Returns the names, such as `time.perf_counter`, that were replaced.

        Raises Lost, which ends the worker process, if a kernel of torch was replaced: that cannot be put back.
        """
        if kernels := set(filter(IS_REPLACED_KERNEL, torch.library._impls)) - self._kernels:
            raise Lost(f"it replaces {', '.join(sorted(kernels))}, by which it is judged,")
        changed = []
        for place, live, put, remembered in self._remembered:
            for name, value in remembered.items():
                if live.get(name) is not value:
                    changed.append(f"{place}.{name}")
                    put(name, value)
        for cls, known in self._closed:
            for name in [name for name, x in vars(cls).items() if name not in known and isinstance(x, KINDS)]:
                changed.append(f"{cls.__name__}.{name}")
                delattr(cls, name)
        for function, code, defaults, by_name in self._code:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not by_name
            ):
                changed.append(f"the code of {function.__qualname__}")
                function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, by_name
        return changed


def _modules() -> list[types.ModuleType]:
    """The imported modules of PACKAGES."""
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]


def _classes(ours: list[types.ModuleType]) -> list[Any]:
    """The classes that these modules hold and that are defined in PACKAGES; those of other packages are left out."""
    classes = [value for module in ours for value in vars(module).values() if isinstance(value, type)]
    return [cls for cls in dict.fromkeys(classes) if cls.__module__.partition(".")[0] in PACKAGES]


def _names(owner: Any) -> dict[str, Any]:
    """The remembered attributes of a module or class, by name: functions and classes, in PACKAGES also constants."""
    is_ours = getattr(owner, "__module__", owner.__name__).partition(".")[0] in PACKAGES
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in IGNORED
        and not name.startswith(COMPILED)
        and (isinstance(value, KINDS) or (is_ours and name.isupper()))
    }


def _function(value: Any) -> types.FunctionType | None:
    """The Python function that a value is, or that a property or method holds; None unless PACKAGES define it."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] in PACKAGES else None


PLAIN = bool | int | str | torch.dtype | torch.device  # values that a message can show
# Prefixes of environment variables that compilers and profilers set for themselves. `State` leaves these alone.
OF_COMPILERS = ("TORCH", "_TORCH", "TRITON_CACHE_", "CUDA_MODULE_LOADING", "KINETO_")


class Changed(Failed):
    """Raised when a row has changed the process's state. Error messages of ranks show the name of this class."""


@dataclass(frozen=True)
class Part:
    """A piece of the process's state.

    name  how messages call it, as in "it leaves changed: NAME"
    get   reads it. None means that the value is not known: the part is then neither compared nor put back
    put   puts back a value that `get` has returned
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _set_default_device(device: torch.device) -> None:
    """Makes `device` the one that torch's factory functions use."""
    torch.set_default_device(None)  # a default that is set, even to the CPU, slows every factory function down
    if torch.empty(0).device != device:
        torch.set_default_device(device)


def _set_cpus(cpus: set[int]) -> None:
    """Lets all threads of this process run on these CPUs."""
    for thread in os.listdir("/proc/self/task"):  # a thread inherits its CPUs when it starts, so each is set by itself
        os.sched_setaffinity(int(thread), cpus)


def _shorten(length: Callable[[], int], pop: Callable[[], Any], right: int) -> None:
    """Pops items of a stack of torch until it has the `right` length."""
    while length() > right:
        pop()


# PARTS are put back in this order. The default device stands before "a torch_function mode", because torch holds it as
# such a mode: in the other order it would be reported as one.
PARTS = (
    Part("the CPUs that it may use", partial(os.sched_getaffinity, 0), _set_cpus),
    Part(
        "its scheduling policy",
        partial(os.sched_getscheduler, 0),
        lambda policy: os.sched_setscheduler(0, policy, os.sched_param(0)),
    ),
    Part("its niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
    Part("whether gradients are recorded", torch.is_grad_enabled, torch._C._set_grad_enabled),
    # It cannot be put back, so `put` does nothing: if a row leaves it on, `State.mend` raises Lost, which ends the
    # worker process.
    Part("torch.inference_mode", torch.is_inference_mode_enabled, lambda _: None),
    Part("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Part("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    *(
        Part(
            f"torch.autocast of {device}",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        for device in ("cpu", "cuda")
    ),
    Part(
        "the current CUDA stream",
        lambda: torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        lambda stream: stream and torch.cuda.set_stream(stream),
    ),
    Part("whether garbage is collected", gc.isenabled, lambda enabled: (gc.disable, gc.enable)[enabled]()),
    Part("when garbage is collected", gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    Part(
        "callbacks of the garbage collector",
        lambda: list(gc.callbacks),
        partial(operator.setitem, gc.callbacks, slice(None)),
    ),
    # `get` puts the hook into a list: without a hook it is None, and a bare None would mean that it is not known.
    Part("a hook of sys.setprofile", lambda: [sys.getprofile()], lambda hooks: sys.setprofile(*hooks)),
    Part("a hook of sys.settrace", lambda: [sys.gettrace()], lambda hooks: sys.settrace(*hooks)),
    *(
        Part(
            f"a timer of signal.{name}",
            partial(lambda which: signal.getitimer(which)[0] > 0, which),  # True: the timer runs
            partial(lambda which, _: signal.setitimer(which, 0.0), which),
        )
        for name, which in (
            ("ITIMER_REAL", signal.ITIMER_REAL),
            ("ITIMER_VIRTUAL", signal.ITIMER_VIRTUAL),
            ("ITIMER_PROF", signal.ITIMER_PROF),
        )
    ),
    Part("torch's default device", lambda: torch.empty(0).device, _set_default_device),
    Part("torch's seed", torch.initial_seed, torch.manual_seed),
    *(
        Part(f"a torch_{kind} mode", length, partial(_shorten, length, pop))
        for kind, length, pop in (
            ("function", torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
            ("dispatch", torch._C._len_torch_dispatch_stack, partial(torch._C._pop_torch_dispatch_stack, None)),
        )
    ),
    *(
        Part(f"whether {kind} SDPA is allowed", get, put)
        for kind, get, put in (
            ("flash", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
            ("memory-efficient", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
            ("math", cuda.math_sdp_enabled, cuda.enable_math_sdp),
            ("cuDNN", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        )
    ),
    Part("whether oneDNN is used", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Part("whether tiny numbers are flushed to zero", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
    Part("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Part("the precision of float32 matmuls", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Part("deterministic mode", deterministic.mode, deterministic.set_mode),
    Part("the working directory", os.getcwd, os.chdir),
    *(
        Part(f"the handler of {number.name}", partial(signal.getsignal, number), partial(signal.signal, number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    ),
)


class State:
    """Remembers the process's state when it is made: PARTS, environment variables, stdout and stderr.

    The owner must call `close`, which closes this object's copies of the file descriptors of stdout and stderr.
    """

    def __init__(self) -> None:
        self._parts = {part: _read(part) for part in PARTS}
        self._variables, self._raw_variables = dict(os.environ), _raw_variables()
        self._outputs = Outputs()

    def mend(self) -> str | None:
        """Puts back what has changed. Returns a sentence that names it, or None. It takes some 20 us.

        Environment variables that were added are removed. The sentence names them only beside other changes: libraries
        add some when they are imported, which is no fault of the row. Raises Lost, which ends the worker process, if
        something cannot be put back.
        """
        parts, (changed, added) = list(self._mend_parts()), self._mend_variables()
        changes = parts + [f"environment variable {name}" for name in changed] + self._outputs.mend()
        changes += [f"environment variables that it adds: {', '.join(added)}"] * bool(changes and added)
        return f"it leaves changed: {'; '.join(changes)}" if changes else None

    def _mend_parts(self) -> Iterator[str]:
        """Puts back the changed PARTS, and yields the name of each, with both values where these are plain."""
        for part, was in self._parts.items():
            now = _read(part)
            if now == was or was is None:
                continue
            change = f"{part.name} ({was}, now {now})" if isinstance(was, PLAIN) else part.name
            with suppress(Exception):
                part.put(was)
            if _read(part) != was:
                raise Lost(f"it leaves changed: {change}")
            yield change

    def _mend_variables(self) -> tuple[list[str], list[str]]:
        """Puts back environment variables, but for those of OF_COMPILERS.

        Returns (names that had other values or were missing, names that were added).
        """
        if self._raw_variables == _raw_variables():
            return [], []
        names = {
            name for name, _ in self._variables.items() ^ dict(os.environ).items() if not name.startswith(OF_COMPILERS)
        }
        changed, added = sorted(names & self._variables.keys()), sorted(names - self._variables.keys())
        for name in added:
            del os.environ[name]
        os.environ.update({name: self._variables[name] for name in changed})
        self._raw_variables = _raw_variables()
        return changed, added

    def close(self) -> None:
        self._outputs.close()


def _read(part: Part) -> Any:
    """Returns the value of the part, or the error, as text, if it cannot be read."""
    try:
        return part.get()
    except Exception as error:  # torch raises for some settings once related ones were changed
        return f"{type(error).__name__}: {error}"


def _raw_variables() -> dict[Any, Any]:
    """The environment in the encoded form that `os.environ` keeps. It is compared first, as decoding takes 0.1 ms."""
    return dict(vars(os.environ)["_data"])
