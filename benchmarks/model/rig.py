"""The whole language models of a group on their device, ready to be timed in every mode."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.arithmetic import LOSS_SCALE, arithmetic, autocast
from benchmarks.model.cases import ModelTest, Row, model_of
from benchmarks.model.spots import NUM_ROWS, OUTPUTS, UPDATE, UPDATES, Spots
from benchmarks.model.update import Watch
from benchmarks.models import Batch, build
from lmsys.bench import Settings, Step
from lmsys.bench.benchmark import verdict
from lmsys.draws import Draws
from lmsys.extremes.model import FIRST_ID, write_model
from lmsys.extremes.optimizer import planted
from lmsys.measure import memory
from lmsys.measure.clock import clock_of, synchronize, timed
from lmsys.measure.compare import Kept
from lmsys.testing import norm_rms
from lmsys.training.graph import GraphedGradients, backward_of
from lmsys.training.optimizer import HAS_TRITON, AdamW

# So small that no number of timed steps moves a weight by more than float32 rounds in a gradient: what was right in any
# timed call is made by the weights as they are when it is judged.
LEARNING_RATE = 1e-12
CHECKED_UPDATES = 2  # before any timed call
COLD_ROUNDS = 10  # timed steps of the warm-up study
GRAPH_BUDGET = 4 * torch.finfo(torch.bfloat16).eps  # of a gradient's size: additions have no fixed order


class WrongCall(ValueError):
    """A graph, or an update on extreme gradients, is wrong before any timed call."""

    failure = property(lambda self: ("wrong", str(self)))


class BatchDraws(Draws):
    """Draws of tokens and targets, of which the first token of each sequence is ordinary."""

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        super().fill(draw, names)
        self.tensors["tokens"].data[:, 0] = FIRST_ID


class Rig:
    """The models of a group on one set of weights and gradients, with one batch, whose tokens and targets are drawn
    again and again in one place; each is made when it is first used.

    Some embeddings and gates are extreme, as those of the gate: so are the tokens of every draw that have these
    embeddings.

    All of ours have one optimizer, a peer has its own: while both are sampled, there are two sets of moments.
    """

    def __init__(self, case: ModelTest, seed: int):
        self.device, self.precision = case.device, case.precision
        self.base = build(case.config, case.device, seed)
        write_model(dict(self.base.named_parameters()))
        self.models: dict[Row, nn.Module] = {}  # by ModelTest.row
        shape, below = (2, case.batch, case.context), case.config.vocab_size
        self.data = Batch(*torch.empty(shape, dtype=torch.int64, device=case.device))
        self.draws = BatchDraws(vars(self.data), seed, below=dict.fromkeys(vars(self.data), below))
        self.draws.fill(seed)
        self.spots = Spots(self.base, self.data, self.precision)
        self._watch: Watch | None = None
        self.clear()

    def clear(self) -> None:
        """No gradients and no optimizer: only the weights are left."""
        self.base.zero_grad(set_to_none=True)
        self.optimizers: dict[bool, torch.optim.Optimizer] = {}  # by ModelTest.peer
        enabled = self.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device, LOSS_SCALE, growth_interval=2**31 - 1, enabled=enabled)

    def model(self, case: ModelTest) -> nn.Module:
        if case.row not in self.models:
            self.models[case.row] = model_of(case, self.base, shared=True)
        return self.models[case.row]

    def forward(self, case: ModelTest) -> torch.Tensor:
        """The logits of inference, or the loss of training."""
        model, data = self.model(case), self.data
        with torch.set_grad_enabled(case.grad), autocast(self.precision, self.device):
            return model.loss(data.tokens, data.targets) if case.grad else model(data.tokens)

    def loss_and_states(self, case: ModelTest) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of training, and what it was made of: the hidden states, of a peer the logits."""
        model, data = self.model(case), self.data
        with torch.enable_grad(), autocast(self.precision, self.device):
            if case.peer:
                return model.loss_and_logits(data.tokens, data.targets)
            hidden = model.hidden(data.tokens)
            return model.loss_of(hidden, data.targets), hidden

    def loss(self, case: ModelTest) -> torch.Tensor:
        """Scaled, with no gradients from before."""
        self.base.zero_grad(set_to_none=True)
        return self.scaler.scale(self.forward(case))

    def update(self, case: ModelTest) -> None:
        """A step of AdamW, ours, or for a peer torch's as its users take it: their hyper-parameters are the same."""
        peer = case.peer
        if peer not in self.optimizers:
            theirs = partial(torch.optim.AdamW, fused=True if self.device == "cuda" else None)
            self.optimizers[peer] = (theirs if peer else AdamW)(self.base.parameters(), lr=LEARNING_RATE)
        if not peer:
            self.optimizers[peer].rounded = self.model(case).rounded  # of this row alone
        self.scaler.step(self.optimizers[peer])
        self.scaler.update()

    def step_of(self, case: ModelTest) -> Step:
        """The call to time, on tokens of its own; a backward's forward, and an optimizer's gradients, are made untimed
        just before."""
        keep = self._keep_outputs if case.mode in OUTPUTS else self._keep_gradients
        return replace(self._timed(case), redraw=partial(self._redraw, case), keep=partial(keep, case))

    def _timed(self, case: ModelTest) -> Step:
        def whole() -> None:
            self.loss(case).backward()
            self.update(case)

        def replayed() -> None:
            graph()
            self.update(case)

        if case.replayed:
            graph = self.graph_of(case)
            return Step(lambda _: replayed(), prepare=graph.record, before=replayed)
        train = partial(self.loss_and_states, case)
        return {
            "forward": Step(lambda _: self.forward(case), before=lambda: self.forward(case)),
            "train_forward": Step(lambda _: train(), before=train),
            "backward": Step(lambda made: made.backward(), prepare=lambda: self.loss(case)),
            "optimizer": Step(lambda _: self.update(case), prepare=lambda: self._make_gradients(case)),
            "step": Step(lambda _: whole(), before=whole),
        }[case.mode]

    def _make_gradients(self, case: ModelTest) -> None:
        """Those of the loss, but in a few rows that a draw has chosen: these are extreme."""
        self.loss(case).backward()
        if self._watch is not None:
            self._watch.plant(self._extremes(case), self.scaler.get_scale())

    def _extremes(self, case: ModelTest) -> Sequence[float]:
        """The values that the case's optimizer must hold: on a GPU torch's does not hold all that ours does."""
        return planted(held_by_torch=self.device == "cuda" and (case.peer or not HAS_TRITON))

    def _redraw(self, case: ModelTest, draw: int) -> None:
        self.draws.fill(draw)
        if not case.peer and (rounded := self.model(case).rounded) is not None:
            rounded.refresh()  # in a training of its own no other row steps the weights
        if case.mode in UPDATES:
            self._watch = Watch.of(self.spots.parameters, NUM_ROWS, draw, self.optimizers.get(case.peer))

    def _keep_outputs(self, case: ModelTest, result: Any, key: int | None) -> Any:
        return self.spots.outputs(case, result, key)

    def _keep_gradients(self, case: ModelTest, result: Any, key: int | None) -> Any:
        if key is None:
            return None
        if case.mode not in UPDATES:
            return self.spots.gradients(key, self.scaler.get_scale())
        assert self._watch is not None
        update = self._watch.done(self.optimizers[case.peer])
        self._watch.put_back()
        return self.spots.gradients(key, 1.0) | {UPDATE: update}

    def judge(self, case: ModelTest, kept: Kept) -> Mapping[str, float]:
        self.base.zero_grad(set_to_none=True)  # makes room
        meant = self.model(case).meant if case.peer else lambda name, weight: weight
        return self.spots.judge(case, kept, meant)

    def graph_of(self, case: ModelTest) -> GraphedGradients:
        return GraphedGradients(backward_of(lambda: self.scaler.scale(self.forward(case))), self.base.parameters())

    def alone(self, case: ModelTest) -> float:
        """Seconds of the case's first call, with nothing else live and nothing left afterwards, even where it fails.

        Blocks are not compiled again, but where the gate's shape was smaller; what is compiled whole is. WrongCall
        where a graph is wrong, or an update on extreme gradients.
        """
        self.clear()
        try:
            step, start = self.step_of(case), time.perf_counter()
            step.run(step.prepare())
            synchronize(self.device)
            seconds = time.perf_counter() - start
            if case.mode in UPDATES:
                self.check_update(case)
            del step  # with the memory of its graph
            if case.replayed:
                self.check_graph(case)
            return seconds
        finally:
            self.clear()

    def check_graph(self, case: ModelTest) -> None:
        self.loss(case).backward()
        launched = [p.grad for p in self.base.parameters()]
        self.graph_of(case)()
        pairs = zip(self.base.parameters(), launched, strict=True)
        worst = max(norm_rms(p.grad - x) / norm_rms(x) for p, x in pairs)
        if not worst <= GRAPH_BUDGET:
            raise WrongCall(f"a gradient of the graph is off by {worst:.2g} of its size")

    def check_update(self, case: ModelTest) -> None:
        """The first two steps of an optimizer, with extreme gradients in rows of a matrix; all others are as they are.

        WrongCall where they are not the formula's.
        """
        self.optimizers.pop(case.peer, None)
        for draw in range(CHECKED_UPDATES):
            watch = Watch.of(self.spots.parameters, NUM_ROWS, draw, self.optimizers.get(case.peer))
            watch.plant(self._extremes(case), self.scaler.get_scale())
            self.update(case)
            _, wrong = verdict(watch.done(self.optimizers[case.peer]).ratios(), "before any timed call")
            if wrong:
                raise WrongCall(wrong[1])

    def memory_of(self, case: ModelTest) -> tuple[int, int]:
        """Bytes live before what is timed (weights, gradients, optimizer state), and the peak above all that was."""
        self.optimizers.clear()  # its own is made anew: another's moments are not this row's
        step = self.step_of(case)
        step.run(step.prepare())
        self.base.zero_grad(set_to_none=True)
        step = self.step_of(case)  # anew: a graph is recorded within what is measured
        prepared = None if case.replayed else step.prepare()
        held = sum(memory.breakdown(self.model(case), self.optimizers.get(case.peer)).values())
        return held, memory.peak_bytes(lambda: step.run(prepared), self.device)


def cold_samples(case: ModelTest, settings: Settings) -> list[float]:
    """Seconds of COLD_ROUNDS steps after `case.warmup` untimed ones, of a new model; for a process of its own."""
    if settings.memory_limit_bytes is not None:
        memory.cap_gpu_memory(settings.memory_limit_bytes)
    assert case.warmup is not None
    clock, samples = clock_of(case.device), []
    with arithmetic(case.precision):
        step = Rig(case, settings.seed).step_of(case)
        for _ in range(case.warmup + COLD_ROUNDS):
            prepared = step.prepare()
            synchronize(case.device)
            samples += timed(clock, partial(step.run, prepared))
            del prepared
    return samples[case.warmup :]
