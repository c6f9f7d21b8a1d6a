"""A Triton kernel that writes outside of all allocated memory: a row of faults.py ends its process by it.

It is a file of its own, since faults.py is imported without Triton, too.
"""

import triton
import triton.language as tl


@triton.jit
def write_far_behind(x):  # type: ignore[no-untyped-def]
    tl.store(x + 2**40, 1.0)
