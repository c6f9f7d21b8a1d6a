"""Language models as benchmarks make them: precisions, the rows that models take, their weights, and their batches.

A row is an implementation of attention, an entry of the table ATTENTION; benchmarks compare models that differ in it.
The benchmarks of models, steps, anatomy, data parallelism and training share this file; the benchmark of losses takes
its precisions and budgets. To compare with somebody else's whole model, add it to MODEL_ROWS.

A new way to run a model is a value of the axis `compile` in `axes.py`. `run_blocks` of lmsys/training/prepare.py runs
it; its docstring says what a training needs. COMPILED and the properties of `ModelCase` that read `compile` extend it
here, conditions in bench_model.py and data_parallel/cases.py say what refuses it, and COMPILED of layouts.py and WAYS
of lmsys/reports/answers.py have its words.

A precision has the name that a user gives it on the command line. fp32 and tf32 keep float32 tensors and differ in
their matmuls; bf16 is autocast, and fp16 is autocast with a scaled loss. A budget is the error that is allowed: errors
of plain PyTorch in the same precision, against float64, determine it.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lmsys import checkpointing, testing, traits
from lmsys.attention import ATTENTION, AttentionCase, compiled
from lmsys.bench import Case, Entry, Field, Record, Table, ranks
from lmsys.config import ModelConfig, model_config
from lmsys.measure.machine import peak_flops_per_s
from lmsys.model import BLOCKS_PER_GRAPH, TransformerLM, transformer
from lmsys.training.prepare import AUTOCAST, run_blocks

# By precision: the dtype that matmuls read.
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# By precision: the dtype of the large matmul whose rate, measured on this machine, is 100 % in reports. None: it is not
# measured.
MEASURED = DTYPES | {"tf32": None}
# By precision: a dtype that rounds as its matmuls do. The mantissa of float16 is as long as that of TF32.
ROUNDING = AUTOCAST | {"fp32": torch.float32, "tf32": torch.float16}
LOSS_SCALE = 2.0**12  # keeps float16 gradients above its smallest value
# How far errors and budgets may differ, relatively, when `lmsys verify` recomputes them. Errors are differences from
# float64. Budgets are errors of plain PyTorch, which rounds in another order on another machine.
ERROR_RTOL, BUDGET_RTOL = 1e-3, 0.5
RECOMPILE_LIMIT = 64  # how often torch may compile one function: each row compiles the same block anew


def why_no_arithmetic(precision: str, device: str, compiles: bool) -> str | None:
    """The reason why the device cannot compute in this precision, or None.

    compiles  True: a missing compiler for the device is a reason, too
    """
    reason = "TF32 is an arithmetic of CUDA devices" if precision == "tf32" and device == "cpu" else None
    return reason or (compiled.why_no_compiler(device) if compiles else None)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """A context of `matmuls` in which many rows can be compiled; at its end all compiled code is dropped."""
    try:
        with matmuls(precision), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """A context in which float32 matmuls use TF32 if that is the precision, and full float32 otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def widened(logits: torch.Tensor) -> torch.Tensor:
    """The logits as float32, in which losses are computed; float64 logits stay float64.

    The function is here and not in `lmsys.model`, because `--against` runs this file with the `lmsys.model` of an
    earlier commit, which may lack it.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


def ratio_by_group(
    x: torch.Tensor,
    reference: torch.Tensor,
    plain: torch.Tensor,
    dtype: torch.dtype,
    groups: torch.Tensor,
    lines: Sequence[int] | None = None,
    times: float = 2,
) -> float:
    """The largest error ratio (`lmsys.testing.ratio_of`) of any group of lines; line i is the slice x[i].

    An error ratio is an error over its budget. Lines with extreme inputs are groups of their own, with budgets of their
    own: otherwise their large errors would widen the budget of ordinary lines. Plain PyTorch may be exact in extreme
    lines, so only ordinary lines must also meet the rule for root mean squares.

    x          the result to judge
    reference  the same tensor in float64
    plain      the same tensor by plain PyTorch: its error, when it is rounded to `dtype`, makes the budget
    groups     a number for each line; 0 for ordinary lines
    lines      the numbers, in `reference`, `plain` and `groups`, of the lines that x holds; None: x holds all. The
               budget of an extreme group always comes from all its lines: in a single line, plain PyTorch may round
               well or badly by chance
    times      how many times plain PyTorch's error, in root mean square, is allowed; for parts of a result it is
               SPOT_TIMES of `lmsys.testing`
    """
    groups = groups.to(x.device)
    judged = torch.arange(len(groups), device=x.device) if lines is None else torch.tensor(lines, device=x.device)
    whole = reference.to(torch.promote_types(x.dtype, reference.dtype), copy=True)
    whole[judged] = x.to(whole.dtype)  # all other lines are those of the reference, and have no error
    ratios = []
    for group in groups[judged].unique().tolist():
        part = judged[groups[judged] == 0] if group == 0 else groups == group
        ratios.append(testing.ratio_of(whole[part], reference[part], plain[part], dtype, mean=group == 0, times=times))
    return max(ratios)


def mean_ratio(
    mean: torch.Tensor, terms: torch.Tensor, plain: torch.Tensor, groups: torch.Tensor | None = None
) -> float:
    """The error ratio of a scalar `mean`, |mean - terms.mean()| / budget; inf if the ratio is not finite.

        budget = sum over groups of (size of the group / number of terms) · testing.rms_budget(its terms, its plain)

    The mean of the terms' errors is at most their root mean square, and `rms_budget` allows a multiple of that of plain
    PyTorch. The error of the plain mean itself would be a wrong budget, since errors of both signs may cancel in it.
    Large terms in a small group widen the budget less than they would if all terms were one group.

    terms   the exact numbers: their mean is the right result
    plain   the same numbers by plain PyTorch
    groups  the number of the group of each term; None: all terms are one group
    """
    terms, plain = terms.double(), plain.double()
    groups = torch.zeros_like(terms) if groups is None else groups.to(terms.device)
    parts = [groups == group for group in groups.unique()]
    budget = sum(part.double().mean().item() * testing.rms_budget(terms[part], plain[part]) for part in parts)
    ratio = abs(mean.item() - terms.mean().item()) / budget
    return ratio if math.isfinite(ratio) else math.inf


def finite(value: float) -> float | None:
    """The value with six digits; None for infinity and NaN, which JSON lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def matmul_rates(flops: float, time_s: float, dtype: str, machine: Record) -> Record:
    """Fields of a record: the rate of `flops` operations in `time_s` seconds, and its shares of a large matmul's rates.

    dtype    the dtype of the tensors, or the name of a precision
    machine  the record of this run's machine, which has the rates of the large matmul

    In names of fields, "ceiling" is the rate of a matmul that ran for a moment, and "sustained" that of one that ran
    until the GPU's clocks had settled. A share is None if this rate was not measured.
    """
    reached = machine["ceilings"]["matmul_flops_per_s"].get(MEASURED.get(dtype, dtype))
    sustained = (machine.get("sustained") or {}).get("matmul_flops_per_s", {}).get(MEASURED.get(dtype, dtype))
    return {
        "flops_per_s": flops / time_s,
        "matmul_ceiling_fraction": flops / time_s / reached if reached else None,
        "sustained_ceiling_fraction": flops / time_s / sustained if sustained else None,
    }


def model_rates(flops: float, time_s: float, precision: str, machine: Record) -> Record:
    """The fields of `matmul_rates`, and "mfu", the share of the peak on the GPU's data sheet (None: unknown peak)."""
    stated = peak_flops_per_s(machine["gpu"], precision)
    return matmul_rates(flops, time_s, precision, machine) | {"mfu": flops / time_s / stated if stated else None}


COMPILED = ("compiled", "graphed")  # values of `ModelCase.compile` that need torch.compile


# Checks before timing run a model of so many blocks, as many as one compiled graph holds: all graphs share their code.
NUM_BLOCKS = BLOCKS_PER_GRAPH
# Naive attention, the reference, may hold so many scores (batch x heads x queries x keys) in one block: 2 GiB in
# float64. Checks and references take smaller batches where there would be more.
MAX_SCORES = 2**28
# The learning rate times d_model: the rate that suits Adam falls as 1 / width (Yang et al. 2022, arXiv 2203.03466).
LR_BY_WIDTH = 0.256
# By size: a smaller vocabulary than the default, with which embeddings would be 5/6 of the parameters of "tiny".
VOCABULARIES = {"tiny": {"vocab_size": 1000}}


@dataclass(frozen=True)
class ModelTraits(traits.AttentionTraits):
    """Traits of a row of MODEL_ROWS: those of an attention row, and one more.

    whole_model  the row is a whole model by itself, and not an attention that our model calls
    """

    whole_model: bool = False


# Besides attention rows, benchmarks of models take AUTO, for which `attention_row` picks the fastest row, and whole
# models of other people.
AUTO = Entry("auto", "lmsys.attention:attention", "the fastest attention row that can run it")
whole_model = partial(Entry, peer=True, extra="peers", traits=ModelTraits(whole_model=True))
LLAMA = whole_model("llama", "benchmarks.model.llama:Llama", "Hugging Face Llama")
MODEL_ROWS = Table(
    ATTENTION.kind,
    [
        *ATTENTION.values(),
        AUTO,
        LLAMA,
        whole_model("llama_tuned", "benchmarks.model.llama:LlamaTuned", "Hugging Face Llama, no mask tensor"),
    ],
    traits=ModelTraits,
)


WHAT_IS_KEPT = (  # fields of a ModelCase's records, which its benchmark declares among its own `fields`
    Field("checkpoint", role="axis", about="What blocks keep for their backward; the less, the more is computed again"),
    Field("residual", role="axis", about="The dtype of the stream between blocks: narrow is that of the matmuls"),
    Field("levels", role="detail", about="What --checkpoint fit has chosen"),
)


def attention_row(entry: Entry, case: AttentionCase) -> Entry:
    """The row that computes attention: `entry` itself, or for AUTO the fastest row that can run the case."""
    return ATTENTION.pick(AUTO.name, case) if entry == AUTO else entry


def why_not(entry: Entry, case: "ModelCase") -> str | None:
    """The reason why the case's model cannot run with the row `entry`, or None."""
    return why_no_arithmetic(case.precision, case.device, compiles=case.compile in COMPILED) or (
        entry.why_not(case.asked)
        if entry in MODEL_ROWS.values()
        else 'models take no kernel from a file; register it as an entry point (docs/kernel.md, "From a package")'
    )


@dataclass(frozen=True)
class ModelCase(Case):
    """A language model at work: the base of the cases of the benchmarks of models, steps, anatomy and training.

    The runner reads `comparison`, `axes` and `id` of a `Case`. A subclass that varies checkpointing or the residual
    stream puts `keeps` into its id, since `comparison` lacks it.

    size        the name of a model size, such as "small" (`lmsys.config.model_config`)
    context     tokens of a sequence
    batch       sequences; where ranks train, of each rank
    precision   "fp32", "tf32", "bf16" or "fp16"
    compile     how blocks run. "eager"; "compiled": by torch.compile, block by block; "graphed": compiled, and replayed
                as a CUDA graph; "fused": by our fused kernels, and replayed as a CUDA graph
    checkpoint  activation checkpointing, which says what blocks keep for their backward; the values are those of
                `ModelConfig.checkpoint_blocks`, as text
    residual    the dtype of the residual stream, "wide" or "narrow", as `ModelConfig.residual`
    """

    size: str
    context: int
    batch: int
    precision: str
    compile: str
    checkpoint: str = field(default="none", kw_only=True)
    residual: str = field(default="wide", kw_only=True)

    @property
    def comparison(self) -> str:
        compiled = "" if self.compile == "eager" else f"-{self.compile}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{compiled}"

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context, **VOCABULARIES.get(self.size, {}))

    @property
    def grad(self) -> bool:
        """True if gradients are computed."""
        return True

    @property
    def asked(self) -> AttentionCase:
        """The attention problem (shapes, dtype, device) that the model gives to an attention row."""
        return transformer.attention_case(
            self.config,
            self.batch,
            self.context,
            DTYPES[self.precision],
            torch.device(self.device),
            grad=self.grad,
        )

    @property
    def blocks(self) -> str:
        """How blocks compute: "eager", "compiled" or "fused". `replayed` says if a CUDA graph replays them."""
        return "compiled" if self.compile in COMPILED else self.compile

    @property
    def replayed(self) -> bool:
        """True if forward and backward are replayed as one CUDA graph."""
        return self.compile in ("graphed", "fused")

    @property
    def keeps(self) -> str:
        """The part of an id that names checkpointing and the residual stream; empty for the defaults.

        Each level is its first letter and the number of blocks, such as "-Ca12m22" for "attention*12,matmuls*22".
        """
        runs = [run.partition("*") for run in self.checkpoint.split(",")]
        levels = (
            self.checkpoint
            if self.checkpoint == checkpointing.FIT or self.checkpoint.isdecimal()
            else "".join(f"{level[0]}{count}" for level, _, count in runs)
        )
        return f"-C{levels}" * (self.checkpoint != "none") + f"-{self.residual}" * (self.residual != "wide")

    @property
    def runtime(self) -> dict[str, Any]:
        """The fields of a ModelConfig for checkpointing and the residual stream, without those that have their default.

        Defaults are left out because under `--against` the lmsys of an earlier commit makes the model, and may not have
        these fields.
        """
        blocks = int(self.checkpoint) if self.checkpoint.isdecimal() else self.checkpoint
        fields = {"checkpoint_blocks": (blocks, "none"), "residual": (self.residual, "wide")}
        return {name: value for name, (value, default) in fields.items() if value != default}

    @property
    def why_not_runtime(self) -> str | None:
        """The reason why the device cannot run the model with this checkpointing and residual stream, or None.

        ValueError for a checkpointing whose number of blocks is not the model's.
        """
        if self.residual == "narrow" and self.precision not in AUTOCAST:
            return f"matmuls in {self.precision} read float32, so nothing is narrower: --precision bf16"
        return (
            "what fits is chosen for a GPU: the memory of a CPU is others' too"
            # `replace` checks the levels, and may raise ValueError on any device.
            if replace(self.config, **self.runtime).checkpoint_blocks == checkpointing.FIT and self.device != "cuda"
            else None
        )


@dataclass(frozen=True)
class TrainedCase(ModelCase):
    """A model that a data-parallel strategy, the `entry`, trains on ranks, each with a batch of its own.

    This is the base of the cases of the benchmarks of data parallelism, steps and training.
    """

    @property
    def axes(self) -> Record:
        return {"strategy": self.entry.name, **super().axes, "backend": self.backend}

    @property
    def backend(self) -> str:
        return ranks.backend_of(self.device)

    @property
    def traits(self) -> traits.StrategyTraits:
        return traits.StrategyTraits.of(self.entry)


@dataclass(frozen=True)
class Batch:
    """Random token ids, and as targets the id that follows each token, both (B, S)."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def draw(cls, config: ModelConfig, batch: int, device: str, seed: int) -> "Batch":
        tokens = torch.randint(
            config.vocab_size,
            (batch, config.context_length + 1),
            device=device,
            generator=torch.Generator(device).manual_seed(seed),
        )
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def build(config: ModelConfig, device: str, seed: int) -> TransformerLM:
    """The model with weights drawn from the seed. The state of torch's random generators does not change."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TransformerLM(config, device)


def variant(base: TransformerLM, blocks: str, **changes: Any) -> TransformerLM:
    """A model that shares the parameters of `base`, but runs in another way. `base` must not have run yet.

    blocks   how blocks compute: a value of `ModelCase.blocks`
    changes  fields of the config that differ from those of `base`
    """
    # deepcopy takes the objects of its second argument as they are, and does not copy them.
    model = copy.deepcopy(base, {id(x): x for x in (*base.parameters(), *base.buffers())})
    model.config = replace(base.config, **changes)
    run_blocks(model, blocks, together=BLOCKS_PER_GRAPH)
    return model
