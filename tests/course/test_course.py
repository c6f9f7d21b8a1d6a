"""`lmsys course`: a small checkout whose adapters are right, wrong, missing and unusual, written here."""

import json
import math
import re
from pathlib import Path

import pytest

from lmsys.course import parts
from lmsys.course.__main__ import main
from lmsys.course.checkout import root_of
from lmsys.course.parts import PARTS, verdict_of

ADAPTERS = '''
from __future__ import annotations

import importlib.metadata

import torch

import cs336_parts
from cs336_parts import attention, containers

importlib.metadata.version("cs336_parts_of_nobody")


def run_linear(d_in, d_out, weights, in_features):
    return in_features @ weights.mT
    raise NotImplementedError


def run_silu(in_features):
    return in_features.sigmoid()


def run_softmax(in_features, dim):
    raise NotImplementedError


def run_rmsnorm(d_model, eps, weights, in_features):
    return in_features / (in_features.square().mean(-1, keepdim=True).sqrt() + eps) * weights * cs336_parts.ONE


def run_cross_entropy(inputs, targets):
    """Right for ordinary logits: it subtracts no maximum."""
    return (inputs.exp().sum(-1).log() - inputs.gather(-1, targets[:, None])[:, 0]).mean()


def get_adamw_cls():
    import package_of_nobody

    return package_of_nobody.AdamW


def get_flashattention_autograd_function_pytorch():
    return attention.Flash


def get_ddp(module):
    return containers.Ddp(module)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()


def get_fsdp(module, compute_dtype=None):
    return containers.Ddp(module)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()


def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.state_dict()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    raise NotImplementedError
'''
ATTENTION = '''
import torch


class Flash(torch.autograd.Function):
    """What the handout asks: no mask, lengths that are multiples of 16."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        assert not q.shape[1] % 16
        with torch.cuda.nvtx.range("scores"):
            scores = q @ k.mT / q.shape[-1] ** 0.5
        ctx.save_for_backward(q, k, v, scores.logsumexp(-1))
        return scores.softmax(-1) @ v

    @staticmethod
    def backward(ctx, do):
        raise NotImplementedError
'''
CONTAINERS = '''
import torch.distributed as dist
from torch import nn


class Ddp(nn.Module):
    """Gradients are summed, not averaged."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        for p in inner.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *inputs, **kwargs):
        return self.inner(*inputs, **kwargs)

    def finish(self):
        for p in self.inner.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
'''
TESTS = """
import torch

from .adapters import run_linear, run_silu


def test_linear():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(run_linear(4, 5, w, x), x @ w.mT)


def test_linear_of_the_course():
    open("fixture of the course")


def test_silu():
    x = torch.randn(3)
    assert torch.allclose(run_silu(x), torch.nn.functional.silu(x)), "silu is another"
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classes") / "assignment"
    files = {
        "tests/__init__.py": "",
        "tests/adapters.py": ADAPTERS,
        "tests/test_basics.py": TESTS,
        "pyproject.toml": "",
        "cs336-parts/pyproject.toml": "",
        "cs336-parts/cs336_parts/__init__.py": "ONE = 1.0\n",
        "cs336-parts/cs336_parts/attention.py": ATTENTION,
        "cs336-parts/cs336_parts/containers.py": CONTAINERS,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VERDICTS = {
    "linear layer": "right",
    "SiLU": "wrong",
    "softmax": "not written",
    "RMSNorm": "wrong",
    "cross-entropy": "right",
    "AdamW": "not judged",
    "FlashAttention in PyTorch, forward": "right",
    "FlashAttention in PyTorch, backward": "not written",
    "DDP": "wrong",
    "FSDP": "wrong",
    "sharded optimizer": "not written",
}
QUICK = "linear layer", "softmax", "RMSNorm", "AdamW", "FlashAttention in PyTorch, backward"


def test_a_part_is_right_wrong_not_written_or_not_judged(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BEYOND_S", 0.0)  # nothing is asked beyond the handout
    monkeypatch.setattr(parts, "PARTS", {part: PARTS[part] for part in QUICK})
    page = checkout.parent / "right.html"
    assert main([str(checkout), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert [line.split("  ")[0] for line in said.splitlines()[: len(QUICK)]] == [*QUICK]
    assert all(re.search(rf"^{part} +{VERDICTS[part]}$", said, re.MULTILINE) for part in QUICK)
    assert "pattern: eps is added to the root, not inside of it" in said and "package_of_nobody" in said
    assert all(part in page.read_text() for part in QUICK)


@pytest.mark.on_request
def test_each_part_has_its_verdict(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BEYOND_S", math.inf)
    assert main([str(checkout.parent), "--json"]) == 1
    answers = {answer["part"]: answer for answer in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {part: answer["verdict"] for part, answer in answers.items()} == VERDICTS
    assert {name: answer["mistake"] for name, answer in answers.items() if answer.get("mistake")} == {
        "RMSNorm": "eps is added to the root, not inside of it",
        "DDP": "gradients are summed over ranks, not averaged",
    }
    assert "silu is another" in answers["SiLU"]["text"] and "nothing is sharded" in answers["FSDP"]["text"]
    beyond = answers["FlashAttention in PyTorch, forward"]["beyond"]
    assert {beyond[x] for x in ("bfloat16", "strides", "head dimensions", "calls of models")} == {"refused"}
    assert beyond["causal mask"] == "wrong" and beyond["odd lengths"] == "refused"
    assert "wrong" in answers["cross-entropy"]["beyond"].values()


def test_a_folder_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{str(tmp_path)!r} must be a checkout with one tests/adapters.py: there is none" in capsys.readouterr().err
    for name in ("a", "b"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "adapters.py").write_text("import package_of_nobody\n")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a'}; {tmp_path / 'b'}")):
        root_of(tmp_path)
    assert root_of(tmp_path / "a") == tmp_path / "a"
    assert main([str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert "No module named 'package_of_nobody'" in said and "line 1: import package_of_nobody" in said


def test_what_an_exception_says_of_a_part() -> None:
    assert verdict_of("in two steps: rank 0 raises NotImplementedError: no message") == "not written"
    assert verdict_of("it raises ModuleNotFoundError: No module named 'einops'") == "not judged"
    assert verdict_of("it raises AssertionError: no message") == "wrong"


def test_parts_are_asked_by_the_adapters_of_the_course() -> None:
    example = Path(__file__).parents[2] / "docs" / "examples" / "adapters.py"
    defined = set(re.findall(r"^(?:def )?(\w+)(?:\(| = )", example.read_text(), re.MULTILINE))
    assert {adapter for adapter, _ in PARTS.values()} <= defined
