"""`get_batch` makes batches of random windows of a text, as in nanoGPT, for a training loop of your own.

Each batch draws the starts of its windows independently, so windows repeat. The training loop of this package takes
`lmsys.training.data.Batches` instead, which has every window once in an epoch.
Legend: B sequences, S context length.
"""

import numpy as np
import torch

from lmsys import values


def get_batch(
    ids: np.ndarray | torch.Tensor,
    batch_size: int,
    context_length: int,
    device: torch.device | str | int | None = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, (B, S) int64 on `device`: the targets are the inputs' next tokens.

    ids        a one-dimensional array or tensor of token ids, or a memory map, in any integer dtype
    generator  a CPU generator, which draws the starts uniformly over the windows of S + 1 ids; None: torch's own
    ValueError for other or too few ids, and for sizes below 1.
    """
    values.counts(batch_size=batch_size, context_length=context_length)
    values.instance("generator", generator, torch.Generator | None)
    kind = str(values.instance("ids", ids, np.ndarray | torch.Tensor).dtype).removeprefix("torch.")
    values.hold(
        (
            ids.ndim == 1 and kind.startswith(("int", "uint")),
            f"ids must be a one-dimensional array or tensor of integers; got {kind} of shape {tuple(ids.shape)}",
        )
    )
    values.hold(
        (len(ids) > context_length, f"{len(ids):,} ids are too few: {context_length=} needs {context_length + 1:,}")
    )
    starts = torch.randint(len(ids) - context_length, (batch_size, 1), generator=generator)
    places = starts + torch.arange(context_length + 1)  # (B, S + 1)
    windows = (
        ids[places.to(ids.device)].long()
        if isinstance(ids, torch.Tensor)
        else torch.from_numpy(ids[places.numpy()].astype(np.int64))
    ).to(values.instance("device", device, torch.device | str | int | None))
    return windows[:, :-1], windows[:, 1:]
