"""The cases that benchmarks of language models share, a row's model with given weights, and the check before timing.

`bench_model.py` and `bench_anatomy.py` use this module. They make a `ModelTest` for each case and a `Gate` for each
group of cases. A new axis is an attribute of `ModelTest`, named in its `axes`, in its `group` or `id`, and in FIELDS;
and an `Axis` of `bench_model.ModelBenchmark`, whose `cases` reads it.

A row is our model with one implementation of attention, eager or compiled, or somebody else's whole model, such as
Llama. The `Gate` checks that a row computes the same function as the plain model. A whole model gets our weights under
its own names, and its gradients are mapped back to our names.

The reference is the eager model with naive attention in float64. The budget, the error that is allowed, comes from the
error of the same model in the precision that is tested (`lmsys.testing.ratio_of`). Logits are compared for inference,
and for training the loss and each gradient.

A row with a narrow residual stream is held to the budget of plain PyTorch with a narrow stream, which rounds the same
sums. The record of every row says how far its gradients are from float64.

Some embeddings are zero, huge or have an outlier channel, and some gates of the feed-forward are saturated
(`lmsys.extremes.model`). Gradients of these, and logits of their tokens, have a budget apart from that of all others:
the gradient of a zero row may be many times as large as any other, and that of a huge row many times as small.

The `Gate` tests `models.NUM_BLOCKS` blocks, as many as one compiled graph holds, because all graphs share their code.
The context is that of the case, up to MAX_CONTEXT; the batch is smaller where the scores of naive attention would not
fit into memory.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import models
from lmsys import checkpointing, config, testing
from lmsys.bench import Candidate, Entry, Field, Record, fields
from lmsys.cost import memory, operations
from lmsys.extremes.model import EMBEDDINGS, FIRST_ID, ROWS, group_of, write_model
from lmsys.measure.compare import release_memory
from lmsys.model import TransformerLM
from lmsys.training.prepare import autocast, gpu_memory

Row = tuple[str, str, bool, str, str]  # `ModelTest.row`: blocks, entry, grad, checkpoint, residual
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
FIELDS = fields.columns(
    "size context batch precision mode compile",
    " ".join(SHAPE),
    "num_parameters",
    models.WHAT_IS_KEPT,
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
    """One kind of call (`mode`) of a model of some size, by one row.

    mode     forward, which is an inference; train_forward; backward; optimizer, which is an update alone; or step
    compile  as in `ModelCase`: eager, compiled, graphed or fused; the last two replay forward and backward as one CUDA
             graph
    warmup   None, or a number: so many untimed steps come before ten timed ones, in a process of its own
    """

    mode: str
    warmup: int | None

    @property
    def axes(self) -> Record:
        return {
            **{
                name: getattr(self, name)
                for name in ("size", "context", "batch", "precision", "mode", "compile", "checkpoint", "residual")
            },
            **({} if self.warmup is None else {"warmup_steps": self.warmup}),
            **{name: getattr(self.config, name) for name in SHAPE},
            "num_parameters": operations.model_parameters(self.config),
            "attention": self.attention.name,
        }

    @property
    def label(self) -> str:
        return f"auto: {self.attention.name}" if self.entry == models.AUTO else super().label

    @property
    def peer(self) -> bool:
        """True where the whole model is somebody else's, not only its attention."""
        return models.ModelTraits.of(self.entry).whole_model

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
        """True for all modes but inference."""
        return self.mode != "forward"

    @property
    def row(self) -> Row:
        """The key of a candidate, which is compiled and checked once for all its modes."""
        return self.blocks, self.entry.name, self.grad, self.checkpoint, self.residual

    @property
    def computed(self) -> config.ModelConfig:
        """The config of the row's model. ValueError where no levels of checkpointing fit."""
        model = replace(self.config, **self.runtime)
        return (
            memory.fit(model, self.batch, self.context, self.precision, gpu_memory())
            if model.checkpoint_blocks == checkpointing.FIT
            else model
        )

    @property
    def attention(self) -> Entry:
        """The attention row that computes: for the row `auto`, its choice."""
        return models.attention_row(self.entry, self.asked)


def model_of(case: ModelTest, base: TransformerLM, shared: bool) -> torch.nn.Module:
    """The row's model with the weights of `base`.

    shared  only for a peer, somebody else's whole model. True: the peer has the very parameters of `base`, which saves
            memory. Their rows may be in another order than the peer expects, so it may compute another function, by
            the same operations. False: such rows are copied into the peer's order, and it computes the same function
    """
    if not case.peer:
        changes = {**case.runtime, "attention": case.attention.name}
        if "checkpoint_blocks" in changes:
            layers, fewer = case.config.num_layers, base.config.num_layers
            changes["checkpoint_blocks"] = checkpointing.for_fewer(case.computed.checkpoint_blocks, layers, fewer)
        return models.variant(base, case.blocks, **changes)
    theirs = case.entry.load()(base.config, base.lm_head.weight.device).take_weights(base, shared)
    return theirs.compile_blocks() if case.compile in models.COMPILED else theirs


MAX_CONTEXT = 2048  # tokens of a sequence of the gate, at most
LOGITS, GRADIENT = "logits", "gradient of"  # name of an output; beginning of the names of outputs that are gradients


class Gate:
    """A model of a few blocks, and a batch for it; `check` judges all rows of a group by one reference.

    base  our model, whose weights the models of all rows have
    """

    def __init__(self, case: ModelTest, seed: int):
        config, context = case.config, min(case.context, MAX_CONTEXT)
        self.base = models.build(
            replace(config, num_layers=min(config.num_layers, models.NUM_BLOCKS), context_length=context),
            case.device,
            seed,
        )
        write_model(dict(self.base.named_parameters()))
        self.precision, self.seed = case.precision, seed
        self._draw(max(1, min(case.batch, models.MAX_SCORES // (config.num_heads * context**2))))

    def _draw(self, batch: int) -> None:
        """Draws so many sequences. The first of them has a token of each kind of extreme embedding."""
        self.data = models.Batch.draw(self.base.config, batch, self.base.lm_head.weight.device.type, self.seed)
        self.data.tokens[:, 0] = FIRST_ID
        kinds = torch.arange(1, len(ROWS) + 1)  # ids of extreme embeddings, of each kind the first
        self.data.tokens[0, 1 : len(kinds) + 1] = kinds.to(self.data.tokens)[: self.data.tokens.shape[1] - 1]

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Judges each candidate whose outcome is "ok". Its `call` is the row's model.

        Halves the batch as often as the memory is too small for the gate's own reference.
        """
        while True:
            try:
                return self.judge([candidate for candidate in candidates if candidate.outcome == "ok"])
            except (torch.OutOfMemoryError, MemoryError):
                if len(self.data.tokens) == 1:
                    raise
            release_memory()  # only here, after `except`, is the traceback gone, which held the reference's tensors
            self._draw(len(self.data.tokens) // 2)

    def judge(self, candidates: Sequence[Candidate]) -> None:
        """Compares the outputs of rows with a reference and a budget, which all rows of a group share.

        A group is the inferences, or the trainings, with one residual stream, wide or narrow.
        """
        groups = fields.grouped(((row.case.grad, row.case.residual), row) for row in candidates)
        for (grad, residual), rows in groups.items():
            reference = self.outputs(
                models.variant(copy.deepcopy(self.base).double(), "eager", attention="naive"), grad, precision="fp32"
            )
            stream = {} if residual == "wide" else {"residual": residual}
            plain = self.outputs(models.variant(self.base, "eager", attention="naive", **stream), grad)
            for candidate in rows:
                if results := candidate.attempt(self.outputs, candidate.call, grad):
                    candidate.judge(
                        {name: self.ratio(name, results[name], x, plain[name]) for name, x in reference.items()}
                    )
                    candidate.notes["gradient_error"] = self.gradient_error(results, reference) if grad else None

    def ratio(self, name: str, result: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor) -> float:
        """The error of an output over its budget: rows of a gradient, and logits of tokens, are judged by groups."""
        dtype = models.ROUNDING[self.precision]
        if not reference.dim():
            return testing.ratio_of(result, reference, plain, dtype)
        result, reference, plain = (x.reshape(-1, x.shape[-1]) for x in (result, reference, plain))
        return models.ratio_by_group(result, reference, plain, dtype, self.group(name, reference))

    def group(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A number for each row of an output: 0 for ordinary rows, others for the kinds of extreme ones."""
        if name == LOGITS:
            return group_of(EMBEDDINGS, self.base.config.vocab_size)[self.data.tokens.flatten().cpu()]
        return group_of(name.removeprefix(f"{GRADIENT} "), x.numel() // x.shape[-1])

    def outputs(self, model: torch.nn.Module, grad: bool, precision: str = "") -> dict[str, torch.Tensor]:
        """By name the logits; with `grad` the loss, and the gradient of every parameter, by its name in our model.

        precision  of the computation; "": that of the cases
        """
        data, precision = self.data, precision or self.precision
        with torch.set_grad_enabled(grad), autocast(precision, data.tokens.device.type):
            if not grad:
                return {LOGITS: model(data.tokens)}
            loss = model.loss(data.tokens, data.targets)
        scale = models.LOSS_SCALE if precision == "fp16" else 1.0
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss * scale, parameters), strict=True))
        if not isinstance(model, TransformerLM):
            gradients = model.as_ours(gradients)
        return {"loss": loss.detach()} | {f"{GRADIENT} {name}": x / scale for name, x in gradients.items()}

    def gradient_error(
        self, results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> float | None:
        """The error of all gradients as one vector, over the vector's length; None if it is NaN or inf.

        Extreme rows of matrices, those whose `group` is not 0, are left out.
        """
        off = size = 0.0
        for name, x in reference.items():
            if name.startswith(GRADIENT):
                ordinary = (self.group(name, x) == 0).to(x.device) if x.dim() > 1 else slice(None)
                off += (results[name].double() - x)[ordinary].square().sum().item()
                size += x[ordinary].square().sum().item()
        return models.finite(math.sqrt(off / size))
