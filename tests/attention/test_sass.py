"""The Triton kernels, compiled for sm_90 without a GPU: no spills, tensor cores in use and not serialised."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile the kernels")

from tests.support.sass import DECODING  # noqa: E402


def always(head_dim: int, *others: Any) -> Any:
    """Kernels of another head dimension than 128 are compiled on request."""
    return pytest.param(head_dim, *others, marks=[] if head_dim == 128 else [pytest.mark.on_request])


KERNELS = [
    always(head_dim, kernel, mask)
    for head_dim in (64, 128)
    for kernel in ("fwd", "dq", "dkdv")
    for mask in ("full", "causal", "bounds", "alibi")
]


@cache
def compiled(head_dim: int) -> dict[tuple[str, int, str], dict[str, int]]:
    """Runs `python -m tests.support.sass` in a process where Triton compiles rather than interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.sass", str(head_dim)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["kernel"], line["head_dim"], line["mask"]): line for line in lines}


@pytest.mark.parametrize(("head_dim", "kernel", "mask"), KERNELS)
def test_a_kernel_for_hopper_is_well_made(head_dim: int, kernel: str, mask: str) -> None:
    found = compiled(head_dim)[kernel, head_dim, mask]
    assert found["LDL"] == found["STL"] == 0, "registers spill to local memory"
    assert found["registers"] <= 255
    assert found["HGMMA"] >= {"fwd": 2, "dq": 3, "dkdv": 4}[kernel] * 4, "every product runs on tensor cores"
    assert found["waits"] <= found["HGMMA"] // 3, (
        "a wait after every instruction means that the compiler serialised them"
    )
    assert found["UTMALDG"] >= 3, "tiles arrive by bulk tensor loads"
    assert found["shared"] <= 227 * 1024


@pytest.mark.parametrize(("head_dim", "queries"), [always(*one) for one in DECODING])
def test_programs_that_decode_fill_a_multiprocessor(head_dim: int, queries: int) -> None:
    programs = 1 if queries == 1 and head_dim > 64 else 2
    found = compiled(head_dim)["split_keys", head_dim, f"Q{queries}"]
    assert found["LDL"] == found["STL"] == 0, "registers spill to local memory"
    assert found["HMMA"] + found["HGMMA"] >= 8, "every product runs on tensor cores"
    assert found["UTMALDG"] >= 7, (
        "tiles arrive by bulk tensor loads: q, and those of keys and values before the loop and in it"
    )
    assert found["waits"] <= max(2, found["HGMMA"] // 6), "the compiler serialised products"
    assert found["registers"] * 4 * 32 * programs <= 64 * 1024
    assert 128 * 1024 <= (found["shared"] + 1024) * programs <= 228 * 1024
