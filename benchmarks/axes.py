"""The command line's comma lists as the sweeps' axes. Each bad value is a ValueError that says what would be right."""

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks.sections import MODES, Axes, Sweep
from benchmarks.sweeps import SWEEPS
from lmsys.config import SIZES
from lmsys.cost.memory import MATMUL_BYTES

T = TypeVar("T")
DTYPES = ("float32", "float16", "bfloat16")
CAUSAL = {"yes": True, "no": False, "true": True, "false": False}
DIRECTIONS = ("fwd", "bwd", "fwdbwd")
PRECISIONS = tuple(MATMUL_BYTES)
COMPILES = ("eager", "compiled", "graphed")


def sweep_called(name: str, device: str) -> Sweep:
    return SWEEPS[choice("--sweep", name, SWEEPS)][device]


def parse_axes(options: dict[str, str | None]) -> Axes:
    """Axes from the texts of --batch, --heads, --length, --tiers, --head-dim, --dtype, --causal and --direction."""
    return Axes(
        batch=_every(options, "--batch", positive),
        heads=_every(options, "--heads", _heads),
        lengths=_every(options, "--length", _square) + _every(options, "--tiers", _tier),
        head_dims=_every(options, "--head-dim", positive),
        dtypes=_every(options, "--dtype", _one_of(DTYPES)),
        causal=_every(options, "--causal", lambda option, text: CAUSAL[choice(option, text.lower(), CAUSAL)]),
        directions=_every(options, "--direction", _one_of(DIRECTIONS)),
    )


def parse_model_axes(options: dict[str, str | None]) -> dict[str, Any]:
    """The fields of a ModelSection that --size, --context, --batch, --precision, --mode and --compile give."""
    given: dict[str, tuple[Any, ...]] = {
        "sizes": _every(options, "--size", _one_of(tuple(SIZES))),
        "contexts": _every(options, "--context", positive),
        "batch": _every(options, "--batch", positive),
        "precisions": _every(options, "--precision", _one_of(PRECISIONS)),
        "modes": _every(options, "--mode", _one_of(MODES)),
        "compiles": _every(options, "--compile", _one_of(COMPILES)),
    }
    return {name: values for name, values in given.items() if values}


def parse_parallel_axes(options: dict[str, str | None]) -> dict[str, Any]:
    """The fields of a ParallelSection that --strategy, --size, --context, --batch, --precision, --world-size,
    --bucket-mb, --comm-dtype, --sharded-optimizer and --compile give."""
    given: dict[str, tuple[Any, ...]] = {
        "strategies": _every(options, "--strategy", lambda _, text: text),
        "sizes": _every(options, "--size", _one_of(tuple(SIZES))),
        "contexts": _every(options, "--context", positive),
        "batch": _every(options, "--batch", positive),
        "precisions": _every(options, "--precision", _one_of(PRECISIONS)),
        "world_sizes": _every(options, "--world-size", positive),
        "bucket_mbs": _every(options, "--bucket-mb", _bucket),
        "comm_dtypes": _every(options, "--comm-dtype", _one_of(DTYPES)),
        "sharded": _every(options, "--sharded-optimizer", lambda option, text: CAUSAL[choice(option, text, CAUSAL)]),
        "compiles": _every(options, "--compile", _one_of(COMPILES)),
    }
    return {name: values for name, values in given.items() if values}


def parse_training_axes(options: dict[str, str | None]) -> dict[str, Any]:
    """The fields of a TrainingSection: those of models and strategies, and --epochs, --train-tokens, --val-tokens."""
    named = {"epochs": "--epochs", "train_tokens": "--train-tokens", "val_tokens": "--val-tokens"}
    found = {name: _one(option, options[option]) for name, option in named.items() if options.get(option) is not None}
    if found.get("epochs", 2) < 2:
        raise ValueError(f"--epochs {found['epochs']}: must be at least 2, since the first epoch is not timed")
    return parse_model_axes(options) | parse_parallel_axes(options) | found


def _one(option: str, text: str | None) -> int:
    if text is None or not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{option} {text!r}: must be one positive whole number")
    return int(text)


def _bucket(option: str, text: str) -> int | str:
    return text if text == "auto" else positive(option, text)


def _every(options: dict[str, str | None], option: str, parse: Callable[[str, str], T]) -> tuple[T, ...]:
    text = options.get(option)
    return () if text is None else tuple(parse(option, part.strip()) for part in text.split(","))


def _one_of(known: tuple[str, ...]) -> Callable[[str, str], str]:
    return lambda option, text: choice(option, text, known)


def choice(option: str, text: str, known: dict[str, T] | tuple[str, ...]) -> str:
    if text not in known:
        near = difflib.get_close_matches(text, known, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{option} {text!r}: must be one of {', '.join(known)}{hint}")
    return text


def positive(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{option} {text!r}: must be a positive whole number, or several with commas")
    return int(text)


def _square(option: str, text: str) -> tuple[int, int]:
    return positive(option, text), positive(option, text)


def _heads(option: str, text: str) -> tuple[int, int]:
    heads, _, kv_heads = text.partition(":")
    pair = positive(option, heads), positive(option, kv_heads or heads)
    if pair[0] % pair[1]:
        raise ValueError(f"{option} {text!r}: query heads must be a multiple of key/value heads, as in 32:8")
    return pair


def _tier(option: str, text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part).bit_count() == 1 for part in parts):
        raise ValueError(f"{option} {text!r}: must read queries:keys, both powers of two, as in 128:64,256:128")
    return int(parts[0]), int(parts[1])
