"""Language models as benchmarks make them: which rows they take, their weights, and their batches."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.arithmetic import DTYPES, why_no_arithmetic
from lmsys.attention import ATTENTION, AttentionCase
from lmsys.bench import Case, Entry, Record, Table
from lmsys.bench.ranks import backend_of
from lmsys.config import ModelConfig, model_config
from lmsys.model import BLOCKS_PER_GRAPH, TransformerLM
from lmsys.model.transformer import attention_case as case_in_model

NUM_BLOCKS = BLOCKS_PER_GRAPH  # of a model that is checked: as many as make one compiled graph stand for all
MAX_SCORES = 2**28  # of naive attention in one block: 2 GiB in float64
LEARNING_RATE = 1e-6  # so small that hundreds of timed steps leave the weights as they were checked

# What stands for an attention row in a model only: the choice of one, and a whole model of its own.
AUTO = Entry("auto", "lmsys.attention:attention", "the fastest row that can")
LLAMA = Entry(
    "llama",
    "benchmarks.model.llama:Llama",
    "Hugging Face Llama",
    peer=True,
    extra="peers",
    traits={"whole_model": True},
)
MODEL_ROWS = Table(ATTENTION.kind, [*ATTENTION.values(), AUTO, LLAMA])  # all that a model can be asked with


def attention_case(config: ModelConfig, batch: int, precision: str, device: str, grad: bool = True) -> AttentionCase:
    """The case that a model makes for its attention row."""
    return case_in_model(config, batch, config.context_length, DTYPES[precision], torch.device(device), grad=grad)


def attention_row(entry: Entry, case: AttentionCase) -> Entry:
    """The row that computes attention: for AUTO the fastest that can."""
    return ATTENTION.pick(AUTO.name, case) if entry == AUTO else entry


def why_not(entry: Entry, case: AttentionCase, precision: str, compile: str) -> str | None:
    """None, or why a model with this row cannot run."""
    if reason := why_no_arithmetic(precision, case.device, compiles=compile != "eager"):
        return reason
    if entry not in MODEL_ROWS.values():
        return 'a model cannot use a kernel from a file; register it as an entry point (README, "From a package")'
    return entry.why_not(case)


@dataclass(frozen=True)
class ModelCase(Case):
    """A language model at work.

    compile  eager; compiled, block by block; graphed: that, replayed as a CUDA graph
    """

    size: str
    context: int
    batch: int
    precision: str
    compile: str

    @property
    def comparison(self) -> str:
        compiled = "" if self.compile == "eager" else f"-{self.compile}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{compiled}"

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context)


@dataclass(frozen=True)
class TrainedCase(ModelCase):
    """A model that a strategy, the `entry`, trains on ranks with a batch each."""

    @property
    def axes(self) -> Record:
        return {"strategy": self.entry.name, **super().axes, "backend": self.backend}

    @property
    def backend(self) -> str:
        return backend_of(self.device)

    @property
    def synchronizes(self) -> bool:
        return self.entry.trait("synchronizes", True)


@dataclass(frozen=True)
class Batch:
    """Random token ids and what comes after each, both (B, S)."""

    tokens: Tensor
    targets: Tensor

    @classmethod
    def draw(cls, config: ModelConfig, batch: int, device: str, seed: int) -> "Batch":
        generator = torch.Generator(device).manual_seed(seed)
        shape = (batch, config.context_length + 1)
        tokens = torch.randint(config.vocab_size, shape, device=device, generator=generator)
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def build(config: ModelConfig, device: str, seed: int) -> TransformerLM:
    """The model with the weights of this seed, whatever torch's generators are at, which stay as they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TransformerLM(config, device)


def variant(base: TransformerLM, attention: str, compiled: bool) -> TransformerLM:
    """`base`, which has not run yet, with another attention row, eager or compiled: all have one set of parameters."""
    shared = {id(x): x for x in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    model.config = replace(base.config, attention=attention)
    return model.compile_blocks(BLOCKS_PER_GRAPH) if compiled else model
