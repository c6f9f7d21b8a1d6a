"""The language model on its device, ready to be timed in every mode."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.model_cells import Cell
from benchmarks.model_gate import Batch, Contender, arithmetic, autocast, build
from benchmarks.session import cap_gpu_memory
from lmsys.measure import memory
from lmsys.measure.clock import clock_of, synchronize
from lmsys.measure.compare import Failure, Step
from lmsys.testing import norm_rms
from lmsys.training.graph import GraphedGradients
from lmsys.training.optimizer import AdamW

COLD_ROUNDS = 10  # timed steps of the warm-up study
LEARNING_RATE = 1e-6  # so small that hundreds of timed steps leave the weights as they were checked


def make_optimizer(model: torch.nn.Module, peer: bool) -> torch.optim.Optimizer:
    """AdamW, ours, or for a peer torch's as its users take it; both have the same hyper-parameters by default."""
    if not peer:
        return AdamW(model.parameters(), lr=LEARNING_RATE)
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True if on_gpu else None)


class Workbench:
    """The models of a group on one set of weights and gradients, with one batch.

    All of ours have one optimizer, a peer has its own: while both are sampled, there are two sets of moments.
    """

    def __init__(self, cell: Cell, contenders: dict[tuple[str, str, bool], Contender], seed: int):
        self.device, self.precision = cell.device, cell.precision
        self.base = build(cell.config, cell.device, seed)
        self.models = {row: one.model(self.base, shared=True) for row, one in contenders.items()}
        self.data = Batch.draw(cell.config, cell.batch, cell.device, seed + 1)
        self.clear()

    def clear(self) -> None:
        """No gradients and no optimizer: only the weights are left."""
        self.base.zero_grad(set_to_none=True)
        self.optimizers: dict[bool, torch.optim.Optimizer] = {}  # by Cell.peer
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "fp16")

    def forward(self, cell: Cell) -> torch.Tensor:
        """The logits of inference, or the loss of training."""
        model, data = self.models[cell.row], self.data
        with torch.set_grad_enabled(cell.grad), autocast(self.precision, self.device):
            return model.loss(data.tokens, data.targets) if cell.grad else model(data.tokens)

    def step_of(self, cell: Cell) -> Step:
        """What is timed; a backward's forward, and an optimizer's gradients, are made untimed just before."""

        def loss() -> torch.Tensor:
            self.base.zero_grad(set_to_none=True)
            return self.scaler.scale(self.forward(cell))

        def update() -> None:
            if cell.peer not in self.optimizers:
                self.optimizers[cell.peer] = make_optimizer(self.base, cell.peer)
            self.scaler.step(self.optimizers[cell.peer])
            self.scaler.update()

        def whole() -> None:
            loss().backward()
            update()

        if cell.compile == "graphed":
            graph = self.graph_of(cell)

            def replayed() -> None:
                graph()
                update()

            return Step(lambda _: replayed(), prepare=graph.record, before=replayed)
        return {
            "forward": Step(lambda _: self.forward(cell), before=lambda: self.forward(cell)),
            "train_forward": Step(lambda _: self.forward(cell), before=lambda: self.forward(cell)),
            "backward": Step(lambda made: made.backward(), prepare=loss),
            "optimizer": Step(lambda _: update(), prepare=lambda: loss().backward()),
            "step": Step(lambda _: whole(), before=whole),
        }[cell.mode]

    def graph_of(self, cell: Cell) -> GraphedGradients:
        return GraphedGradients(lambda: self.scaler.scale(self.forward(cell)), self.base.parameters())

    def graph_fault(self, cell: Cell) -> Failure | None:
        """What is wrong where a graph's gradients are not those of the same kernels, launched one by one."""
        self.base.zero_grad(set_to_none=True)
        self.scaler.scale(self.forward(cell)).backward()
        launched = [p.grad for p in self.base.parameters()]
        self.graph_of(cell)()
        differences = [
            norm_rms(p.grad - x) / norm_rms(x) for p, x in zip(self.base.parameters(), launched, strict=True)
        ]
        worst, allowed = max(differences), 4 * torch.finfo(torch.bfloat16).eps  # by the order of additions
        return None if worst <= allowed else ("wrong", f"a gradient of the graph is off by {worst:.2g} of its size")

    def memory_of(self, cell: Cell) -> tuple[int, int]:
        """Bytes live before what is timed (weights, gradients, optimizer state), and the peak above all that was."""
        self.optimizers.clear()  # its own is made anew: another's moments are not this row's
        step = self.step_of(cell)
        step.run(step.prepare())
        self.base.zero_grad(set_to_none=True)
        step = self.step_of(cell)  # anew: a graph is recorded within what is measured
        prepared = None if cell.compile == "graphed" else step.prepare()
        held = sum(memory.breakdown(self.models[cell.row], self.optimizers.get(cell.peer)).values())
        return held, memory.peak_bytes(lambda: step.run(prepared), self.device)


def cold_samples(cell: Cell, contender: Contender, seed: int, memory_limit_bytes: int | None) -> list[float]:
    """Seconds of COLD_ROUNDS steps after `cell.warmup` untimed ones, of a new model in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_cold_samples, cell, contender, seed, memory_limit_bytes).result()


def _cold_samples(cell: Cell, contender: Contender, seed: int, memory_limit_bytes: int | None) -> list[float]:
    if memory_limit_bytes is not None:
        cap_gpu_memory(memory_limit_bytes)
    assert cell.warmup is not None
    clock, samples = clock_of(cell.device), []
    with arithmetic(cell.precision):
        step = Workbench(cell, {cell.row: contender}, seed).step_of(cell)
        for _ in range(cell.warmup + COLD_ROUNDS):
            prepared = step.prepare()
            synchronize(cell.device)
            samples += clock.seconds([clock.sample(lambda prepared=prepared: step.run(prepared))])
            del prepared
    return samples[cell.warmup :]
