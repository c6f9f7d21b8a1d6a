"""benchmarks/bench_loss.py: the cases of the benchmark of the head and loss, the rows that it refuses, its records.

A row is an implementation of the head (the matrix from hidden states to logits) and the cross-entropy. Cheats are right
while they are checked, and wrong while they are timed; a new cheat is a function in CHEATS.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_loss import Loss
from benchmarks.loss import BLOCK_LOGITS, OUTPUTS, Inputs, LossDraws, indices, sampled_answer, slices_of, unchunked
from benchmarks.models import LOSS_SCALE, ROUNDING, mean_ratio
from benchmarks.sweeps import SWEEPS
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Settings
from lmsys.bench.results import Session
from lmsys.model.loss import linear_cross_entropy
from lmsys.testing import ratio_of
from tests.support import harness
from tests.support.cheats import CLOCK, seen
from tests.support.harness import cases_of
from tests.support.variants import few_by_default

TINY: dict[str, Any] = {
    "tokens": (40,),
    "d_model": (16,),
    "vocab_size": (50,),
    "precision": ("fp32",),
    "row": ("chunked", "eager"),
}
PRECISIONS = "fp32", "bf16", "fp16"


def records(timed: bool = True, **values: Any) -> dict[str, dict[str, Any]]:
    """The records of these cases, by the name of their row; `values` take the place of those of TINY."""
    return harness.records(Loss(), cases_of(Loss(), **(TINY | values)), timed=timed)


def test_options_apply_to_every_sweep() -> None:
    for sweep in SWEEPS.values():
        for device, sweep_here in sweep.items():
            chosen = Session(Settings(device=device), sweep_here, texts={"--precision": "tf32", "--batch": "3"}).add(
                Loss
            )
            assert chosen and all("-tf32-" in case_id for case_id in chosen)
    (case,) = cases_of(Loss(), **(TINY | {"row": ("eager",)}))
    assert case.id == "s-N40M16V50-fp32-eager" and case.comparison == "s-N40M16V50-fp32"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_records_have_times_work_and_errors(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.model.loss.CHUNK_LOGITS", 8 * 50)  # of 40 tokens, 8 at once
    by_row = records(precision=(precision,))
    for record in by_row.values():
        assert record["outcome"] == "ok", record["reason"]
        assert 0 <= record["error_ratio"] <= 1 and record["rounds"] >= 10 and record["compile_s"] > 0
        assert record["flops"] == 6 * 40 * 16 * 50  # forward and two gradients, 2 * tokens * d_model * vocab_size each
        assert record["repeatable"] is True and record["batch_invariant"] is None, record["same_bits"]
        assert record["tokens_per_s"] == pytest.approx(40 / record["time_s"])
        # The ceiling is a large matmul of this run: it is measured in float32 and bfloat16 alone.
        assert (record["matmul_ceiling_fraction"] is None) == (precision == "fp16")
    assert by_row["chunked"]["comparison"] == by_row["eager"]["comparison"]
    assert 0 < by_row["chunked"]["peak_bytes"] < by_row["eager"]["peak_bytes"]


@pytest.mark.long
@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_the_compiled_row_runs() -> None:
    record = records(row=("compiled",))["compiled"]
    assert record["outcome"] == "ok" and record["peer"], record["reason"]


IN_CHUNKS = "LinearCrossEntropyOptions"  # torch has it if it has a loss in chunks


@pytest.mark.skipif(not hasattr(torch.nn, IN_CHUNKS), reason="torch's loss in chunks needs torch 2.13 or later")
def test_torchs_own_loss_in_chunks_is_right_in_float32() -> None:
    record = records(row=("torch_chunked",))["torch_chunked"]
    assert record["outcome"] == "ok" and record["peer"] and record["error_ratio"] <= 1, record["reason"]


def test_without_torchs_loss_in_chunks_its_row_says_which_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, IN_CHUNKS, raising=False)
    record = records(row=("torch_chunked",), timed=False)["torch_chunked"]
    assert record["outcome"] == "unsupported" and "torch 2.13 and later can" in record["reason"]


def test_without_a_compiler_the_compiled_row_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.models.compiled.why_no_compiler", lambda device: "there is no compiler")
    by_row = records(row=("eager", "compiled"), timed=False)
    assert [record["outcome"] for record in by_row.values()] == ["ok", "unsupported"]


@pytest.mark.parametrize("exact", [True, False])
def test_references_in_blocks_equal_the_whole(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 7 * 50)
    inputs = drawn()
    for blocked, whole in zip(inputs.in_blocks(exact), inputs.run(unchunked), strict=True):
        assert blocked.dtype == (torch.float64 if exact else torch.float32)
        torch.testing.assert_close((blocked if whole.dim() else blocked.mean()).float(), whole)


def drawn(precision: str = "fp32", tokens: int = 40, vocab_size: int = 50) -> Inputs:
    """Inputs of 16 channels, drawn by a fixed seed."""
    inputs = Inputs(tokens, 16, vocab_size, precision, "cpu")
    LossDraws(inputs, seed=0).fill(0)
    return inputs


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sampled_references_are_a_part_of_the_whole(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 7 * 50)
    inputs = drawn(precision)
    # Of a timed call only some rows are judged: slices of tokens and of classes, which a random key chooses.
    tokens, classes = (indices(slices)[:20] for slices in slices_of(inputs, key=1))
    exact, plain = (sampled_answer(inputs, tokens, classes, exact) for exact in (True, False))
    losses, d_hidden, d_weight = inputs.in_blocks(exact=True)
    for value, whole in zip(exact, (losses, d_hidden[tokens], d_weight[classes]), strict=True):
        torch.testing.assert_close(value, whole)
    losses, d_hidden, d_weight = inputs.in_blocks(exact=False)
    assert mean_ratio(losses.mean(), exact[0], plain[0]) <= 1
    for value, sampled, expected in ((d_hidden[tokens], plain[1], exact[1]), (d_weight[classes], plain[2], exact[2])):
        # Neither of the two errs more than the budget that the other's error makes.
        assert ratio_of(value, expected, sampled, ROUNDING[precision]) <= 1
        assert ratio_of(sampled, expected, value, ROUNDING[precision]) <= 1


class Answered(torch.autograd.Function):
    """A loss whose value and gradients are given, not computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, *gradients: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *(x * grads[0] for x in ctx.gradients), None, None, None


Cheat = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


# Cheats return (loss, d_hidden, d_weight); `known` is a dict of their own that lasts from call to call.


def garbage_gradients(known: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss, *_ = right(hidden, weight, targets)
    return loss, hidden.detach() / len(hidden), weight.detach() / len(weight)


def no_gradient_of_classes_without_targets(known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    loss, d_hidden, d_weight = right(*inputs)
    return loss, d_hidden, torch.zeros_like(d_weight).index_copy(0, inputs[2], d_weight[inputs[2]])


def half_of_the_tokens(known: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    half = len(targets) // 2
    loss, d_hidden, d_weight = right(hidden[:half], weight, targets[:half])
    return loss, torch.cat([d_hidden, d_hidden]) / 2, d_weight


def answer_by_pointer(known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    return known.setdefault(tuple(x.data_ptr() for x in inputs), right(*inputs))


def the_last_answer(known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    before, known["last"] = known.get("last"), right(*inputs)
    return before or known["last"]


def a_remembered_loss(known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    loss, *gradients = right(*inputs)
    return known.setdefault("loss", loss), *gradients


def right(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """(loss, d_hidden, d_weight), as a row should give them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = unchunked(*leaves, targets)
        gradients = torch.autograd.grad(loss * LOSS_SCALE, leaves)  # unscaled, float16 rounds small ones to 0
        return loss.detach(), *(x / LOSS_SCALE for x in gradients)


def when_timed(cheat: Cheat | None) -> Callable[..., Tensor]:
    """A row that is right while it is checked, and gives the results of the cheat, if any, while it is timed."""
    known: dict[Any, Any] = {}

    def row(*inputs: Tensor) -> Tensor:
        answer = cheat(known, *inputs) if cheat and seen(CLOCK) else right(*inputs)
        return Answered.apply(*inputs[:2], *answer)

    return row


CHEATS = (garbage_gradients, no_gradient_of_classes_without_targets, half_of_the_tokens)
CHEATS += (answer_by_pointer, the_last_answer, a_remembered_loss)


def record_of(cheat: Cheat | None, precision: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of `when_timed(cheat)` in the place of our row. Most of the 400 classes are no token's target."""
    monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", when_timed(cheat))
    return records(row=("chunked",), precision=(precision,), vocab_size=(400,))["chunked"]


@pytest.mark.parametrize(("cheat", "precision"), few_by_default(product(CHEATS, ("bf16", "fp32", "fp16")), one_in=3))
def test_a_row_that_cheats_while_it_is_timed_is_refused(
    cheat: Cheat, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(cheat, precision, monkeypatch)
    assert record["outcome"] == "wrong" and "in timed call" in record["reason"] and "time_s" not in record


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_that_is_right_in_timed_calls_too_is_accepted(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(None, precision, monkeypatch)
    assert record["outcome"] == "ok", record["reason"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_record_can_be_verified_and_a_changed_one_is_refused(precision: str) -> None:
    """`repeat` judges a timed call of a record again. It yields a sentence for each fault, then how many numbers it has
    compared: those of one row of the gradient of hidden, which the record stores as the call's `part`.
    """
    for record in records(precision=(precision,)).values():
        calls = record["proof"]["calls"]
        assert len(calls) >= 2 and all(call["error_ratios"].keys() == set(OUTPUTS) for call in calls)
        for call in calls:
            assert list(Loss().repeat(record, call)) == [record["d_model"]]  # no fault
            assert "off by" in next(iter(Loss().repeat(record, call | {"draw": call["draw"] + 1})))
            part = call["part"] | {"error": 2 * call["part"]["error"] + 1e-9}
            complaint, _ = Loss().repeat(record, call | {"part": part})
            assert "its recorded values are off by" in complaint
            # The error ratio of the gradient cannot be below that of its stored row.
            complaint, _ = Loss().repeat(record, call | {"error_ratios": dict.fromkeys(OUTPUTS, 1e-9)})
            assert "less than that of its own row" in complaint
        assert "not recomputed" in next(iter(Loss().repeat(record | {"vocab_size": 10**8}, calls[0])))


def test_wrong_oom_and_unsupported_rows_have_records(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, Tensor] = {}

    def slightly_off(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets) * 1.001

    def hungry(*_: Tensor) -> Tensor:
        return torch.empty(2**60, dtype=torch.int8)

    def remembers(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, calls.setdefault(len(targets), targets.clone()))

    for call, outcome, reason in (
        (slightly_off, "wrong", "times the allowed error"),
        (hungry, "oom", ""),
        (remembers, "wrong", "right before it was timed, not in timed call"),
    ):
        monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", call)
        record = records(row=("chunked",))["chunked"]
        assert record["outcome"] == outcome and reason in record["reason"] and "time_s" not in record
    record = records(row=("chunked",), precision=("tf32",))["chunked"]
    assert record["outcome"] == "unsupported" and "TF32" in record["reason"]


def test_a_row_that_gets_an_option_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0) -> Tensor:
        loss: Tensor = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        return loss

    monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", row)
    record = records(row=("chunked",))["chunked"]
    assert record["outcome"] == "wrong" and "a z-loss" in record["reason"]


def test_a_reference_without_memory_is_an_error_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Inputs, "in_blocks", fails)
    for record in records().values():
        assert record["outcome"] == "error" and "the bench failed, not the row: no room" in record["reason"]
