"""The cases that the attention implementation `flash_gluon` runs: shapes, dtypes, GPUs, options, and Triton versions.

This file must not import the kernels, since not every Triton version can import them. `lmsys/attention/table.py`, in
which each implementation is a *row*, names `flash_gluon_supports`. If the kernels can run a new option, head dimension
or GPU, add it to the constants below. On a Triton version on which the GPU tests have not passed, `selftest.py` tries
the row once before it is used: this is called a *trial*.
"""

from pathlib import Path

import torch

from lmsys.attention.contract import AttentionCase, why_not_plain
from lmsys.kernels import custom_op, launch, trial, tritons

HEAD_DIMS = (64, 128)  # those with plans in plans.py and a BLOCK_Q in launch.py
HOPPER = (9, 0)  # compute capability
PATTERNS = "window", "documents"  # options that the kernels know
SELFTEST = "lmsys.attention.flash_gluon.selftest:run"  # the trial: module:function
# A change in any of these files needs a new trial. flash_triton's are among them, as the row launches its kernels under
# a pattern.
FOLDER = Path(__file__).parent
SOURCES = FOLDER, Path(launch.__file__), *(FOLDER.with_name(f"flash_triton{x}.py") for x in ("", "_kernels"))


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
    """None, or why the row is refused on this Triton version.

    If the disk has no verdict for this version yet, a trial runs on a GPU, which takes a minute or two, and its verdict
    is kept on disk.
    """
    return (
        trial.refusal("flash_gluon", SELFTEST, SOURCES, HOPPER)
        if torch.cuda.is_available()
        else f"has to be tried on a GPU before it runs on triton {tritons.version()}, and torch sees none here"
    )
