"""Training on packed documents, `data.packing=documents`: loss and gradients are those of the documents apart.

A document ends where a token has no target (`lmsys.training.data`), so a batch of inputs and targets tells where.
Legend: B sequences, S context length.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmsys.attention import ATTENTION, AttentionCase, Documents
from lmsys.attention.contract import adapt, why_not_told
from lmsys.config import IGNORED
from lmsys.model.transformer import attention_case
from lmsys.registry import Entry
from lmsys.training.config import RunConfig
from lmsys.training.data import Source


def end_of_text_of(source: Source, config: RunConfig) -> int | None:
    """The id that ends a document; None: documents are not told apart. ValueError where the source knows no id."""
    return source.end_of_text if config.data.packing == "documents" else None


def model_inputs(inputs: np.ndarray, targets: np.ndarray, device: torch.device) -> tuple[Any, ...]:
    """Arguments of a model's loss: (tokens, targets), and the documents where sequences have more than one.

    inputs, targets  (B, S) int64
    """
    tensors: tuple[Tensor, ...] = tuple(torch.from_numpy(x).to(device) for x in (inputs, targets))
    ends = targets[:, :-1] == IGNORED
    if not ends.any():
        return tensors
    lengths = [np.diff([0, *(np.flatnonzero(row) + 1), targets.shape[1]]).tolist() for row in ends]
    return *tensors, Documents(lengths, device)


def check_attention(config: RunConfig, device: torch.device) -> None:
    """ValueError, with the rows that can, where model.attention cannot train here, or not on packed documents."""
    model, train, packed = config.model, config.train, config.data.packing == "documents"
    dtype = "bfloat16" if train.precision == "bf16" else "float32"
    case = attention_case(model, train.held, model.context_length, dtype, device, grad=True, documents=packed)
    try:
        reason = _why_not(ATTENTION.pick(model.attention, case), case)
    except ValueError as error:
        reason = str(error)
    if reason:
        able = ", ".join(name for name in ATTENTION if not _why_not(ATTENTION[name], case))
        with_what = "data.packing='documents'" if packed else f"train.precision={train.precision!r} on {device.type}"
        told = f"model.attention={model.attention!r} cannot train with {with_what}: {reason}"
        raise ValueError(f"{told}; here these can: {able}")


def _why_not(row: Entry, case: AttentionCase) -> str | None:
    if reason := row.why_not(case):
        return reason
    if not case.documents:
        return None
    if row.trait("compiles", False):
        return "it compiles anew for the documents of each batch"
    try:
        return why_not_told(adapt(row.load()), case.options)
    except ImportError as error:
        return str(error)
