"""Small functions of tensors (SiLU, softmax, widening), and checks of ids that users give: tokens, classes, positions.

Other files of this folder call these functions, except `softmax`, which is for users. `lmsys.training.generation`
checks the ids of prompts and stop tokens with `check_range`. The kernels of `fused_triton.py` compute SiLU, too: a
change of `silu` is made there as well.
"""

import torch

from lmsys import autograd, values


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), element by element (Elfwing et al. 2017, arXiv 1702.03118)."""
    return torch.nn.functional.silu(x)


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """exp(x) divided by its sum along `dim`: a tensor of x's shape and dtype.

    The largest element along `dim` is subtracted from x first, so that no exponential overflows.
    """
    return torch.softmax(x, dim)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or x itself if it is float64: the dtype that sums and exponentials are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


Shape = tuple[int | str, ...]  # a text such as "B" stands for any size, and names it in messages


def check_ids(name: str, x: object, kind: str, shapes: list[Shape] | None, below: int, but: int | None = None) -> None:
    """ValueError unless x is an integer tensor of one of the shapes, with values from 0 to below - 1, or `but`.

    name    the argument's name in error messages, such as "tokens"
    kind    what the numbers are, in the plural, for error messages, such as "token ids"
    shapes  the shapes that are right; None: any
    but     another value that is right, such as that of ignored targets; None: there is none

    Values are checked on a CPU only, since the host would have to wait for a GPU. They are not checked while
    torch.compile, torch.func or a dispatch mode follows the call (`autograd.is_watched`), since values cannot be read
    there.
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
    """ValueError, with the wrong id, unless ids from `low` to `high` all lie in 0 to below - 1.

    name, kind  as in `check_ids`
    but         another id that is right, for the message alone: callers leave it out of `low` and `high`
    """
    if low < 0 or high >= below:
        other = "" if but is None else f", or {but}"
        raise ValueError(f"{name} must be {kind} from 0 to {below - 1}{other}; got {low if low < 0 else high}")


def _fits(shape: torch.Size, asked: Shape) -> bool:
    """True where `shape` has as many dimensions as `asked`, and each number in `asked` is the size at its place."""
    return len(shape) == len(asked) and all(isinstance(n, str) or n == m for n, m in zip(asked, shape, strict=True))
