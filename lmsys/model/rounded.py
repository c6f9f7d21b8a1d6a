"""Copies of a model's weights in the dtype of its matmuls: an optimizer writes them in the pass that steps the weights.

Autocast casts each weight in each forward, which reads it all again. A copy that is kept is made again only where its
weight is no longer what it was made of: its version, which every change in place counts up, and its address say so. A
change through `.data` is counted by nothing, and must be followed by `torch.autograd.graph.increment_version`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_recordings: list[set["RoundedWeights"]] = []


@contextmanager
def recorded() -> Iterator[set["RoundedWeights"]]:
    """Collects the copies that are read inside. What replays a recording of that has to `refresh` them before."""
    found: set[RoundedWeights] = set()
    _recordings.append(found)
    try:
        yield found
    finally:
        _recordings.pop()


class RoundedWeights:
    """Copies of the weights of `layers`; those of one group lie side by side, as one matmul reads them.

    A copy of this object, or one that is read from a file, has the layers and begins without copies of their weights.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]]):
        self._layers = layers
        self._weights: list[Any] = []
        self._copies: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # by id of the weight
        self._made_of: list[tuple[int, int] | None] = []  # version and address
        self._shown = False

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self._layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, weights have their copies as `rounded`, which `lmsys.model.linear` reads; under autocast alone."""
        groups = [] if self._shown else [[layer.weight for layer in group] for group in self._layers]
        weights = list(chain(*groups))
        if not weights or not _are_cast(weights):
            yield
            return
        dtype = torch.get_autocast_dtype(weights[0].device.type)
        if not self._are_of(weights, dtype):
            self._make(groups, dtype)
        self.refresh()
        for found in _recordings:
            found.add(self)
        self._shown = True
        for weight, copy in zip(weights, self._copies, strict=True):
            weight.rounded = copy
        try:
            yield
        finally:
            self._shown = False
            for weight in weights:
                vars(weight).pop("rounded", None)  # a layer may share it with another

    def refresh(self) -> None:
        """Makes those copies again whose weights have changed."""
        now = [(weight._version, weight.data_ptr()) for weight in self._weights]
        stale = [number for number, made_of in enumerate(self._made_of) if made_of != now[number]]
        if not stale:
            return
        with torch.no_grad():
            torch._foreach_copy_(*([tensors[number] for number in stale] for tensors in (self._copies, self._weights)))
        if self._weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing has been copied yet
        for number in stale:
            self._made_of[number] = now[number]

    def of(self, weight: Tensor) -> Tensor | None:
        """The copy of a weight, for an optimizer to write; None where there is none."""
        number = self._numbers.get(id(weight))
        return None if number is None else self._copies[number]

    def follow(self, weights: Iterable[Tensor]) -> None:
        """Says that the copies of these weights, which have changed, have been written with them."""
        for weight in weights:
            if (number := self._numbers.get(id(weight))) is not None:
                self._made_of[number] = weight._version, weight.data_ptr()

    def _are_of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
        pairs = zip(weights, self._weights, self._copies, strict=True)
        return len(weights) == len(self._weights) and all(
            one is other and copy.dtype == dtype and copy.device == one.device for one, other, copy in pairs
        )

    def _make(self, groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self._weights, self._copies = list(chain(*groups)), []
        for group in groups:
            rows = [len(weight) for weight in group]
            together = torch.empty(sum(rows), group[0].shape[-1], dtype=dtype, device=group[0].device)
            self._copies += together.split(rows)
        self._numbers = {id(weight): number for number, weight in enumerate(self._weights)}
        self._made_of = [None] * len(self._weights)


def _are_cast(weights: Sequence[Tensor]) -> bool:
    """True where autocast would cast each to a narrow dtype, and each is a parameter that counts its changes."""
    device = weights[0].device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device).itemsize >= 4:
        return False
    return all(
        isinstance(weight, nn.Parameter) and weight.dtype == torch.float32 and not weight.is_inference()
        for weight in weights
    )
