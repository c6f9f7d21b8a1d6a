"""Assembles whole tensors from the parts of them that `Fsdp` leaves on all ranks, and divides whole tensors again.

This is for an optimizer that needs whole matrices under fsdp, such as `lmsys.training.muon.Muon`. There a `FlatShard`
(flat_shard.py), here called a *flat*, holds parameters side by side in one tensor. Each rank has one of world_size
equal parts of it, and the same part of the optimizer's state. Here each parameter has an *owner*, the rank that
computes its step. `Muon` makes an `Assembly`, which it uses in each step: `whole` brings every rank the whole tensors
that it owns, the rank computes with them, and `parts` brings every rank its parts of all results. Both are one
all-to-all.

Another optimizer of this kind has the class attribute `takes_whole_matrices`; then `Fsdp.make_optimizer` gives it the
flats.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys.parallel import buckets, collectives, flat_shard


class Assembly:
    """The plan of both all-to-alls: which rank owns which parameter, and what each rank sends to each other rank.

    Every rank makes the same plan, from equal arguments. Parameters are numbered over all flats, in their order.

    flats  the flat shards; `views` and `whole` take one tensor for each, in this order
    costs  for each parameter the cost of its step; owners are chosen so that their costs are about equal
    """

    def __init__(self, flats: Sequence[flat_shard.FlatShard], costs: Sequence[float]):
        self._group, self._device = collectives.unwrapped(flats[0].group), flats[0].shard.device
        self._world_size, self._rank = collectives.size_and_rank(self._group)
        self._members = buckets.share_out(costs, self._world_size)  # by rank: numbers of the parameters that it owns
        self._owned = self._members[self._rank]
        self.shapes = [p.shape for flat in flats for p in flat.params]
        # For each parameter: (the number of its flat, the slice of this rank's part of that flat which is its own).
        self._places = [(number, place) for number, flat in enumerate(flats) for place in flat.places(self._rank)]
        self._sizes: list[list[int]] = []  # by rank: how many elements of each parameter are in its part
        for other in range(self._world_size):
            places = [place for flat in flats for place in flat.places(other)]
            self._sizes.append([place.stop - place.start for place in places])

    def views(self, flat_parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each flat -> this rank's part of each parameter, as views of the former."""
        return [flat_parts[number][place] for number, place in self._places]

    def whole(self, flat_parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each flat -> the whole tensors of the parameters that it owns. All ranks call it."""
        views, count = self.views(flat_parts), len(self._owned)
        sent = [[views[index] for index in owned] for owned in self._members]
        sizes = [[of_rank[index] for index in self._owned] for of_rank in self._sizes]
        # From rank 0 a piece of each parameter that this rank owns, then the same from rank 1, and so on: so
        # pieces[k::count] are all pieces of the k-th of these parameters.
        pieces = self._exchange(sent, sizes, flat_parts[0].dtype)
        return [torch.cat(pieces[k::count]).view(self.shapes[index]) for k, index in enumerate(self._owned)]

    def parts(self, wholes: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The whole tensors that this rank owns, in `dtype` -> its part of each parameter. All ranks call it."""
        pieces = []
        for x, index in zip(wholes, self._owned, strict=True):
            pieces.append(x.reshape(-1).split([of_rank[index] for of_rank in self._sizes]))
        sent = [[of_ranks[rank] for of_ranks in pieces] for rank in range(self._world_size)]
        sizes = [[self._sizes[self._rank][index] for index in owned] for owned in self._members]
        received = self._exchange(sent, sizes, dtype)
        by_index = dict(zip([index for owned in self._members for index in owned], received, strict=True))
        return [by_index[index] for index in range(len(self.shapes))]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Sends to each rank the tensors of the list sent[rank]. Returns those that came, flat, in order of senders.

        sizes  for each sender the number of elements of each tensor that comes from it
        """
        nothing = torch.empty(0, dtype=dtype, device=self._device)  # torch.cat needs at least one tensor
        flat = torch.cat([nothing, *(x for of_rank in sent for x in of_rank)])
        counts = [sum(x.numel() for x in of_rank) for of_rank in sent]
        received = flat
        if self._world_size > 1:
            received = flat.new_empty(sum(map(sum, sizes)))
            dist.all_to_all_single(received, flat, list(map(sum, sizes)), counts, group=self._group)
        return received.split([size for of_rank in sizes for size in of_rank])
