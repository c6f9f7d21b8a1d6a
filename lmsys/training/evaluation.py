"""Measures a model's loss on fixed windows of text, and that of a unigram model, which the model must beat.

The training loop and the pipeline's step `evaluate` call `evaluate` with the windows of `data.fixed_windows`; that step
also calls `unigram`. The loop also makes the inputs of its training steps by `model_inputs`. A new figure of an
evaluation is a field of `Evaluation`; loop.py and pipeline.py decide which figures are printed.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from lmsys import config, values
from lmsys.attention import Documents
from lmsys.training.data import Source

Windows = tuple[np.ndarray, np.ndarray]  # inputs and targets, (count, S), as of `data.fixed_windows`
_READ = 1 << 20  # tokens of a source that `unigram` reads at once


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    loss    mean cross-entropy of a target, in nats
    tokens  how many targets there were
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e to the power of the loss; inf if that is beyond a float, NaN if the loss is NaN."""
        return math.inf if self.loss >= 709 else math.exp(self.loss)  # the largest float is about e^709.8


def model_inputs(inputs: np.ndarray, targets: np.ndarray, device: torch.device) -> tuple[object, ...]:
    """The arguments of a model's loss: (tokens, targets), or (tokens, targets, documents) where documents are packed.

    inputs, targets  (B, S) int64; a document ends where a token has no target, as in `lmsys.training.data`
    """
    tensors = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
    ends = targets[:, :-1] == config.IGNORED  # without the last column: a sequence's end needs no mark
    if not ends.any():
        return tensors
    lengths = [np.diff(np.flatnonzero(row) + 1, prepend=0, append=targets.shape[1]).tolist() for row in ends]
    return *tensors, Documents(lengths, device)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    windows: Windows,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    loss_of: Callable[..., torch.Tensor] | None = None,
) -> Evaluation:
    """The mean loss over all targets of the windows; `batch_size`, sequences of a forward, does not change it.

    autocast  makes the context of a forward
    loss_of   called with the arguments of `model_inputs`, gives the mean loss; None: `model.loss`
    The model's mode, train or eval, is restored at the end. ValueError for no windows, windows without a target, or
    batch_size < 1.
    """
    values.whole("batch_size", batch_size, least=1)
    inputs, targets = values.several("windows", windows, np.ndarray)
    values.hold(
        (len(inputs), "there must be at least one window"),
        (_count(targets), "no token of the windows has a target: name a longer text to evaluate on"),
    )
    device = next(values.instance("model", model, torch.nn.Module).parameters()).device
    values.instance("autocast", autocast, Callable)
    loss_function = values.instance("loss_of", model.loss if loss_of is None else loss_of, Callable)
    was_training, total = model.training, 0.0
    model.eval()
    try:
        for first in range(0, len(inputs), batch_size):
            some = slice(first, first + batch_size)
            if count := _count(targets[some]):  # else the mean loss is not defined
                with autocast():
                    loss = loss_function(*model_inputs(inputs[some], targets[some], device))
                total += loss.item() * count
    finally:
        model.train(was_training)
    return Evaluation(total / _count(targets), _count(targets))


def _count(targets: np.ndarray) -> int:
    """How many targets are not IGNORED."""
    return int(np.count_nonzero(targets != config.IGNORED))


def unigram(source: Source, windows: Windows, vocab_size: int) -> Evaluation:
    """The loss on the windows of a model that knows only how often each id occurs in `source`.

    One is added to each count, so that no id of the windows has the probability 0.
    """
    counts = np.ones(values.whole("vocab_size", vocab_size, least=1))
    for start in range(0, len(source), _READ):
        counts += np.bincount(source.read(start, min(start + _READ, len(source))), minlength=vocab_size)
    losses = np.log(counts.sum()) - np.log(counts)
    targets = windows[1][windows[1] != config.IGNORED]
    return Evaluation(float(losses[targets].mean()), targets.size)
