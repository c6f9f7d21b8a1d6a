"""Records launches of Triton kernels instead of running them, and compiles them for a card.

`answers.py` calls `install`, `record` and `compiled`, in a process for each card (kind of GPU). To the code that
launches kernels, tensors of the CPU seem to be on such a card (`lmsys.check.laptop`). Results of kernels are whatever
was in memory. An autotuner launches every configuration that its pruning leaves.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.library import Library
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from dev.targets import binary
from dev.targets.cards import Card
from lmsys.check import laptop

_run, _impl = JITFunction.run, Library.impl  # the originals of functions that `install` replaces
NUMBERS = "num_warps", "num_stages", "num_ctas"  # options of the compiler that an answer shows
MOST_THREADS = 1024  # in a block
MEMORY_BYTES = 16 * 2**30  # the GPU memory that every card claims to have
# The dispatch keys for which custom operators register implementations, and the keys that they are given here instead.
KEYS = {"CUDA": "CPU", "CompositeExplicitAutograd": "CompositeExplicitAutograd"}


@dataclass(frozen=True)
class Launch:
    """A call of a kernel: the function, its arguments, its constants and the compiler's options."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.function.fn.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        """By name, the constants of the kernel that are numbers or words, and its warps, stages and CTAs."""
        given = dict(zip(self.function.arg_names, self.args, strict=False)) | self.options
        names = [x.name for x in self.function.params if x.is_constexpr]
        plain = {x: given[x] for x in names if isinstance(given.get(x, ...), bool | int | float | str | None)}
        return plain | {name: given[name] for name in NUMBERS if name in given}

    @property
    def dtypes(self) -> set[str]:
        """The names of its tensors' dtypes."""
        tensors = (getattr(x, "base", x) for x in (*self.args, *self.options.values()))
        return {str(x.dtype).removeprefix("torch.") for x in tensors if isinstance(x, torch.Tensor)}


launches: list[Launch] = []  # those recorded in this process


def install(card: Card) -> None:
    """Patches this process: kernels are recorded, not run, and torch and Triton report this card as the GPU.

    A process can have only one card, since code may cache facts about its device.
    """
    laptop.install()
    import lmsys.kernels.launch as ours

    vars(ours).update(Kernel=ours.PublicKernel, DirectKernel=ours.PublicKernel, raw_stream=_always(0))
    properties = SimpleNamespace(
        name=card.names, multi_processor_count=card.processors, gcnArchName=card.arch, major=card.capability[0],
        minor=card.capability[1], total_memory=MEMORY_BYTES, warp_size=card.warp,
        max_threads_per_multi_processor=card.threads, regs_per_multiprocessor=2**16,
        shared_memory_per_block_optin=card.block_bytes, shared_memory_per_multiprocessor=card.shared_bytes,
    )  # fmt: skip
    answers = {
        "get_device_capability": card.capability,
        "get_device_properties": properties,
        "get_device_name": card.names,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "is_current_stream_capturing": False,
        "device_count": 1,
    }
    vars(torch.cuda).update({name: _always(value) for name, value in answers.items()})
    vars(torch.version).update(cuda="12.8" if card.is_nvidia else None, hip=None if card.is_nvidia else "6.4")
    limits = {
        "multiprocessor_count": card.processors, "max_shared_mem": card.block_bytes, "max_num_regs": 2**16,
        "warpSize": card.warp,
    }  # fmt: skip
    arch = 10 * card.capability[0] + card.capability[1] if card.is_nvidia else card.arch
    target = GPUTarget("cuda" if card.is_nvidia else "hip", arch, card.warp)
    driver = triton.runtime.driver.active
    driver.get_current_target = _always(target)
    driver.utils = SimpleNamespace(get_device_properties=_always(limits))
    vars(triton.testing).update(do_bench=_call_once, do_bench_cudagraph=_call_once)
    driver.get_benchmarker = _always(_call_once)
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # `_register` registers a key twice
    JITFunction.run, Autotuner.run, Library.impl = _record, _record_each, _register


def record(load: Callable[[], Callable[[], Any]]) -> Exception | None:
    """Calls load()() and fills `launches`, without duplicates. Returns the exception that the call raised, or None.

    Exceptions of `load` itself are not caught.
    """
    laptop.running.append(load)  # so that backwards run in `Laptop`, too
    raised = None
    with laptop.Laptop():
        call = load()
        try:
            call()
        except Exception as error:
            raised = error
    distinct = {(x.name, str(x.constants), str(sorted(x.dtypes))): x for x in launches}
    launches[:] = distinct.values()
    return raised


def compiled(launch: Launch) -> Any:
    """The kernel of a launch, compiled for the card of this process. It raises what Triton's compiler raises."""
    return _run(launch.function, *launch.args, grid=(1, 1, 1), warmup=True, **launch.options)


def _always(value: Any) -> Callable[..., Any]:
    """A function that returns this value for any arguments."""
    return lambda *_, **__: value


def _call_once(call: Callable[[], Any], *_: Any, **__: Any) -> float:
    """Replaces Triton's benchmark of a call: all candidates are launched once, and are equally fast."""
    call()
    return 1.0


def _record(self: Any, *args: Any, grid: Any = None, warmup: bool = False, stream: Any = None, **options: Any) -> Any:
    """Replaces JITFunction.run: a launch is recorded; with `warmup` the kernel is compiled as well, and returned."""
    launch = Launch(self, tuple(map(_snapshot, args)), {name: _snapshot(x) for name, x in options.items()})
    launches.append(launch)
    if not warmup:
        return None
    kernel = compiled(launch)  # it must look loaded: the caller may read the registers that it needs, and launch it
    facts = binary.read(kernel)
    loaded = {"n_regs": facts["registers"], "n_spills": facts["spills"], "n_max_threads": MOST_THREADS}
    vars(kernel).update(loaded, module=self, _run=_always(None))
    return kernel


def _snapshot(x: Any) -> Any:
    """x, or a copy if it is a descriptor, since an autotuner's hook changes its block for the next configuration."""
    return replace(x, block_shape=list(x.block_shape)) if isinstance(x, TensorDescriptor) else x


def _record_each(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces Autotuner.run: launches every configuration that is not pruned, and times none."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        self.best_config = config  # the caller may read it
        options = kwargs | config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook(self.nargs | options)
        self.fn.run(*args, **options)


def _register(self: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
    """Replaces Library.impl: a custom operator's implementation for GPUs gets tensors of the host, in `Laptop`."""
    if key in KEYS:
        function, key = laptop.Laptop()(function), KEYS[key]
    return _impl(self, name, function, key, **options)
