"""`lmsys course` (lmsys/course) on a student's checkout of CS336, which the fixture `checkout` writes.

A part is a piece of the assignment, such as "softmax". The checkout's parts (in ADAPTERS, ATTENTION, CONTAINERS, MODEL)
are right, wrong, not written, or need a package that is missing. VERDICTS says which verdict each must get. The last
tests are about `--measure`, which times the right parts.
"""

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmsys.bench.__main__ import line_of
from lmsys.course import parts, systems
from lmsys.course.__main__ import main, measure
from lmsys.course.checkout import root_of
from lmsys.course.parts import PARTS, verdict_of
from tests.support.processes import ENVIRONMENT, PATIENCE_S, ROOT

ADAPTERS = """
from __future__ import annotations

import importlib.metadata
import os

import package_of_nobody
import package_of_nobody.parts as more
import torch
from alone_in_a_folder import ONE

from cs336_parts import attention, containers

importlib.metadata.version("cs336_parts")


class Settings(package_of_nobody.Base):
    size: int = package_of_nobody.field(default=3)


def run_linear(d_in, d_out, weights, in_features):
    print("what a checkout prints is no verdict")
    return in_features @ weights.mT
    raise NotImplementedError


def run_embedding(vocab_size, d_model, weights, token_ids):
    return weights[token_ids] * Settings().size


def run_silu(in_features):
    return in_features.sigmoid() * ONE


def run_softmax(in_features, dim):
    raise NotImplementedError


def run_rmsnorm(d_model, eps, weights, in_features):
    os.abort()


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    if in_features.dtype != torch.float32:
        os.abort()
    return (torch.nn.functional.silu(in_features @ w1_weight.mT) * (in_features @ w3_weight.mT)) @ w2_weight.mT


def get_adamw_cls():
    return more.AdamW()


def get_flashattention_autograd_function_pytorch():
    return attention.Flash


def get_flashattention_autograd_function_triton():
    return attention.Triton


def get_ddp(module):
    return containers.Ddp(module)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.finish()


def get_fsdp(module, compute_dtype=None):
    return containers.Ddp(module)


def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()


def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.module.state_dict()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return optimizer_cls(params, **kwargs)
"""
ATTENTION = '''
import torch


class Flash(torch.autograd.Function):
    """No mask, and lengths that are multiples of 16."""

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


class Triton(torch.autograd.Function):
    """It needs no Triton."""

    @staticmethod
    @torch.compile
    def forward(ctx, q, k, v, is_causal=False):
        assert q.is_cuda, "it runs on a GPU alone"
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        ctx.save_for_backward(q, k, v, scores.logsumexp(-1), scores.softmax(-1))
        return scores.softmax(-1) @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v, lse, p = ctx.saved_tensors
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return ds @ k, ds.mT @ q, p.mT @ do, None
'''
CONTAINERS = '''
import torch.distributed as dist
from torch import nn


class Ddp(nn.Module):
    """Gradients are summed, not averaged."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish(self):
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
'''
MODEL = """
import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x):
        return x @ self.weight.mT


class Embedding(Linear):
    def forward(self, ids):
        return self.weight.mT[ids]


class RMSNorm(nn.RMSNorm):
    pass
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the checkout, whose package and modules lie in folders that the command must find."""
    root = tmp_path_factory.mktemp("classes") / "assignment"
    files = {
        "tests/__init__.py": "",
        "tests/adapters.py": ADAPTERS,
        "pyproject.toml": "",
        "deeper/folder/alone_in_a_folder.py": "ONE = 1.0\n",
        "cs336-parts/pyproject.toml": "",
        "cs336-parts/cs336_parts/__init__.py": "",
        "cs336-parts/cs336_parts/attention.py": ATTENTION,
        "cs336-parts/cs336_parts/containers.py": CONTAINERS,
        "cs336-parts/cs336_basics/__init__.py": "",
        "cs336-parts/cs336_basics/model.py": MODEL,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


VERDICTS = {
    "linear layer": "right",
    "embedding": "not judged",
    "SiLU": "wrong",
    "softmax": "not written",
    "RMSNorm": "refused",
    "SwiGLU": "right",
    "AdamW": "not judged",
    "FlashAttention in PyTorch, forward": "right",
    "FlashAttention in PyTorch, backward": "not written",
    "FlashAttention in Triton, forward": "not written",
    "FlashAttention in Triton, backward": "right",
    "DDP": "wrong",
    "FSDP": "refused",
    "sharded optimizer": "refused",
}
QUICK = [*VERDICTS][:6]  # up to SwiGLU: parts that are judged within seconds


@pytest.mark.long
def test_parts_are_chosen_by_their_names(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkout), "--part", "Embedding"]) == 3  # a package is missing
    assert capfd.readouterr().out.startswith("embedding  ")
    assert main([str(checkout), "--part", "run_softmax"]) == 0  # nothing is written
    assert "1 not written" in capfd.readouterr().out
    assert main([str(checkout), "--part", "convolution"]) == 2
    assert "has no part convolution" in capfd.readouterr().err


def test_a_part_is_right_wrong_refused_not_written_or_not_judged(
    checkout: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # so that what a checkout prints waits in a buffer
    monkeypatch.setattr(parts, "PARTS", {part: PARTS[part] for part in QUICK})
    page = checkout.parent / "right.html"
    assert main([str(checkout), "--html", str(page)]) == 1
    report = capfd.readouterr().out
    assert [line[:36].rstrip() for line in report.splitlines()[: len(QUICK)]] == QUICK  # a column of names
    assert all(re.search(rf"^{part} +{VERDICTS[part]}\b", report, re.MULTILINE) for part in QUICK)
    assert "it is the sigmoid alone" in report and "python -m pip install package_of_nobody" in report
    assert "what a checkout prints" not in report and "killed by SIGABRT" in report
    assert all(PARTS[part].asks in html.unescape(page.read_text()) for part in QUICK)


@pytest.mark.on_request
def test_each_part_has_its_verdict(
    checkout: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BEYOND_S", math.inf)  # all that goes beyond the handout is asked, too
    assert main([str(checkout.parent), "--json"]) == 1
    answers: dict[str, Any] = {x["part"]: x for x in map(json.loads, capfd.readouterr().out.splitlines())}
    assert {part: answer["verdict"] for part, answer in answers.items()} == VERDICTS
    assert answers["DDP"]["mistake"] == "gradients are summed over ranks, not averaged"
    assert "no Triton kernel makes them" in answers["FlashAttention in Triton, forward"]["text"]
    assert all("nothing is sharded" in answers[part]["text"] for part in ("FSDP", "sharded optimizer"))
    beyond = answers["FlashAttention in PyTorch, forward"]["beyond"]
    assert beyond["causal mask"] == "wrong" and beyond["odd lengths"] == "refused"
    swiglu = answers["SwiGLU"]
    assert swiglu["beyond"]["an odd width, bfloat16"] == "refused" and "SIGABRT" in swiglu["notes"][-1]


@pytest.mark.on_request
def test_ours_are_right_in_a_checkout(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters of docs/examples are right in a checkout with the tests of either assignment and either year."""
    # Nothing is asked beyond the handout: test_basics.py and the tests of `lmsys check` ask all of it of ours.
    monkeypatch.setattr(parts, "BEYOND_S", 0.0)
    root = tmp_path / "reference"
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "__init__.py").touch()
    (root / "tests" / "adapters.py").write_text((ROOT / "docs" / "examples" / "adapters.py").read_text())
    (root / "cs336_basics").symlink_to(checkout / "cs336-parts" / "cs336_basics")
    assert main([str(root), "--json"]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {answer["part"]: answer["verdict"] for answer in answers} == dict.fromkeys(PARTS, "right")


def test_a_folder_that_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{str(tmp_path)!r} must be a checkout with one tests/adapters.py: there is none" in capsys.readouterr().err
    for name in ("a", "b"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "adapters.py").write_text("\n1 / 0\n")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a'}; {tmp_path / 'b'}")):
        root_of(tmp_path)
    assert root_of(tmp_path / "a") == tmp_path / "a"
    assert main([str(tmp_path / "a")]) == 2
    report = capsys.readouterr().err
    assert (
        "does not load: ZeroDivisionError" in report
        and "line 2: 1 / 0); here it is Python 3." in report
        and "and torch 2." in report
    )


@pytest.mark.parametrize("option", ["--html={}/file/page.html", "--html={}", "--measure={}/file"])
def test_where_nothing_can_be_written_nothing_is_asked(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    monkeypatch.setattr("lmsys.course.__main__.answers_of", None)
    (tmp_path / "file").touch()
    assert main([str(checkout), option.format(tmp_path)]) == 2
    assert re.search(r"^lmsys course: error: .*file", capsys.readouterr().err)


def test_beside_no_checkout_no_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), f"--measure={tmp_path / 'speed'}", f"--html={tmp_path / 'site' / 'page.html'}"]) == 2
    assert "must be a checkout" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_the_bench_would_split_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    monkeypatch.setattr("lmsys.course.__main__.answers_of", None)
    assert main([str(checkout), f"--measure={tmp_path / 'speed, mine' / 'new'}"]) == 2
    assert "its path has a comma" in capsys.readouterr().err and not (tmp_path / "speed, mine").exists()


SLOW = """
import time


def run_linear(d_in, d_out, weights, in_features):
    return in_features @ weights.T


def run_silu(in_features):
    time.sleep(60)
"""


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, in a process group of its own, that has printed a line, and whose next part takes long."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "adapters.py").write_text(SLOW)
    command = [sys.executable, "-m", "lmsys", "course", str(tmp_path)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        assert process.stdout and process.stdout.readline().startswith("linear layer")
        yield process


def test_an_interrupt_ends_it_with_a_sentence(begun: subprocess.Popen[str]) -> None:
    os.killpg(begun.pid, signal.SIGINT)
    _, error = begun.communicate(timeout=PATIENCE_S)
    assert begun.returncode == 130 and error.startswith("lmsys: interrupted") and error.count("\n") == 1


def test_a_closed_pipe_gives_no_traceback(tmp_path: Path, checkout: Path) -> None:
    """The exit code is that of a program that SIGPIPE has ended."""
    line = f"{sys.executable} -m lmsys course {checkout} --part softmax | head -n 0; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "141\n" and not done.stderr


def test_the_text_of_an_exception_decides_the_verdict() -> None:
    verdict = partial(verdict_of, raises=True)
    assert verdict("in two steps: rank 0 raises NotImplementedError: no message") == "not written"
    assert verdict("it raises NotImplementedError: inline_asm not supported in interpreter mode") == "not judged"
    assert verdict("it raises ModuleNotFoundError: No module named 'einops'") == "not judged"
    assert verdict("it raises AssertionError: Torch not compiled with CUDA enabled") == "not judged"
    assert verdict("it raises AssertionError: no message") == "refused"
    # With raises=True, the word NVIDIA would make it "not judged".
    assert verdict_of("after a step weights are wrong; NVIDIA", raises=False) == "wrong"


def test_every_part_has_an_adapter_of_the_course() -> None:
    example = ROOT / "docs" / "examples" / "adapters.py"
    defined = set(re.findall(r"^(?:def )?(\w+)(?:\(| = )", example.read_text(), re.MULTILINE))
    assert {part.adapter for part in PARTS.values()} <= defined


def test_right_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` runs the bench on rows of a file that loads the checkout, and then makes a report."""
    ran: list[list[str]] = []
    codes = {"attention": 0, "data_parallel": 0}  # with which the bench ends

    def runs(command: list[str], **_: object) -> SimpleNamespace:
        ran.append(command[1:])
        return SimpleNamespace(returncode=codes.get(command[3], 0))

    monkeypatch.setattr(subprocess, "run", runs)
    right = {"FlashAttention in Triton, backward", "DDP, bucketed", "linear layer"}
    (tmp_path / "out").mkdir()
    assert measure(tmp_path, right, tmp_path / "out")
    (attention, containers, report), rows = ran, tmp_path / "out" / "rows.py"
    assert attention[:4] == ["-m", "lmsys.bench", "attention", f"--row={rows}:student_triton"]
    assert containers[:4] == ["-m", "lmsys.bench", "data_parallel", f"--row={rows}:student_bucketed"]
    assert report[:4] == [
        "-m",
        "lmsys.reports",
        *(str(rows.with_name(f"{x}.json")) for x in ("attention", "data_parallel")),
    ]
    assert any(x.endswith(f",{rows}:student_triton") for x in line_of(attention[2:]))
    assert str(tmp_path) in rows.read_text()
    assert measure(tmp_path, {"linear layer"}, tmp_path / "out")
    assert len(ran) == 3
    # A file that is there when the bench refuses to run, or is interrupted, is one of an earlier run.
    codes |= {"attention": 4, "data_parallel": 1}
    assert not measure(tmp_path, right, tmp_path / "out")
    assert ran[-1][2:-2] == [str(rows.with_name("data_parallel.json"))]
    codes["data_parallel"] = 2
    assert not measure(tmp_path, right, tmp_path / "out")
    assert [command[1] for command in ran[-2:]] == ["lmsys.bench"] * 2


@pytest.mark.parametrize(("verdict", "ended", "code"), [("right", 0, 0), ("right", 4, 3), ("wrong", 4, 1)])
def test_a_measurement_that_failed_shows_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, ended: int, code: int
) -> None:
    answers = [{"part": "DDP", "verdict": "right"}, {"part": "SiLU", "verdict": verdict}]
    monkeypatch.setattr("lmsys.course.__main__.answers_of", lambda *_: answers)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=ended))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "adapters.py").touch()
    assert main([str(tmp_path), "--json", f"--measure={tmp_path / 'speed'}"]) == code


# A program that loads rows of the file that `measure` writes: its argument is the path of this file.
ROWS = """
import sys
import torch
from lmsys.registry import load_target
for name in ("student_pytorch", "student_triton", "student_ddp"):
    try:
        print(load_target(f"{sys.argv[1]}:{name}").__name__)
    except NotImplementedError:
        print("not written")
with torch.cuda.nvtx.range("NVTX does nothing"):
    pass
"""


def test_other_parts_load_where_one_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "adapters.py").write_text(
        f"class Flash:\n    pass\n\n\ndef {systems.CLASSES['flash_pytorch']}():\n    return Flash\n\n\n"
        f"def {systems.CLASSES['flash_triton']}():\n    raise NotImplementedError\n"
    )
    (tmp_path / "out").mkdir()
    measure(tmp_path, {"linear layer"}, tmp_path / "out")
    command = [sys.executable, "-c", ROWS, str(tmp_path / "out" / "rows.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["Flash", "not written", "Ddp"]


def test_the_page_says_what_the_handout_asks() -> None:
    page = (ROOT / "docs" / "course.md").read_text()
    assert all(f"| {name} | `{part.adapter}` | {part.asks} |" in page for name, part in PARTS.items())
