"""The trial of the kernels on a Triton that nobody has run them on. It is imported when it is needed: a mark of torch's
imports the compiler, which takes about a second."""

from pathlib import Path

import torch
import triton

from lmsys.attention.flash_gluon.support import HOPPER
from lmsys.kernels import launch, trial

SELFTEST = "lmsys.attention.flash_gluon.selftest:run"
SOURCES = Path(__file__).parent, Path(launch.__file__)


@torch.compiler.assume_constant_result  # a trial cannot be traced
def refused_when_tried() -> str | None:
    if not torch.cuda.is_available():
        return f"has to be tried on a GPU before it runs on triton {triton.__version__}, and torch sees none here"
    return trial.refusal("flash_gluon", SELFTEST, SOURCES, HOPPER)
