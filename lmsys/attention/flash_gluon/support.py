"""The cases that the row runs, apart from the kernels, which a Triton of another version could not even import."""

from pathlib import Path

import torch

from lmsys.attention.contract import AttentionCase, why_not_plain
from lmsys.kernels import custom_op, launch, trial, tritons

HEAD_DIMS = (64, 128)
HOPPER = (9, 0)
PATTERNS = "window", "documents"
SELFTEST = "lmsys.attention.flash_gluon.selftest:run"
SOURCES = Path(__file__).parent, Path(launch.__file__)  # a trial's verdict is about these


def flash_gluon_supports(case: AttentionCase) -> str | None:
    """None, or why this row cannot run `case`."""
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
    return None if tritons.version() in tritons.ON_GPUS else refused_when_tried()


@custom_op.constant  # a trial cannot be traced
def refused_when_tried() -> str | None:
    """None, or why the row is refused on a Triton that nobody has run it on: it is tried once, on a GPU."""
    return (
        trial.refusal("flash_gluon", SELFTEST, SOURCES, HOPPER)
        if torch.cuda.is_available()
        else f"has to be tried on a GPU before it runs on triton {tritons.version()}, and torch sees none here"
    )
