"""Checks of values that users give. All packages call these functions where they get arguments. Imports no torch.

A function that *holds* a value to be something checks the value: it returns the value if it is right, else it raises a
ValueError whose message names the value and says what would be right. `name` is what the message calls the value.
`hold` checks any other condition. The types at the end are for fields of configs, see `lmsys.strict_json.Checked`. A
check that several modules need is a new function here.
"""

import difflib
import math
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

SHORT = 80  # the most characters of a value in a message
BEYOND = 1e100  # measured numbers lie between 1 / BEYOND and BEYOND, or are 0


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Holds `value` to be a whole number, not a bool, from `least` to `most`; without `most`, of at most 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={shortly(value)} must be a whole number")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name}={shortly(value)} must be {_bounds(least, most)}")
    if most is None and number.bit_length() > 64:  # not by `hold`, whose message torch.compile cannot trace
        raise ValueError(f"{name}={shortly(value)} must have at most 64 bits")
    return number


def counts(**sizes: Any) -> list[int]:
    """Holds each size, given by its name, to be a whole number of at least 1."""
    return [whole(name, size, least=1) for name, size in sizes.items()]


def finite(name: str, value: Any, above: float = -math.inf, least: float = -math.inf, most: float = math.inf) -> float:
    """Holds `value` to be a finite number, not a bool, more than `above` and from `least` to `most`."""
    try:
        is_finite = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        is_finite = False
    if not is_finite:
        raise ValueError(f"{name}={shortly(value)} must be a finite number")
    if not (above < value and least <= value <= most):
        raise ValueError(f"{name}={shortly(value)} must be {_bounds(least, most, above)}")
    return float(value)


def measured(name: str, value: Any, above: float = -math.inf, least: float = -math.inf) -> float:
    """Holds `value` to be a finite number, 0 or of a size from 1 / BEYOND to BEYOND, so that ratios are finite."""
    number = finite(name, value, above, least)
    if number and not 1 / BEYOND <= abs(number) <= BEYOND:
        raise ValueError(f"{name}={shortly(value)} must be 0 or of a size from {1 / BEYOND:g} to {BEYOND:g}")
    return number


def flag(name: str, value: Any) -> bool:
    """Holds `value` to be True or False, since Python takes text such as "no" for true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shortly(value)} must be True or False")
    return value


def instance(name: str, value: Any, kind: Any) -> Any:
    """Holds `value` to be of the type `kind`: a class, or a union such as `str | None`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={shortly(value)} must be of type {getattr(kind, '__name__', kind)}")
    return value


def path(name: str, value: Any) -> Path:
    """Holds `value` to be a path, as text or as a `Path`."""
    return Path(instance(name, value, str | os.PathLike))


def several(name: str, value: Any, kind: Any = object) -> list[Any]:
    """Holds `value` to be a list or another ordered iterable, whose entries are of type `kind`. Returns a list.

    Text, bytes, sets and mappings are refused. A set has no order: its entries could come in another order in each
    process.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | set | frozenset | Mapping):
        raise ValueError(f"{name}={shortly(value)} must be a list or tuple: a set has no order, and text no entries")
    of_kind = (instance(f"{name}[{place}]", entry, kind) for place, entry in enumerate(value))
    return list(value if kind is object else of_kind)  # without a kind no entry is checked, to be fast for many numbers


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """True where a tensor of `shape` can be expanded to the shape `whole`."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


def hold(*laws: tuple[object, str], error: type[Exception] = ValueError) -> None:
    """Raises error(sentence) for the first of the pairs (condition, sentence) whose condition is false."""
    for is_held, sentence in laws:
        if not is_held:
            raise error(sentence)


def sentences_of(*facts: tuple[object, str]) -> Iterator[str]:
    """Yields the sentences, except empty ones, of those pairs (condition, sentence) whose condition is true."""
    return (sentence for is_so, sentence in facts if is_so and sentence)


def one_of(name: str, value: Any, known: Collection[Any]) -> Any:
    """Holds `value` to be one of the `known` values."""
    if value not in known:
        raise ValueError(f"{name}={shortly(value)} must be one of {', '.join(map(str, known))}")
    return value


def choice(text: Any, known: Iterable[str], begin: str = "") -> str:
    """Holds `text` to be one of the `known` texts. A message begins with `begin`, and names the nearest known texts."""
    known = list(known)
    if text not in known:
        near = difflib.get_close_matches(str(text)[:SHORT], known, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{begin}must be one of {', '.join(known)}{hint}")
    return str(text)


def _bounds(least: float | None, most: float | None, above: float = -math.inf) -> str:
    """The bounds in words, as "at least 1 and at most 9"; None, and an infinite bound, are left out."""
    parts = [f"more than {above:g}"] if above > -math.inf else []
    parts += [f"at least {least:,}"] if least not in (None, -math.inf) else []
    parts += [f"at most {most:,}"] if most not in (None, math.inf) else []
    return " and ".join(parts)


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """{key: [its values]} of pairs (key, value); both keys and values in their order of appearance."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def shortened(text: str) -> str:
    """The text in one line of printable characters; of a text longer than 10 SHORT the middle is left out."""
    text = "".join(x if x.isprintable() else " " for x in text)
    return text if len(text) <= 10 * SHORT else f"{text[: 5 * SHORT]} ... {text[-5 * SHORT :]}"


def shortly(value: Any) -> str:
    """The value as a message shows it: at most SHORT characters of its repr."""
    try:
        text = repr(value)
    except Exception:  # for example of an int with too many digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."


# Types for fields of a config: `lmsys.strict_json.Checked` calls the function of a type on the field's value.
Count = Annotated[int, partial(whole, least=1)]
Natural = Annotated[int, partial(whole, least=0)]
Seed = Annotated[int, partial(whole, least=0, most=2**63 - 1)]  # for torch's and numpy's generators
Amount = Annotated[float, partial(finite, least=0)]
Positive = Annotated[float, partial(finite, above=0)]
Share = Annotated[float, partial(finite, above=0, most=1)]
