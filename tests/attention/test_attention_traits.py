"""The facts about attention rows that benchmarks and reports act on."""

import re
from pathlib import Path

import pytest
import torch

from lmsys.attention import ATTENTION, Documents, Pattern
from lmsys.bench.findings import source_of
from lmsys.registry import Entry, load_target
from lmsys.traits import AttentionTraits

ROWS = {name: row for name, row in ATTENTION.items() if row.target.startswith("lmsys.")}  # not those of other packages


@pytest.mark.parametrize("mask", sorted({AttentionTraits.of(row).mask for row in ROWS.values()} - {""}))
def test_a_mask_is_computed_anew_in_every_call(mask: str) -> None:
    """Benchmarks time these functions, and must not time a cache."""
    make, pattern = load_target(mask), Pattern(True, 5, documents=Documents([3, 13]))
    asked = pattern, 16, 16, torch.device("cpu")
    assert make(*asked) is not make(*asked)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_every_row_states_every_trait(row: Entry) -> None:
    """Traits stand in the table itself, so that reading them imports nothing that the row needs."""
    assert isinstance(row.traits, AttentionTraits)
    assert re.fullmatch("(#[0-9a-f]{6})?", row.traits.color)


def test_peers_come_last() -> None:
    peers = [row.peer for row in ROWS.values()]
    assert peers == sorted(peers)


def test_traits_that_single_rows_state() -> None:
    """Only the rows named here are checked, so a new row needs no change of this test."""
    sdpa = ["sdpa", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn"]
    ours = ["flash_torch", "flash_triton_torch_bwd", "flash_triton", "flash_gluon"]
    judged = ["naive", "naive_compiled", "vectorized", *ours, "flash_cuda", *sdpa, "flex"]
    judged += ["varlen_attn", "flash_attn_2", "flash_attn_3", "flash_attn_4"]

    def where(trait: str) -> list[str]:
        return [name for name in judged if trait in ATTENTION[name].stated]

    assert where("keeps_scores") == ["naive", "naive_compiled", "vectorized", "sdpa_math"]
    by_rank = sorted(where("baseline"), key=lambda name: -AttentionTraits.of(ATTENTION[name]).baseline)
    assert by_rank == ["sdpa", "sdpa_flash", "naive"]  # the first that was measured is what others are compared with
    assert where("compiles") == ["naive_compiled", "flex"]
    assert where("mask") == [*ours, *sdpa, "flex"]


def test_a_function_in_a_file_has_traits_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def own(q, k, v, *, causal, scale): ...\n\nown.keeps_scores = True\nown.kernels = '^_own_kernel'\n"
    )
    (row,) = ATTENTION.select([f"{file}:own"])
    assert AttentionTraits.of(row) == AttentionTraits(keeps_scores=True, kernels="^_own_kernel")


@pytest.mark.parametrize("row", ["naive", "flash_torch", "flash_cuda"])
def test_the_source_that_a_proof_names_is_the_rows_own(row: str) -> None:
    """It is not the file of the function that makes the flash rows, which is the same for all of them."""
    assert source_of(ATTENTION[row])["name"] == f"{row}.py"
