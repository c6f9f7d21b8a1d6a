"""What is to be built, in plain values: frozen, checked, and JSON there and back. Imports no torch."""

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer language model.

    num_kv_heads       key/value heads, a divisor of num_heads; None: as many as query heads
    attention          a row of `lmsys.attention.ATTENTION`
    checkpoint_blocks  activation checkpointing: this many blocks are one group, which keeps only its input and is
                       run again in the backward; 0: no checkpointing
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    vocab_size: int = 10_000
    context_length: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: str = "auto"
    checkpoint_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.d_model % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} must divide into num_heads={self.num_heads} heads of even length"
                f" (rotary positions turn pairs); got {self.d_model / self.num_heads:g}"
            )
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if not 0 <= self.checkpoint_blocks <= self.num_layers:
            raise ValueError(f"checkpoint_blocks={self.checkpoint_blocks} must lie in 0 to {self.num_layers} layers")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(f"rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be positive")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that `to_json` wrote. ValueError that names unknown and missing keys."""
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"a config is a JSON object; got {type(found).__name__}")
        known = {field.name for field in fields(cls)}
        required = {"d_model", "d_ff", "num_layers", "num_heads"}
        if wrong := sorted(found.keys() - known) or sorted(required - found.keys()):
            raise ValueError(f"config keys {wrong} are unknown or missing; known are {sorted(known)}")
        return cls(**found)


SIZES: Mapping[str, Mapping[str, int]] = {
    name: dict(zip(("d_model", "d_ff", "num_layers", "num_heads"), values, strict=True))
    for name, values in {
        "tiny": (128, 512, 2, 4),
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7b": (2560, 10240, 32, 32),  # from 2026 on CS336 calls this one xl
        "10b": (4608, 12288, 50, 36),
    }.items()
}


def model_config(size: str, **changes: Any) -> ModelConfig:
    """A named size, with fields changed. ValueError with the nearest names for an unknown one."""
    if size not in SIZES:
        near = difflib.get_close_matches(size, SIZES, n=2) or list(SIZES)
        raise ValueError(f"unknown {size=}; did you mean {' or '.join(near)}?")
    return ModelConfig(**{**SIZES[size], **changes})


def overlay(config: Any, found: Any, path: str = "") -> Any:
    """A config dataclass with the values that a JSON object gives, of it and of the dataclasses in it.

    ValueError, with the JSON path, for a key that is unknown (it names the nearest), a value of another type, and what
    the dataclass itself refuses.
    """
    where = path or "the config"
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: must be a JSON object; got {json.dumps(found)}")
    hints, changes = get_type_hints(type(config)), {}
    for key, value in found.items():
        here = f"{path}.{key}" if path else key
        if key not in hints:
            raise ValueError(f"{here}: unknown key; did you mean {' or '.join(_nearest(config, key, path))}?")
        current = getattr(config, key)
        changes[key] = overlay(current, value, here) if is_dataclass(current) else _typed(value, hints[key], here)
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_json(text: str) -> Any:
    """JSON, strictly: ValueError for NaN, infinities and a key that an object has twice, as for what is no JSON."""

    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twins := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"{twins[0]!r} is given twice in one object")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    return json.loads(text, object_pairs_hook=without_twins, parse_constant=refuse)


def parse_setting(config: Any, setting: str) -> dict[str, Any]:
    """`train.lr=3e-4` -> {"train": {"lr": 0.0003}}. The value is JSON; a string may go without quotes."""
    name, equals, text = setting.partition("=")
    if not equals or not all(keys := name.split(".")):
        raise ValueError(f"{setting!r}: must be PATH=VALUE, as in train.lr=3e-4")
    hint: Any = type(config)
    for key in keys:
        hint = get_type_hints(hint).get(key) if is_dataclass(hint) else None
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    if _may_be(hint, str) and not isinstance(value, str | None):
        value = text
    nested: dict[str, Any] = {keys[-1]: value}
    for key in reversed(keys[:-1]):
        nested = {key: nested}
    return nested


def paths(config: Any, path: str = "") -> Iterator[str]:
    """The path of every value: `train.lr`, ..."""
    for field in fields(config):
        here = f"{path}.{field.name}" if path else field.name
        value = getattr(config, field.name)
        yield from paths(value, here) if is_dataclass(value) else [here]


def _nearest(config: Any, key: str, path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    own = {field.name: prefix + field.name for field in fields(config)}
    below = {name.rpartition(".")[2]: name for name in paths(config, path)}
    for known in (own, below):
        if near := difflib.get_close_matches(key, known, n=2):
            return [known[name] for name in near]
    return list(own.values())


def _typed(value: Any, hint: Any, path: str) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        if kind is NoneType and value is None:
            return None
        if kind in (bool, int, str) and type(value) is kind:
            return value
        if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
        if get_origin(kind) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(kind)):
            return tuple(
                _typed(one, of, f"{path}[{i}]") for i, (one, of) in enumerate(zip(value, get_args(kind), strict=True))
            )
    raise ValueError(f"{path}: must be {' or '.join(map(_called, kinds))}; got {json.dumps(value)}")


def _called(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string", NoneType: "null"}
    return names.get(kind) or f"a list of {len(get_args(kind))} numbers"


def _may_be(hint: Any, kind: type) -> bool:
    return hint is kind or (isinstance(hint, UnionType) and kind in get_args(hint))
