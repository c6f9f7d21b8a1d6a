"""Attention rows that compute the right result, but harm the process that runs them in one of their calls.

A row is an implementation. Tests of the harness measure these: each must be recorded as an error of its own, and other
rows must be measured all the same. A new one is a function with the decorator `fault`.

$LMSYS_FAULT_CALL=3    the third call in a process does harm; 0: each call, with a chance of one in four
"""

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

AT = int(os.environ.get("LMSYS_FAULT_CALL", "1"))  # number of the call that does harm
FAULTS: dict[str, "Fault"] = {}
_calls = dict[str, int]()  # {row: its calls in this process}
_kept: list[Any] = []  # objects that must not be freed
_random = random.SystemRandom()


@dataclass(frozen=True)
class Fault:
    """A harmful row.

    told     a part of the reason in its records
    harm     the function that does harm
    ends     True if the harm ends its process, or the process has to be ended
    outcome  the outcome in its records
    on_gpu   True if it needs a GPU
    """

    told: str
    harm: Callable[[], Any]
    ends: bool = False
    outcome: str = "error"
    on_gpu: bool = False

    def row(self, name: str) -> Callable[..., Tensor]:
        """The row: right attention, which does harm in the calls that $LMSYS_FAULT_CALL chooses."""

        def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
            _calls[name] = _calls.get(name, 0) + 1
            if _calls[name] == AT or (AT == 0 and _random.random() < 0.25):
                self.harm()
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

        row.__name__ = name
        return row


def hangs_now() -> None:
    """Writes a file named after this process into the folder $LMSYS_FAULT_HANGS.

    A test that sees the file acts as if the deadline were over, so that it need not wait for it.
    """
    if folder := os.environ.get("LMSYS_FAULT_HANGS"):
        (Path(folder) / str(os.getpid())).touch()


def fault(told: str, **more: Any) -> Callable[[Callable[[], Any]], Callable[..., Tensor]]:
    """A decorator that turns a harmful function into a row, and puts its `Fault` into FAULTS. `more`: its fields."""

    def row(harm: Callable[[], Any]) -> Callable[..., Tensor]:
        FAULTS[harm.__name__] = Fault(told, harm, **more)
        return FAULTS[harm.__name__].row(harm.__name__)

    return row


def good(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


also_good = good


@fault("SIGSEGV", ends=True)
def segmentation_fault() -> None:
    ctypes.string_at(0)


@fault("SIGABRT", ends=True)
def aborts() -> None:
    os.abort()


@fault("SIGKILL", ends=True)
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@fault("exit code 0", ends=True)
def leaves_with_0() -> None:
    os._exit(0)


@fault("SystemExit")
def exits() -> None:
    sys.exit(3)


@fault("Skipped")
def skips() -> None:
    pytest.skip("not today")


@fault("KeyboardInterrupt", ends=True)
def interrupts() -> None:
    raise KeyboardInterrupt


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@fault("cannot be printed")
def unprintable() -> None:
    raise Unprintable


@fault("deadline", ends=True)
def hangs_in_python() -> None:
    hangs_now()
    while True:
        time.sleep(0.1)


@fault("deadline", ends=True)
def hangs_in_c() -> None:
    hangs_now()
    ctypes.PyDLL(None).pause()  # keeps the interpreter lock, so no other thread runs


@fault("", ends=True, outcome="oom")
def eats_memory() -> None:
    while True:
        _kept.append(torch.ones(2**26))


@fault("deadline", ends=True, on_gpu=True)
def hangs_in_a_kernel() -> None:
    torch.cuda._sleep(2**62)
    hangs_now()


@fault("illegal memory access", ends=True, on_gpu=True)
def writes_out_of_bounds() -> None:
    from tests.support.out_of_bounds import write_far_behind

    write_far_behind[(1,)](torch.zeros(1, device="cuda"))


@fault("CUDA out of memory", ends=True, outcome="oom", on_gpu=True)
def eats_gpu_memory() -> None:
    while True:
        _kept.append(torch.ones(2**28, device="cuda"))


@fault("whether gradients are recorded")
def leaves_no_grad() -> None:
    torch._C._set_grad_enabled(not torch.is_grad_enabled())


@fault("inference_mode", ends=True)
def leaves_inference_mode() -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    _kept.append(mode)


@fault("default dtype")
def leaves_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


@fault("default device")
def leaves_default_device() -> None:
    torch.set_default_device("meta")


@fault("seed")
def leaves_a_seed() -> None:
    torch.manual_seed(7)


@fault("number of threads")
def leaves_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@fault("working directory")
def leaves_the_folder() -> None:
    os.chdir("/")


@fault("environment variable HOME")
def leaves_the_environment() -> None:
    os.environ["HOME"] = "/nowhere"


@fault("sys.stdout")
def closes_stdout() -> None:
    sys.stdout.close()


@fault("sys.stdout")
def detaches_stdout() -> None:
    sys.stdout.detach()


@fault("sys.stderr")
def takes_stderr_away() -> None:
    sys.stderr = None  # type: ignore[assignment]


@fault("file 1")
def closes_file_1() -> None:
    with contextlib.suppress(OSError):
        os.close(1)


@fault("garbage")
def stops_collection() -> None:
    gc.disable()


@fault("the handler of SIGTERM")
def takes_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
