"""`lmsys check` on losses, norms, rotary embeddings and gated units: how a function is called, and mistakes named.

Covers lmsys/check/{loss,norm,swiglu,formulas,signature}.py. The functions at the top are losses of different
signatures; those of OPTION_FAULTS are wrong in one option. `faults` checks one of them. A question is a case on which
the check compares a function with the exact result. The published faults in tests/museum are checked in
test_mistakes.py.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys.check import norm, rotary
from lmsys.check.formulas import RESULT, Problem, explain, outputs_of
from lmsys.check.kinds import KINDS, RIGHT, WRONG, check, find, kind_of
from lmsys.check.loss import CASES, ROLES, faults_of_options, questions, roles_of
from lmsys.check.question import Options
from lmsys.check.swiglu import mistakes, right
from lmsys.config import IGNORED
from lmsys.registry import Entry
from lmsys.signature import called


# `linear_first`, `of_logits`, `of_seven` and `Several` are right; `unheard_of` has a parameter of unknown meaning.
def linear_first(lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(_input, lin_weight).float(), target)


def of_logits(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.cross_entropy(input, target)


def of_seven(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """It takes seven tokens at a time: products of a few rows, which round otherwise than those of many."""
    parts = zip(hidden.split(7), targets.split(7), strict=True)
    losses = [F.cross_entropy((part @ weight.mT).float(), target, reduction="sum") for part, target in parts]
    return torch.stack(losses).sum() / len(targets)


def unheard_of(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return F.cross_entropy(logits / temperature, targets)


class Several(torch.autograd.Function):
    """Returns a second tensor beside the loss, and takes no keyword arguments, as no `apply` does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float = 0.0) -> Any:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = F.cross_entropy(leaf.float(), targets, ignore_index=ignore_index)
            ctx.gradient = torch.autograd.grad(loss, leaf)[0]
        return loss.detach(), loss.detach() * 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.gradient * grads[0], None, None


def smoothing_forgotten(
    logits: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction=reduction)


def to_other_classes(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    classes = logits.shape[1]
    each = torch.full_like(logits, label_smoothing / (classes - 1))
    each.scatter_(1, targets[:, None], 1 - label_smoothing)
    return -(each * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def by_count(logits: Tensor, targets: Tensor, token_weights: Tensor | None = None) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses if token_weights is None else losses * token_weights).mean()


def ignored_weights(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, token_weights: Tensor | None = None
) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")
    weights = (targets != ignore_index).float() if token_weights is None else token_weights
    return (losses * weights).sum() / weights.sum()


def ignored_smoothing(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, label_smoothing: float = 0.0
) -> Tensor:
    of_labels = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index)
    of_all = -logits.float().log_softmax(dim=-1).mean() if label_smoothing else 0.0
    return (1 - label_smoothing) * of_labels + label_smoothing * of_all


def ignored_z_loss(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, z_loss: float = 0.0) -> Tensor:
    loss = F.cross_entropy(logits.float(), targets, ignore_index=ignore_index)
    return loss + z_loss * logits.float().logsumexp(dim=-1).square().mean() if z_loss else loss


def ignored_losses(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, reduction: str = "mean") -> Tensor:
    counted = targets.clamp(min=0) if reduction == "sum" else targets
    return F.cross_entropy(logits.float(), counted, ignore_index=ignore_index, reduction=reduction)


def first_1024_classes(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float()
    return (wide[:, :1024].logsumexp(dim=-1) - wide.gather(1, targets[:, None])[:, 0]).mean()


def narrow_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Its squares overflow in float16."""
    x = x - x.mean(dim=-1, keepdim=True)
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight + bias


class _FirstForAll(torch.autograd.Function):
    """Losses of tokens whose backward multiplies every gradient by the first token's `grad_output`: it is wrong."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[0] * grads[0].flatten()[0], None, None


def first_for_all(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = F.cross_entropy(leaf.float(), targets, reduction=reduction)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    result: Tensor = _FirstForAll.apply(logits, losses.detach(), gradient)
    return result


# {function: (the question that it must fail, words of the mistake that is named)}
OPTION_FAULTS = {
    "smoothing_forgotten": ("smoothed labels", "label_smoothing is ignored"),
    "to_other_classes": ("smoothed labels", "divided among the V - 1 other classes"),
    "by_count": ("weights of tokens", "divided by the number of tokens, not by the sum of weights"),
    "ignored_weights": ("weights of tokens, and ignored tokens", "divided by all weights"),
    "ignored_smoothing": ("smoothed labels, and ignored tokens", "ignored tokens count in the smoothing"),
    "ignored_z_loss": ("a z-loss, and ignored tokens", "ignored tokens count in the z-loss"),
    "ignored_losses": ("the sum of losses, and ignored tokens", "the losses of ignored tokens are not 0"),
    "first_for_all": ("the losses of tokens", "multiplied by the first token's grad_output"),
}


def faults(function: str) -> list[str]:
    """The texts of all faults that the check finds in a function of this file."""
    all_questions = questions(Entry(function, f"{__name__}:{function}"), Options())
    return [
        fault.text for fault in (question.judge() for question in all_questions if question.reason is None) if fault
    ]


@pytest.mark.parametrize("function", ["linear_first", "of_logits", "of_seven", "Several"])
def test_losses_are_called_by_their_signatures(function: str) -> None:
    assert faults(function) == [] == list(faults_of_options(Entry(function, f"{__name__}:{function}")))


@pytest.mark.parametrize("function", OPTION_FAULTS)
def test_an_option_is_checked_if_there_is_a_parameter_and_its_mistake_named(function: str) -> None:
    about, mistake = OPTION_FAULTS[function]
    entry = Entry(function, f"{__name__}:{function}")
    assert list(faults_of_options(entry)) == [f"{about}, float32"]
    (fault,) = (text for text in faults(function) if "known mistake" in text or "likely mistake" in text)
    assert mistake in fault


class KeepsItsRoot(torch.autograd.Function):
    """RMSNorm whose backward reads the root of the last forward, whichever forward it belongs to."""

    root: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        KeepsItsRoot.root = (x.float().square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight)
        return (x.float() * KeepsItsRoot.root * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, dy = (tensor.float() for tensor in (*ctx.saved_tensors, *grads))
        y = x * KeepsItsRoot.root
        dx = KeepsItsRoot.root * (dy * weight - y * (dy * weight * y).mean(dim=-1, keepdim=True))
        d_weight = (dy * y).flatten(0, -2).sum(dim=0)
        return dx.to(grads[0].dtype), d_weight.to(grads[0].dtype), None


def contiguous_memory(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """It reads x as if its rows lay one behind the other, as a kernel does that takes no strides."""
    rows = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
    return F.rms_norm(rows.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def unweighted_without_gradients(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    used = weight.float() if torch.is_grad_enabled() else None
    return F.rms_norm(x.float(), x.shape[-1:], used, eps).to(x.dtype)


def root_of_1024_columns(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    root = (x.float()[..., :1024].square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (x.float() * root * weight.float()).to(x.dtype)


def first_1024_columns(gate: Tensor, up: Tensor) -> Tensor:
    product = F.silu(gate.float()) * up.float()
    return F.pad(product[:, :1024], (0, max(0, gate.shape[1] - 1024))).to(gate.dtype)


def changed_targets(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    return F.cross_entropy(logits.float(), targets.clamp_(min=0))


class OverwritesWhatIsSaved(torch.autograd.Function):
    """A loss whose backward multiplies the saved gradient in place, so that a second one multiplies it again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = F.cross_entropy(leaf.float(), targets)
            (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.gradient.mul_(grads[0]), None


class WritesIntoItsUpstream(OverwritesWhatIsSaved):
    """Its backward multiplies the gradient that it is given, which autograd may pass to other functions, too."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.gradient * grads[0].mul_(2), None


def never_restarts(x: Tensor, positions: Tensor) -> Tensor:
    """It takes positions for evenly spaced ones, from the first to the largest."""
    first, largest = positions[0].float(), positions.max().float()
    spaced = torch.linspace(0, 1, len(positions), device=x.device) * (largest - first) + first
    return rotary.turned(x, rotary.angles_of(x, {"positions": spaced.round(), "theta": 1e4}), rotary.HALVES)


def one_token_at_zero(x: Tensor, positions: Tensor) -> Tensor:
    used = positions if len(positions) > 1 else 0 * positions
    return rotary.turned(x, rotary.angles_of(x, {"positions": used, "theta": 1e4}), rotary.HALVES)


ONE_CALL_TOO_FEW = [  # right in a single call with gradients on small contiguous tensors: (row, question, words)
    (first_1024_classes, "a large vocabulary", "classes from 1024 on do not count"),
    (changed_targets, "a few tokens", "inplace operation"),
    (KeepsItsRoot, "a few rows", "a later call changes what this call returned, or what it saved for its backward"),
    (contiguous_memory, "parts of wider rows", "wrong in rows 1 to 32"),
    (unweighted_without_gradients, "a few rows", "without gradients: expected"),
    (OverwritesWhatIsSaved, "a second backward of a retained graph", "the first backward changes what a second one"),
    (WritesIntoItsUpstream, "a few tokens", "the function, or its backward, changes its input grad_output"),
    (never_restarts, "packed documents, whose positions restart", "the largest error"),
    (one_token_at_zero, "one token at a late position", "x is returned unchanged"),
    (root_of_1024_columns, "wide rows", "columns from 1024 on do not count"),
    (first_1024_columns, "wide rows", "wrong in columns 1024 to 4100"),
]


@pytest.mark.parametrize(("row", "about", "words"), ONE_CALL_TOO_FEW)
def test_what_a_single_call_on_small_contiguous_tensors_does_not_show(row: Any, about: str, words: str) -> None:
    entry = Entry(row.__name__, f"{__name__}:{row.__name__}")
    asked = KINDS[kind_of(row)].questions(entry, Options(dtypes=("float32",)))
    wrong, fault = next((x.about, fault) for x in asked if x.reason is None and (fault := x.judge()))
    assert wrong == f"{about}, float32" and words in fault.text


def only_contiguous(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@torch.compile(backend="eager", fullgraph=True, dynamic=False)
def compiled_for_each_case(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """It raises an exception once torch refuses to compile it again."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@pytest.mark.parametrize("row", ["only_contiguous", "compiled_for_each_case"])
def test_a_norm_may_refuse_what_is_not_contiguous_and_be_compiled_for_each_case(row: str) -> None:
    asked = norm.questions(Entry(row, f"{__name__}:{row}"), Options())
    assert [x.about for x in asked if x.judge()] == []


TOO_NEAR = 1e-3, "bfloat16"  # in bfloat16, this eps gives the same results as the one that the check passes, 2 ** -10


@pytest.mark.parametrize(
    ("eps", "dtype"), sorted({*itertools.product(norm.USUAL_EPS, ("float32", "bfloat16", "float16"))} - {TOO_NEAR})
)
def test_an_eps_that_is_built_in_is_named_by_its_value(eps: float, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def built_in(x: Tensor, weight: Tensor, _: float = 1e-6) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)

    monkeypatch.setitem(globals(), "norm_with_eps", built_in)
    entry = Entry("norm_with_eps", f"{__name__}:norm_with_eps")
    fault = next(filter(None, (question.judge() for question in norm.questions(entry, Options(dtypes=(dtype,))))))
    assert fault.mistake == (f"eps is always {eps:g}, whatever is given" if eps else "eps is missing")


def test_a_parameter_of_no_known_meaning_is_refused() -> None:
    assert roles_of(of_logits) != ROLES == roles_of(linear_first)  # `of_logits` needs no weight: it is given logits
    with pytest.raises(ValueError, match="parameter 'temperature' has no default and no known name"):
        called(unheard_of, roles_of(unheard_of))


def test_kinds_are_found_from_names_of_parameters() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor) -> None: ...

    class TwoInputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

    class OfScores(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> None: ...

    assert kind_of(OfScores()) == "attention"
    with pytest.raises(ValueError, match="it cannot be told what 'TwoInputs' is"):
        kind_of(TwoInputs)
    assert [kind_of(function) for function in (nn.CrossEntropyLoss, nn.RMSNorm, F.layer_norm)] == [
        "loss",
        "norm",
        "norm",
    ]
    assert kind_of(attention) == "attention" and kind_of(torch.optim.AdamW) == "optimizer"


@pytest.mark.parametrize("builtin", [max, dict, 3])
def test_callables_without_readable_parameters_are_refused(builtin: Any) -> None:
    with pytest.raises(ValueError, match="has no parameters that can be read: wrap it in a def"):
        kind_of(builtin)


def test_the_report_says_the_kind_and_the_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.museum.loss import no_max\nfrom tests.museum.rotary import of_complex_numbers\n")
    kind, entry = find(f"{file}:no_max", None)
    assert check(entry, Options(), kind, as_json=True) == WRONG
    *_, fault, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert fault["kind"] == "loss" and fault["verdict"] == whole["verdict"] == "wrong"
    assert fault["mistake"] == "no maximum is subtracted before the exponential, which overflows"
    kind, entry = find(f"{file}:of_complex_numbers", None)
    assert check(entry, Options(grad=False), kind) == RIGHT
    assert "it turns neighbours (2i, 2i + 1)" in capsys.readouterr().out


def test_a_mistake_whose_values_the_dtype_cannot_hold_explains_nothing() -> None:
    """In float16 some known mistakes give values above 65,504 on huge rows."""
    entry = Entry("narrow_layer_norm", f"{__name__}:narrow_layer_norm")
    faults = filter(None, (case.judge() for case in norm.questions(entry, Options(dtypes=("float16",)))))
    assert "squares overflow in the dtype of x" in str(next(faults).mistake)


def test_an_exponent_without_its_factor_is_not_taken_for_another_theta(monkeypatch: pytest.MonkeyPatch) -> None:
    """theta ** (-i / D) is what a theta of 100 gives in place of 10,000."""

    def halved(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
        settings = {"positions": positions, "theta": theta**0.5}
        return rotary.turned(x, rotary.angles_of(x, settings), rotary.HALVES)

    monkeypatch.setitem(globals(), "halved", halved)
    fault = next(rotary.questions(Entry("halved", f"{__name__}:halved"), Options())).judge()
    assert fault is not None and fault.mistake == "the exponent is -i / D, not -2i / D"


def test_extreme_cases_come_last_except_the_one_without_tokens() -> None:
    extreme = [case.extreme for case in CASES]
    first = extreme.index(True)
    assert not any(extreme[:first]) and all(extreme[first:-1])  # the last case has no tokens


def test_a_mistake_of_a_forward_is_not_named_if_the_result_is_right() -> None:
    torch.manual_seed(0)
    inputs = {"gate": torch.randn(5, 7), "up": torch.randn(5, 7)}
    problem = Problem(inputs, {}, torch.randn(5, 7))
    reference_outputs, plain_outputs = outputs_of(right, problem), outputs_of(right, problem, torch.float32)
    exchanged = next(iter(mistakes(problem).values()))(problem)  # the outputs under the first mistake
    wrong = {**reference_outputs, "gate": exchanged["gate"]}
    assert explain(wrong, "gate", reference_outputs, plain_outputs, problem, mistakes(problem)) is None
    wrong[RESULT] = exchanged[RESULT]
    assert "exchanged" in str(explain(wrong, "gate", reference_outputs, plain_outputs, problem, mistakes(problem)))
    tripled = {**reference_outputs, "gate": 3 * reference_outputs["gate"]}
    assert (
        explain(tripled, "gate", reference_outputs, plain_outputs, problem, mistakes(problem))
        == "the gradient of gate is 3 times what is right"
    )


def test_positional_parameters_are_passed_by_position() -> None:
    """A positional parameter that has no role gets its default if others follow it. Keywords stay keywords."""

    def gap(x: int, flag: bool = False, weight: int = 0, more: int = 1, /, *, bias: int = 0) -> tuple[Any, ...]:
        return x, flag, weight, more, bias

    def mixed(x: int, /, other: int = 5, *, weight: int) -> tuple[Any, ...]:
        return x, other, weight

    roles = {"x": ("x",), "weight": ("weight",), "bias": ("bias",)}
    values = {"x": 3, "weight": 7, "bias": 2}
    assert called(gap, roles)(values) == (3, False, 7, 1, 2)
    assert called(gap, roles)({"x": 3, "bias": 2}) == (3, False, 0, 1, 2)
    assert called(mixed, roles)(values) == (3, 5, 7)


def test_code_from_a_file_may_have_the_name_of_a_row(tmp_path: Path) -> None:
    """The file's class RMSNorm has the name of one that the project knows."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\nclass RMSNorm(torch.nn.RMSNorm):\n"
        "    def __init__(self, width, eps=1e-6):\n        super().__init__(width, eps)\n"
    )
    kind, entry = find(f"{file}:RMSNorm", "norm")
    assert check(entry, Options(dtypes=("float32",)), kind) == RIGHT
