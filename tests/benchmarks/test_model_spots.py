"""Timed calls of whole models are judged at a few places, called spots (`benchmarks/model/spots.py`).

The judge's reference must be right, honest models must be within their budget (the error that is allowed: an error
ratio of 1), and a row that is right only while it is checked must be refused. A new cheat is a function in CHEATS.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_model import Model
from benchmarks.model import spots
from benchmarks.model.cases import ModelTest
from benchmarks.model.rig import Rig
from benchmarks.model.spots import EMBEDDINGS, HEAD, Reference
from benchmarks.models import LLAMA, arithmetic, ratio_by_group
from lmsys.extremes import model as extremes
from lmsys.measure.step import Failed, Kept
from lmsys.model.loss import linear_cross_entropy
from lmsys.testing import SPOT_TIMES
from lmsys.training.optimizer import AdamW
from tests.support.cheats import half_of_the_queries, honest, looks_for_the_clock_in_the_backward, timed
from tests.support.harness import cases_of, results
from tests.support.variants import few_by_default

TINY = {"size": ("tiny",), "context": (32,), "batch": (2,), "compile": ("eager",)}
needs_llama = pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))
ROWS = [pytest.param("auto"), pytest.param("llama", marks=needs_llama)]


def cases(**values: Any) -> list[ModelTest]:
    return cases_of(Model(), **(TINY | {"attention": ("vectorized",), "precision": ("fp32",)} | values))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes limits so small that references run a part of a batch, and attention in blocks of a few query rows."""
    monkeypatch.setitem(spots.MOST_WORK, "cpu", 0)
    monkeypatch.setitem(spots.BLOCK_SCORES, "cpu", 5 * 4 * 32)  # five query rows of 4 heads and 32 keys


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("row", ROWS)
def test_the_reference_is_the_function_that_is_tested(row: str) -> None:
    (case,) = cases(attention=(row,), mode=("step",))
    rig = Rig(case, seed=1)
    # The row's own model in float64, with equal weights: a peer is compared with its own function, not with ours.
    model, data = copy.deepcopy(rig.model(case)).double(), rig.data
    # The peer's rotary embedding pairs other rows of the projections. `meant` reorders a weight of the peer, so that
    # our model computes the same function with it.
    meant = rig.model(case).meant if case.peer else lambda name, weight: weight
    reference = Reference(rig.base, "fp32", exact=True, meant=meant)
    with torch.no_grad():
        logits = model(data.tokens)
    for sequence in range(len(data.tokens)):
        positions = [0, 7, 30]
        states, of_head = reference.outputs(data.tokens[sequence], positions).values()
        torch.testing.assert_close(of_head, logits[sequence, positions])
        torch.testing.assert_close(states @ rig.base.lm_head.weight.double().mT, of_head)
    loss = model.loss(data.tokens, data.targets)
    names = ["layers.1.attn.q_proj.weight", "layers.0.attn.k_proj.weight", "layers.1.ffn.w2.weight", HEAD]
    gradients = reference.gradients(data, range(len(data.tokens)), names)
    loss.backward()
    of_model = dict(model.named_parameters())
    theirs = {ours: name for name, ours in model.names.items()} if case.peer else {}
    for name, gradient in gradients.items():
        right = of_model[f"wrapped.{theirs[name]}" if case.peer else name].grad
        torch.testing.assert_close(gradient, right, msg=name)
    if not case.peer:
        losses = reference.losses(model.hidden(data.tokens).detach(), data.targets)
        torch.testing.assert_close(losses.mean(), loss.detach())


def judged(rig: Rig, case: ModelTest, draw: int, key: int) -> dict[str, float]:
    """The error ratios of a call on the inputs of `draw`, at the places that `key` chooses."""
    step = rig.step_of(case)
    step.before()
    step.redraw(draw)
    parts = step.keep(step.run(step.prepare()), key)
    assert parts is not None
    rig.draws.fill(draw)
    return dict(rig.judge(case, Kept(index=0, draw=draw, key=key, result=parts)))


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("row", ROWS)
def test_where_sequences_are_many_few_are_run_and_a_call_is_judged_by_those(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[int] = []  # how many sequences each call of `gradients(data, sequences, names)` runs
    gradients = Reference.gradients
    monkeypatch.setattr(Reference, "gradients", lambda self, *x: run.append(len(x[1])) or gradients(self, *x))
    for case in cases(attention=(row,), batch=(5,)):
        rig = Rig(case, seed=2)
        ratios = judged(rig, case, draw=3, key=4)
        assert ratios and max(ratios.values()) <= 1, ratios
        assert (EMBEDDINGS in ratios) == (case.mode not in spots.OUTPUTS) and HEAD not in ratios
    assert run and max(run) < 5


def test_a_single_row_of_an_extreme_kind_has_the_budget_of_all_of_them() -> None:
    """In one row of an extreme group plain PyTorch is exact by chance, and another implementation is not.

    That implementation is right if it is as far off in this row as plain PyTorch is in the others of the group.
    """
    torch.manual_seed(0)
    # Every fifth row (4, 9, ...) is in the extreme group 1, all others in the ordinary group 0.
    reference, groups = torch.randn(40, 16, dtype=torch.float64), torch.arange(40) % 5 // 4
    plain = reference + 0.2 * torch.randn_like(reference)
    lucky = 4
    plain[lucky] = reference[lucky]
    for off, rows, is_right in [(0.2, [lucky, 1], True), (0.2, [lucky], True), (3.0, [lucky, 1], False)]:
        result = reference[rows].clone()
        result[0] += off
        ratio = ratio_by_group(result, reference, plain, torch.bfloat16, groups, rows)
        assert (ratio <= 1) == is_right, (off, rows, ratio)
    alone = ratio_by_group(
        reference[[lucky]] + 0.2, reference[[lucky]], plain[[lucky]], torch.bfloat16, groups[[lucky]]
    )
    assert alone > 1, "the row by itself has too little"
    ordinary = ratio_by_group(reference[[1, 2]] + 3.0, reference, plain, torch.bfloat16, groups, [1, 2])
    assert ordinary > 1


def test_a_spot_has_the_budget_in_root_mean_square_that_the_policy_gives_to_spots() -> None:
    torch.manual_seed(0)
    reference = torch.randn(8, 16, dtype=torch.float64)
    error = 0.05  # of plain PyTorch; the result that is judged is `off` times as far off
    plain, groups = reference + error, torch.zeros(8, dtype=torch.int64)
    for off, times, is_right in [(2.5, 2.0, False), (2.5, SPOT_TIMES, True), (3.5, SPOT_TIMES, False)]:
        ratio = ratio_by_group(reference + off * error, reference, plain, torch.bfloat16, groups, times=times)
        assert (ratio <= 1) == is_right, (off, times, ratio)


@pytest.mark.parametrize("residual", ["wide", "narrow"])
def test_gates_that_one_rounding_decides_are_no_mistake(residual: str) -> None:
    """In this draw a row of w3 has gates that are nearly closed, and one token of eight makes its gradient.

    That gradient depends on how a single gate is rounded. Judged alone, the row was off by 2.3 times its budget in a
    narrow residual stream.
    """
    (case,) = cases(
        context=(8,), batch=(1,), precision=("bf16",), mode=("step",), attention=("sdpa_flash",), residual=(residual,)
    )
    with arithmetic("bf16"):
        ratios = judged(Rig(case, seed=0), case, draw=319260491928374056, key=650330669629967214)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_right_call_is_within_its_budget_whatever_is_looked_at(row: str, precision: str) -> None:
    looked_at: dict[str, set[str]] = {}
    for case in cases(attention=(row,), precision=(precision,), context=(16,)):
        with arithmetic(precision):
            rig = Rig(case, seed=0)
            for key in range(2):
                ratios = judged(rig, case, draw=key, key=key)
                assert max(ratios.values()) <= 1, (case.mode, ratios)
                looked_at.setdefault(case.mode, set()).update(ratios)
    states = {spots.LOGITS} if row == "llama" else {spots.STATES, spots.LOSS}
    assert looked_at["forward"] == {spots.LOGITS} and looked_at["train_forward"] == states
    for mode in ("backward", "optimizer", "step"):
        assert {EMBEDDINGS, HEAD} <= looked_at[mode] and sum("attn" in name for name in looked_at[mode]) >= 4
        assert any("exp_avg_sq" in name for name in looked_at[mode]) == (mode in spots.UPDATES)
        # 7.4e+19 is HUGE of `lmsys.extremes.model`, 2 ** 66: a gradient that the mode "optimizer" plants.
        assert any("where the gradient is 7.4e+19" in name for name in looked_at[mode]) == (mode == "optimizer")


# Rows that cheat while the clock runs; others, and `honest`, are those of tests/support/cheats.py.


def zeros(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return honest(q, k, v, **options) * (0 if timed() else 1)


def the_first_result(q: Tensor, k: Tensor, v: Tensor, known: dict[Any, Tensor] = {}, **options: Any) -> Tensor:  # noqa: B006
    """Returns the result of its first call, by dtype and with or without autograd, and right gradients."""
    o = honest(q, k, v, **options)
    first = known.setdefault((q.dtype, torch.is_grad_enabled()), o.detach()) if timed() else o
    return o + (first - o).detach()


CALLS = count()  # calls of `zeros_in_one_layer`: of the two layers of a tiny model, one gets every second call


def zeros_in_one_layer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return honest(q, k, v, **options) * (next(CALLS) % 2 if timed() else 1)


CHEATS = (zeros, half_of_the_queries, the_first_result, zeros_in_one_layer)


def the_first_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    known: dict[torch.dtype, Tensor] = {},  # noqa: B006
) -> Tensor:
    """Returns the loss of its first timed call in this dtype, with right gradients."""
    loss = linear_cross_entropy(hidden, weight, targets)
    return loss + (known.setdefault(hidden.dtype, loss) - loss).detach() if timed() else loss


class Idle(AdamW):
    """Makes a step while the clock runs only if it has made none before."""

    def step(self, closure: Any = None) -> Any:
        return None if timed() and len(self.state) else super().step(closure)


class Twice(AdamW):
    """Makes two steps in each call."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class OverflowsOnHuge(AdamW):
    """Squares gradients before it scales them, which is wrong only for gradients near 1e20."""

    only_timed = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"] if timed() or not self.only_timed else ():
            self.state[p]["exp_avg_sq"][p.grad.square().isinf()] = torch.inf


class OverflowsWhileTimed(OverflowsOnHuge):
    only_timed = True


TRAINED = ("train_forward", "backward", "optimizer", "step")
IN_ATTENTION = [
    *product(CHEATS, ("bf16", "fp32"), ("forward", *TRAINED)),
    *product([looks_for_the_clock_in_the_backward], ("bf16", "fp32"), TRAINED[1:]),
]
ATTENTION, LOSS = "lmsys.attention.vectorized.vectorized", "lmsys.model.transformer.linear_cross_entropy"
OPTIMIZER = "benchmarks.model.rig.optimizer.AdamW"
HUGE = r"exp_avg_sq of .* where the gradient is 7.4e\+19 "


@pytest.mark.parametrize(
    ("part", "wrong", "precision", "mode", "reason"),
    [
        *few_by_default([(ATTENTION, *way, "in timed call") for way in IN_ATTENTION], one_in=6),
        *((LOSS, the_first_loss, precision, "train_forward", "loss is") for precision in ("bf16", "fp32")),
        *((OPTIMIZER, wrong, "fp32", mode, "exp_avg") for wrong in (Idle, Twice) for mode in spots.UPDATES),
        *((OPTIMIZER, OverflowsOnHuge, "fp32", mode, f"{HUGE}.*before any timed call") for mode in spots.UPDATES),
        (OPTIMIZER, OverflowsWhileTimed, "fp32", "optimizer", f"in timed call .*{HUGE}"),
    ],
)
def test_a_part_that_is_wrong_in_timed_calls_is_refused(
    part: str, wrong: Any, precision: str, mode: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wrong` stands in the place of `part`: of a row of attention, of the loss, or of the optimizer."""
    monkeypatch.setattr(part, wrong)
    (record,) = results(Model(), cases(mode=(mode,), precision=(precision,)))
    assert record["outcome"] == "wrong" and re.search(reason, record["reason"]), record["reason"]
    assert "time_s" not in record


def test_planted_gradients_are_put_back_before_gradients_are_judged() -> None:
    """After an update on huge planted gradients, the gradients that the backward has made take their place again.

    They are those of the weights before the update, to the bit: gradients of moved weights would differ.
    """
    for precision in ("fp32", "fp16"):
        (case,) = cases(mode=("optimizer",), precision=(precision,))
        rig = Rig(case, seed=0)
        step = rig.step_of(case)
        step.redraw(3)
        watch = rig._update
        assert watch is not None
        rig.loss(case).backward()
        assert watch.parameter.grad is not None
        made = watch.parameter.grad / rig.scaler.get_scale()
        step.run(step.prepare())
        planted = watch.parameter.grad[watch.rows[:3]]
        values = torch.tensor(extremes.planted(held_by_torch=False))
        assert torch.equal(planted, values[:, None].expand_as(planted))
        step.keep(None, 5)
        assert torch.equal(watch.parameter.grad, made)


class Graph:
    """Replaces a CUDA graph. `stale`: it replays the gradients that it has recorded, whatever the tokens are."""

    def __init__(self, compute: Callable[[], None], parameters: Any, stale: bool):
        self.compute, self.parameters, self.stale = compute, list(parameters), stale
        self.known: list[Tensor] = []

    def record(self) -> None:
        self.compute()
        self.known = [p.grad.clone() for p in self.parameters]

    def __call__(self) -> None:
        if not self.stale:
            return self.compute()
        for p, gradient in zip(self.parameters, self.known, strict=True):
            p.grad = gradient


@pytest.mark.parametrize("stale", [False, True])
def test_a_graph_of_old_tokens_is_refused(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def graph_of(self: Rig, case: ModelTest) -> Graph:
        eager = replace(case, compile="eager")
        return Graph(lambda: self.loss(eager).backward(), self.base.parameters(), stale)

    monkeypatch.setattr(Rig, "graph_of", graph_of)
    (case,) = cases(mode=("step",), compile=("graphed",))
    rig = Rig(case, seed=0)
    step = rig.step_of(case)
    step.prepare()
    for draw in (5, 6):
        step.redraw(draw)
        kept = Kept(index=draw, draw=draw, key=7, result=step.keep(step.run(None), 7))
        assert (max(rig.judge(case, kept).values()) > 1) == stale
        rig.draws.fill(draw)


def test_gradients_that_are_no_tensors_of_their_own_are_refused() -> None:
    (case,) = cases(mode=("backward",))
    rig = Rig(case, seed=0)
    step = rig.step_of(case)
    step.run(step.prepare())
    weight = rig.base.get_parameter(EMBEDDINGS)
    weight.grad = None
    with pytest.raises(Failed, match="the gradient of token_embeddings.weight must be a plain"):
        step.keep(None, 1)
    weight.grad = torch.zeros(1, 1).expand_as(weight)
    with pytest.raises(Failed, match="must have memory for each element"):
        step.keep(None, 1)


def test_a_key_says_where_to_look_and_keys_look_everywhere() -> None:
    (case,) = cases(mode=("step",), batch=(3,))
    rig = Rig(case, seed=0)
    drawn, again = ([rig.spots.spot(key) for key in range(60)] for _ in range(2))
    assert drawn == again
    assert {spot.sequence for spot in drawn} == {0, 1, 2}
    assert {position for spot in drawn for position in spot.positions} == set(range(32))
    assert {name.split(".")[1] for spot in drawn for name in spot.rows if name != HEAD} == {"0", "1"}
    assert len({row for spot in drawn for row in spot.rows[HEAD]}) > 60  # of the head's rows
