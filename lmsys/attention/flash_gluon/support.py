"""The cases that the row runs, apart from the kernels, which a Triton of another version could not even import."""

from lmsys.attention.contract import AttentionCase, why_not_plain
from lmsys.kernels import tritons

HEAD_DIMS = (64, 128)
HOPPER = (9, 0)
PATTERNS = "window", "documents"


def flash_gluon_supports(case: AttentionCase) -> str | None:
    if reason := why_not_plain(case, *PATTERNS):
        return reason
    if case.device != "cuda":
        return "runs on CUDA"
    if case.capability is not None and case.capability != HOPPER:
        return f"is written for compute capability 9.0 (Hopper); this GPU has {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in ("float16", "bfloat16"):
        return f"knows float16 and bfloat16, not {case.dtype}"
    if case.head_dim not in HEAD_DIMS:
        return f"knows head_dim 64 and 128, not {case.head_dim}"
    if tritons.version() in tritons.ON_GPUS:
        return None
    from lmsys.attention.flash_gluon.tried import refused_when_tried

    return refused_when_tried()
