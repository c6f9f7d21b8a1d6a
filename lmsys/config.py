"""The configuration of a model, in plain values: frozen, checked, and JSON there and back. Imports no torch.

`TransformerLM`, benchmarks and `lmsys train` (as the section `model` of its config) take a `ModelConfig`. A new field
is a line in the class and in its docstring, with a default, so that configs which lack it still work. A new named size
is a line in SIZES.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from lmsys import checkpointing, strict_json
from lmsys.values import Count, Positive, choice, hold, one_of

IGNORED = -100  # a target of this value has no loss, as in torch
RESIDUALS = "wide", "narrow"  # the values of `ModelConfig.residual`


@dataclass(frozen=True)
class ModelConfig(strict_json.Checked):
    """A Transformer language model.

    num_kv_heads       key/value heads, a divisor of num_heads; None: as many as query heads
    attention          the name of a row, an implementation in the table `lmsys.attention.ATTENTION`, or "auto"
    checkpoint_blocks  activation checkpointing: what blocks keep for their backward. 0 or "none": all that a backward
                       reads; "matmuls": less; "attention": still less (`lmsys.checkpointing` says what); 1 or "whole":
                       only their input; n: groups of n blocks keep only the group's input; "attention*12,matmuls*22":
                       the first 12 blocks have the first of these levels, and the next 22 the other; "fit": training
                       chooses what recomputes least and fits into the memory
    residual           the dtype of the residual stream between blocks: "wide" is at least float32; "narrow" is the
                       dtype of matmuls: under autocast the stream takes half the bytes, and every block rounds it
    """

    d_model: Count
    d_ff: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count | None = None
    vocab_size: Count = 10_000
    context_length: Count = 1024
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-5
    attention: str = "auto"
    checkpoint_blocks: int | str = 0
    residual: Annotated[str, partial(one_of, known=RESIDUALS)] = "wide"  # `Checked` calls one_of(name, value, known)

    def __post_init__(self) -> None:
        super().__post_init__()  # ValueError for a field of another type, or against its annotated rule
        length = self.d_model / self.num_heads
        hold(
            (
                length % 2 == 0,
                f"d_model={self.d_model} must divide into num_heads={self.num_heads} heads of even length"
                f" (rotary positions turn pairs); got {length:g}",
            ),
            (
                self.num_heads % self.kv_heads == 0,
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}",
            ),
        )
        if self.checkpoint_blocks != checkpointing.FIT:
            checkpointing.groups_of(self.checkpoint_blocks, self.num_layers)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def groups(self) -> list[checkpointing.Group]:
        """The groups of blocks that `checkpoint_blocks` describes, in order. ValueError for "fit"."""
        return checkpointing.groups_of(self.checkpoint_blocks, self.num_layers)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


# Named sizes: fields of a `ModelConfig`. Where vocab_size is left out, it has its default.
SIZES: Mapping[str, Mapping[str, int]] = {
    name: dict(zip(("d_model", "d_ff", "num_layers", "num_heads", "vocab_size"), values, strict=False))
    for name, values in {
        "tiny": (128, 512, 2, 4),
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7b": (2560, 10240, 32, 32),  # from 2026 on CS336 calls this one xl
        "10b": (4608, 12288, 50, 36),
        "1b": (1536, 4096, 20, 12, 151_936),
        "3b": (2560, 6912, 28, 20, 151_936),
        "8b": (4096, 11_008, 34, 32, 151_936),  # the model of CS336's leaderboard of 2026
    }.items()
}


def model_config(size: str, **changes: Any) -> ModelConfig:
    """A named size, with fields changed. ValueError with the nearest names for an unknown one."""
    return ModelConfig(**{**SIZES[choice(size, SIZES, f"unknown {size=}: ")], **changes})
