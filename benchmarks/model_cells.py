"""The tests of the language model: what each is asked, and what it is called."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from benchmarks.sections import ModelSection
from lmsys.attention import ATTENTION
from lmsys.attention.contract import AttentionCase
from lmsys.config import ModelConfig, model_config
from lmsys.registry import Entry, Table

# What stands for an attention row in a model only: the choice of one, and a whole model of its own.
AUTO = Entry("auto", "lmsys.attention:attention", "the fastest row that can")
LLAMA = Entry("llama", "benchmarks.llama:Llama", "Hugging Face Llama", peer=True, extra="peers")
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # of the matmuls


@dataclass(frozen=True)
class Cell:
    """One test: what is done (`mode`) with a model of some size by one attention row.

    compile   eager, compiled, or graphed: compiled, with forward and backward replayed as one CUDA graph
    """

    section: str
    size: str
    context: int
    batch: int
    precision: str
    warmup: int | None
    mode: str
    compile: str
    entry: Entry
    device: str

    @property
    def group(self) -> str:
        """What one trial runs."""
        cold = "" if self.warmup is None else f"-W{self.warmup}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{cold}"

    @property
    def comparison(self) -> str:
        """What is sampled together."""
        return f"{self.group}-{self.mode}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.compile}-{self.entry.name}"

    @property
    def grad(self) -> bool:
        return self.mode != "forward"

    @property
    def row(self) -> tuple[str, str, bool]:
        """What is compiled and checked once for all its modes."""
        return "eager" if self.compile == "eager" else "compiled", self.entry.name, self.grad

    @property
    def peer(self) -> bool:
        """Whether the whole model is somebody else's."""
        return self.entry == LLAMA

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context)

    @property
    def case(self) -> AttentionCase:
        """What the model asks of an attention row."""
        config = self.config
        shape = (self.batch, config.num_heads, config.kv_heads, self.context, self.context, config.head_dim)
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        return AttentionCase(
            *shape, DTYPES[self.precision], causal=True, grad=self.grad, device=self.device, capability=capability
        )


def rows_called(names: Iterable[str]) -> list[Entry]:
    """What a model can be asked with: rows of the attention table, of the user's own code, AUTO and LLAMA."""
    return Table(ATTENTION.kind, [*ATTENTION.values(), AUTO, LLAMA]).select(names)


def cells_of(section: ModelSection, axes: dict[str, Any], rows: list[Entry] | None, device: str) -> Iterator[Cell]:
    """The section's cells with the command line's axes, and with the rows named there, if any.

    A section that sets rows beside Llama is about that: there are none where the command line names rows without it.
    """
    one, entries = replace(section, **axes), rows_called(section.rows) if rows is None else rows
    if LLAMA.name in one.rows and LLAMA not in entries:
        return
    groups = product(one.sizes, one.contexts, one.batch, one.precisions, one.warmups)
    for group, mode, compiled, entry in product(groups, one.modes, one.compiles, entries):
        yield Cell(section.name, *group, mode, compiled, entry, device)
