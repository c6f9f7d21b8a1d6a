"""Language models as benchmarks make them: which rows they take, their weights, and their batches."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.arithmetic import DTYPES, why_no_precision
from lmsys.attention import ATTENTION
from lmsys.attention.compiled import why_no_compiler
from lmsys.attention.contract import AttentionCase
from lmsys.config import ModelConfig
from lmsys.model import BLOCKS_PER_GRAPH, TransformerLM
from lmsys.registry import Entry, Table

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
    context = config.context_length
    shape = (batch, config.num_heads, config.kv_heads, context, context, config.head_dim)
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    return AttentionCase(*shape, DTYPES[precision], causal=True, grad=grad, device=device, capability=capability)


def attention_row(entry: Entry, case: AttentionCase) -> Entry:
    """The row that computes attention: for AUTO the fastest that can."""
    return ATTENTION.pick(AUTO.name, case) if entry == AUTO else entry


def why_not(entry: Entry, case: AttentionCase, precision: str, compile: str) -> str | None:
    """None, or why a model with this row cannot run."""
    if reason := why_no_precision(precision, case.device):
        return reason
    if compile != "eager" and (reason := why_no_compiler(case.device)):
        return reason
    if entry not in MODEL_ROWS.values():
        return 'a model cannot use a kernel from a file; register it as an entry point (README, "From a package")'
    return entry.why_not(case)


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
    torch.manual_seed(seed)
    return TransformerLM(config, device)


def variant(base: TransformerLM, attention: str, compiled: bool) -> TransformerLM:
    """`base`, which has not run yet, with another attention row, eager or compiled: all have one set of parameters."""
    shared = {id(x): x for x in (*base.parameters(), *base.buffers())}
    model = copy.deepcopy(base, shared)
    model.config = replace(base.config, attention=attention)
    return model.compile_blocks(BLOCKS_PER_GRAPH) if compiled else model
