"""The axes (quantities that benchmarks vary) that have an option of their own, such as --size. Imports no torch.

Benchmarks pick their axes by `named("--size --batch")`, and `pytest --help` shows the options. A new option is an
`Axis` in NAMED, with a function that parses one value, and a line in docs/options.md. Such a function (`tier`,
`softcap`, ...) gets the text of one value and returns the value. It raises ValueError with a text that says what would
be right. `Axis.values` calls it.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from lmsys import config, values
from lmsys.bench.fields import Axis, Parse, one_of, positive, yes_no
from lmsys.checkpointing import FIT, LEVELS, RUN
from lmsys.cost import memory, operations

DTYPES = ("float32", "float16", "bfloat16")
MODES = ("forward", "train_forward", "backward", "optimizer", "step")
END = -1  # a value of the axis `offset` that stands for keys - queries; `bench_attention.py` replaces it
MODELS_ONLY = (
    "auto",
    "llama",
    "llama_tuned",
)  # values of --attention that only models take: "auto" chooses a row, the others are whole models


def square(text: str) -> tuple[int, int]:
    """(queries, keys), both of the length that the text states."""
    return positive(text), positive(text)


def tier(text: str) -> tuple[int, int]:
    """(queries, keys) of a text such as "128:64", both powers of two."""
    parts = text.split(":")
    values.hold(
        (
            len(parts) == 2 and all(part.isdecimal() and int(part).bit_count() == 1 for part in parts),
            "must read queries:keys, both powers of two, as in 128:64,256:128",
        )
    )
    return int(parts[0]), int(parts[1])


def head_pair(text: str) -> tuple[int, int]:
    """(query heads, key/value heads) of a text such as "32:8"; "32" stands for "32:32"."""
    heads, _, kv_heads = text.partition(":")
    pair = positive(heads), positive(kv_heads or heads)
    values.hold((pair[0] % pair[1] == 0, "query heads must be a multiple of key/value heads, as in 32:8"))
    return pair


def or_none(parse: Parse) -> Parse:
    """A parser that also takes the text `none`, for None."""
    return lambda text: None if text == "none" else parse(text)


def softcap(text: str) -> float:
    """The cap of scores, a finite number above 0."""
    try:
        return values.finite("softcap", float(text), above=0)
    except ValueError:
        raise ValueError("must be none or a number above 0, as in 30") from None


def asked(text: str) -> bool | None:
    """True for yes. None for no: result files that are older than the axis have no value for it, and mean no."""
    return yes_no(text) or None


def offset(text: str) -> int:
    """The position of query 0 among the keys; `end` becomes END: queries then have the last positions."""
    if text == "end":
        return END
    values.hold((text.isdecimal(), "must be a whole number, or end"))
    return int(text)


def documents(text: str) -> str:
    """The text itself: `mixed` or `equal16` (or another number), which `benchmarks/attention/patterns.py` explains."""
    if text != "mixed":
        values.hold((text.startswith("equal"), "must be none, mixed, or equal and a number, as in equal16"))
        positive(text.removeprefix("equal"))
    return text


def checkpointing(text: str) -> str:
    """A setting of `model.checkpoint_blocks`. Texts of one meaning, such as `0` and `none`, become one value."""
    if text in (FIT,) + LEVELS or all(RUN.fullmatch(run) for run in text.split(",")):
        return text
    values.hold(
        (
            text.isdecimal(),
            f"must be {FIT}, a number of blocks, one of {', '.join(LEVELS)}, or several of these with their numbers of"
            " blocks, as in attention*12,matmuls*22",
        )
    )
    return {0: "none", 1: "whole"}.get(int(text), str(int(text)))


def checkpointings(text: str) -> Iterator[str]:
    """Yields the settings of a list, which commas separate; neighbouring parts with numbers make one setting.

    So "none,attention*12,matmuls*22" has two settings, "none" and "attention*12,matmuls*22".
    """
    for has_number, parts in groupby(map(str.strip, text.split(",")), lambda part: "*" in part):
        texts = list(parts)
        yield from [",".join(texts)] if has_number else texts


def bucket_size(text: str) -> int | str:
    """MiB of a bucket; `auto` (the strategy chooses the size) and `all` (one bucket) stay texts."""
    return text if text in ("auto", "all") else positive(text)


def several(text: str) -> int:
    """A number of epochs, at least 2."""
    values.hold((positive(text) >= 2, "must be at least 2, since the first epoch is not timed"))
    return int(text)


# Positional arguments of `Axis`: name, parse, default (a tuple of values, or one value if `single`), option, help, and
# metavar.
NAMED = (
    Axis(
        "attention",
        option="--attention",
        metavar="ROWS",
        help="exactly these rows: names, path.py:function; of models also auto, llama",
    ),
    Axis("length", square, option="--length", metavar="S", help="sequence lengths, queries and keys alike: 1024,4096"),
    Axis("length", tier, option="--tiers", metavar="Q:K", help="queries and keys apart, powers of two: 128:64,256:128"),
    Axis("head_dim", positive, option="--head-dim", metavar="D", help="head dimensions: 64,128"),
    Axis("batch", positive, (1,), "--batch", "batch sizes: 1,8", "B"),
    Axis("heads", head_pair, ((1, 1),), "--heads", "query heads, or query:key heads: 16,32:8", "H"),
    Axis("dtype", one_of(*DTYPES), option="--dtype", help=", ".join(DTYPES)),
    Axis("causal", yes_no, option="--causal", help="yes, no"),
    Axis(
        "direction",
        one_of(*operations.FLOPS_OF_FORWARD),
        option="--direction",
        help=", ".join(operations.FLOPS_OF_FORWARD),
    ),
    Axis("deterministic", asked, (None,), "--deterministic", "in torch's deterministic mode: yes, no"),
    Axis("window", or_none(positive), (None,), "--window", "keys that a causal query sees at most: 1024, none", "W"),
    Axis(
        "documents",
        or_none(documents),
        (None,),
        "--documents",
        "packed into each sequence: mixed, equal16, none",
        "LENGTHS",
    ),
    Axis("softcap", or_none(softcap), (None,), "--softcap", "of the scores: 30, none", "C"),
    Axis("size", one_of(*config.SIZES), option="--size", help=f"of the language model: {', '.join(config.SIZES)}"),
    Axis("context", positive, option="--context", metavar="S", help="sequence lengths of the language model: 512,1024"),
    Axis(
        "precision",
        one_of(*memory.MATMUL_BYTES),
        ("bf16",),
        "--precision",
        "fp32, tf32, bf16 (autocast), fp16 (autocast and loss scaling)",
    ),
    Axis("mode", one_of(*MODES), MODES, "--mode", "forward (inference), train_forward, backward, optimizer, step"),
    Axis(
        "compile",
        one_of("eager", "compiled", "graphed", "fused"),
        ("eager",),
        "--compile",
        "eager, compiled (block by block), graphed (and replayed as a CUDA graph), fused (by kernels of ours, without a"
        " compiler, and replayed)",
    ),
    Axis(
        "checkpoint",
        checkpointing,
        ("none",),
        "--checkpoint",
        f"what blocks keep for their backward, as model.checkpoint_blocks: {', '.join(LEVELS)}, {FIT},"
        " attention*12,matmuls*22, or a number of blocks",
        "LEVELS",
        split=checkpointings,
    ),
    Axis(
        "residual",
        one_of("wide", "narrow"),
        ("wide",),
        "--residual",
        "the dtype of the stream between blocks, as model.residual: wide, narrow (that of the matmuls)",
    ),
    Axis(
        "traces",
        Path,
        None,
        "--traces",
        "keep what the anatomy reads: traces, and on CUDA memory snapshots",
        "DIR",
        single=True,
    ),
    Axis("strategy", option="--strategy", metavar="ROWS", help="exactly these strategies: names, path.py:Class"),
    # 0, the default, stands for as many ranks as there are (`lmsys.bench.ranks.world_sizes`).
    Axis("world_size", positive, (0,), "--world-size", "ranks: 1,2,4; a GPU each, or processes on a CPU", "N"),
    Axis(
        "bucket_mb",
        bucket_size,
        (25,),
        "--bucket-mb",
        "of strategies that take a size of buckets, MiB: 1,25,auto, or all for one bucket; of a training also of those"
        " that are to be tuned",
        "MIB",
    ),
    Axis(
        "comm_dtype",
        one_of(*DTYPES),
        ("float32",),
        "--comm-dtype",
        "what strategies send that take a dtype for it: float32, bfloat16, float16",
    ),
    Axis(
        "sharded_optimizer",
        yes_no,
        (False,),
        "--sharded-optimizer",
        "optimizer state divided among ranks: yes, no",
    ),
    Axis(
        "optimizer",
        one_of("adamw", "muon"),
        ("adamw",),
        "--optimizer",
        "adamw, or muon: Muon steps the matrices of blocks, AdamW all else",
    ),
    Axis(
        "reproducible",
        yes_no,
        (False,),
        "--reproducible",
        "of a training: the same weights, bit for bit, by every strategy that can, on the numbers of ranks that"
        " train.leaves allows: yes, no",
    ),
    Axis(
        "epochs",
        several,
        4,
        "--epochs",
        "of a training; the first is not timed, the others are the samples",
        "N",
        single=True,
    ),
    Axis("train_tokens", positive, 491_520, "--train-tokens", "of a training: tokens of an epoch", "N", single=True),
    Axis(
        "val_tokens",
        positive,
        65_536,
        "--val-tokens",
        "of a training: held-out tokens of the loss at its end",
        "N",
        single=True,
    ),
)


def named(*parts: str | Axis, **defaults: object) -> tuple[Axis, ...]:
    """The axes of these options, in this order; an `Axis` among them stands for itself.

    defaults  other default values, by axis name

    named("--size --batch", Axis("warmup", int, (None,)), batch=(4,)) has three axes, the second with the default (4,).
    """
    known = {axis.option: axis for axis in NAMED}
    axes: list[Axis] = []
    for part in parts:
        axes += [part] if isinstance(part, Axis) else [known[option] for option in part.split()]
    return tuple(replace(axis, default=defaults.get(axis.name, axis.default)) for axis in axes)
