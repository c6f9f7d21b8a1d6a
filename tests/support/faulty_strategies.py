"""Strategies that compute the right result, but harm the process of rank 1 in finish_gradient_synchronization().

tests/bench/test_isolation.py measures them. TOLD has, for each class, a part of the reason that its record must give.
A new strategy overrides `harm`, and has a line in TOLD. The name of a class says what it does to the process.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmsys.parallel.baselines import Naive


class Faulty(Naive):
    """`Naive`, which calls `harm` on rank 1 before it averages gradients."""

    def harm(self) -> None:
        raise NotImplementedError

    def finish_gradient_synchronization(self) -> Any:
        if dist.get_rank() == 1:
            self.harm()
        return super().finish_gradient_synchronization()


class Crashes(Faulty):
    def harm(self) -> None:
        ctypes.string_at(0)


class Leaves(Faulty):
    def harm(self) -> None:
        os._exit(0)


class Exits(Faulty):
    def harm(self) -> None:
        sys.exit(3)


class Hangs(Faulty):
    def harm(self) -> None:
        while True:
            time.sleep(0.1)


class Stops(Faulty):
    def harm(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class LeavesDtype(Faulty):
    def harm(self) -> None:
        torch.set_default_dtype(torch.float64)


class LeavesThreads(Faulty):
    def harm(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


class DestroysTheGroup(Faulty):
    def harm(self) -> None:
        dist.destroy_process_group()


class LeaksMemory(Faulty):
    """Allocates memory until there is none; it first limits itself to 1 GiB more."""

    def harm(self) -> None:
        status = Path("/proc/self/status").read_text().split()
        held = 1024 * int(status[status.index("VmData:") + 1])
        resource.setrlimit(resource.RLIMIT_DATA, (held + 2**30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        kept = []
        while True:
            kept.append(torch.ones(2**24))


TOLD = {  # {class: a part of the reason}
    "Crashes": "SIGSEGV",
    "Leaves": "exit code 0",
    "Exits": "SystemExit",
    "Hangs": "did not answer within",
    "Stops": "rank 1 was stopped (SIGSTOP) for 3 s, in ",
    "LeavesDtype": "rank",  # the other rank receives twice the bytes that it expects, and dies first
    "LeavesThreads": "number of threads",
    "DestroysTheGroup": "rank 1 failed in ",
    "LeaksMemory": "rank 1 failed in ",
}
