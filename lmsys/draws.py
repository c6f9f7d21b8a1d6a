"""Random inputs that any machine can draw again: one counter-based generator, bitwise equal on every device.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) gives four words for each number
of a counter. A word becomes a value without a logarithm or a sine, which differ between devices: the sum of its four
bytes is nearly normal, and 13 more bits fill the mantissa of float32. The values of a seed are an endless *stream*. A
*draw* for a tensor is a window of the stream, as long as the tensor. So a new draw costs one copy, and any part of it
can be computed again by itself.

Benchmarks fill the inputs of timed calls by `Draws`, and `lmsys verify` draws parts of them again by `part`. Checks
draw their inputs by `values` and `whole_numbers`, with `key(seed, name)` as the seed. A change that makes any of these
functions, or `lmsys.extremes`, give other values needs a new VERSION, since result files name it.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

VERSION = "philox4x32-10/2"  # result files name it; extreme values (`lmsys.extremes`) are a part of what is drawn
STD = (4 * (256**2 - 1) / 12) ** 0.5  # standard deviation of the sum of four bytes
STARTS = 2**16  # how many places of a stream a draw can begin at
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # constants of Philox, and so are the next two
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each of Philox's 10 rounds
_WORD = 0xFFFFFFFF  # the mask of a word's 32 bits
_AT_ONCE = 2**22  # counters whose words are computed together, so that temporaries stay below 1 GiB
_BLOCK, _BLOCKS = 2**16, 2**11  # values in a block of `part`, and blocks that it keeps: 256 MiB of bfloat16


def philox(seed: int, first: int, count: int, device: str | torch.device = "cpu") -> Tensor:
    """The words (4 count,) in int64 of the counters first, first + 1, ...; `seed`, of 64 bits, is Philox's key."""
    counter = torch.arange(first, first + count, dtype=torch.int64, device=device)
    x = [counter & _WORD, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        products = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        high = [product >> 32 & _WORD for product in products]
        x = [high[1] ^ x[1] ^ key[0], products[1] & _WORD, high[0] ^ x[3] ^ key[1], products[0] & _WORD]
        key = [word + weyl & _WORD for word, weyl in zip(key, _WEYL, strict=True)]
    return torch.stack(x, dim=1).flatten()


def values(seed: int, first: int, count: int, device: str | torch.device = "cpu") -> Tensor:
    """The `count` values of the seed's stream from `first` on, float32, of mean 0 and standard deviation 1.

    Each is n · 2**-13 / STD with a whole number |n| < 2**22: it needs nearly all bits of float32, so that code which
    rounds float32 to fewer bits gives other results.
    """

    def nearly_normal(words: Tensor) -> Tensor:
        """Values from words: the sum of four bytes, less its mean, and 13 bits for the rest of the mantissa."""
        total = sum((words >> shift & 255 for shift in (8, 16, 24)), words & 255)
        fraction = (words * _WEYL[0] & _WORD) >> 19  # the upper 13 bits of a hash: the word times an odd constant
        return ((total - 510 << 13) + fraction - 2**12).float() * (2.0**-13 / STD)

    return _stream(nearly_normal, torch.float32, seed, first, count, device)


def whole_numbers(seed: int, first: int, count: int, below: int, device: str | torch.device = "cpu") -> Tensor:
    """The `count` whole numbers of the seed's stream from `first` on, int64: 0 <= number < below, all equally likely.

    `below` is at most 2**31.
    """
    return _stream(lambda words: words * below >> 32, torch.int64, seed, first, count, device)


def _stream(
    of: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    seed: int,
    first: int,
    count: int,
    device: str | torch.device,
) -> Tensor:
    """The elements `first` to `first` + `count` - 1 of a seed's stream, (count,). `of` makes elements from words.

    They are computed in pieces of 4 _AT_ONCE elements, so that temporaries need little memory.
    """
    elements = torch.empty(count, dtype=dtype, device=device)
    for begin in range(first - first % 4, first + count, 4 * _AT_ONCE):
        # Four words for each counter; the last piece has only as many counters as are left, rounded up.
        words = philox(seed, begin // 4, min(_AT_ONCE, -((begin - first - count) // 4)), device)
        low, high = max(begin, first), min(begin + 4 * _AT_ONCE, first + count)
        elements[low - first : high - first] = of(words)[low - begin : high - begin]
    return elements


class Draws:
    """Fills tensors again and again: draw n of a tensor is a window of the tensor's own stream, at a place given by n.

    For each tensor a part of its stream is held on its device, STARTS values longer than the tensor, in its dtype.

    tensors  by name, of any strides
    std      by name: the stream's values are multiplied by this, then rounded to the tensor's dtype; default 1
    below    by name: the tensor gets whole numbers from 0 to below - 1 in place of such values
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        seed: int,
        std: Mapping[str, float] | None = None,
        below: Mapping[str, int] | None = None,
    ):
        self.tensors, self.seed = dict(tensors), seed
        std, below = std or {}, below or {}
        self._source = {
            name: _elements(
                key(seed, name), 0, x.numel() + STARTS, x.dtype, std.get(name, 1.0), below.get(name), x.device
            )
            for name, x in self.tensors.items()
        }

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        """Writes draw number `draw` in place. Autograd does not see it: storage, layout and version stay the same.

        Benchmarks call it to give a call new inputs. Classes derived from this one then write extreme parts into them.

        names  of the tensors to fill; None: all
        """
        for name in self.tensors if names is None else names:
            x, first = self.tensors[name], start(draw, name)
            x.data.copy_(self._source[name][first : first + x.numel()].view(x.shape))


def _elements(
    seed: int,
    first: int,
    count: int,
    dtype: torch.dtype,
    std: float,
    below: int | None,
    device: str | torch.device = "cpu",
) -> Tensor:
    """A part of a stream as `Draws` holds it: `count` elements from `first` on. std, below: as in `Draws`."""
    x = values(seed, first, count, device) * std if below is None else whole_numbers(seed, first, count, below, device)
    return x.to(dtype)


def start(draw: int, name: str) -> int:
    """The place, below STARTS, in the stream of the tensor `name` where the window of draw number `draw` begins."""
    return random.Random(f"{draw} {name}").randrange(STARTS)


def key(seed: int, name: str) -> int:
    """The seed, of 64 bits, of the stream of this name."""
    return random.Random(f"{seed} {name}").getrandbits(64)


def part(
    seed: int,
    draw: int,
    name: str,
    first: int,
    count: int,
    dtype: torch.dtype,
    std: float = 1.0,
    below: int | None = None,
) -> Tensor:
    """`count` elements, from `first` on, of what `Draws.fill` writes into a tensor as draw number `draw`, on a CPU.

    Only those blocks of _BLOCK elements are computed that hold some of these elements. Draws are overlapping windows of
    one stream: blocks that were computed for one draw are kept for the next.

    seed, name         the seed of the `Draws`, and the name of the tensor
    dtype, std, below  of the tensor, as in `Draws`
    """
    begin = start(draw, name) + first
    low, end = begin - begin % _BLOCK, begin + count
    blocks = [_block(key(seed, name), at, dtype, std, below) for at in range(low, max(end, low + 1), _BLOCK)]
    return torch.cat(blocks)[begin - low : end - low].clone()


@lru_cache(_BLOCKS)
def _block(seed: int, first: int, dtype: torch.dtype, std: float, below: int | None) -> Tensor:
    """The _BLOCK elements from `first` on, kept for later calls."""
    return _elements(seed, first, _BLOCK, dtype, std, below)
