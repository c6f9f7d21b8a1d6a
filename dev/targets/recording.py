"""Records launches of Triton kernels instead of running them, and compiles the kernels for a card.

`answers.py` starts a process for each card (kind of GPU), which calls `begin` once and then `answer` for each kernel.
The code that launches kernels sees tensors that say they are on such a card, but are in the CPU's memory
(`lmsys.check.laptop`). As no kernel runs, the outputs of kernels keep what was in memory. An autotuner launches every
configuration that its pruning leaves. If code asks torch or Triton for a fact about the GPU that is not faked yet, add
it to `install`.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.library import Library
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import lmsys.kernels.launch as ours
from dev.targets import binary
from dev.targets.answers import Answer, compiler_error, shorten
from dev.targets.cards import Card
from lmsys import registry, signature, values
from lmsys.attention import ATTENTION, Pattern, attention, contract
from lmsys.check import laptop

_run, _impl = JITFunction.run, Library.impl  # the original functions, which `install` replaces
OPTIONS = "num_warps", "num_stages", "num_ctas"  # options of Triton's compiler that an answer shows
MOST_THREADS = 1024  # the most threads of a block, which every card is said to have
MEMORY_BYTES = 16 * 2**30  # the GPU memory that every card is said to have
# {dispatch key for which a custom operator registers an implementation: the key that it is registered for here}
KEYS = {"CUDA": "CPU", "CompositeExplicitAutograd": "CompositeExplicitAutograd"}
# The kernels that this process has recorded, without repetitions, in order: {text of a description from `_described`:
# (the description, a function that compiles the kernel)}.
launches: dict[str, tuple[Answer, Callable[[], Any]]] = {}


def begin(card: Card, target: tuple[Any, ...]) -> tuple[list[Answer], str | None]:
    """Records the launches of a target: (descriptions of the kernels, the exception that the target raised, or None).

    ValueError if the target launches nothing; exceptions of `load` are passed on.

    target  the arguments of `load`
    """
    os.dup2(2, 1)  # the target's prints go to stderr, since stdout is for the answers
    if card.is_nvidia:
        for name in binary.TOOLS:
            binary.tool(name)  # ValueError if it is missing
    install(card)
    laptop.running.append(target)  # as long as this list has an item, backwards run in `Laptop`, too
    raised = None
    with laptop.Laptop():
        call = load(*target)
        try:
            call()
        except Exception as error:
            raised = shorten(f"raises {type(error).__name__}: {error}{registry.place_of(error)}")
    values.hold((launches or raised, f"{target[0]} launches no kernel of Triton on {card.arch}: --card names others"))
    return [kernel for kernel, _ in launches.values()], raised


def answer(card: Card, target: tuple[Any, ...], number: int, log: Path) -> Answer:
    """Compiles kernel `number` of those that `begin` returned, and returns facts about it.

    "reason" is why the kernel does not compile or fit, or None. The compiler's output goes to `log`.
    """
    if not launches:  # this is a new process: the compiler has ended the one that recorded the launches
        begin(card, target)
    _, compiled = list(launches.values())[number]
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        kernel = compiled()
        facts = binary.read(kernel)
    except Exception as error:
        return {"reason": f"does not compile: {type(error).__name__}: {compiler_error(log, error)}"}
    needs, has = facts["needs"], card.block_bytes
    reason = f"needs {needs} bytes of shared memory, has {has}" if needs > has else None
    return facts | {"reason": reason, "blocks": card.held(facts["registers"], needs, kernel.metadata.num_warps)}


def load(target: str, shape: tuple[int, ...], dtype: str, grad: bool) -> Callable[[], Any]:
    """A function without parameters that launches the kernels of a target. ValueError if the target cannot be called.

    target  "path.py:attribute", or the name of an attention row
    shape   (batch, heads, length, head_dim) of q, k and v, if the target is attention
    dtype   their dtype, such as "float16"
    grad    True: the backward of attention is called, too
    """
    if ".py" in target:
        function = registry.Table("target", []).select([target])[0].load()
    else:
        function = partial(attention, impl=ATTENTION[target].name)
    taken = signature.parameters_of(function)
    if all(x.default is not x.empty or x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in taken.values()):
        return function
    advice = "name a function of q, k, v, or one without parameters that makes its own tensors and calls your kernels"
    values.hold((len(taken) >= 3, f"{target} takes ({', '.join(taken)}): {advice}"))
    return partial(_attend, function, shape, dtype, grad)


def _attend(function: Callable[..., Any], shape: tuple[int, ...], dtype: str, grad: bool) -> None:
    """Calls attention on random q, k and v, causal if the function takes a mask; with `grad` also its backward."""
    q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=grad) for _ in range(3))
    lacks_causal = contract.why_not_called(function, contract.case_of(q, k, v, Pattern(causal=True)))
    o = contract.only_o(contract.adapt(function)(q, k, v, causal=lacks_causal is None, scale=None))
    if o.requires_grad:
        o.backward(torch.ones_like(o))


def install(card: Card) -> None:
    """Patches this process: kernels are recorded, not run, and torch and Triton report this card as the GPU.

    A process can have only one card, since code may cache facts about its device.
    """
    laptop.install()
    vars(ours).update(Kernel=ours.PublicKernel, DirectKernel=ours.PublicKernel, raw_stream=_always(0))
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.names, multi_processor_count=card.processors, gcnArchName=card.arch, major=major, minor=minor,
        total_memory=MEMORY_BYTES, warp_size=card.warp, max_threads_per_multi_processor=card.threads,
        regs_per_multiprocessor=2**16, shared_memory_per_block_optin=card.block_bytes,
        shared_memory_per_multiprocessor=card.shared_bytes,
    )  # fmt: skip
    vars(torch.cuda).update(
        get_device_capability=_always(card.capability),
        get_device_properties=_always(properties),
        get_device_name=_always(card.names),
        mem_get_info=_always((MEMORY_BYTES, MEMORY_BYTES)),
        is_current_stream_capturing=_always(False),
        device_count=_always(1),
    )
    vars(torch.version).update(cuda="12.8" if card.is_nvidia else None, hip=None if card.is_nvidia else "6.4")
    arch = 10 * major + minor if card.is_nvidia else card.arch
    limits = {
        "multiprocessor_count": card.processors, "max_shared_mem": card.block_bytes, "max_num_regs": 2**16,
        "warpSize": card.warp,
    }  # fmt: skip
    vars(triton.runtime.driver.active).update(
        get_current_target=_always(GPUTarget("cuda" if card.is_nvidia else "hip", arch, card.warp)),
        get_benchmarker=_always(_call_once),
        utils=SimpleNamespace(get_device_properties=_always(limits)),
    )
    vars(triton.testing).update(do_bench=_call_once, do_bench_cudagraph=_call_once)
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # `_register` registers a key twice
    JITFunction.run, Autotuner.run, Library.impl = _record, _record_each, _register


def _always(value: Any) -> Callable[..., Any]:
    """A function that takes any arguments and returns this value."""
    return lambda *_, **__: value


def _call_once(call: Callable[[], Any], *_: Any, **__: Any) -> float:
    """Replaces Triton's function that times a call: it calls it once, and all calls seem equally fast."""
    call()
    return 1.0


def _record(self: Any, *args: Any, grid: Any = None, warmup: bool = False, stream: Any = None, **options: Any) -> Any:
    """Replaces JITFunction.run: records a launch. With `warmup` it also compiles the kernel, and returns it."""
    args, options = tuple(map(_snapshot, args)), {name: _snapshot(x) for name, x in options.items()}
    described = _described(self, args, options)
    compiled = partial(_run, self, *args, grid=(1, 1, 1), warmup=True, **options)  # raises what the compiler raises
    launches[str(described)] = described, compiled
    if not warmup:
        return None
    kernel = compiled()  # it must look loaded: the caller may read the registers that it needs, and launch it
    facts = binary.read(kernel)
    loaded = {"n_regs": facts["registers"], "n_spills": facts["spills"], "n_max_threads": MOST_THREADS}
    vars(kernel).update(loaded, module=self, _run=_always(None))
    return kernel


def _described(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
    """The description of a kernel in an answer: its name, its constants, and the dtypes of its tensors.

    The constants are constexpr parameters and OPTIONS, if their values are numbers, texts, booleans or None.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    names = [*(x.name for x in kernel.params if x.is_constexpr), *OPTIONS]
    constants = {x: given[x] for x in names if isinstance(given.get(x, ...), bool | int | float | str | None)}
    tensors = (getattr(x, "base", x) for x in given.values())
    dtypes = {str(x.dtype).removeprefix("torch.") for x in tensors if isinstance(x, torch.Tensor)}
    return {"kernel": kernel.fn.__name__, "constants": constants, "dtypes": sorted(dtypes)}


def _snapshot(x: Any) -> Any:
    """x, or a copy if it is a tensor descriptor: an autotuner's hook changes its block in place before each launch."""
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
    """Replaces Library.impl: a custom operator's implementation for GPUs is registered for CPU tensors, in `Laptop`."""
    if key in KEYS:
        function, key = laptop.Laptop()(function), KEYS[key]
    return _impl(self, name, function, key, **options)
