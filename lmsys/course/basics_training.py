"""The questions about training and the tokenizer of CS336's assignment 1.

As in basics.py, each function without arguments is named in parts.py, asks one adapter (`checkpoints` asks two), and
yields pairs (question, True if it goes beyond the handout). An adapter is a function of the course's tests/adapters.py
that calls a student's code. A new known mistake goes to the `mistakes` of its question.
"""

import io
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys.check.question import Fault, Question
from lmsys.course import basics, checkout
from lmsys.tokenizer import Tokenizer, naive, pretokens

END = "<|endoftext|>"  # the special token


def clipping() -> basics.Questions:
    gradients = basics.drawn("gradients", 5, 5, 5)
    normed = gradients / gradients.norm()

    def clipped(most: float, given: Callable[[list[Tensor]], Any] = list) -> Tensor:
        """The gradients clipped to the norm `most`, divided by `most`.

        given  makes the adapter's argument from the list of parameters
        """
        params: list[Any] = [nn.Parameter(torch.zeros(5, 5)) for _ in range(6)]  # the last has no gradient
        for p, g in zip(params, gradients, strict=False):
            p.grad = g.clone()
        checkout.adapter("run_gradient_clipping")(given(params), most)
        return torch.stack([p.grad for p in params[:-1]]) / most

    mistakes = {
        "each parameter is clipped alone, not the norm of all": F.normalize(gradients.flatten(1)).view_as(gradients),
        "gradients are not changed": gradients / 1e-2,
    }
    yield basics.asked("a norm above the largest", partial(clipped, 1e-2), normed, mistakes)
    yield basics.asked(
        "a norm below the largest",
        partial(clipped, 100.0),
        gradients / 100,
        {"gradients of a smaller norm are scaled up": normed},
    )
    yield basics.asked("parameters in an iterator", partial(clipped, 1e-2, iter), normed, beyond=True)


def schedule() -> basics.Questions:
    warmup, cycle, least, most = 7, 21, 0.1, 1.0

    def rate(it: int, late: int = 0, begin: int = warmup, end: int = cycle) -> float:
        """The learning rate of an iteration.

        late        is added to the number of the iteration in the warm-up
        begin, end  the first and the last iteration of the cosine
        """
        if it < warmup:
            return most * (it + late) / warmup
        return least + (1 + math.cos(math.pi * min(1.0, (it - begin) / (end - begin)))) / 2 * (most - least)

    def rates(of: Callable[[int], float]) -> Tensor:
        """The learning rates of the first 25 iterations by the function `of`."""
        return torch.tensor([float(of(it)) for it in range(25)], dtype=torch.float64)

    mistakes = {
        "the first iteration is 1, not 0": rates(lambda it: rate(it + 1)),
        "warm-up begins at the rate of step 1": rates(partial(rate, late=1)),
        "the cosine begins at iteration 0, not behind the warm-up": rates(partial(rate, begin=0)),
        "the cosine has cosine_cycle_iters iterations behind the warm-up": rates(partial(rate, end=cycle + warmup)),
    }
    run = checkout.adapter("run_get_lr_cosine_schedule")
    yield basics.asked(
        "25 iterations", lambda: rates(lambda it: run(it, most, least, warmup, cycle)), rates(rate), mistakes
    )


def batches() -> basics.Questions:
    def judge(data: Any) -> Fault | None:
        """The fault of the adapter's batches from these tokens; None without one."""
        starts, last = set[int](), len(data) - 7 - 1  # the last start that has a target for each of its inputs
        for _ in range(200):
            x, y = checkout.adapter("run_get_batch")(data, 32, 7, "cpu")  # 32 windows of 7 tokens
            if x.shape != (32, 7) or not torch.equal(x.long() + 1, y.long()):
                text = f"  inputs {tuple(x.shape)}, targets {tuple(y.shape)}; expected (32, 7), and the next tokens"
                return Fault(text, "targets are not the inputs shifted by one" if x.shape == y.shape else None)
            starts |= set(x[:, 0].tolist())
        mistake = "the last window is never drawn" if max(starts) == last - 1 else None
        text = f"  windows begin at {min(starts)} to {max(starts)}; expected 0 to {last}"
        return None if (min(starts), max(starts)) == (0, last) else Fault(text, mistake)

    yield Question("6,400 windows of 7 of 100 tokens", partial(judge, np.arange(100))), False
    yield Question("tokens in uint16", partial(judge, np.arange(100, dtype=np.uint16))), True


def checkpoints() -> basics.Questions:
    def trained(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A small model and its optimizer after one step."""
        model = nn.Linear(5, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        model(basics.drawn(f"{rate}", 2, 5)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    def judge(place: Any) -> Fault | None:
        """The fault of a checkpoint that the adapters write to `place`, and read again into another model."""
        saved, others = trained(0.1), trained(0.2)
        checkout.adapter("run_save_checkpoint")(*saved, 3, place)
        if isinstance(place, io.BytesIO):
            place.seek(0)
        if (iteration := checkout.adapter("run_load_checkpoint")(place, *others)) != 3:
            return Fault(f"  run_load_checkpoint returns {iteration!r}; expected 3", "the iteration is not restored")
        for name, pair in zip(("model", "optimizer"), zip(others, saved, strict=True), strict=True):
            try:
                torch.testing.assert_close(*(x.state_dict() for x in pair), rtol=0, atol=0)
            except AssertionError as error:
                return Fault(f"  {str(error).splitlines()[0]}", f"the {name} is not restored")
        return None

    with tempfile.TemporaryDirectory() as folder:
        yield Question("a file", partial(judge, Path(folder, "checkpoint.pt"))), False
    yield Question("a file in memory", partial(judge, io.BytesIO())), True


TEXT = f"""Im Café saß der größte Bär. He'd read: "Über den Flüssen", 1.234 pages of naïve, déjà-vu prose!
He'd never seen such a façade; the bear's bread was the best, better than the rest of the breads (12 or 13).
{END}Où est-il?  The other bears ate there, they'll say, and then they'd rather bathe in the weather.
ŁÓDŹ łódź łódź. The thin thing that the third brother thought through: nothing. 2024, 2025, 2026...
{END}
Bread, bread, bread! The best bears eat the rest; the rest eat 24 or 25 breads, or the other bread.
The café's façade: größer, größte, naïve; déjà vu, déjà lu. They thought that there'd be more of these {END}bears.
"""
VOCABULARY = 320  # tokens: the 256 bytes, END, and what is merged


def smallest(count: int, pair: naive.Pair) -> object:
    """A mistaken `rank` for `naive.learn_merges`: of equally frequent pairs the smallest is merged, not the greatest.

    `learn_merges` merges the pair with the largest rank. Here bytes are negated, so the smallest pair has that rank.
    """
    return count, [[-x for x in part] for part in pair]


def pretokens_of_text() -> list[bytes]:
    """The pre-tokens of TEXT, without END."""
    return [word.encode() for word in naive.split(TEXT, [END]) if word != END]


def bpe_training() -> basics.Questions:
    kept, number = pretokens_of_text(), VOCABULARY - 256 - 1  # of the tokens, 256 are bytes, and one is END
    expected = naive.learn_merges(Counter(kept), number)
    # By mistake in words: (the pre-tokens, the rank of a pair) that it gives `naive.learn_merges`.
    mistakes: dict[str, tuple[Sequence[bytes], Callable[[int, naive.Pair], object]]] = {
        "of equally frequent pairs the smallest is merged, not the greatest": (kept, smallest),
        "of equally frequent pairs the first that was seen is merged, not the greatest": (kept, lambda count, _: count),
        "the pattern is applied to bytes, not to text: letters of several bytes end a word": (
            [x for part in TEXT.encode().split(END.encode()) for x in regex.findall(pretokens.PATTERN.encode(), part)],
            lambda *ranked: ranked,  # (count, pair), the right rank
        ),
        "the special token is taken for text: pairs of it are merged": (
            [word.encode() for word in naive.split(TEXT)],
            lambda *ranked: ranked,
        ),
    }

    def judge() -> Fault | None:
        """The fault of the vocabulary and merges that the adapter learns from TEXT."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "text.txt")
            file.write_text(TEXT, encoding="utf-8")
            vocab, merges = checkout.adapter("run_train_bpe")(file, VOCABULARY, [END])
        merges = list(map(tuple, merges))
        at = next((i for i, pair in enumerate(expected) if i >= len(merges) or merges[i] != pair), None)
        if at is not None:
            got = merges[at] if at < len(merges) else "none"
            named = (
                words
                for words, (pieces, rank) in mistakes.items()
                if merges == naive.learn_merges(Counter(pieces), number, rank)
            )
            return Fault(f"  merge {at} of {len(expected)}: expected {expected[at]}, got {got}", next(named, None))
        tokens = {bytes([byte]) for byte in range(256)} | {left + right for left, right in expected} | {END.encode()}
        if len(merges) > len(expected) or set(vocab.values()) != tokens or set(vocab) != set(range(VOCABULARY)):
            return Fault(f"  the vocabulary has {len(vocab)} tokens, and {len(merges)} merges; expected {VOCABULARY}")
        return None

    yield Question(f"{VOCABULARY} tokens of a text", judge), False


def bpe_encoding() -> basics.Questions:
    merges, twice = naive.learn_merges(Counter(pretokens_of_text()), VOCABULARY - 256), END + END
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    vocab, sentence = (
        dict(enumerate(tokens + [END.encode(), twice.encode()])),
        "né lo, quing 12 ster\n\n  Héllò 🙃" + END + " wing?" + END + "\n",
    )
    cases = {  # by words: (text, special tokens)
        "an empty text": ("", None),
        "a text with letters of several bytes": (sentence.replace(END, ""), None),
        "a text with special tokens": (sentence, [END]),
        "special tokens of which one begins another": (f"lo {twice} ba {END}", [END, twice]),
    }

    def judge(given: str, special: list[str] | None, in_lines: bool = False) -> Fault | None:
        """The fault of a text's tokens and of their decoding. in_lines: it is given line by line."""
        student = checkout.adapter("get_tokenizer")(dict(vocab), list(merges), special)
        ids = list(student.encode_iterable(given.splitlines(keepends=True)) if in_lines else student.encode(given))
        decoded = student.decode(ids)
        expected = Tokenizer(dict(vocab), list(merges), special or []).encode(given)
        if ids != expected:
            at = next(
                i for i, pair in enumerate(zip([*ids, None], expected + [None], strict=False)) if len(set(pair)) > 1
            )
            pieces = [list(map(vocab.get, of[at : at + 3])) for of in (expected, ids)]
            # True if END is in the text and a special token, and yet no token of the answer.
            split = special and END not in [vocab.get(i, b"").decode(errors="replace") for i in ids] and END in given
            return Fault(
                f"  from token {at} on: expected {pieces[0]}, got {pieces[1]}",
                "special tokens are split as text is" if split else None,
            )
        return None if decoded == given else Fault(f"  decode gives {decoded[:40]!r}; expected {given[:40]!r}")

    for about, case in cases.items():
        yield Question(about, partial(judge, *case)), False
    yield Question("a text in lines", partial(judge, TEXT, [END], in_lines=True)), False
