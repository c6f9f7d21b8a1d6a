"""Strategies that are right, and do harm on the second rank, in a backward's end."""

import ctypes
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from lmsys.parallel.naive import Naive


class Faulty(Naive):
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


class LeavesDtype(Faulty):
    def harm(self) -> None:
        torch.set_default_dtype(torch.float64)


class LeavesThreads(Faulty):
    def harm(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


TOLD = {
    "Crashes": "SIGSEGV",
    "Leaves": "exit code 0",
    "Exits": "SystemExit",
    "Hangs": "did not answer within",
    "LeavesDtype": "rank",  # its neighbour gets twice the bytes that it expects, and dies first
    "LeavesThreads": "number of threads",
}
