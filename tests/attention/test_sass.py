"""The Triton kernels, compiled for every card without a GPU: they fit, spill nothing, use tensor cores.

That a kernel compiles and fits does not say that it is fast: of these cards only sm_90 was measured.
"""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile the kernels")

from lmsys.kernels.tritons import version  # noqa: E402
from tests.support.sass import DECODING, KERNELS, MASKS, PRODUCTS, SHARED, TMA, row, why_not  # noqa: E402
from tests.support.variants import but  # noqa: E402

ROOT = Path(__file__).parents[2]


def always(head_dim: int, *others: Any) -> Any:
    """Kernels of another head dimension than 128 are compiled on request."""
    return pytest.param(head_dim, *others, marks=[] if head_dim == 128 else [pytest.mark.on_request])


HOPPER = [always(*one) for one in product((64, 128), KERNELS, MASKS)]
OTHER_CARDS = [arch for arch in SHARED if arch != 90]
ALWAYS = (86, 100)  # one that moves tiles by addresses, and one by descriptors


def on_card(arch: int, head_dim: int, kernel: str, mask: str) -> Any:
    """Causal kernels at head dimension 128 are compiled always for two other cards, and the rest on request."""
    first = arch in ALWAYS and head_dim == 128 and (mask == "causal" or kernel == "split_keys")
    return pytest.param(arch, head_dim, kernel, mask, marks=[] if first else [pytest.mark.on_request])


ON_CARDS = [on_card(*one) for one in product(OTHER_CARDS, (64, 128), KERNELS, MASKS)]
CLEAN = "clean dq", "clean dkdv"
ON_CARDS += [on_card(arch, head_dim, name, "bounds") for arch, head_dim, name in product(OTHER_CARDS, (64, 128), CLEAN)]
ON_CARDS += [on_card(arch, one[0], "split_keys", f"Q{one[1]}") for arch in OTHER_CARDS for one in DECODING[:-1]]


@cache
def compiled(head_dim: int, arch: int = 90, *masks: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Runs `python -m tests.support.sass` in a process where Triton compiles rather than interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.sass", f"sm_{arch}", str(head_dim), *masks]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["kernel"], line["head_dim"], line["mask"]): line for line in lines}


@pytest.mark.parametrize(("arch", "head_dim", "kernel", "mask"), ON_CARDS)
def test_a_kernel_for_another_card_is_well_made(arch: int, head_dim: int, kernel: str, mask: str) -> None:
    if reason := why_not(arch, mask):
        pytest.skip(reason)
    masks = () if mask in ("full", "bounds", "alibi") or head_dim == 64 else ("causal",)
    found = compiled(head_dim, arch, *masks)[kernel, head_dim, mask]
    assert found["shared"] <= SHARED[arch]
    assert found["loop_spills"] == 0 or kernel in CLEAN, "registers spill to local memory in a loop that runs often"
    if arch in TMA:
        assert found["LDL"] == found["STL"] == 0
        assert found["UTMALDG"] >= 3, "tiles arrive by bulk tensor loads"
        assert kernel == "split_keys" or found["UTCHMMA"] >= PRODUCTS[kernel.split()[-1]], "tcgen05 is used"
    else:
        assert found["copies"] >= 2 or kernel in CLEAN, "tiles arrive by asynchronous copies"
        assert found["products"] == found.get("needed", found["products"]) >= 8, "each product is made, on tensor cores"


@pytest.mark.parametrize("arch", but(OTHER_CARDS, *set(OTHER_CARDS) - set(ALWAYS)))
def test_the_table_in_docs_is_what_was_compiled(arch: int) -> None:
    if version() != "3.6.0":
        pytest.skip(f"the table is of Triton 3.6.0; this is {version()}")
    written = (ROOT / "docs" / "flash_triton.md").read_text().splitlines()
    for (kernel, head_dim, mask), line in compiled(128, arch, "causal").items():
        assert kernel == "split_keys" or row(line) in written, (arch, head_dim, mask)


@pytest.mark.parametrize(("head_dim", "kernel", "mask"), HOPPER)
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
