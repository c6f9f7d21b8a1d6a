"""The training loop: micro-batches, strategy, clipping, schedule, a step that is left out when it is not finite; saves.

A step is a function of the weights, the optimizer's state and its number, so a run that is resumed from a checkpoint
equals one that was not interrupted. Loss and the wish to stop are agreed among ranks in one small all-reduce a step.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from lmsys import doing, registry
from lmsys.cost.operations import model_flops
from lmsys.measure.machine import peak_flops_per_s
from lmsys.model import BLOCKS_PER_GRAPH, Loss, TransformerLM
from lmsys.parallel import adapter, collectives, sharded_optimizer, structure
from lmsys.training import checkpoint, data, evaluation, gradients, log, optimizer, possible, reproducible
from lmsys.training.config import RunConfig
from lmsys.traits import StrategyTraits

RUNTIME_FIELDS = "attention", "checkpoint_blocks", "residual"  # of a model config: how it is computed, not what it is
Say = Callable[[str], None]


def facts_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint must have been saved with, so that a run of these settings goes on from it."""
    train, packing = config.train, config.data.packing
    return {
        "model": {name: value for name, value in asdict(config.model).items() if name not in RUNTIME_FIELDS},
        "batch_size": train.batch_size,
        "seed": train.seed,
        "undecayed": train.undecayed,  # the optimizer numbers parameters by group
        "packing": packing if packing == "documents" else None,  # a checkpoint from before it has none
    }


@dataclass(frozen=True)
class Step:
    """loss: mean over the global batch; norm: of the gradient before clipping; taken: whether weights have moved."""

    loss: float
    norm: float
    lr: float
    taken: bool


@dataclass(frozen=True)
class Outcome:
    """How training ended: `why` is done, time, or the name of a signal."""

    step: int
    why: str
    loss: float | None
    valid: evaluation.Evaluation | None
    seconds: float
    skipped: int


class Trainer:
    """A model in training on this rank, of as many as torch.distributed has, or alone.

    group   of the ranks that train; None: all
    found   the checkpoint to go on from; None: from the beginning
    facts   what a checkpoint must have been saved with, beside `facts_of`: such as the tokenizer
    ValueError for a checkpoint of another run, a batch that ranks cannot share evenly, a strategy that cannot do this.
    """

    def __init__(
        self,
        config: RunConfig,
        source: data.Source,
        windows: evaluation.Windows,
        device: torch.device,
        found: checkpoint.Checkpoint | None = None,
        facts: dict[str, Any] | None = None,
        group: collectives.Group = None,
    ):
        train = config.train
        self.config, self.windows, self.device, self.group = config, windows, device, group
        self.world_size, self.rank = collectives.size_and_rank(group)
        row, model = possible.check(config, device, group)
        traits = StrategyTraits.of(row)
        packed = config.data.packing == "documents"
        self.autocast = evaluation.autocast_of(train.precision, device)
        self.batches = data.Batches(
            source, config.model.context_length, train.held, train.seed, self.rank, self.world_size,
            train.accumulation(self.world_size), train.reproducible and not traits.sums_each_backward,
            data.end_of_text_of(source, config),
        )  # fmt: skip
        torch.manual_seed(train.seed)
        self.model = TransformerLM(model, device=device)
        self.step, self.skipped, self.in_a_row, self.seconds = 0, 0, 0, 0.0
        self.facts = facts_of(config) | (facts or {})
        shared = None
        if found is not None:
            found.require(**self.facts)
            shared = found.shared("model", "progress")
            self.model.load_state_dict(shared["model"])
        if train.compile:  # a strategy may surround each block, and reduce its gradients early
            alike = train.reproducible or traits.synchronizes  # other graphs add in other orders
            together = 1 if alike else BLOCKS_PER_GRAPH
            self.model.compile_blocks(together, fullgraph=not packed)  # graphs end at attention on documents
        if train.fused:
            self.model.fuse_blocks()
        with gradients.on_capture_stream() if train.graph else nullcontext():  # which torch's DDP keeps
            self.strategy = self._strategy(row)
        self._shards_gradients = traits.shards_gradients
        self.optimizer = self._optimizer()
        if isinstance(self.optimizer, optimizer.AdamW):
            self.optimizer.rounded = self.model.rounded
        self._gradients = self._make_gradients()
        self.facts["optimizer"] = checkpoint.optimizer_layout(self.strategy)
        if found is not None and shared is not None:
            self._resume(found, shared)

    def _strategy(self, row: registry.Entry) -> adapter.Adapter:
        train = self.config.train
        options: dict[str, Any] = {} if train.bucket_mb is None else {"bucket_mb": train.bucket_mb}
        if StrategyTraits.of(row).compute_dtype and train.precision == "bf16" and not train.reproducible:
            options["compute_dtype"] = torch.bfloat16
        group = collectives.TreeSums(self.group) if train.reproducible else self.group
        strategy = adapter.Adapter(row.load(), Loss(self.model), group, **options)
        possible.check_accumulation(self.config, row, self.world_size, able=strategy.can_stay_local)
        return strategy

    def _make_gradients(self) -> gradients.Gradients | gradients.ReplayedGradients:
        train = self.config.train
        alone = train.reproducible and self.world_size == 1
        tree = [p for group in self.optimizer.param_groups for p in group["params"]] if alone else None
        divisor = train.leaves if train.reproducible else self.batches.accumulation
        launched = gradients.Gradients(self.strategy, self.autocast, divisor, tree)
        return gradients.ReplayedGradients(launched, self.strategy) if train.graph else launched

    def _optimizer(self) -> torch.optim.Optimizer:
        train = self.config.train
        options = dict[str, Any](lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)
        if train.undecayed is not None:
            options["groups"] = optimizer.undecayed(self.model, train.undecayed)
        if not train.sharded_optimizer:
            return self.strategy.make_optimizer(optimizer.AdamW, **options)
        groups = structure.grouped(self.model, options.pop("groups", None))
        return sharded_optimizer.ShardedOptimizer(groups, optimizer.AdamW, self.group, **options)

    def _resume(self, found: checkpoint.Checkpoint, shared: dict[str, Any]) -> None:
        names = "betas", "eps", "weight_decay"
        settings = [{name: group[name] for name in names} for group in self.optimizer.param_groups]
        checkpoint.restore_optimizer(self.strategy, self.optimizer, found, shared, self.rank, self.world_size)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)  # it has those with which it was saved: the settings are this run's
        progress = shared["progress"]
        self.step = found.step
        self.skipped, self.in_a_row, self.seconds = (progress[name] for name in ("skipped", "in_a_row", "seconds"))
        if self.rank < found.world_size:
            checkpoint.set_rng_state(found.own(self.rank, "rng")["rng"], self.device)

    @property
    def schedule(self) -> dict[str, float]:
        """The settings of the learning rate, and what they give next."""
        train = self.config.train
        rate = optimizer.cosine_schedule(
            self.step, max_lr=train.lr, min_lr=train.min_lr, warmup_steps=train.warmup, total_steps=train.steps
        )
        settings = {f"train.{name}": getattr(train, name) for name in ("steps", "lr", "min_lr")}
        return settings | {"train.warmup_steps": train.warmup} | {"the rate of the next step": rate}

    def train_step(self, stop: int = 0) -> tuple[Step, int]:
        """One step, and the largest `stop` of any rank."""
        train, lr = self.config.train, self.schedule["the rate of the next step"]
        optimizer.set_lr(self.optimizer, lr)
        micros = range(self.batches.accumulation)
        weights = [self.batches.weight(self.step, micro) for micro in micros]
        with reproducible.deterministic(self.device) if train.reproducible else nullcontext():
            total = self._gradients([self._batch(self.step, micro) for micro in micros], weights)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            divided = self._shards_gradients and self.world_size > 1
            if train.reproducible:  # to the last bit, however gradients are divided among ranks
                grads = [p.grad for p in parameters if p.grad is not None]
                count = sum(p.numel() for p in self.model.parameters())
                whole_norm = torch.tensor(
                    reproducible.exact_norm(grads, count, self.group, divided), device=self.device
                )
            else:
                whole_norm = optimizer.whole_norm(parameters, self.group, divided)
            if train.clip_norm:
                optimizer.scale_gradients(self.optimizer, optimizer.clip_factor(whole_norm, train.clip_norm))
            mean, stop = self._agree(total, stop)
            norm = float(whole_norm)  # the host waits here
            taken = math.isfinite(mean) and math.isfinite(norm)
            if taken:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += not taken
        self.in_a_row = 0 if taken else self.in_a_row + 1
        self.step += 1
        return Step(mean, norm, lr, taken), stop

    def _batch(self, step: int, micro: int) -> tuple[Any, ...]:
        return evaluation.model_inputs(*self.batches.batch(step, micro), self.device)

    def _agree(self, loss: Tensor, stop: int) -> tuple[float, int]:
        if self.world_size == 1:
            return loss.item(), stop
        told = torch.zeros(1 + _TIME, dtype=torch.float64, device=self.device)
        told[0] = loss.double() / self.world_size
        if stop:
            told[stop] = 1.0
        torch.distributed.all_reduce(told, group=self.group)
        mean, *stops = told.tolist()
        return mean, max((number for number, count in enumerate(stops, start=1) if count), default=0)

    def evaluate(self) -> evaluation.Evaluation:
        """Evaluates the same windows on every rank: no collective of a strategy is left alone."""
        # The strategy's forward, as some gather parameters in it.
        return evaluation.evaluate(
            self.model, self.windows, self.config.evaluate.batch_size, self.autocast, self.strategy
        )

    def save(self, folder: Path) -> Path:
        shared, own = checkpoint.capture(self.strategy, self.optimizer, self.rank)
        shared["progress"] = {"skipped": self.skipped, "in_a_row": self.in_a_row, "seconds": self.seconds}
        own["rng"] = checkpoint.rng_state(self.device)
        return checkpoint.save(
            folder, self.step, shared, own, facts=self.facts | {"schedule": self.schedule},
            keep=self.config.checkpoint.keep, rank=self.rank, world_size=self.world_size,
            gather=lambda mine: collectives.gather_objects(mine, self.group),
        )  # fmt: skip

    def fit(self, folder: Path, log: log.JsonLines | None = None, say: Say = lambda _: None) -> Outcome:
        """Train to the end, or until a signal or the time that a speedrun has; the last step is always saved.

        NonFiniteError when more steps in a row than allowed were not finite: the last good checkpoint stays.
        """
        train, began, before = self.config.train, time.perf_counter(), self.seconds
        write: Callable[..., None] = log.write if log is not None else lambda **_: None
        valid, loss, why, progress = None, None, "done", self.progress()
        with StopSignals() as signals:
            while self.step < train.steps:
                late = train.max_seconds is not None and time.perf_counter() - began >= train.max_seconds
                doing.now(f"in step {self.step + 1:,}")
                one, stop = self.train_step(signals.seen or (_TIME if late else 0))
                self.seconds, loss = before + time.perf_counter() - began, one.loss
                self._tell(one, write, say, progress)
                last = self.step == train.steps or stop > 0
                if last or _due(self.step, self.config.evaluate.interval):
                    valid = self._validate(write, say)
                if last or _due(self.step, self.config.checkpoint.interval):
                    doing.now(f"in the save after step {self.step:,}")
                    self.save(folder)
                if stop and self.step < train.steps:
                    why = "time" if stop == _TIME else signal.Signals(stop).name
                    break
        if train.reproducible:
            digest = reproducible.weights_sha256(self.strategy.full_state_dict())
            write(step=self.step, weights_sha256=digest)
            say(f"weights after step {self.step}: sha256 {digest}")
        return Outcome(self.step, why, loss, valid, self.seconds, self.skipped)

    def progress(self) -> log.Progress:
        """The line for the reader, from this step on."""
        config = self.config
        tokens = config.train.batch_size * config.model.context_length
        flops = model_flops(config.model, tokens=tokens, context=config.model.context_length, mode="step")
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return log.Progress(
            self.step, config.train.steps, tokens, flops, peak_flops_per_s(gpu, config.train.precision, self.world_size)
        )

    def _tell(self, one: Step, write: Callable[..., None], say: Say, progress: log.Progress) -> None:
        write(
            step=self.step,
            loss=one.loss,
            lr=one.lr,
            grad_norm=one.norm,
            skipped=self.skipped,
            time_s=round(self.seconds, 3),
        )
        if not one.taken:
            say(f"step {self.step:,}: loss {one.loss}, gradient norm {one.norm}: skipped, {self.in_a_row} in a row")
        if self.in_a_row > self.config.train.max_nonfinite:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row were not finite, up to step {self.step}; {self._where()}the last"
                " checkpoint stands; lower train.lr, or raise train.max_nonfinite"
            )
        if _due(self.step, self.config.train.log_interval) or self.step == self.config.train.steps:
            say(progress.line(self.step, one.loss, one.lr))

    def _where(self) -> str:
        """The first module whose output is not finite, on the last batch; of one process."""
        if self.world_size > 1:
            return ""
        batch = self._batch(self.step - 1, self.batches.accumulation - 1)
        name = first_nonfinite(self.model, lambda: self.model.loss(*batch))
        return f"first not finite: {name}; " if name else ""

    def _validate(self, write: Callable[..., None], say: Say) -> evaluation.Evaluation:
        doing.now(f"in the evaluation after step {self.step:,}")
        found = self.evaluate()
        write(step=self.step, valid_loss=found.loss, valid_perplexity=found.perplexity)
        say(f"step {self.step:,}: validation loss {found.loss:.4f}, perplexity {found.perplexity:,.1f}")
        return found


_TIME = 64  # above the numbers of signals, and none of them


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class NonFiniteError(ValueError):
    """The loss is NaN or inf; the message names the step and where it began."""


def first_nonfinite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The name and class of the first module whose output holds NaN or inf while `forward` runs, or None."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        floating = isinstance(output, Tensor) and output.is_floating_point()
        if module in names and floating and not output.isfinite().all():
            found.append(f"{names[module] or 'the whole'} ({type(module).__name__})")

    eager = torch.compiler.set_stance("force_eager")  # a compiled graph holds no hooks
    with torch.nn.modules.module.register_module_forward_hook(hook), torch.no_grad(), eager:
        forward()
    return found[0] if found else None


AGAIN_S = 0.5  # signals closer together are one wish: torchrun and a terminal each pass one on
ENDED_S = 5.0  # for a process to end by itself after a second signal
TWICE = b"lmsys.training: told to end twice, and its step does not: ended at once; what was saved before stands\n"


class StopSignals:
    """SIGTERM and Ctrl-C, kept until the step is done; what is ignored stays so. A second one, later, ends at once.

    Python runs handlers between two of its own instructions, which a rank that waits for a stopped one never reaches:
    a thread reads the signals, too, and ends such a process some seconds after the second.
    """

    def __init__(self) -> None:
        self.seen: int = 0
        self._seen_at_s = 0.0
        self._over = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._told, tell = os.pipe()
        os.set_blocking(tell, False)
        self._tell, self._told_before = tell, signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._told_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._tell)

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if not self.seen:
            self.seen, self._seen_at_s = number, now
        elif now - self._seen_at_s > AGAIN_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Reads until the other end is closed. A step that does not end when told twice ends with its process."""
        first, first_at_s = 0, 0.0
        while number := os.read(self._told, 1):
            now = time.monotonic()
            if number[0] in self._before and not first:
                first, first_at_s = number[0], now
            elif number[0] in self._before and now - first_at_s > AGAIN_S and not self._over.wait(ENDED_S):
                os.write(2, TWICE)
                os._exit(128 + first)
        os.close(self._told)
