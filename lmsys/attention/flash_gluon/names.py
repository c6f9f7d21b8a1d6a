"""Gluon under one name each, where versions of Triton differ."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the first name of each pair, 3.9 the second.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_memory = gl.shared_memory_descriptor
reinterpret = _memory._reinterpret if hasattr(_memory, "_reinterpret") else _memory.reinterpret
_renamed = hasattr(tma, "async_load")  # the first names may still be there, to raise
async_load = tma.async_load if _renamed else tma.async_copy_global_to_shared
async_store = tma.async_store if _renamed else tma.async_copy_shared_to_global
