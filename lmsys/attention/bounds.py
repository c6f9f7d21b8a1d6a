"""`Bounds`: the interval of keys that each query sees, which is all that flash rows read of a pattern.

`Pattern.bounds` makes them. Under windows, documents, a prefix, lengths and causal order each query sees one interval
of keys, whose two ends never decrease from one query to the next. Only under a mask may it see another set of keys;
rows that need intervals refuse masks.

So a tile of queries visits the keys from the `first` of its first query to the `end` of its last query. The keys from
the `first` of its last query to the `end` of its first query are seen by all queries of the tile, and need no mask. The
same holds with queries and keys exchanged, since each key is seen by an interval of queries: `Bounds.of_keys`.

Legend: B batch, Q queries, K keys, S = Q = K.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class Bounds:
    """Query i of batch entry b sees the keys first[b, i] <= j < end[b, i], and none where first[b, i] >= end[b, i].

    first, end  (B, Q), or (1, Q) if all batch entries share them: int32 between 0 and K. Neither decreases with i.
    num_keys    K
    """

    first: torch.Tensor
    end: torch.Tensor
    num_keys: int

    def seen_by(self) -> "Bounds":
        """The interval of queries that see each key: first, end (B or 1, K)."""
        keys = torch.arange(self.num_keys, dtype=torch.int32, device=self.first.device)
        keys = keys.expand(self.first.shape[0], -1).contiguous()
        return Bounds(
            torch.searchsorted(self.end, keys, right=True, out_int32=True),  # queries that end before key j
            torch.searchsorted(self.first, keys, right=True, out_int32=True),  # queries that begin at j or before
            self.first.shape[1],  # `num_keys` of the result: what a key is seen by are the queries
        )

    of_keys = cached_property(seen_by)  # computed once; torch.compile can trace a method, but no cached property

    def until(self, key_lengths: torch.Tensor) -> "Bounds":
        """These intervals, without the keys j >= key_lengths[b] of batch entry b."""
        end = torch.minimum(self.end, key_lengths.clamp(0, self.num_keys).to(torch.int32).unsqueeze(1))
        return Bounds(self.first.expand(end.shape).contiguous(), end, self.num_keys)

    def walk(self, start: int, stop: int, tile: int) -> list[tuple[int, bool]]:
        """The tiles of keys that queries [start, stop) visit, in order: (first key, True if the tile needs a mask).

        `tile` is the number of keys in a tile.
        """
        # The least `first` and `end` are those of the first query, the greatest are those of the last.
        low, full_from, full_to, high = (edge[at] for edge, at in zip(self._edges, (start, stop - 1) * 2, strict=True))
        columns = range(low // tile * tile, high, tile) if low < high else ()
        return [(col, col < full_from or min(col + tile, self.num_keys) > full_to) for col in columns]

    def visible(self, rows: slice, columns: slice) -> torch.Tensor:
        """(B or 1, rows, columns), boolean: True where one of these queries sees one of these keys."""
        keys = torch.arange(columns.start, columns.stop, device=self.first.device)
        return (keys >= self.first[:, rows, None]) & (keys < self.end[:, rows, None])

    @cached_property
    def _edges(self) -> list[list[int]]:
        """[least first, greatest first, least end, greatest end] over all batch entries, each a list by query.

        While a CUDA graph is recorded, the host cannot read them, and the graph may be replayed with other documents
        and lengths. The edges returned then make `walk` visit and mask every tile.
        """
        if self.first.is_cuda and torch.cuda.is_current_stream_capturing():
            return [[edge] * self.first.shape[1] for edge in (0, self.num_keys, 0, self.num_keys)]
        return torch.stack([self.first.amin(0), self.first.amax(0), self.end.amin(0), self.end.amax(0)]).tolist()
