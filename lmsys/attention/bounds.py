"""`Bounds`: the interval of keys that each query sees. `Pattern.bounds` makes one for the rows of flash attention.

A pattern is the set of options that say what queries see: windows, documents, a prefix, lengths and causal order. Under
these each query sees one interval of keys, whose two ends never decrease from one query to the next. The kernels read
only these intervals, not the options. A new option of this kind is applied in `Pattern._intervals`, not here. Only
under a `mask` may a query see another set of keys; rows that need intervals refuse masks.

So a tile of queries visits the keys from the `first` of its first query to the `end` of its last query. The keys from
the `first` of its last query to the `end` of its first query are seen by all queries of the tile, and need no mask. The
same holds with queries and keys exchanged, since each key is seen by an interval of queries: `Bounds.of_keys`.

Legend: B batch, Q queries, K keys.
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
            # The first query that sees key j is the number of queries with end <= j: their intervals end before it.
            torch.searchsorted(self.end, keys, right=True, out_int32=True),
            # Behind the last query that sees it: the number of queries with first <= j.
            torch.searchsorted(self.first, keys, right=True, out_int32=True),
            self.first.shape[1],  # keys and queries are exchanged, so Q takes the place of `num_keys`
        )

    # Computed once. torch.compile cannot trace a cached property, so `hidden.py` calls `seen_by` while it is traced.
    of_keys = cached_property(seen_by)

    def until(self, key_lengths: torch.Tensor) -> "Bounds":
        """These intervals, without the keys j >= key_lengths[b] of batch entry b; key_lengths (B,)."""
        end = torch.minimum(self.end, key_lengths.clamp(0, self.num_keys).to(torch.int32).unsqueeze(1))
        return Bounds(self.first.expand(end.shape).contiguous(), end, self.num_keys)

    def walk(self, start: int, stop: int, tile: int) -> list[tuple[int, bool]]:
        """The tiles of keys that the queries [start, stop) visit, in order: (first key, True if the tile needs a mask).

        tile  the number of keys in a tile; tiles begin at its multiples
        """
        # No query sees keys outside of [low, high), and all queries see [full_from, full_to). Neither end decreases, so
        # the smallest values are those of query `start`, and the largest are those of query `stop - 1`.
        low, full_from, full_to, high = (edge[at] for edge, at in zip(self._edges, (start, stop - 1) * 2, strict=True))
        columns = range(low // tile * tile, high, tile) if low < high else ()
        return [(col, col < full_from or min(col + tile, self.num_keys) > full_to) for col in columns]

    def visible(self, rows: slice, columns: slice) -> torch.Tensor:
        """A boolean mask (B or 1, rows, columns): True where the query of the row sees the key of the column."""
        keys = torch.arange(columns.start, columns.stop, device=self.first.device)
        return (keys >= self.first[:, rows, None]) & (keys < self.end[:, rows, None])

    @cached_property
    def _edges(self) -> list[list[int]]:
        """[smallest first, largest first, smallest end, largest end] over all batch entries, each a list by query.

        While a CUDA graph is captured, the host cannot read the tensors, and the graph may be replayed with other
        documents and lengths. So the edges are then 0 and K, by which `walk` visits and masks every tile.
        """
        if self.first.is_cuda and torch.cuda.is_current_stream_capturing():
            return [[edge] * self.first.shape[1] for edge in (0, self.num_keys, 0, self.num_keys)]
        return torch.stack([self.first.amin(0), self.first.amax(0), self.end.amin(0), self.end.amax(0)]).tolist()
