"""Data-parallel strategies in the museum of published faults: each fault is a few lines on top of a right strategy.

`lmsys check` must refuse each fault, and must not accuse the right strategies, which HONEST lists. A new fault is a
class derived from `Container` or `Hooked`, with the decorator `exhibit(kind, where it was published, what users saw, a
part of the mistake's name)`. Names of layers here are those of the check's model, `Probe` in
lmsys/extremes/strategy.py. Ranks import this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry
from tests.museum.containers import Container, Hooked, mean_
from tests.museum.exhibit import exhibit

HONEST = [
    *(STRATEGIES[name] for name in ("naive", "flat", "overlapped", "bucketed", "zero1", "fsdp")),
    *(STRATEGIES[name] for name in ("torch_ddp", "torch_ddp_tuned", "torch_zero1", "torch_fsdp2", "torch_fsdp2_zero2")),
    Entry("MyDDP", "docs/examples/mine.py:MyDDP"),
]


@exhibit("strategy", "neuralmagic/sparseml#135", "gradients are world_size times too large", "summed over ranks")
class Summed(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)


@exhibit("strategy", "verl-project/verl-SpeCo#29", "the learning rate is divided by world_size", "twice")
class DividedTwice(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        grad /= dist.get_world_size()
        mean_(grad)


@exhibit("strategy", "deepspeedai/DeepSpeed#5618", "expert gradients are as many times too large as ranks", "summed")
class ExpertsSummed(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)
        if not name.startswith("layers.1."):
            grad /= dist.get_world_size()


@exhibit("strategy", "pytorch/xla#3216", "models that begin apart are never made equal", "initial weights")
class NeverBroadcast(Container):
    def broadcast(self) -> list[Tensor]:
        return list(self.module.buffers())


@exhibit("strategy", "pytorch/pytorch#63916", "a buffer that was assigned anew is not synchronized", "buffers")
class BuffersLeft(Container):
    def broadcast(self) -> list[Tensor]:
        return list(self.module.parameters())


@exhibit("strategy", "NVIDIA/Megatron-LM#1446", "vectors such as norms drift apart over ranks", "never synchronized")
class VectorsLeft(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        if grad.dim() > 1:
            mean_(grad)


@exhibit("strategy", "deepspeedai/DeepSpeed#5545", "with overlapped communication losses differ", "not waited for")
class NotWaited(Hooked):
    def finish_gradient_synchronization(self) -> None:
        self.handles.pop()
        super().finish_gradient_synchronization()


@exhibit("strategy", "deepspeedai/DeepSpeed#5606", "a buffer is filled again while it is sent", "still running")
class BufferReused(Container):
    def finish_gradient_synchronization(self) -> None:
        buffer, sent = torch.empty(512), []
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            part = buffer[: p.numel()]
            part.copy_(p.grad.flatten())
            sent.append((dist.all_reduce(part, async_op=True), part, p))
        for handle, part, p in sent:
            handle.wait()
            p.grad.copy_(part.view_as(p) / dist.get_world_size())


@exhibit("strategy", "pytorch/pytorch#51929", "of a checkpointed layer that is used twice one use counts", "too early")
class FirstUse(Container):
    """Synchronizes a shared weight after its first use: reentrant checkpoints call its hook for each use."""

    def prepare(self) -> None:
        self.sent = set[str]()
        for shared in [child for name, child in self.module.named_children() if name == "shared"]:
            shared.forward = partial(checkpoint, shared.forward, use_reentrant=True)
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(partial(self.ready, name))

    def ready(self, name: str, p: Tensor) -> None:
        if name not in self.sent:
            self.sent.add(name)
            mean_(p.grad)

    def finish_gradient_synchronization(self) -> None:
        self.sent.clear()


@exhibit("strategy", "modelscope/FunASR#3472", "the first micro-batch is synchronized, and not the last", "first micro")
class FirstMicroBatch(Container):
    def prepare(self) -> None:
        self.count = 0
        for p in self.named.values():
            p.register_post_accumulate_grad_hook(lambda p: None if self.count else mean_(p.grad))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.count += 1

    def finish_gradient_synchronization(self) -> None:
        self.count = 0


@exhibit("strategy", "NVIDIA/Megatron-LM#7186", "the last micro-batch is all that is left", "last micro-batch alone")
class LastMicroBatch(Hooked):
    def prepare(self) -> None:
        super().prepare()
        for p in self.named.values():
            p.register_hook(lambda grad, p=p: p.grad.zero_() * 0 + grad if p.grad is not None else grad)


@exhibit("strategy", "pytorch/pytorch#128949", "a bucket with an unused parameter is never reduced", "last bucket")
class WaitsForUnused(Container):
    """Reduces a bucket only if all of its gradients have come, so never one that has an unused parameter.

    The bucket of "embed" also holds the layer "idle", which is unused.
    """

    def finish_gradient_synchronization(self) -> None:
        complete = [p for name, p in self.named.items() if self.whole(name)]
        for p in complete:
            mean_(p.grad)

    def whole(self, name: str) -> bool:
        first = name.partition(".")[0] in ("embed", "idle")
        return not first or not hasattr(self.module, "idle")


@exhibit(
    "strategy", "deepspeedai/DeepSpeed#2343", "gradients of one layer are added to those of another", "the same order"
)
class OrderOfGradients(Container):
    """Reduces gradients in the order in which they come. On rank 1 it is the reverse of that on rank 0."""

    def finish_gradient_synchronization(self) -> None:
        order = list(self.named.values())
        for p in order if dist.get_rank() == 0 else reversed(order):
            mean_(p.grad)


@exhibit("strategy", "horovod/horovod#597", "a rank without a gradient does not join an all-reduce", "the same order")
class SkipsMissing(Container):
    def finish_gradient_synchronization(self) -> None:
        for p in self.named.values():
            if p.grad is not None:
                mean_(p.grad)


@exhibit(
    "strategy",
    "NVIDIA/Megatron-LM#4609",
    "gradients begin at weights that a buffer held",
    "contain gradient + weight",
)
class BufferNotZeroed(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        mean_(grad)
        grad += self.named[name].detach()


@exhibit("strategy", "NVIDIA/Megatron-LM#6624", "small gradients vanish in a bfloat16 sum", "bfloat16")
class SumsInBfloat16(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        sent = grad.bfloat16()
        mean_(sent)
        grad.copy_(sent)


@exhibit("strategy", "NovaSky-AI/SkyRL#1886", "a copy is reduced, and its result is dropped", "never synchronized")
class ReducesACopy(Container):
    def broadcast(self) -> list[Tensor]:
        return []

    def prepare(self) -> None:
        for x in [*self.module.parameters(), *self.module.buffers()]:
            sent = x.detach().contiguous()
            dist.broadcast(sent, src=0)
            x.detach().copy_(sent)

    def reduce(self, name: str, grad: Tensor) -> None:
        mean_(grad.contiguous())


@exhibit("strategy", "pytorch/pytorch#69031", "what only an earlier micro-batch uses stays local", "never synchronized")
class OnlyTheLastBackward(Hooked):
    """Synchronizes only gradients whose hooks ran in the last backward."""


@exhibit("strategy", "pytorch/pytorch#53160", "a used parameter is taken for an unused one", "lost on the ranks")
class TakenForUnused(Container):
    def finish_gradient_synchronization(self) -> None:
        used = {name: p.grad is not None for name, p in self.named.items()}
        super().finish_gradient_synchronization()
        for name, p in self.named.items():
            p.grad = p.grad if used[name] else None


@exhibit("strategy", "pytorch/pytorch#63210", "the first bucket is taken for the last", "summed")
class FirstTakenForLast(Container):
    """Divides only the first bucket, which it takes for the last one."""

    def reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad)
        if name == "embed.weight":
            grad /= dist.get_world_size()


@exhibit("strategy", "NVIDIA/TransformerEngine#3552", "of a tied weight one use is assigned, not added", "one use")
class TiedAssigned(Container):
    """Keeps only the gradient of the last use, as if it were written to a buffer, not added."""

    def forward(self, tokens: Tensor, **kwargs: Any) -> Any:
        if self.module.head.weight is not self.module.embed.weight:
            return self.module(tokens, **kwargs)
        tied = {"head.weight": self.module.head.weight.detach()}
        return torch.func.functional_call(self.module, tied, (tokens,), kwargs, tie_weights=False)


@exhibit("strategy", "NVIDIA/Megatron-LM#844", "a tied embedding is reduced for each of its places", "two names")
class TiedTwice(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        mean_(grad)
        if name == "embed.weight" and self.module.head.weight is self.module.embed.weight:
            dist.all_reduce(grad)


@exhibit(
    "strategy",
    "hpcaitech/ColossalAI#247",
    "micro-batches reduce gradients many times",
    "are summed again",
)
class ReducedEachMicroBatch(Container):
    def prepare(self) -> None:
        for p in self.named.values():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))

    def reduce(self, name: str, grad: Tensor) -> None:
        grad /= dist.get_world_size()


@exhibit("strategy", "deepspeedai/DeepSpeed#8090", "the owner of a weight has gradients that are not reduced", "owner")
class OwnersGradient(Container):
    def reduce(self, name: str, grad: Tensor) -> None:
        owner = list(self.named).index(name) % dist.get_world_size()
        dist.broadcast(grad, src=owner)


@exhibit("strategy", "NVIDIA/Megatron-LM#663", "a forward reads the weights of the step before", None)
class StaleGather(Container):
    """Forwards read the embedding's weights as they were one step before."""

    def prepare(self) -> None:
        self.late = self.module.embed.weight.detach().clone()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.module.embed.weight
        now, weight.data = weight.data, self.late
        loss = self.module(*args, **kwargs)
        weight.data, self.late = now, now.clone()
        return loss
