"""Computes the gradients of a training step: of all micro-batches of a rank, synchronized with the other ranks.

The training loop calls `Gradients` or `ReplayedGradients`; benchmarks, and `prepare.Prepared.gradients`, call
`backward_of` and `GraphedGradients`. All leave gradients in `.grad` and return the loss.

Forward and backward may be one CUDA graph. A step of a small model, or on a slow host, takes the GPU less time than the
host needs to launch its kernels. If the step was captured once, its replays need no launches by the host. The optimizer
stays outside of the graph, so that learning rate, clipping and loss scale may change from step to step.

Source: Gray 2019, "Getting Started with CUDA Graphs" (developer.nvidia.com/blog/cuda-graphs).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.model import linear
from lmsys.parallel import adapter, buckets
from lmsys.training.reproducible import Tree
from lmsys.values import hold

WARM_UPS = 3  # calls before the capture, in which kernels are compiled and tuned, and lasting buffers allocated
_capture_stream = cache(torch.cuda.Stream)  # by the number of a device: the stream that its graphs are captured on


@contextmanager
def on_capture_stream() -> Iterator[torch.cuda.Stream]:
    """Makes the stream that graphs are captured on the current one, in order with the work around it.

    Objects that remember the stream of their construction must be made inside of it, such as torch's DDP, whose
    constructor creates autograd's AccumulateGrad nodes. Otherwise a backward in a capture would wait for the default
    stream, which is not allowed.
    """
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def warm_ups_of(wrapper: Any) -> int:
    """How many steps under a strategy must run before one is captured. wrapper: `Adapter.wrapper`, the strategy."""
    return getattr(wrapper, "warm_ups_before_graph", WARM_UPS)


def backward_of(loss_of: Callable[..., Tensor], finish: Callable[[], Any] = lambda: None) -> Callable[..., Tensor]:
    """A function that computes loss_of(*inputs) and its backward, and returns the loss, detached.

    finish  called after the backward, such as a strategy's finish_gradient_synchronization
    """

    def compute(*inputs: Tensor) -> Tensor:
        loss = loss_of(*inputs)
        loss.backward()
        finish()
        return loss.detach()

    return compute


class GraphedGradients:
    """`compute(*inputs)`, such as `backward_of` a loss, captured by the first call and replayed by every call.

    `compute` takes CUDA tensors, leaves gradients in `.grad` and returns a scalar. It must do the same work on each
    call, in kernels alone: it may not read a value (`.item()`, boolean masks) or draw random numbers on the host. A
    call copies its inputs into those of the capture, whose shapes and dtypes they must have (ValueError), and sets
    `.grad` of the `parameters`. The gradients are the same tensors every time, and so is the loss. Their memory, and
    that of everything between, belongs to the graph until it is dropped.

    NCCL's collectives are captured too. Wait for every earlier collective before a call; `compute` must wait for its
    own before it returns. All ranks must capture and replay together.

    warm_ups  the number of calls of `compute` before the capture; they may change nothing but gradients
    """

    def __init__(
        self, compute: Callable[..., Tensor], parameters: Iterable[nn.Parameter], warm_ups: int = WARM_UPS
    ) -> None:
        self._function, self._warm_ups = compute, warm_ups
        self._parameters = [p for p in parameters if p.requires_grad]
        self._graph: Any = None  # a torch.cuda.CUDAGraph, once it is recorded

    def record(self, *inputs: Tensor) -> None:
        """Captures the graph, unless that has been done; the first call does it by itself."""
        if self._graph is not None:
            return
        hold((all(x.is_cuda for x in inputs), "a CUDA graph takes CUDA tensors; on a CPU call backward as usual"))
        self._inputs = [x.clone() for x in inputs]
        with on_capture_stream() as stream:
            for _ in range(self._warm_ups):
                self._compute()
        buckets.clear_gradients(self._parameters)
        graph = torch.cuda.CUDAGraph()
        linear.READ.clear()  # the set to which `RoundedWeights` add themselves when a forward reads their copies
        # The warm-ups have made cuBLAS's workspace, so that it is not allocated in the graph's pool. Thread-local:
        # NCCL's watchdog thread queries events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._loss = self._compute()
        self._read = set(linear.READ)  # copies of weights in the autocast dtype
        self._gradients = [p.grad for p in self._parameters]
        self._graph = graph

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Replays the graph; returns the loss, which the next call overwrites."""
        self.record(*inputs)
        given, recorded = ([(tuple(x.shape), x.dtype) for x in tensors] for tensors in (inputs, self._inputs))
        if given != recorded:
            raise ValueError(f"inputs of {given} for a graph that was recorded with {recorded}")
        for x, into in zip(inputs, self._inputs, strict=True):
            into.copy_(x)
        for copies in self._read:  # weights may have been updated since the copies were made
            copies.refresh()
        self._graph.replay()
        buckets.set_gradients(self._parameters, self._gradients)
        return self._loss

    def _compute(self) -> Tensor:
        buckets.clear_gradients(self._parameters)
        return self._function(*self._inputs)


class Gradients:
    """Forward and backward of micro-batches under a strategy, which leave the mean over the global batch in `.grad`.

    Without `tree` all backwards of a step but the last run under the strategy's no_sync().

    loss_of  a function that computes the loss of a micro-batch under the strategy
    divisor  what that loss is divided by before its backward: the number of a rank's micro-batches, as the strategy
             averages over ranks; in a reproducible training the number of all ranks' leaves (`reproducible.py`)
    scale    multiplies the divided loss by a loss scale, as `torch.amp.GradScaler.scale` does
    tree     parameters whose gradients are added in pairs of micro-batches, as ranks would add theirs, for a
             reproducible training on one rank; None: each backward adds to the gradients that are there
    """

    def __init__(
        self,
        strategy: adapter.Adapter,
        loss_of: Callable[..., Tensor],
        divisor: int,
        scale: Callable[[Tensor], Tensor],
        tree: Sequence[torch.nn.Parameter] | None = None,
    ):
        self._strategy, self._loss_of, self._divisor, self._scale = strategy, loss_of, divisor, scale
        self._tree = tree

    def __call__(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> Tensor:
        """The mean of the weighted losses of micro-batches, after the backward of each.

        batches  by micro-batch the arguments of `loss_of`
        weights  by micro-batch the factor of its loss; 1 but for documents (`lmsys.training.data.Batches.weight`)
        """
        losses, sums = list[Tensor](), Tree()
        for inputs, weight in zip(batches, weights, strict=True):
            synchronizes = self._tree is not None or len(losses) == len(batches) - 1
            with nullcontext() if synchronizes else self._strategy.no_sync():
                loss = self._loss_of(*inputs)
                if weight != 1:  # 0 for a micro-batch without targets, whose mean loss is NaN
                    loss = loss * weight if weight else loss.nan_to_num()
                self._scale(loss / self._divisor).backward()
            losses.append(loss.detach())
            if synchronizes:
                self._strategy.finish()
            if self._tree is not None:
                sums.add([p.grad for p in self._tree])
                buckets.clear_gradients(self._tree)
        if self._tree is not None:
            buckets.set_gradients(self._tree, sums.total)
        return torch.stack(losses).mean()


class ReplayedGradients:
    """`Gradients` as one CUDA graph, which the first call captures: see `GraphedGradients`.

    A micro-batch is (tokens, targets); ValueError for a weight other than 1. Drop this object before the process group
    ends.
    """

    def __init__(self, gradients: Gradients, strategy: adapter.Adapter):
        def compute(*flat: Tensor) -> Tensor:  # tokens and targets in turn
            batches = list(zip(flat[0::2], flat[1::2], strict=True))
            return gradients(batches, [1.0] * len(batches))

        self._graph = GraphedGradients(compute, strategy.module.parameters(), warm_ups_of(strategy.wrapper))

    def __call__(self, batches: Sequence[tuple[Any, ...]], weights: Sequence[float]) -> Tensor:
        hold((set(weights) == {1}, f"a CUDA graph takes micro-batches of weight 1, not {list(weights)}"))
        return self._graph(*chain(*batches))
