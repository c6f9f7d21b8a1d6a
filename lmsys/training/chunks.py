"""Lists of tensors that one launch works on, in chunks of so many elements, each of one tensor."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(16)
def chunks_of(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(elements by tensor, the tensor by chunk, the number of a chunk in its tensor by chunk), on the device."""
    elements = torch.tensor(sizes)
    counts = (elements + block - 1) // block
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]  # 0, 1, ... in each tensor
    return elements.to(device), owners.int().to(device), numbers.int().to(device)
