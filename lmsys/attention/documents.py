"""Documents packed one after another into a sequence: made once, and then given to many calls."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lmsys.values import shortly, whole

INTEGERS = (torch.int32, torch.int64)
FARTHEST = 2**31 - 1  # positions are int32 in kernels


class Documents:
    """Documents that fill sequences of S tokens: `Documents([3, 5])` packs two of them into 8 tokens.

    lengths  tokens of each document, in their order; or a list of such lists, one for each batch entry, of one sum
    device   that of the tensors which attention will be given
    keys     of as many documents, the keys that their queries see, where they are not the same tokens:
             `Documents([1, 2], keys=Documents([3, 5]))` has one query on 3 keys and two on 5

    starts, ends  (B, S) or, where all batch entries are packed alike, (1, S), int32: the first token of the document
                  that a token belongs to, and the first one behind it
    key_starts, key_ends  (B, S) or (1, S), int32: the same among the keys, which a token sees as a query
    places        (B, S) or (1, S), int32: where a token stands among the keys. A document's last query stands at its
                  last key.
    ValueError names a length that is none, or sums or numbers of documents that differ.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        keys: "Documents | None" = None,
    ):
        self.lengths = tuple(_checked(row) for row in _rows(lengths))
        sums = [sum(row) for row in self.lengths]
        if len(set(sums)) != 1:
            raise ValueError(f"documents must fill all batch entries alike; their lengths add up to {shortly(sums)}")
        self.num_tokens = sums[0]
        self.longest = max(max(row) for row in self.lengths)
        ends = [list(accumulate(row)) for row in self.lengths]
        self._edges = [[0, *row[:-1]] for row in ends], ends
        self.starts, self.ends = (self._by_token(x, device) for x in self._edges)
        self._kept = dict[Hashable, Any]()
        self._keys = keys
        if [len(row) for row in self.keys.lengths] != [len(row) for row in self.lengths]:
            raise ValueError(f"keys={shortly(keys)} must be of as many documents as {shortly(self.lengths)}")
        self.key_starts, self.key_ends = (self._by_token(x, device) for x in self.keys._edges)
        tokens = torch.arange(self.num_tokens, dtype=torch.int32, device=device)
        self.places = self.key_ends - self.ends + tokens

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Documents":
        """From where documents begin and the last one ends: (N + 1,) integers 0, ..., S, on attention's device."""
        _check_integers("cu_seqlens", cu_seqlens, (1,))
        edges = cu_seqlens.tolist()
        if len(edges) < 2 or edges[0] != 0:
            raise ValueError(f"cu_seqlens={shortly(edges)} must be 0, then where each document ends")
        lengths = [end - start for start, end in zip(edges, edges[1:], strict=False)]
        if min(lengths) < 1:
            raise ValueError(f"cu_seqlens={shortly(edges)} must increase: a document has at least one token")
        return cls(lengths, cu_seqlens.device)

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """From a number for each token, one for all tokens of a document: (S,) or (B, S) integers."""
        _check_integers("ids", ids, (1, 2))
        lengths = []
        for row in ids if ids.dim() == 2 else [ids]:
            found, counts = torch.unique_consecutive(row, return_counts=True)
            if len(found.unique()) != len(found):
                raise ValueError(f"ids={shortly(row.tolist())}: the tokens of a document must stand together")
            lengths.append(counts.tolist())
        return cls(lengths, ids.device)

    @property
    def keys(self) -> "Documents":
        """The documents that its tokens see as queries: itself, where no others were given."""
        return self._keys or self

    def of_entries(self, entries: Sequence[int]) -> "Documents":
        """The documents of some batch entries."""
        keys = self._keys and self._keys.of_entries(entries)
        return Documents([self.lengths[entry % self.batch] for entry in entries], self.device, keys)

    @property
    def batch(self) -> int:
        """B, or 1 where all batch entries are packed alike."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.starts.device

    def cu_seqlens(self, batch: int) -> Tensor:
        """(N + 1,) int32: where the documents of `batch` sequences, laid end to end, begin, and where the last ends."""

        def made() -> Tensor:
            rows = self.lengths if self.batch == batch else self.lengths * batch
            edges = [0, *accumulate(length for row in rows for length in row)]
            return torch.tensor(edges, dtype=torch.int32, device=self.device)

        return self.keep(("cu_seqlens", batch), made)

    def keep(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make()`, made once; it goes with the documents, and so must not hold them."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def positions(self) -> Tensor:
        """(B, S) or (1, S) int64: the place of each token in its own document, from 0 on."""
        return torch.arange(self.num_tokens, device=self.device) - self.starts

    def __repr__(self) -> str:
        keys = "" if self._keys is None else f", keys={self._keys!r}"
        return f"Documents({shortly([list(row) for row in self.lengths])}, device={str(self.device)!r}{keys})"

    def _by_token(self, values: list[list[int]], device: torch.device | str) -> Tensor:
        rows = [
            torch.tensor(row, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
            for row, lengths in zip(values, self.lengths, strict=True)
        ]
        return torch.stack(rows).to(device)


def kept_on_documents(maxsize: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `make(documents, *key)` once, and keeps it on the documents; without any, keeps the last `maxsize`."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        without = lru_cache(maxsize)(partial(make, None))

        @wraps(make)
        def made(documents: Documents | None, *key: Hashable) -> Any:
            if documents is None:
                return without(*key)
            return documents.keep((make.__qualname__, *key), partial(make, documents, *key))

        return made

    return decorate


def _rows(lengths: Any) -> Sequence[Any]:
    if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
        told = "their lengths, as in Documents([3, 5]), or one list of lengths for each batch entry"
        raise ValueError(f"documents are made of {told}; got {shortly(lengths)}")
    return lengths if isinstance(lengths[0], Sequence) else [lengths]


def _checked(lengths: Any) -> tuple[int, ...]:
    if not isinstance(lengths, Sequence) or not lengths:
        raise ValueError(f"documents of a batch entry must be a list of lengths; got {shortly(lengths)}")
    found = tuple(whole("length of a document", length, least=1, most=FARTHEST) for length in lengths)
    whole("number of tokens of a batch entry", sum(found), most=FARTHEST)
    return found


def _check_integers(name: str, x: Any, dims: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        told = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a torch.Tensor of int32 or int64; got {told}")
    if x.dim() not in dims or 0 in x.shape:
        raise ValueError(f"{name} must have {' or '.join(map(str, dims))} dimensions of tokens; got {tuple(x.shape)}")
