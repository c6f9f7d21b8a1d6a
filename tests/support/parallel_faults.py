"""Faults seeded into data-parallel strategies, for collectives and for copy engines. Ranks import this file.

Tests train by `train_with` or `play_with`, and must find the result wrong. A new fault is a function in FAULTS, or in
FAULTS_OF_SHARDS if only strategies that shard the optimizer can have it. The text beside it there says what is wrong. A
fault changes functions by `use` (tests/support/ranks.py): each target is (owner, name, old function -> new function).

Buckets are sent by `Collectives.reduce(bucket)`, or with copy engines by `ExchangeOverGloo.send(number, gradients)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.parallel import collectives, copy_engine
from lmsys.parallel.buckets import Layout, offsets
from lmsys.parallel.collectives import Pending
from lmsys.parallel.copy_engine import CopyEngines
from lmsys.parallel.overlapped import Bucket, Collectives
from lmsys.parallel.sharded_optimizer import FlatBuffer, ShardedOptimizer
from tests.support import engines
from tests.support.engines import ExchangeOverGloo
from tests.support.graphs import Graph
from tests.support.players import play
from tests.support.ranks import Recipe, Training, train, use

# A function whose result is a context, in which strategies have the fault. Its argument is True for strategies that
# communicate by copy engines, False for those that use collectives.
Fault = Callable[[bool], Any]


def _summed(by_engines: bool) -> Any:
    def sums(mean: Any) -> Any:
        def send(out: Tensor, *args: Any) -> Pending:
            pending, group = mean(out, *args), args[-1]

            def scale() -> None:
                pending.wait()
                out.mul_(dist.get_world_size(group))

            return Pending(then=scale)

        return send

    return _for_means(by_engines, sums)


def _rounded(by_engines: bool) -> Any:
    def rounds(mean: Any) -> Any:
        def send(*args: Any) -> Pending:
            x = args[-2]  # what is sent
            if x.dtype == torch.float32:
                x.copy_(x.bfloat16())
            return mean(*args)

        return send

    return _for_means(by_engines, rounds)


def _for_means(by_engines: bool, change: Callable[[Any], Any]) -> Any:
    """Changes the collectives that average gradients: all_reduce_mean(x, group), reduce_scatter_mean(out, x, group)."""
    names = ("all_reduce_mean",) if by_engines else ("all_reduce_mean", "reduce_scatter_mean")
    return use(*((engines if by_engines else collectives, name, change) for name in names))


def _never_waited(by_engines: bool) -> Any:
    def forgets(send: Any) -> Any:
        def sends(self: Any, bucket: Any, *args: Any) -> Pending:
            pending = send(self, bucket, *args)
            number = bucket if by_engines else bucket.number
            return Pending() if number == 1 else pending

        return sends

    return use((ExchangeOverGloo, "send", forgets) if by_engines else (Collectives, "reduce", forgets))


def _off_by_one(by_engines: bool) -> Any:
    """All tensors of a bucket but the first begin an element early: means, and if it is `whole` gradients, too."""

    def shifted(bucket: Bucket) -> Bucket:
        starts, _ = offsets([p.numel() for p in bucket.owned], alignment=1)
        own = Layout.at(bucket.owned, [max(0, start - 1) for start in starts], bucket.own.length)
        return replace(bucket, own=own, layout=own if bucket.whole else bucket.layout)

    if by_engines:
        return use((copy_engine, "_means", lambda means: lambda bucket, flat: means(shifted(bucket), flat)))
    return use((Collectives, "reduce", lambda send: lambda self, bucket: send(self, shifted(bucket))))


def _buffers_left(_: bool) -> Any:
    """Integers are still sent, since `Overlapped` broadcasts the order of its buckets."""

    def parameters_alone(send: Any) -> Any:
        return lambda x, g: None if x.is_floating_point() and not isinstance(x, nn.Parameter) else send(x, g)

    return use((collectives, "broadcast_", parameters_alone))


def _twice(by_engines: bool) -> Any:
    """Gradients of square weights, among them a tied one, are summed over ranks before they are averaged."""

    def sends_twice(send: Any) -> Any:
        def sends(self: Any, bucket: Any, *args: Any) -> Pending:
            gradients = args[0] if by_engines else [p.grad for p in bucket.params]
            for x in gradients:
                if x.dim() == 2 and x.shape[0] == x.shape[1]:
                    dist.all_reduce(x, group=self.group)
            return send(self, bucket, *args)

        return sends

    return use((ExchangeOverGloo, "send", sends_twice) if by_engines else (Collectives, "reduce", sends_twice))


def _wrong_owner(_: bool) -> Any:
    def own(_: Any) -> Any:
        return lambda self, group: {
            **group,
            "params": [p for p in group["params"] if self.owners[p] != self.rank] or group["params"][:1],
        }

    return use((ShardedOptimizer, "_own", own))


def _stale(by_engines: bool) -> Any:
    def keeps(gather: Any) -> Any:
        def gathers(self: Any, number: int, buffer: FlatBuffer) -> Pending:
            before, pending = buffer.flat.clone(), gather(self, number, buffer)
            return Pending(then=lambda: (pending.wait(), buffer.flat.copy_(before) if number == 1 else None))

        return gathers

    return use((CopyEngines if by_engines else Collectives, "gather", keeps))


FAULTS: dict[str, Fault] = {
    "gradient summed, not averaged": _summed,
    "gradients rounded to bfloat16": _rounded,
    "one bucket never waited for": _never_waited,
    "bucket boundary off by one": _off_by_one,
    "buffers not broadcast": _buffers_left,
    "tied weight reduced twice": _twice,
    "optimizer shard updated on the wrong rank": _wrong_owner,
}
FAULTS_OF_SHARDS: dict[str, Fault] = {"parameters of one bucket left as they were": _stale}
NO_FAULT: dict[str, Fault] = {"": lambda _: use()}


def train_with(fault: str, recipe: Recipe, training: Training, seed: int) -> dict[str, Tensor] | None:
    """Trains on this rank as `train` does, with the fault of this name; "": without one."""
    with (FAULTS | FAULTS_OF_SHARDS | NO_FAULT)[fault](training.strategy.startswith("copy_engine")):
        return train(recipe, training, seed)


def play_with(fault: str, strategy: str, graph: Graph, ways: Sequence[str]) -> list[dict[str, Tensor]] | str | None:
    """Trains on this rank as `play` of tests/support/players.py does, with the fault of this name; "": without one."""
    with (FAULTS | NO_FAULT)[fault](strategy.startswith("copy_engine")):
        return play(strategy, graph, ways)
