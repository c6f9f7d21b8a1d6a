"""Timed calls of whole models are judged at a few places, called spots (`benchmarks/model/spots.py`).

The judge's reference must be right, honest models must be within their budget (the error that is allowed: an error
ratio of 1), and a row that is right only while it is checked must be refused. A new cheat is a function in CHEATS,
which gets the right row and its inputs.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.axes import MODES
from benchmarks.bench_model import Model
from benchmarks.model import rig as rigs
from benchmarks.model import spots
from benchmarks.model.cases import ModelTest
from benchmarks.model.rig import Rig
from benchmarks.model.spots import EMBEDDINGS, HEAD, Reference
from benchmarks.models import LLAMA, arithmetic, ratio_by_group
from lmsys.attention.naive import naive
from lmsys.extremes import model as extremes
from lmsys.measure.step import Kept
from lmsys.model.loss import linear_cross_entropy
from lmsys.testing import SPOT_TIMES
from lmsys.training.optimizer import AdamW
from tests.support.cheats import CLOCK, seen
from tests.support.harness import cases_of, results
from tests.support.variants import few_by_default

TINY = {"size": ("tiny",), "context": (32,), "batch": (2,), "compile": ("eager",)}
needs_llama = pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))
ROWS = [pytest.param("auto"), pytest.param("llama", marks=needs_llama)]


def timed() -> bool:
    """True while the harness times the call."""
    return seen(CLOCK)


def cases(**values: Any) -> list[ModelTest]:
    return cases_of(Model(), **(TINY | {"attention": ("vectorized",), "precision": ("fp32",)} | values))


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes limits so small that references run a part of a batch, and attention in blocks of a few query rows."""
    monkeypatch.setitem(spots.MOST_WORK, "cpu", 0)
    monkeypatch.setitem(spots.BLOCK_SCORES, "cpu", 5 * 4 * 32)  # five query rows of 4 heads and 32 keys


def exact_model(rig: Rig, case: ModelTest) -> Any:
    """The row's own model in float64, with equal weights: a peer is compared with its own function, not with ours."""
    return copy.deepcopy(rig.model(case)).double()


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("row", ROWS)
def test_the_reference_is_the_function_that_is_tested(row: str) -> None:
    (case,) = cases(attention=(row,), mode=("step",))
    rig = Rig(case, seed=1)
    model, data = exact_model(rig, case), rig.data
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


Row = Callable[..., Tensor]


def zeros(right: Row, *x: Tensor) -> Tensor:
    return right(*x) * 0


class Garbage(torch.autograd.Function):
    """Attention with a right forward, and a backward that computes nothing."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> Tensor:
        ctx.save_for_backward(*x)
        return naive(*x, causal=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(x / 100 for x in ctx.saved_tensors)


def garbage_gradients(right: Row, *x: Tensor) -> Tensor:
    return Garbage.apply(*x)


def half_of_the_queries(right: Row, *x: Tensor) -> Tensor:
    o = right(*x)
    half = o.shape[2] // 2
    return torch.cat([o[:, :, :half], o[:, :, : o.shape[2] - half]], dim=2)


def the_first_result(right: Row, *x: Tensor, known: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    """Returns the result of its first call, by dtype and with or without autograd, and right gradients."""
    o = right(*x)
    return o + (known.setdefault((x[0].dtype, torch.is_grad_enabled()), o.detach()) - o).detach()


CALLS = [0]  # calls of `zeros_in_one_layer` so far: of the two layers of a tiny model, one gets every second call


def zeros_in_one_layer(right: Row, *x: Tensor) -> Tensor:
    CALLS[0] += 1
    return right(*x) * (CALLS[0] % 2)


CHEATS = (zeros, half_of_the_queries, the_first_result, zeros_in_one_layer)
TRAINED = ("train_forward", "backward", "optimizer", "step")
VARIANTS = [
    *product(CHEATS, ("bf16", "fp32"), ("forward", *TRAINED)),
    *product([garbage_gradients], ("bf16", "fp32"), TRAINED[1:]),
]


def record_of(**values: Any) -> dict[str, Any]:
    (result,) = results(Model(), cases(**values))
    return result.record


@pytest.fixture
def honest_when_checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A function put(cheat), which makes `vectorized` a row that cheats while the clock runs; None: an honest row."""

    def put(cheat: Any) -> None:
        def right(*x: Tensor) -> Tensor:
            return naive(*x, causal=True)

        def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
            return cheat(right, q, k, v) if cheat and timed() else right(q, k, v)

        monkeypatch.setattr("lmsys.attention.vectorized.vectorized", row)

    return put


@pytest.mark.parametrize(("cheat", "precision", "mode"), few_by_default(VARIANTS, one_in=6))
def test_an_attention_row_that_cheats_while_it_is_timed_is_refused(
    cheat: Any, precision: str, mode: str, honest_when_checked: Callable[[Any], None]
) -> None:
    honest_when_checked(cheat)
    record = record_of(mode=(mode,), precision=(precision,))
    assert record["outcome"] == "wrong" and "in timed call" in record["reason"] and "time_s" not in record


@pytest.mark.parametrize("mode", MODES)
def test_an_attention_row_that_does_not_cheat_is_timed(mode: str, honest_when_checked: Callable[[Any], None]) -> None:
    honest_when_checked(None)
    record = record_of(mode=(mode,))
    assert record["outcome"] == "ok", record["reason"]
    calls = record["proof"]["calls"]
    assert len(calls) >= 2 and max(max(call["error_ratios"].values()) for call in calls) <= record["error_ratio"] <= 1


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_loss_that_is_remembered_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Tensor] = []

    def remembers(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of its first timed call, with right gradients."""
        loss = linear_cross_entropy(hidden, weight, targets)
        if not timed():
            return loss
        known.append(loss.detach())
        return loss + (known[0] - loss).detach()

    monkeypatch.setattr("lmsys.model.transformer.linear_cross_entropy", remembers)
    record = record_of(mode=("train_forward",), precision=(precision,))
    assert record["outcome"] == "wrong" and "loss is" in record["reason"]


class Idle(AdamW):
    """Makes a step while the clock runs only if it has made none before."""

    def step(self, closure: Any = None) -> Any:
        return None if timed() and len(self.state) else super().step(closure)


class Twice(AdamW):
    """Makes two steps in each call."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [Idle, Twice])
@pytest.mark.parametrize("mode", spots.UPDATES)
def test_an_optimizer_that_steps_never_or_twice_is_refused(
    mode: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rigs.optimizer, "AdamW", optimizer)
    record = record_of(mode=(mode,))
    assert record["outcome"] == "wrong" and "exp_avg" in record["reason"]


class OverflowsOnHuge(AdamW):
    """Squares gradients before it scales them, which is wrong only for gradients near 1e20."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if self.overflows():
                self.state[p]["exp_avg_sq"][p.grad.square().isinf()] = torch.inf

    def overflows(self) -> bool:
        return True


class OverflowsWhileTimed(OverflowsOnHuge):
    def overflows(self) -> bool:
        return timed()


@pytest.mark.parametrize(("mode", "optimizer", "when"), [
    ("optimizer", OverflowsOnHuge, "before any timed call"),
    ("step", OverflowsOnHuge, "before any timed call"),
    ("optimizer", OverflowsWhileTimed, "in timed call"),
])  # fmt: skip
def test_an_update_that_overflows_on_huge_gradients_is_refused(
    mode: str, optimizer: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rigs.optimizer, "AdamW", optimizer)
    record = record_of(mode=(mode,))
    assert record["outcome"] == "wrong" and when in record["reason"], record["reason"]
    assert "exp_avg_sq of" in record["reason"] and "where the gradient is 7.4e+19" in record["reason"]


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
    with pytest.raises(ValueError, match="the gradient of token_embeddings.weight must be a plain"):
        step.keep(None, 1)
    weight.grad = torch.zeros(1, 1).expand_as(weight)
    with pytest.raises(ValueError, match="must have memory for each element"):
        step.keep(None, 1)


def spots_of(keys: range) -> Iterator[spots.Spot]:
    (case,) = cases(mode=("step",), batch=(3,))
    rig = Rig(case, seed=0)
    for key in keys:
        assert rig.spots.spot(key) == rig.spots.spot(key)
        yield rig.spots.spot(key)


def test_a_key_says_where_to_look_and_keys_look_everywhere() -> None:
    drawn = list(spots_of(range(60)))
    assert {spot.sequence for spot in drawn} == {0, 1, 2}
    assert {position for spot in drawn for position in spot.positions} == set(range(32))
    assert {name.split(".")[1] for spot in drawn for name in spot.rows if name != HEAD} == {"0", "1"}
    assert len({row for spot in drawn for row in spot.rows[HEAD]}) > 60  # of the head's rows
