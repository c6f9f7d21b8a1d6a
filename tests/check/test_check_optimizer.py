"""`lmsys check` on optimizers (lmsys/check/optimizer*.py): their algorithms, forms, claims and extreme gradients.

test_mistakes.py has the optimizers of tests/museum/optimizer.py. A few classes below make a mistake in another form of
AdamW. A "form" is a variant of the algorithm that counts as right, such as decay after the step. A
"claim" is what an optimizer says that it is: its algorithm and its settings. A "question" is one test of the check.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.check.kinds import kind_of
from lmsys.check.optimizer import mistakes, questions, remark
from lmsys.check.optimizer_formula import FORMS, Form, Formula, Trace
from lmsys.check.optimizer_runs import cases_of, claim_of, run_of, trace_of
from lmsys.check.question import Fault, Options, Question
from lmsys.extremes.model import HUGE, LARGE, SIZES, TINY, extreme, plant, planted
from lmsys.registry import Entry
from tests.museum import optimizer as museum
from tests.museum.families import exhibits


def answers(entry: Entry) -> Iterator[tuple[Question, Fault | None]]:
    """Each question that an optimizer is asked, with the fault that it finds, or None. Skipped ones are left out."""
    return ((question, question.judge()) for question in questions(entry, Options(seed=1)) if question.reason is None)


def test_half_of_the_extreme_questions_are_about_a_first_step_and_one_fault_shows_in_them_alone() -> None:
    (fault,) = (fault for fault in exhibits("optimizer") if fault.name == "HalfEpsAdam")
    judged = list(answers(fault.entry))
    assert sum(question.extreme for question, _ in judged) == 2 * len(SIZES)  # in a first step, and after others
    assert {question.extreme for question, answer in judged if answer is not None} == {True}


@pytest.mark.parametrize("algorithm", ["AdamW", "Adam", "SGD"])
def test_the_formula_is_that_of_torch(algorithm: str) -> None:
    claim = claim_of(getattr(torch.optim, algorithm))
    for case in cases_of(claim):
        if case.dtype == torch.float32 and case.why_not(claim) is None:
            run = run_of(case, seed=3)
            results = trace_of(claim.plain, claim, run)
            formula = Formula(FORMS[algorithm][0].rule)  # the first form is torch's
            for parameters, expected in zip(results, formula.trace(run), strict=True):
                for p, right in zip(parameters, expected, strict=True):
                    torch.testing.assert_close(p.double(), right, rtol=2e-5, atol=2e-6, msg=case.about)


@pytest.mark.parametrize(("algorithm", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_every_mistake_shows_in_some_run(algorithm: str, form: Form) -> None:
    claim = claim_of(getattr(torch.optim, algorithm))
    able = [case for case in cases_of(claim) if case.why_not(claim) is None]
    runs = [run_of(case, seed=0) for case in able]
    rights = [Formula(form.rule).trace(run) for run in runs]
    for words, formula in mistakes(algorithm, form.rule).items():
        shown = (values(formula.trace(run)) != values(right) for run, right in zip(runs, rights, strict=True))
        assert any(shown), words


def values(trace: Trace) -> list[list[float]]:
    """The elements of each parameter after each step, as lists that `!=` compares."""
    return [p.flatten().tolist() for parameters in trace for p in parameters]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("HandoutAdamW", "AdamW in the form of CS336's handout: decay after the step, eps before bias correction"),
        ("FixedEpsAdamW", "AdamW in the form of CS336's handout"),
        ("EfficientAdamW", "AdamW with eps before bias correction, as in Kingma & Ba's"),
        ("EfficientAdam", "Adam with eps before bias correction"),
        ("LateDecayAdamW", "AdamW with decay after the step, as in CS336's handout; here the update decays"),
        ("TextbookAdam", "Adam in the form of torch.optim.Adam"),
        ("PlainAdamW", "AdamW in the form of torch.optim.AdamW"),
        ("Sgd", "SGD in the form of torch.optim.SGD"),
    ],
)
def test_the_remark_has_the_form(name: str, form: str) -> None:
    assert remark(Entry(name, f"tests.museum.optimizer:{name}"), Options()).startswith(form)


# Each of these makes one mistake; test_a_mistake_in_another_form_is_named says which.
class InRootAdamW(museum.EfficientAdamW):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m / c1) / ((v + eps) / c2).sqrt()


class ForgetsLateAdamW(museum.HandoutAdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class NeverCountsAdamW(museum.HandoutAdamW):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["t"] = 1


class CountsTogetherAdamW(museum.CountsTogetherAdam, museum.EfficientAdamW):
    coupled = False


class FirstEpsAdamW(museum.PlainAdamW):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return super().update(m, v, c1, c2, self.param_groups[0]["eps"])


class TwoFormsAdamW(museum.PlainAdamW):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        if eps > 0.1:
            return m * (c2**0.5 / c1) / (v.sqrt() + eps)
        return super().update(m, v, c1, c2, eps)


class OnlyMinimizesAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        asked = [group["maximize"] for group in self.param_groups]
        for group in self.param_groups:
            group["maximize"] = False
        super().step(closure)
        for group, maximize in zip(self.param_groups, asked, strict=True):
            group["maximize"] = maximize


@pytest.mark.parametrize(
    ("faulty", "mistake"),
    [
        (InRootAdamW, "eps is added inside of the root, before bias correction"),
        (ForgetsLateAdamW, "state is lost by load_state_dict"),
        (NeverCountsAdamW, "steps are not counted"),
        (CountsTogetherAdamW, "one step counter serves all"),
        (FirstEpsAdamW, "eps of the first param group is used for all"),
        (OnlyMinimizesAdamW, "maximize is ignored"),
        (TwoFormsAdamW, "form of torch.optim.AdamW, these are those of AdamW with eps before bias correction"),
    ],
)
def test_a_mistake_in_another_form_is_named(faulty: type, mistake: str) -> None:
    wrong = next(answer for _, answer in answers(Entry("it", f"{__name__}:{faulty.__name__}")) if answer is not None)
    assert wrong.mistake is not None and mistake in wrong.mistake, wrong.text


class FlattensSgd(museum.Sgd):
    """It steps a flat view of each parameter; of one that is transposed in memory, `reshape` makes a copy."""

    def step(self, closure: Any = None) -> None:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            new = p.detach().clone()
            p.data.copy_(old)
            p.data.reshape(-1).copy_(new.reshape(-1))


# torch's fused kernel for CPUs takes any memory for contiguous (torch 2.13).
FusedAdamW = museum.with_settings("FusedAdamW", torch.optim.AdamW, fused=True)


class RefusesTransposedSgd(museum.Sgd):
    def step(self, closure: Any = None) -> None:
        assert all(p.is_contiguous() for group in self.param_groups for p in group["params"])
        super().step(closure)


@pytest.mark.parametrize(
    ("row", "first"),
    [
        (FlattensSgd, ["weights transposed in memory, float32"]),
        (FusedAdamW, ["weights that are every other column of a tensor, float32"]),
        (RefusesTransposedSgd, []),
    ],
)
def test_weights_anywhere_may_be_refused_but_their_steps_not_lost(row: type, first: list[str]) -> None:
    if row is FusedAdamW and torch.cuda.is_available():
        first = []  # torch's kernel for GPUs refuses such weights
    wrong = [(question.about, fault) for question, fault in answers(Entry("it", f"{__name__}:{row.__name__}")) if fault]
    assert [about for about, _ in wrong][:1] == first
    assert all("memory beside a weight" in str(fault.mistake) for _, fault in wrong[:1])


def test_the_algorithm_is_told_by_base_class_and_name() -> None:
    class MyAdamW(torch.optim.AdamW): ...

    class Mine(torch.optim.Adam):
        def __init__(self, params: object, lr: float = 0.1, **more: object): ...

    class DerivesFromAdamW(torch.optim.AdamW): ...

    DerivesFromAdamW.__name__ = "Mine"

    class AdamPlain(torch.optim.AdamW): ...

    class CustomSGD(torch.optim.Optimizer):
        def __init__(self, params: object, lr: float = 0.1): ...

    assert claim_of(MyAdamW).algorithm == "AdamW" and "AdamW is in its name" in str(claim_of(MyAdamW))
    assert claim_of(DerivesFromAdamW).algorithm == "AdamW" and claim_of(AdamPlain).algorithm == "Adam"
    assert claim_of(Mine).algorithm == "Adam" and {"lr", "betas", "eps", "weight_decay"} <= claim_of(Mine).settings
    assert claim_of(museum.Masters).masters == {"master_weights": True} and claim_of(MyAdamW).masters is None
    assert claim_of(museum.Sgd).algorithm == claim_of(CustomSGD).algorithm == "SGD" and kind_of(MyAdamW) == "optimizer"


class FancyLion(torch.optim.Adam): ...


class Derived(FancyLion): ...


class TinyMuon(torch.optim.SGD): ...


class GaLoreAdamW(torch.optim.AdamW): ...


class FastAdamP(torch.optim.Adam): ...


class SGDP(torch.optim.SGD): ...


class AdEMAMix(torch.optim.Optimizer):
    def __init__(self, params: object, lr: float = 0.1, betas: Any = (0.9, 0.999, 0.9999)): ...


class Tiger(torch.optim.Optimizer):
    def __init__(self, params: object, lr: float = 0.1, momentum: float = 0.9): ...


class BareAdam(torch.optim.Optimizer):
    def __init__(self, params: object, lr: float = 0.1): ...


def make_adamw(params: Any, lr: float = 0.1, betas: Any = (0.9, 0.999)) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=betas)


def test_a_function_that_makes_an_optimizer_is_not_taken_for_attention() -> None:
    with pytest.raises(ValueError, match="it cannot be told what 'make_adamw' is: say --kind"):
        kind_of(make_adamw)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (make_adamw, "make_adamw .* is no class: name the class of the optimizer"),
        (FancyLion, "FancyLion looks like Lion"),
        (Derived, "Derived looks like Lion"),
        (TinyMuon, "TinyMuon looks like Muon"),
        (GaLoreAdamW, "GaLoreAdamW looks like GaLore"),
        (torch.optim.RMSprop, "RMSprop looks like RMSprop"),
        (FastAdamP, "FastAdamP looks like AdamP, for"),
        (SGDP, "SGDP looks like SGDP"),
        (torch.optim.ASGD, "ASGD looks like ASGD"),
        (AdEMAMix, "no formula is known for AdEMAMix, which takes lr, betas: .* put its algorithm into its name"),
        (Tiger, "no formula is known for Tiger, which takes lr, momentum: "),
        (BareAdam, "no formula is known for BareAdam, which takes lr: "),
    ],
)
def test_an_optimizer_of_another_algorithm_is_not_judged(row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(questions(Entry(row.__name__, f"{row.__module__}:{row.__name__}"), Options()))


def test_settings_that_it_does_not_take_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyRateSGD(torch.optim.SGD):
        def __init__(self, params: object, lr: float = 0.1):
            super().__init__(params, lr=lr)  # type: ignore[arg-type]

    monkeypatch.setattr(museum, "OnlyRateSGD", OnlyRateSGD, raising=False)
    entry = Entry("OnlyRateSGD", "tests.museum.optimizer:OnlyRateSGD")
    reasons = {question.reason for question in questions(entry, Options())}
    assert {"it takes no weight_decay", "it takes no momentum, nesterov", None} <= reasons
    assert all(answer is None for _, answer in answers(entry))


def test_extreme_gradients_are_exact() -> None:
    drawn = torch.randn(8, 3)
    for size, factor in (("zero", 0.0), ("tiny", TINY), ("huge", HUGE)):
        assert torch.equal(extreme(drawn, size, held_by_torch=False).double(), drawn.double() * factor)
    assert torch.equal(extreme(drawn, "huge", held_by_torch=True), drawn * LARGE)
    mixed = extreme(drawn, "mixed", held_by_torch=False)
    assert (
        mixed[::4].eq(0).all()
        and torch.equal(mixed[2::4], drawn[2::4] * HUGE)
        and torch.equal(mixed[3::4], drawn[3::4])
    )
    held = drawn.clone()  # three of its rows become zero, tiny and large
    plant(held, [4, 1, 6], planted(held_by_torch=True), scale=2.0)
    assert held[[4, 1, 6]].tolist() == [[0.0] * 3, [2 * TINY] * 3, [2 * LARGE] * 3]
    assert torch.equal(held[[0, 2, 3, 5, 7]], drawn[[0, 2, 3, 5, 7]])
