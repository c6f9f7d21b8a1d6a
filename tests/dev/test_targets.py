"""`python -m dev.targets`: which kernels that a target launches do not compile for a card, or do not fit it.

A target is a function that launches kernels of Triton; those here are in `tests/support/kernels_for_cards.py`. A card
is a GPU, which need not be there, named by its architecture, such as sm_86. An answer is about one kernel on one card:
its registers, the shared memory that it needs, the blocks that fit a multiprocessor at once, or the reason why none
does.
"""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 to compile kernels")

from dev.targets import binary, cards  # noqa: E402
from dev.targets.__main__ import main  # noqa: E402
from dev.targets.cards import CARDS, KIB  # noqa: E402
from lmsys import commands  # noqa: E402

KERNELS = "tests/support/kernels_for_cards.py"


def answers_to(name: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, answers) of the command for a target."""
    with redirect_stdout(StringIO()) as printed:
        status = main([name, *options, "--json"])
    return status, [json.loads(line) for line in printed.getvalue().splitlines()]


@pytest.fixture(scope="module")
def products() -> tuple[int, list[dict[str, Any]]]:
    """The command's answer on two kernels, `product` and `described`, of two configurations each on two cards."""
    return answers_to(f"{KERNELS}:launch_products", "--card", "sm_86,sm_90")


def test_a_kernel_that_does_not_fit_a_card_has_a_reason(products: tuple[int, list[dict[str, Any]]]) -> None:
    status, lines = products
    assert status == 0 and [x["kernel"] for x in lines] == ["product", "product", "described", "described"] * 2
    small, large = ([x for x in lines if (x["card"], x["kernel"]) == (card, "product")] for card in ("sm_86", "sm_90"))
    assert [x["reason"] is None for x in small + large] == [False, True, True, True]
    assert small[0]["reason"] == f"needs {small[0]['needs']} bytes of shared memory, has {99 * KIB}"
    assert small[0]["needs"] > 99 * KIB and small[0]["blocks"] == 0
    assert all(x["tensor_cores"] and x["copies"] and x["spills"] == 0 for x in small[1:] + large)
    assert all(0 < x["registers"] <= 255 and x["blocks"] >= 1 for x in small[1:] + large)
    assert small[1]["constants"] == {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2, "num_ctas": 1}


def test_every_configuration_has_descriptors_of_its_own_block(products: tuple[int, list[dict[str, Any]]]) -> None:
    narrow, wide = products[1][-2:]
    assert [x["constants"]["ROWS"] for x in (narrow, wide)] == [16, 64]
    assert narrow["needs"] * 4 == pytest.approx(wide["needs"], rel=0.2)


def test_a_kernel_that_does_not_compile_has_a_reason_of_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """For sm_75 Triton cannot compile a matmul of whole numbers, and prints its whole module with the error."""
    status = main([f"{KERNELS}:launch_what_does_not_compile", "--card", "sm_75"])
    captured = capfd.readouterr()
    assert status == 1 and captured.err == ""
    _, first, why_first, second, why_second, lacking = captured.out.splitlines()
    assert "no_such_thing" in first and "0 of 1" in first and "small_product" in second and "1 of 2" in second
    assert "does not compile" in why_first and "no_such_function" in why_first
    assert re.search(r"does not compile: \w+: .*kernels_for_cards.py:\d+.* error: ", why_second)
    assert lacking == "    sm_75 has no bfloat16 in hardware" and " no " in second  # it uses no tensor cores


def test_a_target_sees_its_card(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and Triton answer the target as they would on that card. What it prints is not in the output.

    It reads versions, limits and device numbers, and uses custom operators, warm-ups, benchmarks and the best
    configuration of an autotuned kernel.
    """
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # so that what it prints waits in a buffer
    assert main([f"{KERNELS}:launch_as_libraries_do", "--card", "sm_75,gfx942", "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    by_card = {card: [x["kernel"] for x in lines if x["card"] == card] for card in ("sm_75", "gfx942")}
    assert by_card["sm_75"] == by_card["gfx942"] == ["double"] * 4
    assert [x["constants"]["BLOCK"] for x in lines] == [64, 32, 16, 128] * 2


@pytest.mark.parametrize(("target", "blocks"), [("copied", [64]), ("Copied", [64, 32])])
def test_attention_is_called_as_it_is_written(target: str, blocks: list[int]) -> None:
    """A function without a mask is called without one, an autograd Function by its `apply`."""
    status, lines = answers_to(f"{KERNELS}:{target}", "--card", "sm_86", "--dtype", "float32")
    assert status == 0 and [x["constants"]["BLOCK"] for x in lines] == blocks
    assert all(x["dtypes"] == ["float32"] for x in lines)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("end_the_process", "a worker process died: killed by SIGABRT"), ("leave", "SystemExit: enough .*process\\)")],
)
def test_a_target_that_ends_its_process_has_an_answer(target: str, reason: str) -> None:
    status, (line,) = answers_to(f"{KERNELS}:{target}", "--card", "sm_90")
    assert status == 1 and line["kernel"] == "its caller" and re.fullmatch(reason, line["reason"])


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("GIVEN", [], "must name a function or a class; it is \\["),
        ("launch_nothing", [], "launches no kernel of Triton"),
        ("takes_too_little", [], r"takes \(x\): name a function of q, k, v, or one without parameters"),
        ("launch_products", ["--card", "sm_90,sm_87"], "--card='sm_87' must be one of sm_75"),
        ("launch_products", ["--dtype", "int8"], "--dtype='int8' must be one of"),
        ("launch_products", ["--head-dim", "0"], "--head-dim=0 must be"),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], target: str, options: list[str], message: str
) -> None:
    assert main([f"{KERNELS}:{target}", "--card", "sm_90", *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the error names the extra; a tool of NVIDIA is looked for where Triton looks for it."""
    nvdisasm = vars(type(triton.knobs.nvidia))["nvdisasm"]
    with monkeypatch.context() as patches:
        patches.delenv("TRITON_NVDISASM_PATH", raising=False)
        patches.setattr(nvdisasm, "default_path", "/nowhere")
        with pytest.raises(ValueError, match="no nvdisasm, which its wheels .* by TRITON_NVDISASM_PATH"):
            binary.tool("nvdisasm")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main([f"{KERNELS}:launch_products"]) == 2
    assert commands.with_extra("triton") in capsys.readouterr().err


def test_a_row_of_ours_launches_all_tiles_that_it_would_time() -> None:
    """A row that refuses a card gets an answer with the reason, and is no error of the command."""
    options = "--head-dim", "32", "--length", "256", "--dtype", "bfloat16", "--forward"
    status, (refused, *lines) = answers_to("flash_triton", "--card", "sm_75,sm_86", *options)
    assert status == 1 and refused["kernel"] == "its caller" and "ValueError" in refused["reason"]
    assert {(x["card"], x["kernel"], x["constants"]["D"]) for x in lines} == {("sm_86", "_fwd_kernel", 32)}
    assert len({str(x["constants"]) for x in lines}) > 1
    assert all(x["spills"] == 0 and x["tensor_cores"] and x["reason"] is None for x in lines)


@given(
    card=st.sampled_from([*CARDS.values()]),
    registers=st.integers(16, 255),
    shared=st.integers(0, 256 * KIB),
    warps=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_the_blocks_of_a_multiprocessor_fit_it(card: cards.Card, registers: int, shared: int, warps: int) -> None:
    held = card.held(registers, shared, warps)
    assert held >= 0 and (shared <= card.block_bytes or held == 0)
    assert held * warps * card.warp <= card.threads and held * shared <= card.shared_bytes
    if card.is_nvidia:
        assert held * warps * 32 * registers <= 2**16
    assert card.held(registers, shared, 2 * warps) <= held  # more of anything never leaves room for more blocks
    assert card.held(min(255, registers + 8), shared, warps) <= held


@pytest.mark.parametrize(  # numbers of NVIDIA's occupancy calculator
    ("arch", "registers", "shared", "warps", "blocks"),
    [
        ("sm_80", 128, 0, 4, 4),
        ("sm_86", 255, 48 * KIB, 4, 2),
        ("sm_90", 168, 64 * KIB, 4, 3),
        ("sm_90", 32, 1 * KIB, 4, 16),
        ("sm_75", 64, 32 * KIB, 4, 2),
    ],
)
def test_known_numbers_of_blocks(arch: str, registers: int, shared: int, warps: int, blocks: int) -> None:
    assert CARDS[arch].held(registers, shared, warps) == blocks


def test_a_compiler_that_ends_its_process_fails_one_kernel_alone() -> None:
    """LLVM aborts on instructions of another card. An exception that the target raises is the last answer."""
    status, (ended, behind, caller) = answers_to(f"{KERNELS}:launch_what_ends_the_compiler", "--card", "sm_86")
    assert status == 1 and ended["reason"] == "its compiler ends: LLVM ERROR: Cannot select: intrinsic"
    assert behind["kernel"] == "double" and behind["reason"] is None
    assert caller["kernel"] == "its caller"
    assert re.fullmatch(
        r"raises RuntimeError: no such card \(.*kernels_for_cards.py, line \d+: raise .*\)", caller["reason"]
    )
