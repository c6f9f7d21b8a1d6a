"""benchmarks/bench_loss.py: the cases of the benchmark of the head and loss, the rows that it refuses, its records.

A row is an implementation of the head (the matrix from hidden states to logits) and the cross-entropy. HONEST has
losses as people write them, which are right for any seed. WRONG has rows that are refused, some of which are wrong only
for extreme tokens, whose logits are far from 0. Cheats are right while they are checked, and wrong while they are
timed. A new row is a function there, or in CHEATS.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.bench_loss import Loss
from benchmarks.loss import (
    BLOCK_LOGITS,
    ERRORS,
    OUTPUTS,
    Inputs,
    LossDraws,
    _evidence,
    indices,
    odd_inputs,
    references,
    sampled_answer,
    slices_of,
    unchunked,
)
from benchmarks.models import LOSS_SCALE, ROUNDING, mean_ratio
from lmsys.attention.compiled import why_no_compiler
from lmsys.check.kinds import RIGHT, check
from lmsys.check.question import Options
from lmsys.draws import VERSION, Draws
from lmsys.extremes import BEFORE
from lmsys.model.functions import widened
from lmsys.model.loss import linear_cross_entropy
from lmsys.registry import Entry
from lmsys.testing import ratio_of
from tests.support import harness
from tests.support.cheats import timed
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


def test_a_case_has_its_sizes_and_its_row_in_its_name() -> None:
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
        errors = [record[name] for name in ERRORS]
        assert min(errors) >= 0 and 0 < max(errors) < (1e-4 if precision == "fp32" else 0.1)
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


def remembered_targets(known: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return right(hidden, weight, known.setdefault(len(targets), targets.clone()))


def an_overflow(known: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    _, *gradients = right(*inputs)
    return without_maximum(*inputs).detach(), *gradients


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
        answer = cheat(known, *inputs) if cheat and timed() else right(*inputs)
        return Answered.apply(*inputs[:2], *answer)

    row.__name__ = cheat.__name__ if cheat else "honest"  # in the test's id
    return row


CHEATS = (garbage_gradients, no_gradient_of_classes_without_targets, half_of_the_tokens)
CHEATS += (answer_by_pointer, the_last_answer, a_remembered_loss, remembered_targets, an_overflow)


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


def slightly_off(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets) * 1.001


def hungry(*_: Tensor) -> Tensor:
    return torch.empty(2**60, dtype=torch.int8)


def without_z_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0
) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, reduction=reduction)


def without_maximum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = widened(F.linear(hidden, weight))
    return (logits.exp().sum(dim=1).log() - logits.gather(1, targets[:, None])[:, 0]).mean()


def from_zero(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Takes 0 as the maximum if all logits are negative: the exponentials of logits far below 0 are then all 0."""
    logits = widened(F.linear(hidden, weight))
    top = logits.amax(dim=1, keepdim=True).clamp(min=0)
    return ((logits - top).exp().sum(dim=1).log() + (top - logits.gather(1, targets[:, None]))[:, 0]).mean()


EXTREME = without_maximum, from_zero
WRONG = [  # (row, precision, outcome, a part of the reason); "ok" is an honest row
    (slightly_off, "fp32", "wrong", "times the allowed error"),
    (without_z_loss, "fp32", "wrong", "a z-loss"),
    (hungry, "fp32", "oom", ""),
    (linear_cross_entropy, "tf32", "unsupported", "TF32"),
    *((row, precision, "wrong", "NaN or inf") for row, precision in product(EXTREME, PRECISIONS)),
    *((when_timed(None), precision, "ok", "") for precision in PRECISIONS),
]
WAYS = product(CHEATS, ("bf16", "fp32", "fp16"))
CHEATING = [(when_timed(cheat), precision, "wrong", "in timed call") for cheat, precision in WAYS]


@pytest.mark.parametrize(
    ("row", "precision", "outcome", "reason"), [*WRONG, *few_by_default(CHEATING, one_in=len(PRECISIONS))]
)
def test_only_right_rows_are_timed_and_others_say_why(
    row: Any, precision: str, outcome: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row takes the place of ours. Most of the 400 classes are no token's target."""
    monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", row)
    record = records(row=("chunked",), precision=(precision,), vocab_size=(400,))["chunked"]
    assert record["outcome"] == outcome and reason in str(record["reason"]), record["reason"]
    assert ("time_s" in record) == (outcome == "ok")


def test_records_of_draws_without_extremes_are_repeated_as_they_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LossDraws, "fill", Draws.fill)
        patch.setattr("lmsys.draws.VERSION", BEFORE)
        record = records(row=("chunked",))["chunked"]
    assert record["proof"]["generator"] == BEFORE and record["proof"]["calls"]
    later = record | {"proof": record["proof"] | {"generator": VERSION}}
    for call in record["proof"]["calls"]:
        assert list(Loss().repeat(record, call)) == [record["d_model"]]  # elements, and no sentence
        assert "off by" in next(iter(Loss().repeat(later, call)))


def test_extreme_tokens_are_looked_at_in_every_call_and_often_recorded() -> None:
    inputs = drawn(tokens=600, vocab_size=400)
    of_tokens, of_classes = inputs.groups
    rows = []
    for draw in range(20):
        tokens, classes = (indices(some) for some in slices_of(inputs, key=draw))
        assert len(set(tokens)) == len(tokens) >= 56 and len(set(classes)) == 64
        assert of_tokens[tokens].sum() and of_classes[classes].sum()
        zeros = torch.zeros(len(tokens), 16)
        rows.append(of_tokens[tokens][_evidence(draw, of_tokens[tokens], zeros, zeros.double())["row"]].item())
    assert 5 < sum(rows) < 15


def by_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def by_log_sum_exp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return (torch.logsumexp(logits, dim=-1) - logits.gather(1, targets[:, None])[:, 0]).mean()


def by_maximum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The log-softmax by hand, with the largest logit subtracted before the exponential."""
    logits = F.linear(hidden, weight).float()
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return F.nll_loss(shifted - shifted.exp().sum(dim=-1, keepdim=True).log(), targets)


HONEST = by_cross_entropy, by_log_sum_exp, by_maximum


@pytest.mark.parametrize("loss", HONEST)
@given(seed=st.integers(0, 2**31), precision=st.sampled_from(("fp32", "bf16", "fp16")))
@settings(max_examples=20)
def test_an_honest_loss_is_right_in_the_benchmark(loss: Any, seed: int, precision: str) -> None:
    usual = Inputs(200, 16, 300, precision, "cpu")
    LossDraws(usual, seed).fill(seed)
    for inputs in (usual, odd_inputs(precision, "cpu", seed)):
        inputs.exact, inputs.plain = references(inputs.in_blocks)
        ratios = inputs.check(inputs.run(loss))
        assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("loss", HONEST)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(("float32", "bfloat16", "float16")))
@settings(max_examples=5)
def test_an_honest_loss_is_right_in_the_check(loss: Any, seed: int, dtype: str) -> None:
    assert check(Entry("loss", f"{__name__}:{loss.__name__}"), Options(seed=seed, dtypes=(dtype,)), "loss") == RIGHT
