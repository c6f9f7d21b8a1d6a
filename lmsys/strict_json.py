"""JSON, strictly, and into dataclasses: every refusal names the path and the value. Imports no torch."""

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


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
    if str in (hint, *get_args(hint)) and not isinstance(value, str | None):
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
