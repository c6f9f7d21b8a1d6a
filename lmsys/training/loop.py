"""The training loop. The pipeline makes a `Trainer` on every rank, and calls `fit`.

A step (`train_step`) sets the learning rate, computes the gradients of its micro-batches under the strategy, clips
them, and steps the optimizer unless loss or gradient is not finite. `fit` takes all steps; it also logs, evaluates,
saves checkpoints, and stops early when a signal or the time asks for it. A step depends only on the weights, the
optimizer's state, the loss scale and the step's number, so a run that is resumed from a checkpoint equals one that was
not interrupted. Ranks agree on the loss and on whether to stop in one small all-reduce a step.

A new setting of the training is a field of `TrainConfig` (config.py), on which `Trainer` acts here. If a resumed run
must have the same value, it is also an entry of `facts_of`. New state goes into `save` and `_resume`.
"""

import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lmsys import doing, values
from lmsys.cost.operations import model_flops
from lmsys.measure import clock, machine
from lmsys.model import TransformerLM
from lmsys.parallel import StrategyTraits, collectives, structure
from lmsys.training import (
    checkpoint,
    data,
    evaluation,
    gradients,
    log,
    muon,
    optimizer,
    possible,
    prepare,
    reproducible,
    stopping,
    training_state,
)
from lmsys.training.config import RunConfig

RUNTIME_FIELDS = "attention", "checkpoint_blocks", "residual"  # a model's fields that a resumed run may change
Say = Callable[[str], None]


def facts_of(config: RunConfig) -> dict[str, Any]:
    """The facts that a checkpoint must have been saved with, so that a run with this config may resume from it."""
    train, packing = config.train, config.data.packing
    return {
        "model": {name: value for name, value in asdict(config.model).items() if name not in RUNTIME_FIELDS},
        "batch_size": train.batch_size,
        "seed": train.seed,
        "undecayed": train.undecayed,  # the optimizer numbers parameters by group
        "train.optimizer": train.optimizer if train.optimizer != "adamw" else None,  # older checkpoints lack this fact
        "packing": packing if packing == "documents" else None,  # older checkpoints lack this one, too
    }


@dataclass(frozen=True)
class Step:
    """The result of a training step.

    loss   mean over the global batch
    norm   L2 norm of the gradient before clipping
    lr     learning rate
    scale  factor of the loss before the backward: 1 except in fp16
    taken  False if loss or norm was not finite, so that the optimizer was not called and weights have not changed
    """

    loss: float
    norm: float
    lr: float
    scale: float
    taken: bool


class Trainer:
    """A model in training on this rank. The pipeline and benchmarks make it; they call `fit` or `train_step`.

    source   the token ids to train on
    windows  inputs and targets to evaluate on
    saved    the checkpoint to go on from; None: from the beginning
    facts    what a checkpoint must have been saved with, beside `facts_of`: such as the tokenizer
    group    the ranks that train; None: all, or this process alone
    ValueError for a checkpoint of another run, a batch that ranks cannot share evenly, a strategy that cannot do what
    the config asks.
    """

    def __init__(
        self,
        config: RunConfig,
        source: data.Source,
        windows: evaluation.Windows,
        device: torch.device,
        saved: checkpoint.Checkpoint | None = None,
        facts: dict[str, Any] | None = None,
        group: collectives.Group = None,
    ):
        train = values.instance("config", config, RunConfig).train
        self.config, self.windows, self.group = config, values.several("windows", windows), group
        self.device = values.instance("device", device, torch.device)
        self.world_size, self.rank = collectives.size_and_rank(group)
        model, execution = possible.plan(config, device, group)
        traits, micro_batches = StrategyTraits.of(execution.strategy), train.accumulation(self.world_size)
        self._divided = traits.shards_gradients and self.world_size > 1  # this rank has parts of the gradients
        self.batches = data.Batches(
            source, config.model.context_length, train.sequences_at_once, seed=train.seed, rank=self.rank,
            world_size=self.world_size, accumulation=micro_batches,
            neighbours=train.reproducible and not traits.sums_each_backward,
            end_of_text=source.end_of_text if config.data.packing == "documents" else None,
        )  # fmt: skip
        torch.manual_seed(train.seed)
        self.model = TransformerLM(model, device=device)
        # step: steps done. skipped: how many of them were not taken. in_a_row: how many were not taken in a row up to
        # now; train.max_nonfinite limits it, and `train_step` says which steps count. seconds: the time of all steps,
        # without evaluations and checkpoints.
        self.step, self.skipped, self.in_a_row, self.seconds = 0, 0, 0, 0.0
        self.facts = facts_of(config) | values.instance("facts", {} if facts is None else facts, dict)
        shared = None
        if saved is not None:
            values.instance("saved", saved, checkpoint.Checkpoint).require(**self.facts)
            shared = saved.shared("model", "progress")
            self.model.load_state_dict(shared["model"])
        optimizer_cls, self._settings, groups = muon.optimizer_of(train, self.model)
        prepared = prepare.prepare(self.model, execution, optimizer_cls, lr=train.lr, **self._settings, **groups)
        self.strategy, self.optimizer, self.autocast = prepared
        possible.check_accumulation(config, self.world_size, able=self.strategy.can_stay_local)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "fp16")
        self._gradients: Any = gradients.Gradients(
            self.strategy, prepared.loss, divisor=train.leaves if train.reproducible else micro_batches,
            scale=self.scaler.scale, tree=self._parameters if train.reproducible and self.world_size == 1 else None,
        )  # fmt: skip
        if train.graph:
            self._gradients = gradients.ReplayedGradients(self._gradients, self.strategy)
        self.facts["optimizer"] = training_state.optimizer_layout(self.strategy)
        if saved is not None and shared is not None:
            self._resume(saved, shared)

    def _resume(self, saved: checkpoint.Checkpoint, shared: dict[str, Any]) -> None:
        """Restores optimizer, progress and random numbers; weights were loaded before the strategy wrapped them."""
        settings = [{name: group[name] for name in self._settings} for group in self.optimizer.param_groups]
        training_state.restore_optimizer(self.strategy, self.optimizer, saved, shared, self.rank, self.world_size)
        # The state dict has brought the settings of the run that saved it.
        structure.set_options(self.optimizer.param_groups, settings)
        self.step, progress = saved.step, shared["progress"]
        self.skipped, self.in_a_row, self.seconds = progress["skipped"], progress["in_a_row"], progress["seconds"]
        if progress.get("scaler"):  # empty in other precisions, in which the run may have begun
            self.scaler.load_state_dict(progress["scaler"])
        if self.rank < saved.world_size:
            training_state.set_rng_state(saved.own(self.rank, "rng")["rng"], self.device)

    @property
    def schedule(self) -> dict[str, float]:
        """The settings of the learning rate, and the rate of the next step, by name; a checkpoint has it as a fact."""
        train = self.config.train
        of_matrices = {"train.matrix_lr": train.matrix_lr} if train.optimizer == "muon" else {}
        return of_matrices | {
            "train.steps": train.steps,
            "train.lr": train.lr,
            "train.min_lr": train.min_lr,
            "train.warmup_steps": train.warmup,
            # `train_step` reads this entry by its name.
            "the rate of the next step": optimizer.cosine_schedule(
                self.step, max_lr=train.lr, min_lr=train.min_lr, warmup_steps=train.warmup, total_steps=train.steps
            ),
        }

    def train_step(self, stop: int = 0) -> tuple[Step, int]:
        """Takes a step; returns it and the largest `stop` of any rank.

        stop  why this rank asks to stop after the step: 0 (it does not), the number of a signal, or _TIME
        """
        train, lr = self.config.train, self.schedule["the rate of the next step"]
        optimizer.set_lr(self.optimizer, lr, lr / train.lr * train.matrix_lr if train.optimizer == "muon" else None)
        micros = range(self.batches.accumulation)
        weights = [self.batches.weight(self.step, micro) for micro in micros]
        with reproducible.deterministic(self.device) if train.reproducible else nullcontext():
            total = self._gradients([self._batch(self.step, micro) for micro in micros], weights)
            self.scaler.unscale_(self.optimizer)
            gradient_norm = self._gradient_norm()
            if train.clip_norm:
                optimizer.scale_gradients(self.optimizer, optimizer.clip_factor(gradient_norm, train.clip_norm))
            mean, finite, stop = self._agree(total, gradient_norm, stop)
            # float(gradient_norm) costs no further wait: `_agree` has made the host wait for the device.
            step = Step(mean, float(gradient_norm), lr, self.scaler.get_scale(), finite and math.isfinite(mean))
            if step.taken:
                self.optimizer.step()
            elif self.scaler.is_enabled():
                # Ranks must keep one scale, even if somebody else's strategy leaves infinities on one rank alone: this
                # private method gives the flags, by device, from which `update` learns that a step was not finite.
                for has_inf in self.scaler._found_inf_per_device(self.optimizer).values():
                    has_inf.fill_(1.0)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += not step.taken
        # With a finite loss it may be the scale alone that has made gradients infinite: then a smaller one helps.
        self.in_a_row = 0 if step.taken or (math.isfinite(mean) and step.scale > 1) else self.in_a_row + 1
        self.step += 1
        return step, stop

    def _gradient_norm(self) -> torch.Tensor:
        """The norm of all ranks' gradients, a scalar tensor.

        In a reproducible training it is bitwise equal for any number of ranks.
        """
        if not self.config.train.reproducible:
            return optimizer.whole_norm(self._parameters, self.group, self._divided)
        grads = [p.grad for p in self._parameters if p.grad is not None]
        count = sum(p.numel() for p in self.model.parameters())
        norm = reproducible.exact_norm(grads, count, self.group, self._divided, self.device)
        return torch.tensor(norm, device=self.device)

    def _batch(self, step: int, micro: int) -> tuple[Any, ...]:
        return evaluation.model_inputs(*self.batches.batch(step, micro), self.device)

    def _agree(self, loss: torch.Tensor, norm: torch.Tensor, stop: int) -> tuple[float, bool, int]:
        """(mean over ranks of the loss, True if the norm is finite on all, the largest `stop` of any rank)."""
        if self.world_size == 1:
            return loss.item(), math.isfinite(norm), stop
        # At 0 the loss; at each `stop` from 1 to _TIME the number of ranks that ask for it; at the end the number of
        # ranks whose norm is not finite.
        sums = torch.zeros(2 + _TIME, dtype=torch.float64, device=self.device)
        sums[0], sums[-1] = loss.double() / self.world_size, ~norm.isfinite()
        if stop:
            sums[stop] = 1.0
        torch.distributed.all_reduce(sums, group=collectives.unwrapped(self.group))
        mean, *stops, infinite = sums.tolist()
        return mean, not infinite, max((number for number, count in enumerate(stops, start=1) if count), default=0)

    def evaluate(self) -> evaluation.Evaluation:
        """Evaluates the same windows on every rank. All ranks call it."""
        # loss_of is the strategy's forward, since some strategies gather parameters in it.
        return evaluation.evaluate(
            self.model, self.windows, self.config.evaluate.batch_size, autocast=self.autocast, loss_of=self.strategy
        )

    def save(self, folder: Path) -> Path:
        """Saves a checkpoint; returns its manifest. All ranks call it. NonFiniteError for weights with NaN or inf."""
        shared, of_rank = training_state.capture(self.strategy, self.optimizer, self.rank)
        values.hold(
            *(
                (
                    x.isfinite().all(),
                    f"step {self.step}: {name} is not finite, so this step is not saved, and earlier checkpoints stay;"
                    " lower train.lr",
                )
                for name, x in shared["model"].items()  # whole on every rank, so that all raise
            ),
            error=NonFiniteError,
        )
        shared["progress"] = {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "seconds": self.seconds,
            "scaler": self.scaler.state_dict(),
        }
        of_rank["rng"] = training_state.rng_state(self.device)
        return checkpoint.save(
            folder, self.step, shared, of_rank, facts=self.facts | {"schedule": self.schedule},
            keep=self.config.checkpoint.keep, rank=self.rank, world_size=self.world_size,
            gather=lambda mine: collectives.gather_objects(mine, self.group),
        )  # fmt: skip

    def fit(
        self, folder: Path, log: log.JsonLines | None = None, say: Say = lambda _: None
    ) -> tuple[str, evaluation.Evaluation | None]:
        """Trains until all steps are done, a signal comes or max_seconds are over; the last step is always saved.

        Returns why it ended: done, time, or the name of a signal; and the last evaluation, None if there was no step.

        folder  where checkpoints are saved
        log     where a line for every step is written; None: nowhere
        say     called with each line for the reader
        NonFiniteError when more steps in a row than allowed were not finite: the last good checkpoint stays.
        """
        train, began = self.config.train, time.perf_counter()
        write: Callable[..., None] = log.write if log is not None else lambda **_: None
        valid, why, progress = None, "done", self.progress()
        with stopping.StopSignals() as signals:
            while self.step < train.steps:
                start = time.perf_counter()
                late = train.max_seconds is not None and start - began >= train.max_seconds
                doing.now(f"in step {self.step + 1:,}")  # the report about a rank that dies shows it
                taken, stop = self.train_step(signals.seen or (_TIME if late else 0))
                last = self.step == train.steps or stop > 0
                evaluates = last or _due(self.step, self.config.evaluate.interval)
                # While steps are not taken, weights may be NaN already: such saves would replace the good ones.
                saves = last or (taken.taken and _due(self.step, self.config.checkpoint.interval))
                if evaluates or saves:  # else the rest of the step's kernels would be timed as a part of these
                    clock.synchronize(self.device.type)
                self.seconds += time.perf_counter() - start
                self._tell(taken, write, say, progress)
                if evaluates:
                    doing.now(f"in the evaluation after step {self.step:,}")
                    valid = self.evaluate()
                    write(step=self.step, valid_loss=valid.loss, valid_perplexity=valid.perplexity)
                    say(f"step {self.step:,}: validation loss {valid.loss:.4f}, perplexity {valid.perplexity:,.1f}")
                if saves:
                    doing.now(f"in the save after step {self.step:,}")
                    self.save(folder)
                if stop and self.step < train.steps:
                    why = "time" if stop == _TIME else signal.Signals(stop).name
                    break
        if train.reproducible:
            digest = reproducible.weights_sha256(self.strategy.full_state_dict())
            write(step=self.step, weights_sha256=digest)
            say(f"weights after step {self.step}: sha256 {digest}")
        return why, valid

    def progress(self) -> log.Progress:
        """A new `Progress`, which makes the printed lines and measures from this step on."""
        config = self.config
        tokens = config.train.batch_size * config.model.context_length
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return log.Progress(
            self.step, self.seconds, config.train.steps, tokens,
            model_flops(config.model, tokens=tokens, context=config.model.context_length, mode="step"),
            machine.peak_flops_per_s(gpu, config.train.precision, self.world_size),
        )  # fmt: skip

    def _tell(self, step: Step, write: Callable[..., None], say: Say, progress: log.Progress) -> None:
        """Logs a step. NonFiniteError when too many in a row were not finite."""
        write(
            step=self.step,
            loss=step.loss,
            lr=step.lr,
            grad_norm=step.norm,
            loss_scale=step.scale,
            skipped=self.skipped,
            time_s=round(self.seconds, 3),
        )
        if not step.taken:
            say(
                f"step {self.step:,}: loss {step.loss}, gradient norm {step.norm}, loss scale {step.scale:,g}: skipped;"
                f" {self.in_a_row} of at most {self.config.train.max_nonfinite} in a row"
            )
        if self.in_a_row > self.config.train.max_nonfinite:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were not finite, up to step {self.step}; {self._where()}the last"
                " checkpoint stands; lower train.lr, or raise train.max_nonfinite"
            )
        if _due(self.step, self.config.train.log_interval) or self.step == self.config.train.steps:
            say(progress.line(self.step, self.seconds, step.loss, step.lr))

    def _where(self) -> str:
        """Names, for an error, the first module whose output is not finite on the last batch; "" on several ranks."""
        if self.world_size > 1:
            return ""
        batch = self._batch(self.step - 1, self.batches.accumulation - 1)
        name = first_nonfinite(self.model, lambda: self.model.loss(*batch))
        return f"first not finite: {name}; " if name else ""


_TIME = 64  # the `stop` of a run whose train.max_seconds are over: larger than the number of any signal


def _due(step: int, interval: int) -> bool:
    """True after every `interval` steps; never for an interval of 0 or less."""
    return interval > 0 and step % interval == 0


class NonFiniteError(ValueError):
    """The loss, a gradient or a weight is NaN or inf; the message names the step, and a module or weight if known."""


def first_nonfinite(model: torch.nn.Module, forward: Callable[[], Any]) -> str | None:
    """The name and class of the first module of `model` whose output holds NaN or inf while `forward` runs, or None."""
    names = {module: name or "the whole" for name, module in model.named_modules()}
    broken: list[str] = []

    def hook(module: torch.nn.Module, _: Any, output: Any) -> None:
        floating = isinstance(output, torch.Tensor) and output.is_floating_point()
        if module in names and floating and not output.isfinite().all():
            broken.append(f"{names[module]} ({type(module).__name__})")

    with (
        torch.nn.modules.module.register_module_forward_hook(hook),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # compiled code does not call hooks
    ):
        forward()
    return broken[0] if broken else None
