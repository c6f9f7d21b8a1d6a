"""A Triton kernel that writes outside of all allocated memory. A row of faults.py launches it to break its process.

It is a file of its own, since faults.py must also import where Triton is not installed.
"""

import triton
import triton.language as tl


@triton.jit
def write_far_behind(x):  # type: ignore[no-untyped-def]
    tl.store(x + 2**40, 1.0)
