"""A stub of the CUDA driver: without a GPU, Triton compiles, loads and launches kernels, and the stub records launches.

It needs a process of its own, without TRITON_INTERPRET, since it replaces the driver for good. `launches.py` uses it.
driver_stub.c is the library that Triton loads in place of libcuda.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

# {type of a parameter in PTX: its bytes}
WIDTHS = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8, "f64": 8}
OBSERVER = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p
)
Launch = tuple[str, tuple[int, int], int | None, tuple[bytes, ...]]  # kernel, grid, stream, its parameters


def parameters(ptx: str) -> list[int]:
    """The number of bytes of each parameter that a kernel's PTX declares."""
    head = ptx[ptx.index(".entry") :]
    types = re.findall(r"\.param\s+(?:\.align \d+\s+)?\.(\w+)[^,)]*?_param_\d+(?:\[(\d+)\])?", head[: head.index("{")])
    return [WIDTHS[width] * int(length or 1) for width, length in types]


class Stub:
    """Replaces Triton's driver by one for a GPU of `capability` (80 or 90), which records launches in `launches`."""

    def __init__(self, capability: int):
        self.folder = tempfile.TemporaryDirectory()  # kept, since launchers are linked with the library in it
        library = Path(self.folder.name, "libcuda.so.1")
        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        source = Path(__file__).with_suffix(".c")
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
        subprocess.run(["gcc", source, *flags, "-o", library], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = self.folder.name
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.capability, self.sizes = capability, {}
        self.recorded: list[Launch] = []
        self._observer = OBSERVER(self._observe)
        self.library.stub_set(capability, None)
        self._activate()

    def _activate(self) -> None:
        from triton.backends.nvidia.driver import CudaDriver

        driver = CudaDriver()
        driver.get_device_capability = lambda device=0: divmod(self.capability, 10)
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda device: 0
        triton.runtime.driver.set_active(driver)
        triton.knobs.runtime.kernel_load_end_hook = self._loaded

    def _loaded(self, module: int, function: int, name: str, files: dict[str, str], _: Any) -> None:
        self.sizes[function] = name, parameters(Path(files[f"{name}.ptx"]).read_text())

    def _observe(self, function: int, params: Any, x: int, y: int, stream: int | None) -> None:
        name, sizes = self.sizes[function]
        self.recorded.append(
            (name, (x, y), stream, tuple(ctypes.string_at(params[i], size) for i, size in enumerate(sizes)))
        )

    def launches(self, call: Callable[[], Any]) -> list[Launch]:
        """The kernels that call() launches, in order."""
        self.recorded = []
        self.library.stub_set(self.capability, self._observer)
        call()
        self.library.stub_set(self.capability, None)
        return self.recorded
