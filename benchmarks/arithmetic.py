"""Precisions as a user names them: how a model computes in each, and how far a result may be from the exact one.

fp32 and tf32 keep float32 tensors and differ in their matmuls; bf16 is autocast, and fp16 is autocast with a scaled
loss.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Record
from lmsys.testing import ratio_of, rms_budget

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # of the matmuls
MEASURED = DTYPES | {"tf32": None}  # of the large matmuls
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = AUTOCAST | {"fp32": torch.float32, "tf32": torch.float16}  # by length of the mantissa
LOSS_SCALE = 2.0**12  # keeps float16 gradients above its smallest value
ERROR_RTOL, BUDGET_RTOL = 1e-3, 0.5  # made again: what is exact is float64; plain PyTorch rounds in an order of its own
RECOMPILE_LIMIT = 64  # every row makes graphs of the same block


def why_no_arithmetic(precision: str, device: str, compiles: bool) -> str | None:
    """None, or why the device has no such arithmetic, or no code can be compiled for it."""
    if precision == "tf32" and device == "cpu":
        return "TF32 is an arithmetic of CUDA devices"
    return why_no_compiler(device) if compiles else None


def capability_of(device: str) -> tuple[int, int] | None:
    """The CUDA device's capability, as cases of attention say it; None on a CPU."""
    return torch.cuda.get_device_capability() if device == "cuda" else None


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Does what `matmuls` does, and drops what is compiled meanwhile."""
    try:
        with matmuls(precision), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """Float32 matmuls in TF32 or, for every other precision, in full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: str, device: str) -> torch.autocast:
    return torch.autocast(device, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)


def widened(logits: Tensor) -> Tensor:
    """Widens to float32 what is narrower, as losses are computed."""
    return logits if logits.dtype == torch.float64 else logits.float()


def ratio_by_group(found: Tensor, reference: Tensor, plain: Tensor, dtype: torch.dtype, groups: Tensor) -> float:
    """The largest `ratio_of` of any group of rows: `groups` holds a number for each row, 0 for ordinary ones.

    Rows of extreme inputs are groups of their own: neither do they lend others their budget, nor take theirs. They may
    be exact in plain PyTorch, so only the ordinary ones are held in root mean square.
    """
    groups = groups.to(found.device)
    parts = [(groups == group, group == 0) for group in groups.unique().tolist()]
    return max(ratio_of(found[rows], reference[rows], plain[rows], dtype, mean) for rows, mean in parts)


def mean_ratio(found: Tensor, terms: Tensor, plain: Tensor, groups: Tensor | None = None) -> float:
    """The error of a mean over its budget: what the `plain` computation of its terms loses in root mean square.

    No mean of errors is larger than that. The error of the plain mean says little: errors of both signs may cancel.
    With `groups`, a number for each term, the budget is the mean of those of the groups by their shares: no mean is
    larger than that either, and large terms in a small group do not widen it as they would in all.
    """
    terms, plain = terms.double(), plain.double()
    groups = torch.zeros_like(terms) if groups is None else groups.to(terms.device)
    parts = [groups == group for group in groups.unique()]
    budget = sum(part.double().mean().item() * rms_budget(terms[part], plain[part]) for part in parts)
    ratio = abs(found.item() - terms.mean().item()) / budget
    return ratio if math.isfinite(ratio) else math.inf


def matmul_rates(flops: float, time_s: float, dtype: str, machine: Record) -> Record:
    """The rate of so much work, and its shares of the large matmul measured in this run, None where none was.

    dtype  of the tensors, or a precision by its name
    """
    reached = machine["ceilings"]["matmul_flops_per_s"].get(MEASURED.get(dtype, dtype))
    sustained = (machine.get("sustained") or {}).get("matmul_flops_per_s", {}).get(MEASURED.get(dtype, dtype))
    return {
        "flops_per_s": flops / time_s,
        "matmul_ceiling_fraction": flops / time_s / reached if reached else None,
        "sustained_ceiling_fraction": flops / time_s / sustained if sustained else None,
    }
