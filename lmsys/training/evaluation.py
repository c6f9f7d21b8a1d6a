"""How well a model predicts a fixed set of text, and the least that it must beat."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lmsys.training.data import Source

Windows = tuple[np.ndarray, np.ndarray]  # inputs and targets, (count, S), as of `data.fixed_windows`
_READ = 1 << 20  # tokens of a source that are read at once


@dataclass(frozen=True)
class Evaluation:
    """loss: mean cross-entropy of a token, in nats, over `tokens` of them."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e to the loss; inf where no float holds it."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module,
    windows: Windows,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    loss_of: Callable[..., Tensor] | None = None,
) -> Evaluation:
    """The loss over all windows, each token counting the same whatever `batch_size`.

    loss_of  (inputs, targets) -> the mean loss; None: `model.loss`
    The model is left in the mode, training or not, in which it came. ValueError for no windows or batch_size < 1.
    """
    inputs, targets = windows
    if batch_size < 1 or not len(inputs):
        raise ValueError(f"{batch_size=} and {len(inputs)} windows must both be at least 1")
    device = next(model.parameters()).device
    was_training, total = model.training, 0.0
    model.eval()
    try:
        for first in range(0, len(inputs), batch_size):
            batch = (torch.from_numpy(x[first : first + batch_size]).to(device) for x in (inputs, targets))
            with autocast():
                loss = (loss_of or model.loss)(*batch)
            total += loss.item() * inputs[first : first + batch_size].size
    finally:
        model.train(was_training)
    return Evaluation(total / inputs.size, inputs.size)


def unigram(source: Source, windows: Windows, vocab_size: int) -> Evaluation:
    """The loss of a model that knows how often each id stands in `source`, each counted once more, and nothing else."""
    counts = np.ones(vocab_size)
    for start in range(0, len(source), _READ):
        counts += np.bincount(source.read(start, min(start + _READ, len(source))), minlength=vocab_size)
    losses = np.log(counts.sum()) - np.log(counts)
    return Evaluation(float(losses[windows[1]].mean()), windows[1].size)
