"""The cases that benchmarks of language models share, and a row's model with given weights.

A row is an attention row in our model, eager or compiled, or somebody else's whole model.
"""

from dataclasses import dataclass, replace

from torch import nn

from benchmarks import axes, models
from lmsys import checkpointing, config
from lmsys.attention import AttentionCase
from lmsys.bench import Axis, Entry, Field, Record, fields
from lmsys.cost.operations import model_parameters
from lmsys.model import TransformerLM

Row = tuple[str, str, bool, str, str]
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
AXES = (
    *axes.named("--size", "--context", "--batch", "--precision", "--mode", batch=(4,)),
    *axes.named("--compile", "--attention", compile=("eager", "compiled"), attention=(models.AUTO.name,)),
    *axes.named("--checkpoint", "--residual"),
    Axis("warmup", int, (None,)),
    Axis("against", default="", single=True),  # a row that the grid is about: there are no cases without it
)
FIELDS = (
    *fields.axes("size", "context", "batch", "precision", "mode", "compile"),
    *fields.axes(*SHAPE, "num_parameters"),
    *models.WHAT_IS_KEPT,
    Field("peer", role="axis", about="Whether the whole model is somebody else's code"),
    Field("attention", role="detail", about="The attention row that computes; for auto, its choice"),
    Field("loss", role="detail", about="Loss on the batch of a timed call, after timing"),
    Field(
        "gradient_error",
        label="Error of gradients",
        role="detail",
        about="Error of all gradients of a few blocks against float64, as a share of their size, in root mean square",
        shown="%",
    ),
)


@dataclass(frozen=True)
class ModelTest(models.ModelCase):
    """One thing (`mode`) that is done with a model of some size by one row.

    compile  graphed, fused: forward and backward are replayed as one CUDA graph
    warmup   when given: so many untimed steps before ten timed ones, in a process of its own
    """

    mode: str
    warmup: int | None

    @property
    def axes(self) -> Record:
        names = "size", "context", "batch", "precision", "mode", "compile", "checkpoint", "residual"
        asked = {name: getattr(self, name) for name in names}
        warmup = {} if self.warmup is None else {"warmup_steps": self.warmup}
        shape = {name: getattr(self.config, name) for name in SHAPE}
        found = {"num_parameters": model_parameters(self.config), "attention": self.attention.name}
        return asked | warmup | shape | found

    @property
    def label(self) -> str:
        return f"auto: {self.attention.name}" if self.entry == models.AUTO else super().label

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
        return f"{self.comparison}-{self.compile}{self.keeps}-{self.impl}"

    @property
    def grad(self) -> bool:
        return self.mode != "forward"

    @property
    def row(self) -> Row:
        """The key of a candidate, which is compiled and checked once for all its modes."""
        blocks = "compiled" if self.compile in models.COMPILED else self.compile
        return blocks, self.entry.name, self.grad, self.checkpoint, self.residual

    @property
    def computed(self) -> config.ModelConfig:
        """The config of the row's model. ValueError where no levels of checkpointing fit."""
        return models.fitted(replace(self.config, **self.runtime), self.batch, self.precision)

    @property
    def asked(self) -> AttentionCase:
        """The case that the model makes for an attention row."""
        return models.attention_case(self.config, self.batch, self.precision, self.device, self.grad)

    @property
    def attention(self) -> Entry:
        return models.attention_row(self.entry, self.asked)


def model_of(case: ModelTest, base: TransformerLM, shared: bool) -> nn.Module:
    """The row's model with the weights of `base`: a peer's may share them, or be such that it is the same function."""
    if not case.peer:
        changes = {**case.runtime, "attention": case.attention.name}
        if "checkpoint_blocks" in changes:
            layers, fewer = case.config.num_layers, base.config.num_layers
            changes["checkpoint_blocks"] = checkpointing.for_fewer(case.computed.checkpoint_blocks, layers, fewer)
        return models.variant(base, case.compile, **changes)
    theirs = case.entry.load()(base.config, base.lm_head.weight.device).take_weights(base, shared)
    return theirs.compile_blocks() if case.compile in models.COMPILED else theirs
