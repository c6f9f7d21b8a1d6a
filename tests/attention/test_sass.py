"""The Triton kernels, compiled for every card (kind of GPU) without one: they fit, spill nothing, use tensor cores.

`nox -s tritons` compiles all of them with each known version of Triton; a plain run compiles some. The instructions are
counted in SASS, NVIDIA's machine code; `tests/support/sass.py` says what their names (LDL, HGMMA, ...) mean. That a
kernel compiles and fits does not say that it is fast: of these cards only sm_90 was measured.
"""

from functools import cache
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile the kernels")

from lmsys.kernels.tritons import version  # noqa: E402
from tests.support import sass_gluon  # noqa: E402
from tests.support.processes import ROOT, compiling  # noqa: E402
from tests.support.sass import DECODING, KERNELS, MASKS, PRODUCTS, SHARED, TMA, Selection, row, why_not  # noqa: E402


def some(arch: int, head_dim: int, kernel: str, mask: str) -> Any:
    """Parameters of a test. Causal kernels for sm_90 at head dimension 128 are compiled always, the rest on request."""
    first = arch == 90 and head_dim == 128 and (mask == "causal" or kernel == "split_keys")
    return pytest.param(arch, head_dim, kernel, mask, marks=[] if first else [pytest.mark.on_request])


HOPPER = [some(90, *values) for values in product((64, 128), KERNELS, MASKS)]
# The kernel of decoding, "split_keys", has the number of queries in place of a mask: Q1 or Q16.
DECODES = [some(90, head_dim, "split_keys", f"Q{queries}") for head_dim, queries in DECODING]
OTHER_CARDS = [arch for arch in SHARED if arch != 90]
ON_CARDS = [some(*values) for values in product(OTHER_CARDS, (64, 128), KERNELS, MASKS)]
CLEAN = "clean dq", "clean dkdv"  # second launches of a backward, for tiles that a NaN has reached: they may spill
ON_CARDS += [some(arch, head_dim, name, "bounds") for arch, head_dim, name in product(OTHER_CARDS, (64, 128), CLEAN)]
ON_CARDS += [
    some(arch, head_dim, "split_keys", f"Q{queries}")
    for arch in OTHER_CARDS
    for head_dim, queries in DECODING[:-1]  # without head dimension 256
]


@pytest.mark.parametrize(
    ("select", "words", "selection"),
    [
        (Selection.of, "sm_86 full 64 float16", Selection([86], ["float16"], [64], ["full"])),
        (Selection.of, "full", Selection([90], ["bfloat16"], [64, 128], ["full"])),
        (Selection.of, "", Selection([90], ["bfloat16"], [64, 128], list(MASKS))),
        (sass_gluon.chosen, "", (["bfloat16"], False, [64, 128])),
        (sass_gluon.chosen, "128 every float16", (["float16"], True, [128])),
    ],
)
def test_words_of_the_command_line_select_kernels(select: Any, words: str, selection: Any) -> None:
    assert select(words.split()) == selection


@pytest.mark.parametrize(
    ("select", "first", "word", "message"),
    [
        *(
            (Selection.of, "causal", word, "is no head dimension; any other word must be one of sm_80, ")
            for word in ("casual", "ones", "sm_70", "float64")
        ),
        *(
            (sass_gluon.chosen, "64", word, "must be one of bfloat16, float16, every, 64, 128")
            for word in ("evry", "96", "float32")
        ),
    ],
)
def test_words_that_select_nothing_are_refused(select: Any, first: str, word: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"'{word}' {message}"):
        select([first, word])


@cache
def compiled(arch: int, head_dim: int, *masks: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    lines = compiling("tests.support.sass", f"sm_{arch}", head_dim, *masks)
    return {(line["kernel"], line["head_dim"], line["mask"]): line for line in lines}


def program(arch: int, head_dim: int, kernel: str, mask: str) -> dict[str, Any]:
    """The facts about a compiled kernel.

    At head dimension 128 causal kernels are compiled apart from others, since a plain run needs only them.
    """
    masks = () if mask in ("full", "bounds", "alibi") or head_dim == 64 else ("causal",)
    return compiled(arch, head_dim, *masks)[kernel, head_dim, mask]


@pytest.mark.parametrize(("arch", "head_dim", "kernel", "mask"), ON_CARDS)
def test_a_kernel_for_another_card_is_well_made(arch: int, head_dim: int, kernel: str, mask: str) -> None:
    if reason := why_not(arch, mask):
        pytest.skip(reason)
    found = program(arch, head_dim, kernel, mask)
    assert found["shared"] <= SHARED[arch]
    assert found["loop_spills"] == 0 or kernel in CLEAN, "registers spill to local memory in a loop that runs often"
    if arch in TMA:
        assert found["LDL"] == found["STL"] == 0
        assert found["UTMALDG"] >= 3, "tiles arrive by bulk tensor loads"
        assert kernel == "split_keys" or found["UTCHMMA"] >= PRODUCTS[kernel.split()[-1]], "tcgen05 is used"
    else:
        assert found["copies"] >= 2 or kernel in CLEAN, "tiles arrive by asynchronous copies"
        assert found["products"] == found.get("needed", found["products"]) >= 8, "each product is made, on tensor cores"


@pytest.mark.on_request
@pytest.mark.parametrize("arch", OTHER_CARDS)
def test_the_table_in_docs_is_what_was_compiled(arch: int) -> None:
    if version() != "3.6.0":
        pytest.skip(f"the table is of Triton 3.6.0; this is {version()}")
    written = (ROOT / "docs" / "flash_triton.md").read_text().splitlines()
    for (kernel, head_dim, mask), line in compiled(arch, 128, "causal").items():
        assert kernel == "split_keys" or row(line) in written, (arch, head_dim, mask)


@pytest.mark.parametrize(("arch", "head_dim", "kernel", "mask"), HOPPER)
def test_a_kernel_for_hopper_is_well_made(arch: int, head_dim: int, kernel: str, mask: str) -> None:
    found = program(arch, head_dim, kernel, mask)
    assert found["LDL"] == found["STL"] == 0, "registers spill to local memory"
    assert found["registers"] <= 255
    # An instruction multiplies 16 columns, and a tile has at least 64.
    assert found["HGMMA"] >= PRODUCTS[kernel] * 4, "every product runs on tensor cores"
    assert found["waits"] <= found["HGMMA"] // 3, (
        "a wait after every instruction means that the compiler serialised them"
    )
    assert found["UTMALDG"] >= 3, "tiles arrive by bulk tensor loads"
    assert found["shared"] <= 227 * 1024


@pytest.mark.parametrize(("arch", "head_dim", "kernel", "mask"), DECODES)
def test_decoding_kernels_fill_a_multiprocessor(arch: int, head_dim: int, kernel: str, mask: str) -> None:
    """A multiprocessor has 64 Ki registers and 228 KiB of shared memory; a program takes 1 KiB more than it asks."""
    programs = 1 if mask == "Q1" and head_dim > 64 else 2
    found = program(arch, head_dim, kernel, mask)
    assert found["LDL"] == found["STL"] == 0, "registers spill to local memory"
    assert found["HMMA"] + found["HGMMA"] >= 8, "every product runs on tensor cores"
    assert found["UTMALDG"] >= 7, (
        "tiles arrive by bulk tensor loads: q, and those of keys and values before the loop and in it"
    )
    assert found["waits"] <= max(2, found["HGMMA"] // 6), "the compiler serialised products"
    assert found["registers"] * 4 * 32 * programs <= 64 * 1024  # in each thread of four warps
    assert 128 * 1024 <= (found["shared"] + 1024) * programs <= 228 * 1024
