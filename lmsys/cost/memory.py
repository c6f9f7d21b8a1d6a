"""The memory that training a model needs, in bytes, from its config; a table in Markdown by level of checkpointing.

python -m lmsys.cost.memory --size medium --context 1024 --batch 8 --precision bf16

A *level* of activation checkpointing says what a block of the model keeps for its backward and what it computes again
(`lmsys.checkpointing`). Training and benchmarks call `fit`, which chooses the levels of blocks; benchmarks also compare
`training_memory` with the memory that they measure. A new level needs its bytes in `kept_bytes`, and its operations in
`again_flops`. A *stage* is a stage of ZeRO, 0 to 3: it says which state the ranks divide among them (`zero_memory`).
Imports no torch.
"""

import argparse
import math
from dataclasses import dataclass, replace
from itertools import pairwise

from lmsys import checkpointing, values
from lmsys.config import RESIDUALS, SIZES, ModelConfig, model_config
from lmsys.cost.operations import block_matrices, model_flops, model_parameters

MATMUL_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of an element that a matmul reads
WIDE = 4  # bytes of an element of parameters, gradients, optimizer state, and of the residual stream unless narrow


@dataclass(frozen=True)
class Footprint:
    """Bytes on a device, by what they hold: parameters, gradients, optimizer state, activations.

    parameters   in stage 3 the device's own part, and those that are gathered at one time: embeddings, head, two blocks
    activations  the tensors that the forward leaves for the backward, and the head's gradient
    recomputed   the most that the backward of a block adds to the activations by running the block again
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int = 0

    @property
    def peak(self) -> int:
        """The peak of a step. A backward frees activations while it makes gradients: only the larger of both counts."""
        return self.parameters + self.optimizer + max(self.gradients, self.activations + self.recomputed)


def training_memory(
    config: ModelConfig, batch: int, context: int, precision: str, world_size: int = 1, stage: int = 0
) -> Footprint:
    """The memory of a training step with float32 AdamW, uncompiled blocks, and an attention that keeps no scores.

    batch, context     sequences that the device holds at once, and tokens of each
    precision          of MATMUL_BYTES, bf16 and fp16 by autocast; ValueError for another
    world_size, stage  as in `zero_memory`; in stage 3 weights that matmuls read are gathered in the precision's dtype
    """
    values.one_of("precision", precision, MATMUL_BYTES)
    count, tokens = model_parameters(config), batch * context
    held = {name: math.ceil(size) for name, size in zero_memory(count, world_size, stage).items()}
    if _gathers(world_size, stage):
        # `table` elements are in the embedding, and as many in the head.
        blocks, table = min(2, config.num_layers), config.vocab_size * config.d_model
        matrices, norms = blocks * block_matrices(config), (2 * blocks + 1) * config.d_model
        held["parameters"] += MATMUL_BYTES[precision] * (matrices + table) + WIDE * (table + norms)
    return Footprint(**held, **_activations(config, tokens, precision, world_size, stage))


def fit(
    config: ModelConfig,
    batch: int,
    context: int,
    precision: str,
    memory: float,
    *,
    world_size: int = 1,
    stage: int = 0,
    gradients_stay: bool = False,
) -> ModelConfig:
    """The config with the levels of checkpointing that recompute least and have a peak of at most `memory` bytes.

    Its blocks have one level, or two levels that are neighbours in `lmsys.checkpointing.LEVELS`. Blocks that keep more
    come last: while their backward runs, all the others' activations are held anyway.

    gradients_stay  gradients are in memory before a backward: of earlier micro-batches, or in a strategy's buffers
    The other arguments are those of `training_memory`. ValueError where not even the level "whole" fits.
    """

    blocks = config.num_layers
    # Pairs of neighbours, and at last "whole" with itself: all blocks recompute everything.
    for keeps_more, keeps_less in pairwise([*checkpointing.LEVELS, checkpointing.LEVELS[-1]]):
        for count in range(blocks, 0, -1):
            levels = [keeps_less] * (blocks - count) + [keeps_more] * count
            candidate = replace(config, checkpoint_blocks=checkpointing.setting_of(levels))
            footprint = training_memory(candidate, batch, context, precision, world_size, stage)
            # Gradients that stay are in memory together with all activations: the peak is the sum of all fields.
            peak = sum(vars(footprint).values()) if gradients_stay else footprint.peak
            if peak <= memory:
                return candidate
    least, most = (f"{size / 2**30:.4g} GiB" for size in (peak, memory))  # peak: of the last candidate, "whole"
    raise ValueError(
        f"checkpoint_blocks={checkpointing.FIT!r}: a step needs {least} of {most} even where whole blocks are run again"
    )


def zero_memory(num_parameters: int, world_size: int, stage: int) -> dict[str, float]:
    """Bytes on each device of float32 parameters, gradients and AdamW's two moments, by name.

    stage  0: every device has all; 1: optimizer state is divided by world_size; 2: gradients too; 3: parameters too
    Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 5, there with 16-bit parameters and gradients.
    ValueError for another stage.
    """
    values.one_of("stage", stage, range(4))
    whole = 4.0 * num_parameters
    # (bytes, the stage from which ranks divide them)
    parts = {"parameters": (whole, 3), "gradients": (whole, 2), "optimizer": (2 * whole, 1)}
    return {name: size / world_size if stage >= since else size for name, (size, since) in parts.items()}


def _activations(config: ModelConfig, tokens: int, precision: str, world_size: int, stage: int) -> dict[str, int]:
    """The fields `activations` and `recomputed` of a `Footprint`."""
    narrow = MATMUL_BYTES[precision]
    # after: bytes that later groups keep. Their backwards run first, so these bytes are free when this group's begins.
    after = recomputed = 0
    for group in reversed(config.groups):
        blocks = group.stop - group.first
        # A group of the level "whole" keeps the input of its first block, and runs all of its blocks again together.
        run_again, keeping = (blocks, 1) if group.level == "whole" else (1, blocks)
        # Bytes of a block: what it keeps, and all that its backward reads.
        kept, read = (
            kept_bytes(config, level, tokens, precision, world_size, stage) for level in (group.level, "none")
        )
        if group.level != "none":
            gradients = 2 * tokens * narrow * config.d_ff  # of w1 x and w3 x, while all of the block is held
            recomputed = max(recomputed, run_again * read - kept + gradients - after)
        after += keeping * kept
    # Bytes of a token: input of ln_final and gradient of its output, 1 / rms, the token's id.
    last = (WIDE + narrow) * config.d_model + WIDE + 8
    head = WIDE * config.vocab_size * config.d_model  # the head's gradient: the loss computes it in the forward
    return {"activations": after + tokens * last + head, "recomputed": recomputed}


def kept_bytes(
    config: ModelConfig, level: str, tokens: int, precision: str, world_size: int = 1, stage: int = 0
) -> int:
    """Bytes that a block keeps for its backward. level: of `lmsys.checkpointing`; the rest as in `training_memory`.

    They include the copies of float32 weights that autocast makes and keeps. A block that runs again in the backward
    keeps no copies, since its weights are cast once more then; nor does a piece of a block that runs again. At the
    levels "matmuls" and "attention" all weights but output_proj's are in such pieces (`lmsys.model.selective`).
    """
    narrow = MATMUL_BYTES[precision]
    casts = narrow < WIDE and not _gathers(world_size, stage)
    heads, kv_heads, head_dim = config.num_heads, config.kv_heads, config.head_dim
    residual = (narrow if config.residual == "narrow" else WIDE) * config.d_model
    attention = narrow * (2 * heads + 2 * kv_heads) * head_dim + WIDE * heads  # q, k, v, o; lse
    projection = narrow * config.d_model
    of_a_token, weights = {  # (bytes of a token, weights that autocast copies), by level
        # For each of two norms its input, always in float32, its output and 1 / rms; w1 x, silu, w3 x, their product.
        "none": (
            2 * (WIDE * config.d_model + projection + WIDE) + attention + 4 * narrow * config.d_ff,
            block_matrices(config),
        ),
        "matmuls": (residual + attention + projection + 2 * narrow * config.d_ff, config.d_model**2),
        "attention": (residual + attention + projection, config.d_model**2),
        "whole": (residual, 0),
    }[level]
    return tokens * of_a_token + weights * narrow * casts  # casts: True where autocast copies weights


def _gathers(world_size: int, stage: int) -> bool:
    """True where ranks gather the weights of matmuls in the precision's dtype: then autocast copies none."""
    return stage == 3 and world_size > 1


def again_flops(config: ModelConfig, level: str, tokens: int, context: int) -> float:
    """Operations of the matmuls that a step recomputes if all blocks have this level.

    The level "whole" runs the whole forward again, with w2, whose result no backward needs.
    """
    width = config.d_model
    forward = 2 * block_matrices(config) + 2 * context * width  # with causal attention, as in `model_flops`
    of_a_token = {"none": 0, "matmuls": 0, "attention": 4 * width * config.d_ff, "whole": forward}[level]
    return float(config.num_layers * tokens * of_a_token)


def table(config: ModelConfig, batch: int, precision: str, world_size: int = 1, stage: int = 0) -> str:
    """A table in Markdown, with a line for each level of checkpointing.

    Its columns: what a block keeps and the peak of a step, in GiB; recomputed matmuls, in % of a step's operations.
    """
    context = config.context_length
    step = model_flops(config, tokens=batch * context, context=context, mode="step")
    lines = ["| level | a block keeps, GiB | peak, GiB | matmuls again, % of a step |", "|---|---:|---:|---:|"]
    for level in checkpointing.LEVELS:
        footprint = training_memory(
            replace(config, checkpoint_blocks=level), batch, context, precision, world_size, stage
        )
        kept = kept_bytes(config, level, batch * context, precision, world_size, stage)
        again = again_flops(config, level, batch * context, context) / step
        lines.append(f"| {level} | {kept / 2**30:.3f} | {footprint.peak / 2**30:.2f} | {100 * again:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lmsys.cost.memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--context", type=int, default=1024, metavar="S", help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="sequences that a rank holds at once")
    parser.add_argument("--precision", choices=MATMUL_BYTES, default="bf16")
    parser.add_argument("--residual", choices=RESIDUALS, default="wide", help="the residual stream")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks that divide the state")
    parser.add_argument("--stage", type=int, choices=range(4), default=0, help="what they divide: 3 for fsdp")
    asked = parser.parse_args()
    config = replace(model_config(asked.size, context_length=asked.context), residual=asked.residual)
    print(table(config, asked.batch, asked.precision, asked.ranks, asked.stage))


if __name__ == "__main__":
    main()
