"""The command line's comma lists as the sweeps' axes. Each bad value is a ValueError that says what would be right."""

import difflib
from collections.abc import Callable
from typing import TypeVar

from benchmarks.sweeps import SWEEPS, Axes, Sweep

T = TypeVar("T")
DTYPES = ("float32", "float16", "bfloat16")
CAUSAL = {"yes": True, "no": False, "true": True, "false": False}
DIRECTIONS = ("fwd", "bwd", "fwdbwd")


def sweep_called(name: str, device: str) -> Sweep:
    return SWEEPS[choice("--sweep", name, SWEEPS)][device]


def parse_axes(options: dict[str, str | None]) -> Axes:
    """Axes from the texts of --batch, --heads, --length, --tiers, --head-dim, --dtype, --causal and --direction."""

    def every(option: str, parse: Callable[[str, str], T]) -> tuple[T, ...]:
        text = options.get(option)
        return () if text is None else tuple(parse(option, part.strip()) for part in text.split(","))

    return Axes(
        batch=every("--batch", positive),
        heads=every("--heads", _heads),
        lengths=every("--length", _square) + every("--tiers", _tier),
        head_dims=every("--head-dim", positive),
        dtypes=every("--dtype", lambda option, text: choice(option, text, DTYPES)),
        causal=every("--causal", lambda option, text: CAUSAL[choice(option, text.lower(), CAUSAL)]),
        directions=every("--direction", lambda option, text: choice(option, text, DIRECTIONS)),
    )


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
