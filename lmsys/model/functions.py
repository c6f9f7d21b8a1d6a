"""SiLU, softmax and widening as functions of tensors; checks of ids that users give: tokens, classes, positions.

Files of this folder call these functions, but for `softmax`, which is for users; `lmsys.training.generation` checks the
ids of prompts.
"""

import torch

from lmsys import autograd, values


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), element by element (Elfwing et al. 2017, arXiv 1702.03118)."""
    return torch.nn.functional.silu(x)


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """exp(x) divided by its sum along `dim`, of x's shape and dtype.

    The largest element is subtracted before, so that no exponential overflows.
    """
    return torch.softmax(x, dim)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32; x itself if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


Shape = tuple[int | str, ...]  # a text stands for any size, and is its name in messages


def check_ids(name: str, x: object, kind: str, shapes: list[Shape] | None, below: int, but: int | None = None) -> None:
    """ValueError unless x is an integer tensor of one of the shapes, with values from 0 to below - 1, or `but`.

    name    of the argument, for messages
    kind    what the numbers are, in the plural, for messages
    shapes  the shapes that are right; None: any
    but     another value that is right, such as that of ignored targets; None: there is none
    Values are checked on a CPU only: the host would have to wait for a GPU, and neither a compiler nor torch.func can
    read them.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of {kind}; got {values.shortly(x)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be {kind} in int64 or int32; got {x.dtype}")
    if shapes is not None and not any(_fits(x.shape, shape) for shape in shapes):
        allowed = " or ".join(f"({', '.join(map(str, shape))})" for shape in shapes)
        raise ValueError(f"{name} must be {kind} of shape {allowed}; got shape {tuple(x.shape)}")
    if x.device.type != "cpu" or autograd.is_watched():
        return
    known = x if but is None else x[x != but]
    if known.numel():
        check_range(name, kind, int(known.min()), int(known.max()), below, but)


def check_range(name: str, kind: str, low: int, high: int, below: int, but: int | None = None) -> None:
    """ValueError, with the wrong id, unless ids from `low` to `high` all lie in 0 to below - 1."""
    if low < 0 or high >= below:
        other = "" if but is None else f", or {but}"
        raise ValueError(f"{name} must be {kind} from 0 to {below - 1}{other}; got {low if low < 0 else high}")


def _fits(shape: torch.Size, asked: Shape) -> bool:
    """True where a tensor's shape is the one that was asked for."""
    return len(shape) == len(asked) and all(isinstance(n, str) or n == m for n, m in zip(asked, shape, strict=True))
