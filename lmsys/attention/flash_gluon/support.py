"""The cases that the row runs; apart from the kernels, which a Triton of another version could not even import."""

import triton

from lmsys.attention.contract import AttentionCase

KNOWN_TRITON = ("3.6.0",)  # Gluon's names, its launcher and the compiler's output change from version to version
HEAD_DIMS = (64, 128)


def flash_gluon_supports(case: AttentionCase) -> str | None:
    if case.device != "cuda":
        return "runs on CUDA"
    if case.capability is not None and case.capability != (9, 0):
        return f"is written for compute capability 9.0 (Hopper); this GPU has {case.capability[0]}.{case.capability[1]}"
    if triton.__version__.split("+")[0] not in KNOWN_TRITON:
        return f"is verified with triton {', '.join(KNOWN_TRITON)}; this is {triton.__version__}"
    if case.dtype not in ("float16", "bfloat16"):
        return f"knows float16 and bfloat16, not {case.dtype}"
    if case.head_dim not in HEAD_DIMS:
        return f"knows head_dim 64 and 128, not {case.head_dim}"
    return None
