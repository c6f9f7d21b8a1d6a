"""Launches compiled Triton kernels with little Python between a call and the driver.

The attention implementations `flash_triton*.py` make a `Kernel` once and keep it. `launch`, which
`lmsys/model/fused_triton.py` and `lmsys/training/muon_triton.py` call, makes and keeps the `Kernel` of each of their
kernels: a new kernel is best launched by it. The attention `flash_gluon` derives its own class from `DirectKernel`.

A *descriptor* says where a tensor lies in memory; by it the GPU's TMA unit moves tiles of the tensor. Triton's own
launch looks a kernel up by all its arguments, and encodes each descriptor again: 57 us, and 17 us for each descriptor,
against 10 us or less for the kernel of a short sequence. Here a kernel is compiled once, and descriptors are kept by
the address, shape and strides of their tensors. They own no memory, so they also describe any tensor that later lies at
the same address.

With the versions of Triton in `tritons.py`, `Kernel` is `DirectKernel`: it calls the launcher of Triton's CUDA backend,
and does not call Triton's launch hooks. If the launcher of a new version takes other arguments, `DirectKernel` must
change. Elsewhere (a later Triton, ROCm, Triton's interpreter) `Kernel` is `PublicKernel`, which launches as Triton's
documentation says.
"""

import functools
import inspect
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmsys.kernels.tritons import is_known

FUSED = {"enable_fp_fusion": True}  # Triton's default, given since 3.9 warns that 3.10 will change it
FARTHEST_ROWS = 2**23  # a row stride in elements: the 256 rows of the largest tile then span 2**31 elements
MAX_DESCRIPTORS = 8192  # how many are kept at a time, to bound the memory: each takes about 1 KiB

_descriptors: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # arguments of launches: see `DirectKernel._arguments_of`
INTERPRETED = triton.knobs.runtime.interpret  # True: kernels run in Triton's interpreter
if INTERPRETED:
    from lmsys.kernels import interpreter

    interpreter.mend()
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent where torch is built without CUDA


def stream_of(x: Tensor) -> int:
    """The current stream of x's device, as kernels take it; 0 on a CPU, where Triton's interpreter ignores it."""
    return raw_stream(x.device.index) if x.is_cuda else 0


def geometry(x: Tensor) -> tuple[list[int], list[int]]:
    """(shape, strides) for a descriptor of x.

    The stride of a dimension of length 1 does not matter, but TMA checks it, so it is replaced by a valid one.
    """
    shape = list(x.shape)
    strides = [s if n > 1 else 16 * shape[-1] for s, n in zip(x.stride(), shape, strict=True)]
    strides[-1] = 1
    return shape, strides


# A tensor (B, H, S, D) as an argument of the kernels of flash_triton_kernels.py that load by addresses, without TMA
# (tests/support/sass.py makes the same tuple): its base, three strides in units
# of 16 bytes, S as `rows`, and D as `columns`, a constant. Each number n is passed as 2 n + 1: inside of a tuple Triton
# specialises on 1 and on multiples of 16, whatever `do_not_specialize` says, and the binary of the first call would be
# wrong for the next.
Strided = namedtuple("Strided", "base batch head row rows columns")


@functools.cache
def arch_of(device: torch.device) -> int:
    """The architecture that Triton compiles for on an NVIDIA GPU, such as 86 for sm_86; elsewhere 0."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    override = triton.knobs.runtime.override_arch  # such as "sm80"
    major, minor = torch.cuda.get_device_capability(device)
    return int(override[2:]) if override else 10 * major + minor


def by_tma(device: torch.device) -> bool:
    """True if kernels move tiles by descriptors: on sm_90 and sm_100, and in Triton's interpreter, on a CPU.

    Descriptors are slow on other GPUs. Without TMA the compiler turns them into a 64-bit address and a load for each
    element, and no load is prefetched. On sm_120, which has TMA, registers spill.
    """
    return device.type != "cuda" or 90 <= arch_of(device) < 110


def tile_argument(x: Tensor, block: list[int], tma: bool) -> Any:
    """x (B, H, S, D), or a vector, as an argument of a kernel that moves tiles of shape `block`.

    With `tma` it is a descriptor, else as `strided`.
    """
    return TensorDescriptor(x, *geometry(x), block) if tma else strided(x, x)


def strided(x: Tensor, base: Any) -> Any:
    """x (B, H, S, D) as `Strided`, or a vector as its base alone. `base`: x or its address."""
    if x.dim() == 1:
        return base
    shape, strides = geometry(x)
    unit = 16 // x.element_size()
    batch, head, row = (2 * (stride // unit) + 1 for stride in strides[:-1])
    return Strided(base, batch, head, row, 2 * shape[-2] + 1, triton.language.constexpr(shape[-1]))


def with_aligned_rows(x: Tensor) -> Tensor:
    """x (B, H, S, D) itself if a descriptor can address it, else a copy whose rows start at multiples of 16 bytes.

    A copy is also made if rows are so far apart that offsets inside of a tile do not fit 32 bits.
    """
    b, h, s, d = x.stride()
    aligned = d == 1 and b and h and s and not (b | h | s) * x.element_size() & 15 and not x.data_ptr() & 15
    if aligned and s < FARTHEST_ROWS:
        return x
    padding = -x.shape[-1] % (16 // x.element_size())
    return x.new_empty(*x.shape[:-1], x.shape[-1] + padding)[..., : x.shape[-1]].copy_(x)


def dot_precision(x: Tensor) -> str:
    """The `input_precision` of matmuls of x: "tf32" if torch's own matmuls on the GPU use it, else "ieee"."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


class DirectKernel:
    """One binary of `function`, compiled for constants and for the dtypes and blocks of its descriptors.

    function     the kernel, as `triton.jit` returns it
    descriptors  examples of the first arguments, as `tile_argument` makes them
    others       an example of each further argument, tensors for pointers. Whatever Triton specialises on (types,
                 alignment, divisibility) must be the same in every call
    options      the constants of the kernel, by name, and options of the compiler
    """

    def __init__(self, function: Any, descriptors: list[Any], others: list[Any], **options: Any):
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        compiled = function.warmup(*descriptors, *others, grid=(1, 1, 1), **FUSED | options)
        launcher = compiled.run  # loads the binary
        if isinstance(launcher, functools.partial):
            launcher()  # raises the error, such as OutOfResources, with which an earlier load of the binary ended
        assert launcher.global_scratch_size == launcher.profile_scratch_size == 0
        self.compiled = compiled
        utils = triton.runtime.driver.active.utils
        ways = launcher.launch_cooperative_grid, launcher.launch_pdl  # flags of how kernels are launched
        # Later versions have one launcher for all kernels, which is told how to read the arguments; 3.6 has one for
        # each kernel.
        self._common = hasattr(utils, "launch")
        # The arguments of the launcher behind the grid and the stream, in the order of its C function. None stands for
        # what is left out: metadata of launches, hooks, scratch memory.
        if self._common:
            reads = launcher.arg_annotations, launcher.kernel_signature
            self._launch = utils.launch
            self._encode = utils.fill_tma_descriptor_tiled
            self._head: Any = compiled.function, *ways, compiled.packed_metadata, None, None, None, None, None, *reads
        else:
            self._launch = launcher.launch
            if compiled.metadata.tensordesc_meta:  # it wraps the launcher that takes encoded descriptors
                self._launch = inspect.getclosurevars(self._launch).nonlocals["launcher"]
            self._encode = utils.fill_tma_descriptor
            self._head = compiled.function, *ways, None, None, compiled.packed_metadata, None, None, None
        # How to encode each descriptor. For a `Strided` it is the dtype: without it the key of `_descriptors` would not
        # tell tensors apart whose strides are equal in elements but not in bytes.
        self._metas: list[Any] = [
            (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], *meta["block_size"])
            for meta in compiled.metadata.tensordesc_meta or ()
        ] or [getattr(x, "base", x).dtype for x in descriptors]
        assert len(self._metas) == len(descriptors)
        self._constants = (None,) * (len(function.arg_names) - len(descriptors) - len(others))

    def __call__(
        self, grid: int, stream: int, tensors: tuple[Tensor, ...], others: tuple[Any, ...], grid_y: int = 1
    ) -> None:
        """Launches `grid` by `grid_y` programs on `stream`, a stream of the current device.

        tensors  the tensor of each descriptor
        others   the further arguments: ints, floats, and pointers as tensors or ints
        """
        args: list[Any] = []
        for x, meta in zip(tensors, self._metas, strict=True):
            key = x.data_ptr(), x.shape, x.stride(), meta
            arguments = _descriptors.get(key)
            args += self._arguments_of(x, key) if arguments is None else arguments
        args += *others, *self._constants
        # A grid has three dimensions; the last one is 1.
        self._launch(grid, grid_y, 1, stream, *self._head, *((args,) if self._common else args))

    def _arguments_of(self, x: Tensor, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that the launcher takes for x: a TMA descriptor with shape and strides, or a `Strided`."""
        address, _, _, meta = key
        if isinstance(meta, torch.dtype):
            arguments: tuple[Any, ...] = (strided(x, address),)
        else:
            shape, strides = geometry(x)
            swizzle, element_size, element_type, *block = meta
            # 0: what a tile reads outside of the tensor is zero, not NaN.
            encoded = self._encode(address, swizzle, element_size, element_type, block, shape, strides, 0)
            arguments = encoded, *shape, *strides
        if len(_descriptors) >= MAX_DESCRIPTORS:
            _descriptors.clear()
        _descriptors[key] = arguments
        return arguments


class PublicKernel:
    """A kernel called as `DirectKernel` is, but by Triton's documented interface. Pointers among `others` are tensors.

    TypeError for a call with tensors of other dtypes than it was made with; `DirectKernel` does not check them.
    """

    def __init__(self, function: Any, descriptors: list[Any], others: list[Any], **options: Any):
        self._blocks = [getattr(descriptor, "block_shape", None) for descriptor in descriptors]
        self._constants = [options.pop(name) for name in function.arg_names[len(descriptors) + len(others) :]]
        self._dtypes = _dtypes(others)
        binary = function.warmup(*descriptors, *others, *self._constants, grid=(1, 1, 1), **FUSED | options)
        self._kernel = function if binary is None else binary  # None in Triton's interpreter

    def __call__(
        self, grid: int, stream: int, tensors: tuple[Tensor, ...], others: tuple[Any, ...], grid_y: int = 1
    ) -> None:
        """Launches the kernel; the arguments are those of `DirectKernel.__call__`."""
        arguments = [_unchecked_tile_argument(x, block) for x, block in zip(tensors, self._blocks, strict=True)]
        if (dtypes := _dtypes(others)) != self._dtypes:  # `DirectKernel` would read the memory as the wrong dtype
            raise TypeError(f"the kernel was compiled for {self._dtypes}, and is called with {dtypes}")
        self._kernel[grid, grid_y, 1](*arguments, *others, *self._constants, stream=stream)


def _dtypes(others: Sequence[Any]) -> list[Any]:
    """The dtype of each tensor among the arguments, None for each number."""
    return [x.dtype if isinstance(x, Tensor) else None for x in others]


def _unchecked_tile_argument(x: Tensor, block: list[int] | None) -> Any:
    """x as a descriptor of tiles of shape `block`, or if that is None as `strided`; faster than `tile_argument`.

    The constructor is not called: its checks cost more than the launch, and `PublicKernel`'s examples have passed them.
    """
    if block is None:
        return strided(x, x)
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, (descriptor.shape, descriptor.strides), descriptor.block_shape = x, geometry(x), block
    return descriptor


DIRECT = is_known() and torch.version.hip is None and not INTERPRETED  # True: `Kernel` is `DirectKernel`
Kernel = DirectKernel if DIRECT else PublicKernel

_kernels: dict[tuple[Any, ...], Any] = {}  # those of `launch`, by its `key`


def launch(
    function: Any,
    grid: int,
    *others: Any,
    grid_y: int = 1,
    tiles: Sequence[tuple[Tensor, list[int]]] = (),
    **options: Any,
) -> None:
    """Launches a kernel, which is compiled once for its constants and for the dtypes and the alignment of its tensors.

    grid, grid_y  the numbers of programs; with `grid` 0 nothing is launched
    others        tensors of one device and numbers; the kernel must not be specialised on them (`do_not_specialize`)
    tiles         for each of the kernel's first arguments a tensor (B, H, S, D), as `with_aligned_rows` returns it, and
                  the shape of the tiles that the kernel moves. A tile is as wide as the tensor. Equal `options` must
                  mean equal shapes of tiles: the key by which compiled kernels are kept has the options, not the shapes
    options       the constants and compiler options
    """
    moved = tuple(x for x, _ in tiles)
    tensors = [*moved, *(x for x in others if isinstance(x, Tensor))]
    key = (
        function,
        tensors[0].device,
        *((x.dtype, x.data_ptr() % 16 == 0) for x in tensors),
        *options.values(),
    )
    with torch.cuda.device_of(tensors[0]):
        kernel = _kernels.get(key)
        if kernel is None:
            descriptors = [tile_argument(x, block, by_tma(x.device)) for x, block in tiles]
            kernel = _kernels[key] = Kernel(function, descriptors, list(others), **options)
        if grid:
            kernel(grid, stream_of(tensors[0]), moved, others, grid_y)
