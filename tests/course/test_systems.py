"""`lmsys course` on the adapters of assignment 2 (lmsys/course/systems.py), as far as one process can judge them.

An adapter is a function by which the course's tests call a student's code. Ranks are replaced by a stand-in, which runs
nothing in parallel; test_course.py starts real ones.
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmsys.attention.flash_torch import FlashTorch
from lmsys.check import optimizer_runs
from lmsys.course import parts, systems
from lmsys.course.parts import PARTS, judged
from tests.course.test_course import MODEL


class Halves:
    """A sharded optimizer that steps every second parameter with torch's optimizer, or, with `whole`, all of them."""

    def __init__(self, params: Any, optimizer_cls: Any, whole: bool = False, **kwargs: Any):
        self.inner = optimizer_cls(list(params)[:: 1 if whole else 2], **kwargs)

    def step(self) -> None:
        self.inner.step()


class WithoutState(Halves, torch.optim.Optimizer):
    """Is a torch Optimizer, but does not call its constructor, so that it has no `state`."""


@pytest.mark.parametrize("kind", [Halves, WithoutState])
def test_an_optimizer_that_keeps_all_state_shards_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests.adapters", SimpleNamespace(get_sharded_optimizer=kind))
    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    for p in params:
        p.grad = torch.ones(4)
    systems.sharded_optimizer(params, torch.optim.AdamW).step()
    assert [bool((p < 1).all()) for p in params] == [True, False, True, False]
    optimizer = systems.sharded_optimizer(params, torch.optim.AdamW)
    optimizer.zero_grad()  # must reach all parameters, though the course's tests pass if it reaches those of the rank
    assert all(p.grad is None for p in params)
    for p in params:
        p.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="nothing is sharded"):
        systems.sharded_optimizer(params, torch.optim.AdamW, whole=True).step()
    systems.sharded_optimizer(params[:1], torch.optim.AdamW).step()  # with a single parameter, a rank may own all


class Mine(torch.optim.AdamW):
    """An optimizer whose name does not say that it is AdamW."""


def test_a_students_optimizer_is_asked_as_adamw_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests.adapters", SimpleNamespace(get_adamw_cls=lambda: Mine))
    assert optimizer_runs.claim_of(systems.adamw).algorithm == "AdamW" and systems.adamw.__name__ == "Mine (AdamW)"


class WithoutLse(torch.autograd.Function):
    """Saves probabilities in place of the log-sum-exp, and makes dk twice what is right."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return ds @ k, 2 * ds.mT @ q, p.mT @ do, None


def test_attention_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handout demands that the log-sum-exp is saved, and no mask."""

    def verdicts(function: Any) -> list[dict[str, Any]]:
        functions = SimpleNamespace(**{systems.CLASSES["flash_pytorch"]: lambda: function})
        monkeypatch.setitem(sys.modules, "tests.adapters", functions)
        part = "FlashAttention in PyTorch, "
        return [judged(PARTS[part + name], beyond_s=0.0) for name in ("forward", "backward")]

    assert [answer["verdict"] for answer in verdicts(FlashTorch)] == ["right", "right"]
    forward, backward = verdicts(WithoutLse)
    assert forward["verdict"] == parts.REFUSED and "one saved tensor of shape (batch, queries)" in forward["text"]
    assert backward["verdict"] == parts.WRONG and "dk" in backward["text"]
    forward, _ = verdicts(lambda q, k, v, is_causal=False: FlashTorch.apply(q, k, v, is_causal).detach())
    assert forward["verdict"] == parts.REFUSED and "there are 0" in forward["text"]


def test_a_function_without_a_triton_kernel_counts_as_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(
        sys.modules, "tests.adapters", SimpleNamespace(**{systems.CLASSES["flash_triton"]: lambda: FlashTorch})
    )
    answer = judged(PARTS["FlashAttention in Triton, forward"], beyond_s=0.0)
    assert answer["verdict"] == parts.NOT_WRITTEN and "no Triton kernel" in answer["text"]


def test_mistakes_of_fsdp_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("cs336_basics")
    package.model = ModuleType("cs336_basics.model")  # type: ignore[attr-defined]
    exec(MODEL, vars(package.model))
    monkeypatch.setitem(sys.modules, "cs336_basics", package)
    monkeypatch.setitem(sys.modules, "cs336_basics.model", package.model)

    def fault_of(train: Callable[[], systems.State]) -> Any:
        ranks = SimpleNamespace(run=lambda *_: [train()] * 2)  # two, that train in this process
        monkeypatch.setattr(systems, "WorkerGroup", lambda *_, **__: nullcontext(ranks))
        answers = [question.judge() for question, _ in systems.fsdp()]
        assert len(answers) == 2  # in float32, and with float16 for computation
        return answers[0]

    right = systems.train_alone(systems.RATE)
    assert fault_of(lambda: right) is None
    assert "summed" in fault_of(lambda: systems.train_alone(2 * systems.RATE)).mistake
    assert "divided by the number of ranks twice" in fault_of(lambda: systems.train_alone(systems.RATE / 2)).mistake
    norm = {"1.weight": right["1.weight"] + 1e-2}  # layer 1 is the model's RMSNorm
    assert "not sharded, such as RMSNorm's" in fault_of(lambda: right | norm).mistake
    other = {"0.weight": torch.full_like(right["0.weight"], math.nan)}
    assert fault_of(lambda: right | other).mistake is None
    assert "0.weight" in fault_of(lambda: {k: x for k, x in right.items() if k != "0.weight"}).text
