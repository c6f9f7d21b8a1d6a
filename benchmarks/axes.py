"""The axes that have an option of their own here, each declared once; `pytest --help` shows them. Imports no torch."""

from pathlib import Path

from lmsys.bench.axes import Axis, one_of, positive, yes_no
from lmsys.config import SIZES
from lmsys.cost.memory import MATMUL_BYTES

DTYPES = ("float32", "float16", "bfloat16")
DIRECTIONS = ("fwd", "bwd", "fwdbwd")
MODES = ("forward", "train_forward", "backward", "optimizer", "step")
COMPILES = ("eager", "compiled", "graphed")
MODELS_ONLY = ("auto", "llama")  # of --attention: no rows of the table, but ways to choose or replace a whole model


def square(text: str) -> tuple[int, int]:
    return positive(text), positive(text)


def tier(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part).bit_count() == 1 for part in parts):
        raise ValueError("must read queries:keys, both powers of two, as in 128:64,256:128")
    return int(parts[0]), int(parts[1])


def head_pair(text: str) -> tuple[int, int]:
    heads, _, kv_heads = text.partition(":")
    pair = positive(heads), positive(kv_heads or heads)
    if pair[0] % pair[1]:
        raise ValueError("query heads must be a multiple of key/value heads, as in 32:8")
    return pair


def bucket_size(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def several(text: str) -> int:
    if positive(text) < 2:
        raise ValueError("must be at least 2, since the first epoch is not timed")
    return int(text)


ATTENTION = Axis(
    "attention",
    option="--attention",
    metavar="ROWS",
    help="exactly these rows: names, path.py:function; of models also auto, llama",
)
LENGTH = Axis(
    "length", square, option="--length", metavar="S", help="sequence lengths, queries and keys alike: 1024,4096"
)
TIERS = Axis(
    "length", tier, option="--tiers", metavar="Q:K", help="queries and keys apart, powers of two: 128:64,256:128"
)
HEAD_DIM = Axis("head_dim", positive, option="--head-dim", metavar="D", help="head dimensions: 64,128")
BATCH = Axis("batch", positive, (1,), "--batch", "batch sizes: 1,8", "B")
HEADS = Axis("heads", head_pair, ((1, 1),), "--heads", "query heads, or query:key heads: 16,32:8", "H")
DTYPE = Axis("dtype", one_of(*DTYPES), option="--dtype", help=", ".join(DTYPES))
CAUSAL = Axis("causal", yes_no, option="--causal", help="yes, no")
DIRECTION = Axis("direction", one_of(*DIRECTIONS), option="--direction", help=", ".join(DIRECTIONS))
SIZE = Axis("size", one_of(*SIZES), option="--size", help=f"of the language model: {', '.join(SIZES)}")
CONTEXT = Axis(
    "context", positive, option="--context", metavar="S", help="sequence lengths of the language model: 512,1024"
)
PRECISION = Axis(
    "precision",
    one_of(*MATMUL_BYTES),
    ("bf16",),
    "--precision",
    "fp32, tf32, bf16 (autocast), fp16 (autocast and loss scaling)",
)
MODE = Axis("mode", one_of(*MODES), MODES, "--mode", "forward (inference), train_forward, backward, optimizer, step")
COMPILE = Axis(
    "compile",
    one_of(*COMPILES),
    ("eager",),
    "--compile",
    "eager, compiled (block by block), graphed (and replayed as a CUDA graph)",
)
TRACES = Axis(
    "traces",
    Path,
    None,
    "--traces",
    "keep what the anatomy reads: traces, and on CUDA memory snapshots",
    "DIR",
    single=True,
)
STRATEGY = Axis("strategy", option="--strategy", metavar="ROWS", help="exactly these strategies: names, path.py:Class")
WORLD_SIZE = Axis("world_size", positive, (0,), "--world-size", "ranks: 1,2,4; a GPU each, or processes on a CPU", "N")
BUCKET_MB = Axis(
    "bucket_mb",
    bucket_size,
    (25,),
    "--bucket-mb",
    "of bucketed and copy_engine, MiB: 1,25,auto; of a training also torch DDP's",
    "MIB",
)
COMM_DTYPE = Axis(
    "comm_dtype",
    one_of(*DTYPES),
    ("float32",),
    "--comm-dtype",
    "what bucketed and copy_engine send: float32, bfloat16, float16",
)
SHARDED = Axis(
    "sharded_optimizer",
    yes_no,
    (False,),
    "--sharded-optimizer",
    "optimizer state divided among ranks: yes, no",
)
EPOCHS = Axis(
    "epochs",
    several,
    4,
    "--epochs",
    "of a training; the first is not timed, the others are the samples",
    "N",
    single=True,
)
TRAIN_TOKENS = Axis(
    "train_tokens", positive, 491_520, "--train-tokens", "of a training: tokens of an epoch", "N", single=True
)
VAL_TOKENS = Axis(
    "val_tokens",
    positive,
    65_536,
    "--val-tokens",
    "of a training: held-out tokens of the loss at its end",
    "N",
    single=True,
)
NAMED = (
    *(ATTENTION, LENGTH, TIERS, HEAD_DIM, BATCH, HEADS, DTYPE, CAUSAL, DIRECTION),
    *(SIZE, CONTEXT, PRECISION, MODE, COMPILE, TRACES),
    *(STRATEGY, WORLD_SIZE, BUCKET_MB, COMM_DTYPE, SHARDED, EPOCHS, TRAIN_TOKENS, VAL_TOKENS),
)
