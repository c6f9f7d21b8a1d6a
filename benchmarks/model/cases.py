"""The cases that benchmarks of language models share, and a row's model with given weights.

A row is an attention row in our model, eager or compiled, or somebody else's whole model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from benchmarks import axes
from benchmarks.models import AUTO, MODEL_ROWS, attention_case, attention_row, variant
from lmsys.attention import AttentionCase
from lmsys.bench import Axis, Case, Entry, Field, Grid
from lmsys.bench import fields as f
from lmsys.bench.fields import Record
from lmsys.config import ModelConfig, model_config
from lmsys.cost.operations import model_parameters
from lmsys.model import TransformerLM

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
AXES = (
    axes.SIZE,
    axes.CONTEXT,
    replace(axes.BATCH, default=(4,)),
    axes.PRECISION,
    axes.MODE,
    replace(axes.COMPILE, default=("eager", "compiled")),
    replace(axes.ATTENTION, default=(AUTO.name,)),
    Axis("warmup", int, (None,)),
    Axis("against", default="", single=True),  # a row that the grid is about: there are no cases without it
)
FIELDS = (
    *f.axes("size", "context", "batch", "precision", "mode", "compile"),
    *f.axes(*SHAPE, "num_parameters"),
    Field("peer", role="axis", about="Whether the whole model is somebody else's code"),
    Field("attention", role="detail", about="The attention row that computes; for auto, its choice"),
    Field("loss", role="detail", about="Loss on the case's own batch after timing"),
)


@dataclass(frozen=True)
class ModelTest(Case):
    """One thing (`mode`) that is done with a model of some size by one row.

    warmup   when given: so many untimed steps before ten timed ones, in a process of its own
    compile  eager, compiled, or graphed: compiled, with forward and backward replayed as one CUDA graph
    """

    size: str
    context: int
    batch: int
    precision: str
    warmup: int | None
    mode: str
    compile: str

    @property
    def rows(self) -> Mapping[str, Entry]:
        return {"attention": self.entry}

    @property
    def axes(self) -> Record:
        config = self.config
        asked = {name: getattr(self, name) for name in ("size", "context", "batch", "precision", "mode", "compile")}
        warmup = {} if self.warmup is None else {"warmup_steps": self.warmup}
        shape = {name: getattr(config, name) for name in SHAPE} | {"num_parameters": model_parameters(config)}
        return asked | warmup | shape | {"attention": self.attention.name}

    @property
    def label(self) -> str:
        return f"auto: {self.attention.label}" if self.entry == AUTO else super().label

    @property
    def peer(self) -> bool:
        """True where the whole model is somebody else's, not only its attention."""
        return self.entry.trait("whole_model", False)

    @property
    def group(self) -> str:
        cold = "" if self.warmup is None else f"-W{self.warmup}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{cold}"

    @property
    def comparison(self) -> str:
        return f"{self.group}-{self.mode}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.compile}-{self.impl}"

    @property
    def grad(self) -> bool:
        return self.mode != "forward"

    @property
    def row(self) -> tuple[bool, str, bool]:
        """The key of a candidate, which is compiled and checked once for all its modes."""
        return self.compile != "eager", self.entry.name, self.grad

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context)

    @property
    def asked(self) -> AttentionCase:
        """The case that the model makes for an attention row."""
        return attention_case(self.config, self.batch, self.precision, self.device, self.grad)

    @property
    def attention(self) -> Entry:
        return attention_row(self.entry, self.asked)


def cases_of(grid: Grid, device: str) -> Iterator[ModelTest]:
    rows = MODEL_ROWS.select(grid["attention"])
    if grid["against"] and grid["against"] not in (entry.name for entry in rows):
        return
    for setting in grid.product("size", "context", "batch", "precision", "warmup", "mode", "compile"):
        for entry in rows:
            yield ModelTest(grid.name, entry, device, *setting)


def model_of(case: ModelTest, base: TransformerLM, shared: bool) -> nn.Module:
    """The row's model with the weights of `base`: a peer's may share them, or be such that it is the same function."""
    compiled = case.compile != "eager"
    if not case.peer:
        return variant(base, case.attention.name, compiled)
    theirs = case.entry.load()(base.config, base.lm_head.weight.device).take_weights(base, shared)
    return theirs.compile_blocks() if compiled else theirs
