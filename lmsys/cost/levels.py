"""Memory and computation of a training step by level of activation checkpointing, predicted: a table in Markdown.

python -m lmsys.cost.levels --size medium --context 1024 --batch 8 --precision bf16
"""

import argparse
from dataclasses import replace

from lmsys.checkpointing import LEVELS
from lmsys.config import RESIDUALS, SIZES, ModelConfig, model_config
from lmsys.cost.memory import MATMUL_BYTES, kept_bytes, training_memory
from lmsys.cost.operations import block_matrices, model_flops


def again_flops(config: ModelConfig, level: str, tokens: int, context: int) -> float:
    """Operations of the matmuls that a step makes again where all blocks have this level; w2's too in whole blocks."""
    width = config.d_model
    forward = 2 * block_matrices(config) + 2 * context * width  # with causal attention, as in `model_flops`
    of_a_token = {"none": 0, "matmuls": 0, "attention": 4 * width * config.d_ff, "whole": forward}[level]
    return float(config.num_layers * tokens * of_a_token)


def table(config: ModelConfig, batch: int, precision: str, world_size: int = 1, stage: int = 0) -> str:
    """A line for each level: what a block keeps, the peak of a step, both in GiB, and what is computed again."""
    context = config.context_length
    step = model_flops(config, tokens=batch * context, context=context, mode="step")
    lines = ["| level | a block keeps, GiB | peak, GiB | matmuls again, % of a step |", "|---|---:|---:|---:|"]
    for level in LEVELS:
        footprint = training_memory(
            replace(config, checkpoint_blocks=level), batch, context, precision, world_size, stage
        )
        kept = kept_bytes(config, level, batch * context, precision, world_size, stage)
        again = again_flops(config, level, batch * context, context) / step
        lines.append(f"| {level} | {kept / 2**30:.3f} | {footprint.peak / 2**30:.2f} | {100 * again:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lmsys.cost.levels", description=__doc__.splitlines()[0])
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
