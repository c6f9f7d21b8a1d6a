"""`python -m lmsys` says what would bring each row that is missing, once for all rows that lack the same."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lmsys.__main__ import remedy
from lmsys.registry import Entry
from tests.support.processes import ENVIRONMENT, ROOT


def supports(case: SimpleNamespace) -> str | None:
    """As a row's own, for Hopper alone and with a package that is not here."""
    if case.device != "cuda":
        return "runs on CUDA"
    if case.capability != (9, 0):
        return f"is for 9.0; this GPU has {case.capability}"
    raise ImportError("No module named 'absent'")


def later(case: SimpleNamespace) -> str | None:
    if case.device != "cuda":
        return "runs on CUDA only"
    return None if case.capability >= (9, 0) else f"needs (9, 0); this GPU has {case.capability}"


def anywhere(case: SimpleNamespace) -> str | None:
    """As a row of which torch decides, that asks the device."""
    if case.device != "cuda":
        return "runs on CUDA only"
    raise RuntimeError("no CUDA device is here")


PIP = "needs a package that is not here (No module named 'absent'); pip install absent --now brings it"
CASES = [
    ("supports", "runs on CUDA", "cpu", f"a GPU of compute capability 9.0; {PIP}"),
    ("supports", "is for 9.0; this GPU has (8, 0)", "cuda", f"a GPU of compute capability 9.0; {PIP}"),
    ("supports", f"row {PIP}", "cuda", PIP),
    ("later", "runs on CUDA only", "cpu", "a GPU of compute capability 9.0 or later"),
    ("later", "needs (9, 0); this GPU has (8, 0)", "cuda", "a GPU of compute capability 9.0 or later"),
    ("anywhere", "runs on CUDA only", "cpu", "a GPU"),
    ("anywhere", "torch.compile on CPU needs a C++ compiler", "cpu", "torch.compile on CPU needs a C++ compiler"),
    ("anywhere", "torch: no such case", "cuda", "torch: no such case"),
]


@pytest.mark.parametrize(("row", "reason", "device", "told"), CASES)
def test_a_remedy_is_what_the_row_itself_would_say_elsewhere(row: str, reason: str, device: str, told: str) -> None:
    entry = Entry("row", "operator:add", supports=f"{__name__}:{row}", install="absent --now")
    assert remedy(entry, reason, device, SimpleNamespace) == told


def test_every_row_is_told_and_each_remedy_once() -> None:
    line = [sys.executable, "-m", "lmsys"]
    said = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=True
    ).stdout
    table, _, brings = said.partition("\nwhat would bring the others\n")
    missing = [line.split()[0] for line in table.splitlines() if "  no: " in line or " take bucketed" in line]
    lines = [line.strip().partition(": ") for line in brings.splitlines() if not line.startswith("  for a GPU")]
    assert sorted(missing) == sorted(name for names, _, _ in lines for name in names.split(", "))
    remedies = [told for _, _, told in lines]
    assert len(set(remedies)) == len(remedies)
    if not torch.cuda.is_available():
        assert "pip install flash-attn --no-build-isolation" in brings and "compute capability 9.0" in brings


def test_a_reader_that_goes_early_gets_no_traceback() -> None:
    line = f"{sys.executable} -u -m lmsys | head -n 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("name") and "Traceback" not in done.stderr and not done.stderr.strip(), done.stderr
