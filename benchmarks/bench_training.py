"""Times whole trainings on text, of attention rows with data-parallel strategies, and compares them with one process.

A row is an implementation; a case trains a model with one attention row by one strategy. All cases begin with the same
weights and see the same tokens in the same order, so their losses must follow one curve. The reference is one process
with naive attention that accumulates the gradients of all ranks' batches. A case is wrong as soon as its losses, or the
norm of its first gradient, are too far from those of the reference: `lmsys.testing` has the bounds.

`benchmarks/training/rank.py` holds the case and the functions that run on the ranks; this file calls them, epoch by
epoch, and makes the record. The runner calls the methods of `Training`: they override hooks of `lmsys.bench.Benchmark`,
which says when each is called and what it returns. A new metric is a `Field` of `Training.fields`, and its value in
`Training.metrics`.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from benchmarks import axes, models
from benchmarks.training.layout import TRAINING as LAYOUT
from benchmarks.training.rank import CORPUS, Epoch, TrainingCase, begin, clear, end, epoch, inspect, tokens_of
from lmsys import attention, parallel, testing, traits
from lmsys.bench import Axis, Benchmark, Candidate, Entry, Field, Grid, Record, Settings, bench, fields, positive, ranks
from lmsys.bench.trial import NOT_TIMED
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.measure.compare import attempt

CURVE_POINTS = 100  # the most points of a curve that a record holds, beside the last one


@dataclass
class Curve:
    """Results of a training: losses over the global batch and gradient norms by step, and the final held-out loss.

    weights  {attention row: (sha256 of the weights, `TrainingCase.row`)} at the end of the first reproducible training
             with this attention row: all later ones must end with the same weights. Kept in the reference alone
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    valid_loss: float | None = None
    weights: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, epoch: Epoch) -> None:
        """Appends the losses and gradient norms of an epoch's steps."""
        self.losses += epoch.losses
        self.norms += epoch.norms

    def fields(self, reference: "Curve", dtype: str) -> Record:
        """Fields of a record: evenly spaced losses and the last one, and how far they are from the reference's.

        Only the first steps have such differences: as many steps as the reference has losses.
        """
        apart = [a - b for a, b in zip(self.losses[: testing.CURVE_STEPS], reference.losses, strict=False)]
        number = len(self.losses)
        places = sorted({number - 1}.union(range(0, number, -(-number // CURVE_POINTS))))
        return {
            "steps": len(self.losses),
            "curve_steps": [place + 1 for place in places],
            "curve_losses": [models.finite(self.losses[place]) for place in places],
            "curve_differences": [models.finite(apart[place]) for place in places if place < len(apart)],
            "curve_difference": models.finite(max(map(abs, apart))),
            "curve_budget": testing.CURVE_BUDGET[dtype],
            "norm_difference": models.finite(abs(self.norms[0] / reference.norms[0] - 1)),
            "loss": models.finite(self.losses[-1]),
            "valid_loss": None if self.valid_loss is None else models.finite(self.valid_loss),
        }


class Training(Benchmark):
    """Trains one case after another.

    A case's first steps are measured in a run of their own (`inspect`). Then it is trained, and after each epoch its
    losses are compared with the reference's. The first epoch is not timed; the others are the samples.
    """

    name = "training"
    layout = LAYOUT
    tables = {"attention": attention.ATTENTION, "strategy": parallel.STRATEGIES}
    clock = "host"
    opens = False
    streams = True
    axes: tuple[Axis, ...] = axes.named(
        "--size --context --batch --precision --compile --attention",
        "--strategy --world-size --bucket-mb --reproducible",
        "--epochs --train-tokens --val-tokens",
        Axis("vocab_size", positive, 10_000, single=True),
        batch=(8,),
    )
    fields: tuple[Field, ...] = fields.columns(
        "attention strategy row attention_label attention_peer strategy_peer",
        "size context batch global_batch precision compile",
        Field("num_ranks", label="ranks", role="axis", about="Ranks of the group: with the batch, the global batch"),
        Field("world_size", label="ranks that train", role="axis"),
        "backend",
        Field("num_nodes", label="nodes", role="axis"),
        Field("bucket_mb", "MiB", "bucket size", "axis"),
        "reproducible epochs train_tokens val_tokens vocab_size corpus",
        Field("num_parameters", label="parameters", role="axis"),
        fields.TIME.called(about="Median time of an epoch, of the slowest rank", shown="s"),
        Field("mean_s", "s", "Time of an epoch", about="Mean time of an epoch, of the slowest rank", shown="s"),
        Field("tokens_per_s", "tokens/s", "Throughput", about="Tokens of an epoch over its median time"),
        fields.PEAK.called(about="Peak memory of a step, of the rank with most", shown="GiB"),
        Field(
            "first_step_s",
            "s",
            "First step",
            about="Time of the first step, which compiles and tunes, in a run of its own",
            shown="s",
        ),
        Field("loss", "nats", "Last loss", about="Loss of the last step over the global batch"),
        Field("valid_loss", "nats", "Held-out loss", about="Loss on held-out tokens after the last epoch"),
        Field(
            "curve_difference",
            "nats",
            "Off the reference",
            about="How far the loss of a step is at most from that of naive attention in one process, over the first "
            f"{testing.CURVE_STEPS} steps",
        ),
        Field(
            "norm_difference",
            label="Norm off",
            about="How far the norm of the first gradient is from the reference's",
            shown="%",
        ),
        fields.ERROR.called(
            about="Worst difference, of the curve or the first norm, as a share of what is allowed (right: at most 1)"
        ),
        fields.RATE.called(role="detail"),
        Field("curve_budget", "nats", role="detail", about="How far a loss may be from the reference's"),
        fields.details("lr", "tokens", "steps", "steps_per_epoch", "rank_peak_bytes"),
        fields.details("curve_steps", "curve_losses", "curve_differences"),
        Field("weights", role="detail", about="The sha256 of the weights after the last epoch, where reproducible"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[TrainingCase]:
        """A case for each model, number of ranks, attention row, strategy and choice of options.

        On one rank there is only the strategy that does not synchronize. ValueError for numbers of tokens on the
        command line that fill no step or window.
        """
        text = {name: grid[name] for name in ("epochs", "train_tokens", "val_tokens", "vocab_size")}
        for ((size, context, batch, precision, compile), num_ranks), row, entry in product(
            product(
                grid.product("size", "context", "batch", "precision", "compile"),
                ranks.world_sizes(grid, ranks.backend_of(settings.device)),
            ),
            models.MODEL_ROWS.select(grid["attention"] or [models.AUTO.name]),
            parallel.STRATEGIES.select(grid["strategy"]),
        ):
            strategy = traits.StrategyTraits.of(entry)
            buckets = grid["bucket_mb"] if strategy.takes_bucket_mb or strategy.tuned_bucket_mb else (None,)
            ways = product(buckets, grid["reproducible"])
            for bucket_mb, reproducible in ways if num_ranks > 1 or not strategy.synchronizes else ():
                case = TrainingCase(
                    grid.name,
                    entry,
                    settings.device,
                    size=size,
                    context=context,
                    batch=batch,
                    precision=precision,
                    compile=compile,
                    attention=row,
                    num_ranks=num_ranks,
                    bucket_mb=bucket_mb,
                    reproducible=reproducible,
                    names_bucket=len(buckets) > 1,
                    **text,
                )
                if grid.given & {"train_tokens", "val_tokens"}:
                    _ = case.steps, case.windows  # properties that raise the ValueError
                yield case

    def rows_of(self, case: TrainingCase) -> Mapping[str, Entry]:
        return {"attention": case.attention, "strategy": case.entry}

    def why_not(self, case: TrainingCase) -> str | None:
        if models.ModelTraits.of(case.attention).whole_model:
            return "a training is of our own model: name a row of attention"
        try:
            _ = case.steps, case.windows
            reason = models.why_not(case.attention, case) or case.entry.why_not(case)
            _ = reason or case.run_config(seed=0)  # raises ValueError for what the training loop does not have
        except ValueError as error:
            return str(error)
        return reason

    def setup(self, cases: Sequence[TrainingCase], settings: Settings) -> Curve:
        """The reference, which `check_all` fills."""
        return Curve()

    def check_all(self, candidates: Sequence[Candidate], reference: Curve, runner: Any) -> None:
        """Trains the reference, once. If that fails, all candidates fail: there is nothing to compare them with."""
        if reference.losses:
            return
        runner.say(f"  the reference: naive attention, one process, {CORPUS}")
        _, failure = attempt(self._train_reference, candidates[0].case.reference, reference, runner)
        if failure:
            for candidate in candidates:
                candidate.failed(failure[0], f"the bench failed, not the row: the reference: {failure[1]}")

    def _train_reference(self, plain: TrainingCase, reference: Curve, runner: Any) -> None:
        """Trains the reference for the steps in which curves are compared, CURVE_STEPS at most."""
        run, steps = partial(_on_ranks, plain, runner), min(testing.CURVE_STEPS, plain.epochs * plain.steps)
        run(begin, tokens_of(plain.tokens, plain.val_tokens, plain.vocab_size), runner.settings.seed)
        while steps > len(reference.losses):
            (only_rank,) = run(epoch, min(steps - len(reference.losses), plain.steps))
            reference.add(only_rank)
        run(clear)

    def sample(self, turn: Sequence[TrainingCase], trial: Any) -> None:
        (case,) = turn  # `streams` makes each case a turn of its own
        candidate, curve = trial.candidate(case), Curve()
        candidate.attempt(self._train, case, candidate, curve, trial)
        if curve.losses:
            candidate.notes |= curve.fields(trial.setup, models.DTYPES[case.precision])
        trial.runner.say(
            f"  [{trial.cases.index(case) + 1}/{len(trial.cases)}] {case.impl}: {self._figures(case, candidate, trial)}"
        )

    def _train(self, case: TrainingCase, candidate: Candidate, curve: Curve, trial: Any) -> None:
        """Inspects a case, then trains it, judges each epoch by the reference, and compares the weights at the end."""
        run, measurement = partial(_on_ranks, case, trial.runner), trial.measurements[case.id]
        settings, dtype = trial.settings, models.DTYPES[case.precision]
        text = tokens_of(case.tokens, case.val_tokens, case.vocab_size)
        # By rank: why the case is not trained, or None; seconds of the first step; peak bytes of the second.
        refused, first_steps, peaks = zip(*run(inspect, text, settings.seed), strict=True)
        if refused[0] is not None:
            candidate.failed("unsupported", refused[0])
            return
        run(begin, text, settings.seed)
        epochs: list[list[Epoch]] = []  # of each epoch the results by rank
        while len(epochs) < case.epochs and (settings.timed or len(curve.losses) < testing.CURVE_STEPS):
            epochs.append(run(epoch, case.steps))
            curve.add(epochs[-1][0])
            ratios = testing.curve_ratios(curve.losses, trial.setup.losses, curve.norms[0], trial.setup.norms[0], dtype)
            candidate.judge(ratios, dtype)
            if candidate.outcome == "ok" and not math.isfinite(math.fsum(curve.losses)):
                candidate.failed("wrong", "a loss is not finite")
            if candidate.outcome != "ok":
                run(clear)
                return
        valid_losses, weights = zip(*run(end), strict=True)  # by rank: held-out loss, fingerprint of the weights
        curve.valid_loss = valid_losses[0]
        if len(set(weights)) > 1:
            candidate.failed("wrong", "after the last epoch ranks have different parameters")
        elif case.reproducible and (others := _other_weights(case, weights[0], trial.setup)):
            candidate.failed("wrong", others)
        elif settings.timed:
            clocks = [x.sm_clock_mhz for by_rank in epochs[1:] for x in by_rank if x.sm_clock_mhz is not None]
            measurement.samples = [max(x.seconds for x in by_rank) for by_rank in epochs[1:]]
            candidate.notes["weights"] = weights[0] if case.reproducible else None
            measurement.record = {
                "peak_bytes": max(peaks),
                "rank_peak_bytes": list(peaks),
                "sm_clock_mhz": statistics.median(clocks) if clocks else None,
                "first_step_s": max(first_steps),
            }

    def _figures(self, case: TrainingCase, candidate: Candidate, trial: Any) -> str:
        """A line for the terminal: how the case has ended."""
        samples = trial.measurements[case.id].samples
        if candidate.outcome != "ok" or not samples:
            return f"{candidate.outcome}: {candidate.reason or NOT_TIMED}"
        rate, notes = case.tokens / statistics.median(samples), candidate.notes
        return (
            f"{rate:,.0f} tokens/s, {statistics.fmean(samples):.3g} s an epoch, loss {notes['valid_loss']:.4f},"
            f" at most {notes['curve_difference']:.1e} from the reference"
        )

    def metrics(self, case: TrainingCase, record: Record, machine: Record) -> Record:
        work: Record = {
            "num_parameters": model_parameters(case.config),
            "num_nodes": ranks.num_nodes(),
            "corpus": CORPUS,
            "lr": case.lr,
        }
        if time_s := record.get("time_s"):
            flops = model_flops(case.config, tokens=case.tokens, context=case.context, mode="step")
            work |= {
                "steps_per_epoch": case.steps,
                "tokens": case.tokens,
                "flops": flops,
                "tokens_per_s": case.tokens / time_s,
                "flops_per_s": flops / time_s,
            }
        return work


def _other_weights(case: TrainingCase, weights: str, reference: Curve) -> str:
    """A sentence if the weights are not those of the first reproducible training with this attention row, else ""."""
    first, row = reference.weights.setdefault(case.attention.name, (weights, case.row))
    return "" if first == weights else f"its weights are not those of {row}: sha256 {weights[:12]} and {first[:12]}"


def _on_ranks(case: TrainingCase, runner: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs function(case, *args) on all ranks of the group. Returns the answers of the ranks that train, by rank."""
    return runner.ranks.run(case.num_ranks, case.backend, function, case, *args)[: case.world_size]


test_training = bench(Training)
