"""The language models of a group of cases on their device, the timed calls of these models, and checks of updates.

`bench_model.py` and `bench_anatomy.py` make a `Rig` for each group. `Rig.step_of` returns the call that is timed, by
the case's mode. `benchmarks.model.spots` checks outputs and gradients of timed calls. A new mode is an entry in
`Rig._timed` and in MODES of `benchmarks/axes.py`; if it has outputs, or updates weights, `spots.OUTPUTS` or
`spots.UPDATES` names it. A *row* of the benchmark is our model with one implementation of attention, or a peer,
somebody else's whole model. A *draw* is a seed of a call's inputs. The *key* of a call is a random number, which
no row can foresee, that chooses the parts of its results that are judged.

Timed updates of weights are checked by AdamW's formula (`Update`), also where gradients are zero, tiny and huge. Such
gradients are planted in rows of one matrix (`lmsys.extremes.model`). Every row of the matrix is judged alone, in units
of its own largest value: beside the moments of a huge gradient, errors of all other rows would vanish. If all values of
a row are below the smallest normal number of float32, as the second moment of a tiny gradient is, the unit is that
number: below it float32 rounds to multiples of 2**-149, whatever the size.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.model import cases, spots
from benchmarks.models import LOSS_SCALE, Batch, arithmetic, build
from lmsys import draws, testing
from lmsys.bench import Failed, Kept, Record, Settings, Step, ranks
from lmsys.bench.case import verdict
from lmsys.extremes.model import FIRST_ID, plant, planted, write_model
from lmsys.measure import clock, memory
from lmsys.training import gradients, optimizer, prepare

MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names of AdamW's two moments in an optimizer's state
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # the unit of rows below it: see above


class Update:
    """Some rows of a matrix with their moments, before an update by AdamW and, once `read_result` is called, after it.

    The draw chooses the matrix and the rows, as both must be known before the call; the key is known only after it.

    name, parameter, rows  the matrix's name, the matrix, and the numbers of its rows that are judged
    old, new  weights and moments of these rows, before and after the update
    planted   values of the extreme gradients in the first of these rows; () for none
    replaced  the gradients that these rows had before, without the loss scale
    gradient  the gradient of all rows that are judged, as the update has used it
    count     the optimizer's number of the step
    group     the optimizer's settings of the step
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], num_rows: int, draw: int, optimizer: torch.optim.Optimizer | None
    ):
        rng = random.Random(draw)
        self.name = rng.choice([name for name, p in parameters.items() if p.dim() == 2])
        self.parameter = parameters[self.name]
        self.rows = rng.sample(range(len(self.parameter)), min(num_rows, len(self.parameter)))
        self.old = _state(self.parameter, self.rows, optimizer)
        self.planted: Sequence[float] = ()

    def plant(self, values: Sequence[float], scale: float) -> None:
        """Replaces the gradients of the first rows by extreme ones, one of `values` each, times a loss scale."""
        gradient, self.planted = self.parameter.grad, values[: len(self.rows)]
        rows = self.rows[: len(self.planted)]
        self.replaced = gradient[rows] / scale
        plant(gradient, rows, self.planted, scale)

    def put_back(self) -> None:
        """Puts back the gradients that the planted ones have replaced, unscaled."""
        if self.planted and self.parameter.grad is not None:
            self.parameter.grad[self.rows[: len(self.planted)]] = self.replaced

    def read_result(self, optimizer: torch.optim.Optimizer) -> "Update":
        """Reads weights, moments and the gradient after the update: `ratios` judges them. Returns this object."""
        self.gradient, self.group = self.parameter.grad[self.rows], dict(optimizer.param_groups[0])
        self.count = float(optimizer.state[self.parameter]["step"])
        self.new = _state(self.parameter, self.rows, optimizer)
        return self

    def ratios(self) -> dict[str, float]:
        """{name: error over its budget}, of weights and moments. The budget comes from the formula's error in float32.

        All ordinary rows share one ratio, the worst; each row with a planted gradient has a ratio of its own.
        """
        exact, plain = map(self._by_formula, (torch.float64, torch.float32))
        ratios: dict[str, float] = {}
        for what, x in self.new.items():
            for i in range(len(self.rows)):
                where = f" where the gradient is {self.planted[i]:.2g}" if i < len(self.planted) else ""
                name = f"{what} of {self.name}{where}"
                ratios[name] = max(ratios.get(name, 0.0), _ratio_of_row(x[i], exact[what][i], plain[what][i]))
        return ratios

    def _by_formula(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Weights and moments after the update, by AdamW's formula (`lmsys.training.optimizer`) in this dtype."""
        p, m, v, g = (x.to(dtype) for x in (*self.old.values(), self.gradient))
        beta1, beta2, lr = torch.tensor([*self.group["betas"], self.group["lr"]], dtype=dtype, device=p.device)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = v.sqrt() / (1 - beta2**self.count).sqrt() + self.group["eps"]
        p = p - lr * self.group["weight_decay"] * p - lr * m / (1 - beta1**self.count) / root
        return dict(zip(self.old, (p, m, v), strict=True))


def _ratio_of_row(new: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> float:
    """The error ratio of one row, without elements that overflow float32 by the formula itself."""
    finite = plain.isfinite()
    if not finite.any():
        return 0.0
    new, exact, plain = new[finite], exact[finite], plain[finite]
    if exact.abs().max() >= SMALLEST_NORMAL:
        return testing.ratio_of(new, exact, plain, torch.float32)
    new, exact, plain = (x.double() / SMALLEST_NORMAL for x in (new, exact, plain))
    return testing.error_ratio(new, exact, plain.float())


def _state(
    parameter: torch.Tensor, rows: list[int], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Weights and moments of these rows; moments are zeros if the optimizer has made no step."""
    weights, state = parameter.detach()[rows], optimizer.state.get(parameter, {}) if optimizer else {}
    return {"weights": weights} | {m: state[m][rows] if m in state else torch.zeros_like(weights) for m in MOMENTS}


# At this rate all timed steps together move weights too little to show in a float32 gradient. So the result of any
# timed call can be judged later, when other steps have moved the weights.
LEARNING_RATE = 1e-12
COLD_ROUNDS = 10  # timed steps of the warm-up study


class BatchDraws(draws.Draws):
    """Draws of tokens and targets. The first token of each sequence is none of the extreme ones."""

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        super().fill(draw, names)
        self.tensors["tokens"].data[:, 0] = FIRST_ID


class Rig:
    """The models of a group of cases, with one set of weights and gradients, and one batch.

    Each model is built on first use. New tokens and targets are drawn into the same memory. Some embeddings and gates
    are extreme, as in the check before timing (`cases.Gate`), so that tokens with these embeddings are drawn, too.

    All rows with our model have one optimizer. A peer, somebody else's model, has its own, with its own moments.
    """

    def __init__(self, case: cases.ModelTest, seed: int):
        self.device, self.precision = case.device, case.precision
        self.base = build(case.config, case.device, seed)
        write_model(dict(self.base.named_parameters()))
        self.models: dict[cases.Row, torch.nn.Module] = {}  # by ModelTest.row
        shape, below = (2, case.batch, case.context), case.config.vocab_size
        self.data = Batch(*torch.empty(shape, dtype=torch.int64, device=case.device))
        self.draws = BatchDraws(vars(self.data), seed, below=dict.fromkeys(vars(self.data), below))
        self.draws.fill(seed)
        self.spots = spots.Spots(self.base, self.data, self.precision)
        self._update: Update | None = None
        self.clear()

    def clear(self) -> None:
        """Frees gradients and optimizers: only the weights are left."""
        self.base.zero_grad(set_to_none=True)
        self.optimizers: dict[bool, torch.optim.Optimizer] = {}  # by ModelTest.peer
        self.scaler = torch.amp.GradScaler(
            self.device, LOSS_SCALE, growth_interval=2**31 - 1, enabled=self.precision == "fp16"
        )

    def model(self, case: cases.ModelTest) -> torch.nn.Module:
        """The model of the case's row, which has the parameters of `base`."""
        if case.row not in self.models:
            self.models[case.row] = cases.model_of(case, self.base, shared=True)
        return self.models[case.row]

    def forward(self, case: cases.ModelTest) -> torch.Tensor:
        """The logits of inference, or the loss of training."""
        model, data = self.model(case), self.data
        with torch.set_grad_enabled(case.grad), prepare.autocast(self.precision, self.device):
            return model.loss(data.tokens, data.targets) if case.grad else model(data.tokens)

    def loss_and_states(self, case: cases.ModelTest) -> spots.Parts:
        """By name the loss of training, and the hidden states that it was computed from; for a peer, the logits."""
        model, data = self.model(case), self.data
        with torch.enable_grad(), prepare.autocast(self.precision, self.device):
            if case.peer:
                return dict(
                    zip((spots.LOSS, spots.LOGITS), model.loss_and_logits(data.tokens, data.targets), strict=True)
                )
            hidden = model.hidden(data.tokens)
            return {spots.LOSS: model.loss_of(hidden, data.targets), spots.STATES: hidden}

    def loss(self, case: cases.ModelTest) -> torch.Tensor:
        """The scaled loss. Gradients of earlier calls are freed first."""
        self.base.zero_grad(set_to_none=True)
        return self.scaler.scale(self.forward(case))

    def update(self, case: cases.ModelTest) -> None:
        """A step of our AdamW; for a peer a step of torch's AdamW, as its users take it. Hyper-parameters are equal."""
        peer = case.peer
        if peer not in self.optimizers:
            theirs = partial(torch.optim.AdamW, fused=True if self.device == "cuda" else None)
            self.optimizers[peer] = (theirs if peer else optimizer.AdamW)(self.base.parameters(), lr=LEARNING_RATE)
        if not peer:
            self.optimizers[peer].rounded = self.model(case).rounded  # the step also writes this row's rounded weights
        self.scaler.step(self.optimizers[peer])
        self.scaler.update()

    def step_of(self, case: cases.ModelTest) -> Step:
        """The call that is timed, on newly drawn tokens.

        The forward of a backward, and the gradients of an update alone, are computed just before, untimed.
        """
        return replace(
            self._timed(case),
            redraw=partial(self._redraw, case),
            keep=self.spots.outputs if case.mode in spots.OUTPUTS else partial(self._keep_gradients, case),
        )

    def _timed(self, case: cases.ModelTest) -> Step:
        """The call of the case's mode, without draws and checks.

        `before` is an untimed call, which a clock that times calls in a loop makes before each sample.
        """

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
            "forward": Step(lambda _: {spots.LOGITS: self.forward(case)}, before=lambda: self.forward(case)),
            "train_forward": Step(lambda _: train(), before=train),
            "backward": Step(lambda made: made.backward(), prepare=lambda: self.loss(case)),
            "optimizer": Step(lambda _: self.update(case), prepare=lambda: self._make_gradients(case)),
            "step": Step(lambda _: whole(), before=whole),
        }[case.mode]

    def _make_gradients(self, case: cases.ModelTest) -> None:
        """Computes the gradients of the loss, and replaces those of a few rows by extreme ones."""
        self.loss(case).backward()
        if self._update is not None:
            self._update.plant(self._extremes(case), self.scaler.get_scale())

    def _extremes(self, case: cases.ModelTest) -> Sequence[float]:
        """Extreme gradients that the case's optimizer must handle; torch's kernels on a GPU get a less huge one."""
        return planted(held_by_torch=self.device == "cuda" and (case.peer or not optimizer.HAS_TRITON))

    def _redraw(self, case: cases.ModelTest, draw: int) -> None:
        """Draws tokens before a call; before an update, also the rows of a matrix that are checked after it."""
        self.draws.fill(draw)
        # Our model may keep copies of weights, rounded to the dtype of matmuls (`lmsys.model.linear.RoundedWeights`).
        if not case.peer and (rounded := self.model(case).rounded) is not None:
            rounded.refresh()  # other rows have changed the weights; in a training nothing else changes them
        if case.mode in spots.UPDATES:
            self._update = Update(self.spots.parameters, spots.NUM_ROWS, draw, self.optimizers.get(case.peer))

    def _keep_gradients(self, case: cases.ModelTest, result: Any, key: int | None) -> Any:
        """`Step.keep` of modes with gradients: parts of the gradients, and the `Update`, if any; None without a key."""
        if key is None:
            return None
        if case.mode not in spots.UPDATES:
            return self.spots.gradients(key, self.scaler.get_scale())
        assert self._update is not None
        self._update.read_result(self.optimizers[case.peer]).put_back()
        # `put_back` has put unscaled gradients in the place of planted ones, and the step has unscaled all others.
        return self.spots.gradients(key, scale=1.0) | {spots.UPDATE: self._update}

    def judge(self, case: cases.ModelTest, kept: Kept) -> Mapping[str, float]:
        """{part of a timed call: its error over its budget}, by `Spots.judge`."""
        self.base.zero_grad(set_to_none=True)  # frees memory
        return self.spots.judge(case, kept, self.model(case).meant if case.peer else lambda name, weight: weight)

    def graph_of(self, case: cases.ModelTest) -> gradients.GraphedGradients:
        """A function that replays forward and backward as one CUDA graph; its first call, or `record`, captures it."""
        return gradients.GraphedGradients(
            gradients.backward_of(lambda: self.scaler.scale(self.forward(case))), self.base.parameters()
        )

    def alone(self, case: cases.ModelTest) -> float:
        """Seconds of the case's first call, with nothing else live and nothing left afterwards, even if it fails.

        Compiled blocks are compiled again only if the check before timing had a smaller shape; whole models always.
        `Failed` as "wrong" if a graph's gradients, or an update by extreme gradients, are wrong.
        """
        self.clear()
        try:
            step = self.step_of(case)
            seconds = clock.seconds_of(step.once, self.device)
            if case.mode in spots.UPDATES:  # checks two first steps, with extreme gradients in some rows of a matrix
                self.optimizers.pop(case.peer, None)
                for draw in range(2):
                    update = Update(self.spots.parameters, spots.NUM_ROWS, draw, self.optimizers.get(case.peer))
                    update.plant(self._extremes(case), self.scaler.get_scale())
                    self.update(case)
                    update.read_result(self.optimizers[case.peer])
                    if wrong := verdict(update.ratios(), "before any timed call")[1]:
                        raise Failed(*wrong)
            del step  # frees the memory of its graph
            if case.replayed:
                self.loss(case).backward()
                launched = [p.grad for p in self.base.parameters()]
                self.graph_of(case)()
                worst = max(
                    testing.norm_rms(p.grad - x) / testing.norm_rms(x)
                    for p, x in zip(self.base.parameters(), launched, strict=True)
                )
                # Not 0: the order of additions is not fixed, so the two may round differently.
                if not worst <= 4 * torch.finfo(torch.bfloat16).eps:
                    raise Failed("wrong", f"a gradient of the graph is off by {worst:.2g} of its size")
            return seconds
        finally:
            self.clear()

    def memory_of(self, case: cases.ModelTest) -> Record:
        """Fields of the record about memory, in bytes.

        held_bytes  weights, gradients and optimizer state before the timed call
        peak_bytes  the call's peak above all that was live before it
        """
        self.optimizers.clear()  # drops the moments that other rows have left: this row's optimizer is made again
        step = self.step_of(case)
        step.once()
        self.base.zero_grad(set_to_none=True)
        step = self.step_of(case)  # again, so that a graph is recorded while memory is measured
        prepared = None if case.replayed else step.prepare()
        return {
            "held_bytes": sum(memory.breakdown(self.model(case), self.optimizers.get(case.peer)).values()),
            "peak_bytes": memory.peak_bytes(lambda: step.run(prepared), self.device),
        }


def cold_samples(case: cases.ModelTest, settings: Settings) -> list[float]:
    """Seconds of COLD_ROUNDS steps of a new model, after `case.warmup` untimed ones. It runs in a new process.

    `Failed` as "wrong" if one more step, on new inputs, is wrong. The steps before it are all on one batch: drawing a
    new one would build the model, and the time to build it belongs to the first step.
    """
    if settings.memory_limit_bytes is not None:
        memory.cap_gpu_memory(settings.memory_limit_bytes)
    assert case.warmup is not None
    device_clock, samples = clock.clock_of(case.device), []
    with arithmetic(case.precision):
        rig = Rig(case, settings.seed)
        step = rig.step_of(case)
        for _ in range(case.warmup + COLD_ROUNDS):
            prepared = step.prepare()
            clock.synchronize(case.device)
            samples += clock.timed(device_clock, partial(step.run, prepared))
            del prepared
        draw, key = settings.seed + 1, ranks.entropy()
        step.redraw(draw)
        kept = Kept(len(samples), draw, key, step.keep(step.once(), key))
        if wrong := verdict(rig.judge(case, kept), "in a step after the timed ones")[1]:
            raise Failed(*wrong)
    return samples[case.warmup :]
