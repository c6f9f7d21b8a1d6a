"""Random modules as graphs of calls of blocks: a `Graph` says what a `Net` does in each forward.

`tests/parallel/test_graphs.py` draws graphs, and `tests/support/players.py` trains them. Ranks import this file. A new
kind of block is a name in BLOCKS and a case in `Block`; a new kind of call is a name in OPS and a case in `Net._do`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, EXAMPLES = 4, 3
BLOCKS = "mlp deep frozen half lstm complex mixed normed spare branch".split()  # kinds that every strategy supports
HOLDERS = "list reversed zipped nested attributes dict sequential".split()  # how a module holds its blocks
RETURNS = "tensor pair dict object deep-object nothing stored".split()  # containers of a result: see `_held`
OPS = (  # what a call does: see `Net._do`
    "call",
    "twice",
    "method",
    "read",
    "checkpoint",
    "reentrant",
    "segment",
    "no_grad",
    "detach",
    "add",
    "own",
    "apart",
    "boom",
)


@dataclass(frozen=True)
class Call:
    """A step of a forward: `op` computes a new value, which is appended to the values.

    op       one of OPS
    block    the number of the block that it calls
    sources  indices of the values that it reads
    returns  one of RETURNS: the container in which the block returns its result
    """

    op: str
    block: int = 0
    sources: tuple[int, ...] = (-1,)
    returns: str = "tensor"


Program = tuple[Call, ...]


@dataclass(frozen=True)
class Graph:
    """A module: its blocks, how it holds them (one of HOLDERS), and the programs that its forwards run in turn."""

    programs: tuple[Program, ...]
    blocks: tuple[str, ...] = ("mlp",) * 3
    holder: str = "list"
    tied: bool = False
    outside: bool = True  # it has a first and a last layer outside of blocks
    returns: str = "tensor"  # one of RETURNS: the container in which the module returns its result
    prepared: str = ""  # what is done before it is wrapped: "compiled", "eval", "meta"
    optimizer: str = "sgd"


class Kept:
    """A container that torch does not know, and that hides its attributes."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Seen:
    """A container that torch does not know, with ordinary attributes."""

    def __init__(self, value: Any):
        self.value = value


class Block(nn.Module):
    """(B, WIDTH) -> (B, WIDTH), of a kind in BLOCKS, or "batch-norm" or "sparse", which some strategies refuse."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        wide = torch.float64 if kind == "mixed" else None
        self.up = nn.LSTM(WIDTH, WIDTH) if kind == "lstm" else nn.Linear(WIDTH, WIDTH + 1, dtype=wide)
        self.down = nn.Linear(WIDTH if kind == "lstm" else WIDTH + 1, WIDTH)
        if kind == "normed":
            self.up, self.norm = weight_norm(self.up), nn.LayerNorm(WIDTH)
        if kind == "complex":
            self.phase, self.angle = (nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)) for _ in range(2))
        if kind == "deep":
            self.more = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        if kind == "spare":
            self.spare = nn.Parameter(torch.randn(3))
        if kind == "batch-norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "sparse":
            self.table = nn.Embedding(3, WIDTH, sparse=True)
        if kind == "branch":
            self.gate = nn.Parameter(torch.rand(WIDTH))
        if kind == "frozen":
            self.requires_grad_(False)
        if kind == "half":
            self.down.requires_grad_(False)
        self.kept: Any = None

    def body(self, x: Tensor) -> Tensor:
        if self.kind == "lstm":
            return x + self.down(self.up(x.unsqueeze(0))[0].squeeze(0))
        y = self.norm(x) if self.kind in ("normed", "batch-norm") else x
        if self.kind == "sparse":
            y = y + self.table(torch.arange(len(x), device=x.device) % 3)
        y = self.down(torch.tanh(self.up(y.to(_dtype(self.up)))).to(_dtype(self.down)))
        if self.kind == "complex":
            phase = self.phase * self.angle.conj()  # whose gradient autograd leaves to be conjugated later
            y = y * (x.to(phase.dtype) * phase).real.to(x.dtype)
        if self.kind == "deep":
            y = self.more(y)
        if self.kind == "branch":
            y = y * (self.gate.square() / self.gate.square().sum())  # a branch that depends on no input
        return x + y

    def forward(self, x: Any, returns: str = "tensor") -> Any:
        if isinstance(x, list):  # for a call that returns "nothing": the result replaces the input in its container
            x[0]["x"] = self.body(x[0]["x"])
            return None
        y = self.body(x)
        if returns == "stored":
            self.kept = y.square().mean()
        return _held(y, returns)


def _dtype(layer: nn.Module) -> torch.dtype:
    return layer.bias.dtype


def _held(y: Tensor, returns: str) -> Any:
    """y in a container of the kind `returns`, one of RETURNS."""
    made: dict[str, Callable[[], Any]] = {
        "pair": lambda: (y, y.mean()),
        "dict": lambda: [{"y": y}],
        "object": lambda: Seen(y),
        "deep-object": lambda: Kept(Seen(y)),
    }
    return made.get(returns, lambda: y)()


def taken(held: Any) -> Tensor:
    """The tensor in a container that `_held` has made."""
    while not isinstance(held, Tensor):
        if isinstance(held, tuple | list):
            held = held[0]
        else:
            held = held["y"] if isinstance(held, dict) else held.value
    return held


class Boom(torch.autograd.Function):
    """The identity. Its backward raises ArithmeticError while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Boom.armed:
            raise ArithmeticError("boom")
        return grad


class Net(nn.Module):
    """The module of a graph: x (B, WIDTH) -> (B, WIDTH), in a container of the kind `graph.returns`.

    turn  number of the program that the next forward runs, modulo their count; an argument of `forward` replaces it
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.turn = graph, 0
        blocks = [Block(kind) for kind in graph.blocks]
        half = (len(blocks) + 1) // 2
        if graph.outside:
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            if graph.tied:
                self.last.weight = self.first.weight
        if graph.holder == "reversed":
            self.blocks = nn.ModuleList(blocks[::-1])
        elif graph.holder == "zipped":
            self.one, self.other = nn.ModuleList(blocks[:half]), nn.ModuleList(blocks[half:])
        elif graph.holder == "nested":
            self.blocks = nn.ModuleList([nn.ModuleList(blocks[:half]), nn.ModuleList(blocks[half:])])
        elif graph.holder == "attributes":
            for number, block in enumerate(blocks):
                setattr(self, f"block{number}", block)
        elif graph.holder == "dict":
            self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        elif graph.holder == "sequential":
            self.blocks = nn.Sequential(*blocks)
        else:
            self.blocks = nn.ModuleList(blocks)

    def block(self, number: int) -> Block:
        """The block with this number, modulo their count. "reversed" and "zipped" modules do not call them in order."""
        blocks = [x for x in self.modules() if isinstance(x, Block)]
        number %= len(blocks)
        if self.graph.holder == "zipped":
            half = len(self.one)
            order = [n // 2 + half * (n % 2) for n in range(2 * half)]
            return blocks[[n for n in order if n < len(blocks)][number]]
        return blocks[-1 - number if self.graph.holder == "reversed" else number]

    def forward(self, x: Tensor, rank: int = 0, turn: int | None = None) -> Any:
        program = self.graph.programs[(self.turn if turn is None else turn) % len(self.graph.programs)]
        values = [self.first(x) if self.graph.outside else x]
        extra: list[Tensor] = []
        for call in program:
            values.append(self._do(call, values, rank, extra))
        y = self.last(values[-1]) if self.graph.outside else values[-1]
        return _held(sum(extra, y), self.graph.returns)

    def _do(self, call: Call, values: Sequence[Tensor], rank: int, extra: list[Tensor]) -> Tensor:
        """The value that a call computes. A result that its block has stored is appended to `extra`, for the loss."""
        x, block = values[call.sources[0] % len(values)], self.block(call.block)
        match call.op:
            case "twice":
                return block(block(x))
            case "method":
                return block.body(x)
            case "read":
                return x + torch.tanh(F.linear(x, block.down.bias.diag()))
            case "checkpoint":
                return checkpoint(block, x, use_reentrant=False)
            case "reentrant":
                return checkpoint(block, x, use_reentrant=True)
            case "segment":
                other = self.block(call.block + 1)
                return checkpoint(lambda x: other(block(x)), x, use_reentrant=False)
            case "no_grad":
                with torch.no_grad():
                    aside = block(x)
                return x + aside
            case "detach":
                return block(x.detach())
            case "add":
                return x + values[call.sources[-1] % len(values)]
            case "own":  # only rank 0 calls the block
                return block(x) if rank == 0 else x
            case "apart":  # ranks call two blocks in different orders
                pair = block, self.block(call.block + 1)
                for called in pair[:: 1 - 2 * (rank % 2)]:
                    x = called(x)
                return x
            case "boom":
                return Boom.apply(block(x))
        if call.returns == "nothing":
            held: Any = [{"x": x}]
            block(held)
            return held[0]["x"]
        y = taken(block(x, call.returns))
        if call.returns == "stored":
            extra.append(block.kept)
            block.kept = None
        return y
