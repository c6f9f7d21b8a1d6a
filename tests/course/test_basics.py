"""`lmsys course` on the adapters of assignment 1 (lmsys/course/basics.py): ours are right, mistakes are named.

A part is one problem of the assignment, with the adapter by which it is called; `judged` gives its verdict. The fixture
`adapters` puts functions in the place of a student's. To add a mistake, add (part, functions, what is named) to
MISTAKES. All is judged in this process; test_course.py runs the command.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmsys.check.rotary import HALVES
from lmsys.course import parts
from lmsys.course.basics import attended, block_of, heads, normed, rotate
from lmsys.course.parts import PARTS, judged
from lmsys.registry import load_target
from lmsys.tokenizer import naive
from tests.support.processes import ROOT

EXAMPLE = load_target(f"{ROOT / 'docs' / 'examples' / 'adapters.py'}:run_linear").__globals__
BASICS = [part for part, of in PARTS.items() if of.adapter.startswith("run_") or of.adapter == "get_tokenizer"]
Adapters = Callable[..., None]


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Adapters:
    """A function that puts functions, given by name, in the place of a checkout's adapters."""

    def put(**functions: Any) -> None:
        monkeypatch.setitem(sys.modules, "tests.adapters", SimpleNamespace(**functions))

    return put


@pytest.mark.parametrize("part", BASICS)
def test_our_adapters_are_right(part: str, adapters: Adapters) -> None:
    adapters(**EXAMPLE)
    answer = judged(PARTS[part], math.inf)
    assert answer["verdict"] == parts.RIGHT, answer
    assert answer["cases"] > 0 and set(answer["beyond"].values()) <= {parts.RIGHT}


# For MISTAKES: functions with one mistake each, and functions that make such functions.
def attention_of(mask: Callable[[Tensor], Tensor | None], scale: float | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v, given: attended(q, k, v, mask(given), scale=scale)


def with_positions(shift: int, **how: Any) -> Callable[..., Tensor]:
    return lambda d, theta, longest, x, positions: rotate(x, positions + shift, **how)


def rate(it: int, most: float, least: float, warmup: int, cycle: int) -> float:
    if it < warmup:
        return most * it / warmup
    return least + (1 + math.cos(math.pi * min(1.0, it / cycle))) / 2 * (most - least)


def clip_each(parameters: list[Tensor], most: float) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad *= min(1.0, most / float(p.grad.norm()))


def batches_without_the_last(data: Any, batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - length - 1, (batch, 1)) + torch.arange(length)
    data = torch.from_numpy(data.astype(np.int64))
    return data[starts], data[starts + 1]


def train_by(rank: Callable[[int, naive.Pair], object], special: bool = True) -> Callable[..., Any]:
    def train(file: Any, size: int, specials: list[str]) -> Any:
        words = naive.split(file.read_text(encoding="utf-8"), specials if special else ())
        merges = naive.learn_merges(Counter(w.encode() for w in words if w not in specials), size - 257, rank)
        tokens = [bytes([byte]) for byte in range(256)] + [a + b for a, b in merges] + [specials[0].encode()]
        return dict(enumerate(tokens)), merges

    return train


class WithoutSpecials:
    """A tokenizer that splits special tokens like any other text."""

    def __init__(self, vocab: Any, merges: Any, specials: Any):
        self.encode = EXAMPLE["get_tokenizer"](vocab, merges).encode
        self.decode = EXAMPLE["get_tokenizer"](vocab, merges).decode

    def encode_iterable(self, texts: Any) -> Iterator[int]:
        for text in texts:
            yield from self.encode(text)


def save_weights(model: Any, optimizer: Any, iteration: int, out: Any) -> None:
    torch.save({"model": model.state_dict(), "iteration": iteration}, out)


def load_weights(src: Any, model: Any, optimizer: Any) -> int:
    state = torch.load(src)
    model.load_state_dict(state["model"])
    return int(state["iteration"])


def block(d: int, h: int, ff: int, longest: int, theta: float, weights: Any, x: Tensor) -> Tensor:
    return block_of(x, weights, form="post")


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("SiLU", {"run_silu": torch.sigmoid}, "it is the sigmoid alone"),
    ("softmax", {"run_softmax": lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True)}, "exp overflows"),
    ("softmax", {"run_softmax": lambda x, dim: x.softmax(0)}, "dimension 0, not dim"),
    ("rotary positions", {"run_rope": with_positions(0, pairs=HALVES)}, "channels turn in halves"),
    ("rotary positions", {"run_rope": with_positions(1)}, "the first position is 1"),
    ("rotary positions", {"run_rope": lambda *of: torch.full_like(of[3], math.nan)}, "unwritten, as of torch.empty"),
    ("attention with a mask", {"run_scaled_dot_product_attention": attention_of(torch.logical_not)}, "the opposite"),
    ("attention with a mask", {"run_scaled_dot_product_attention": attention_of(lambda x: x, 1.0)}, "not divided"),
    (
        "multi-head attention",
        {"run_multihead_self_attention": lambda d, h, q, k, v, o, x: heads(x, [q, k, v, o], mask=None)},
        "there is no causal mask",
    ),
    (
        "multi-head attention, rotary",
        {"run_multihead_self_attention_with_rope": lambda d, h, n, t, q, k, v, o, x, p: heads(x, [q, k, v, o])},
        "RoPE is not applied",
    ),
    ("Transformer block", {"run_transformer_block": block}, "post-norm"),
    (
        "Transformer LM",
        {"run_transformer_lm": lambda *of: EXAMPLE["run_transformer_lm"](*of).softmax(-1)},
        "probabilities, not logits",
    ),
    ("gradient clipping", {"run_gradient_clipping": clip_each}, "each parameter is clipped alone"),
    ("learning-rate schedule", {"run_get_lr_cosine_schedule": rate}, "the cosine begins at iteration 0"),
    ("batches", {"run_get_batch": batches_without_the_last}, "the last window is never drawn"),
    (
        "checkpoints",
        {"run_save_checkpoint": save_weights, "run_load_checkpoint": load_weights},
        "the optimizer is not restored",
    ),
    ("BPE training", {"run_train_bpe": train_by(lambda count, pair: count)}, "the first that was seen"),
    ("BPE training", {"run_train_bpe": train_by(lambda *of: of, special=False)}, "the special token is taken for text"),
    ("BPE encoding", {"get_tokenizer": WithoutSpecials}, "special tokens are split as text is"),
    (
        "RMSNorm",
        {"run_rmsnorm": lambda d, eps, w, x: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w},
        "eps is added to the root",
    ),
]


@pytest.mark.parametrize(("part", "functions", "mistake"), MISTAKES, ids=[mistake for _, _, mistake in MISTAKES])
def test_a_mistake_is_named(part: str, functions: dict[str, Any], mistake: str, adapters: Adapters) -> None:
    adapters(**functions)
    answer = judged(PARTS[part], 0.0)
    assert answer["verdict"] == parts.WRONG and mistake in answer["mistake"], answer


def test_a_loss_that_overflows_is_wrong(adapters: Adapters) -> None:
    """The course's own tests have logits that are a thousand times as large."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return (inputs.exp().sum(-1).log() - inputs.gather(-1, targets[:, None])[:, 0]).mean()

    adapters(run_cross_entropy=loss)
    answer = judged(PARTS["cross-entropy"], 0.0)
    assert answer["verdict"] == parts.WRONG and "logits" in answer["text"], answer


@pytest.mark.parametrize("part", ["RMSNorm", "SwiGLU", "cross-entropy", "AdamW"])
def test_each_word_of_a_part_s_pattern_is_in_a_question(part: str, adapters: Adapters) -> None:
    """A question of `lmsys check` that is renamed would leave the handout's questions without a word."""
    adapters(**EXAMPLE)
    abouts = "\n".join(question.about for question, _ in PARTS[part].questions())
    words = re.findall(r"[A-Za-z][A-Za-z0-9 ]+", PARTS[part].questions.keywords["asked"])  # type: ignore[attr-defined]
    assert words and not [word for word in words if word not in abouts]


def test_what_the_handout_does_not_demand_is_never_wrong(adapters: Adapters) -> None:
    """A norm that takes only float32 of three dimensions, and a RoPE that takes only positions of one dimension."""

    def norm(d: int, eps: float, w: Tensor, x: Tensor) -> Tensor:
        assert x.ndim == 3 and x.dtype == torch.float32
        return normed(x, w) if eps == 1e-5 else x / (x.square().mean(2, keepdim=True) + eps).sqrt() * w

    def rope(d: int, theta: float, longest: int, x: Tensor, positions: Tensor) -> Tensor:
        assert positions.ndim == 1
        return rotate(x, positions)

    adapters(run_rmsnorm=norm, run_rope=rope)
    for part, aspect in {"RMSNorm": "an odd width, bfloat16", "rotary positions": "positions of each sequence"}.items():
        answer = judged(PARTS[part], math.inf)
        assert answer["verdict"] == parts.RIGHT and answer["beyond"][aspect] == "refused", answer


def test_the_kind_of_an_exception_decides_the_verdict(adapters: Adapters) -> None:
    def absent(*_: Any) -> Tensor:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    def unwritten(*_: Any) -> Tensor:
        raise NotImplementedError

    adapters(run_silu=lambda x: x.no_such_method(), run_linear=absent, run_embedding=unwritten)
    refused, unjudged, missing = (judged(PARTS[part], 0.0) for part in ("SiLU", "linear layer", "embedding"))
    assert refused["verdict"] == parts.REFUSED and "test_basics.py, line" in refused["text"]
    assert unjudged["verdict"] == parts.NOT_JUDGED and "python -m pip install PyYAML" in unjudged["text"]
    assert missing["verdict"] == parts.NOT_WRITTEN


def test_a_result_of_another_shape_or_type_is_named(adapters: Adapters) -> None:
    adapters(run_silu=lambda x: x[0], run_linear=lambda *_: None)
    assert "shape (5,); expected a tensor of shape (2, 5)" in judged(PARTS["SiLU"], 0.0)["text"]
    assert "NoneType" in judged(PARTS["linear layer"], 0.0)["text"]
