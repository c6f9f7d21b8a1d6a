"""Reads JSON strictly, and into config dataclasses: every error names the path and the value. Imports no torch.

A config class derives from `Checked`, as those of `lmsys.config` and `lmsys.training.config` do. `overlay` sets fields
of a config from JSON; `parse_setting` turns a setting of a command line into such JSON. Readers of other files call
`read_json`. `Kept` keeps computed answers in the cache folder between runs. To allow another type for fields of
configs, change `_typed` and `_called`.
"""

import difflib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lmsys.files import cache_folder, read_text, write_json
from lmsys.values import SHORT, hold, instance, shortened, shortly

HALF = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped UTF-16 surrogate: half of a character beyond \uffff


def overlay(config: Any, given: Any, path: str = "", whole: Any = None) -> Any:
    """A copy of a config dataclass, and of dataclasses in it, with the values of the JSON object `given`.

    path   the place of `config` in a larger config, such as "train", for messages
    whole  that larger config, of which messages name similar keys; None: `config` itself

    ValueError, with the JSON path, for an unknown key (it names similar ones), for a value of another type, and for
    whatever the dataclass itself refuses.
    """
    where = path or "the config"
    hold((isinstance(given, Mapping), f"{where}: must be a JSON object; got {shortly(given)}"))
    hints, changes, whole = get_type_hints(type(config)), {}, whole or config
    for key, value in given.items():
        here = f"{path}.{key}" if path else key
        if key not in hints:
            raise ValueError(
                f"{shortened(here)}: unknown key; did you mean {' or '.join(_nearest(config, key, path, whole))}?"
            )
        current = getattr(config, key)
        changes[key] = (
            overlay(current, value, here, whole) if is_dataclass(current) else _typed(value, hints[key], here)
        )
    try:
        return replace(config, **changes)
    except ValueError as error:
        raise ValueError(shortened(f"{where}: {error}")) from None


class Checked:
    """The base class of config dataclasses: checks the fields when an object is made.

    ValueError unless every field has a value of its declared type, by the rules for JSON values (`_typed`). If the type
    is annotated with a rule, as the types of `lmsys.values` are, rule(name, value) is called too.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            _typed(getattr(self, name), hint, name)
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, kinds = getattr(self, name), (hint, *get_args(hint))  # the type, and of `X | None` also X
            rules = [rule for kind in kinds for rule in getattr(kind, "__metadata__", ())]
            for rule in rules if value is not None else ():
                rule(name, value)


def parse_json(text: str) -> Any:
    """The content of JSON text.

    ValueError for text that is no JSON, and for NaN, infinities, a key that an object has twice, too many nested
    brackets, and half of a surrogate pair.
    """

    def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twin = min(key for key in counts if counts[key] > 1)
            raise ValueError(f"{shortly(twin)} is given twice in one object")
        return content

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    instance("text", text, str)
    try:
        content = json.loads(text, object_pairs_hook=without_twins, parse_constant=refuse)
        if HALF.search(text):  # most texts have no escape of this kind, and need no second pass
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{ascii(error.object[error.start])} is half of a character") from None
    return content


def read_json(path: Path, **kinds: type) -> Any:
    """The content of a JSON file. ValueError, with the path, for other content, or if the file cannot be read.

    kinds  {key: type}; if any are given, the content must be an object with these keys, and values of these types
    """
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    hold(
        *(
            (
                isinstance(content, dict) and type(content.get(name)) is kind,
                f"{path}: must be an object with {name!r}, {_called(kind)}",
            )
            for name, kind in kinds.items()
        )
    )
    return content


def parse_setting(config: Any, setting: str) -> Any:
    """PATH=VALUE as `overlay` takes it: `train.lr=3e-4` -> {"train": {"lr": 0.0003}}.

    VALUE is JSON; text that is no JSON is a string, and needs no quotes. If the config declares a string at PATH, VALUE
    is taken as text even if it is a number: `data.name=7` -> "7". Two kinds of VALUE are still read as JSON there:
    null, and a value of another type that the config also allows. ValueError for a setting without `=`, or with an
    empty name in its path; `overlay` refuses unknown names and values of a wrong type.
    """
    name, equals, text = setting.partition("=")
    hold((equals and all(keys := name.split(".")), f"{shortly(setting)}: must be PATH=VALUE, as in train.lr=3e-4"))
    hint: Any = type(config)
    for key in keys:
        hint = get_type_hints(hint).get(key) if is_dataclass(hint) else None
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    if str in (kinds := (hint, *get_args(hint))) and type(value) not in (*kinds, NoneType):
        value = text
    for key in reversed(keys):
        value = {key: value}
    return value


def paths(config: Any, path: str = "") -> Iterator[str]:
    """Yields the path of every value of a config, such as "train.lr", in the order of its fields."""
    for field in fields(config):
        here = f"{path}.{field.name}" if path else field.name
        value = getattr(config, field.name)
        yield from paths(value, here) if is_dataclass(value) else [here]


def _nearest(config: Any, key: str, path: str, whole: Any) -> list[str]:
    """The paths of fields that an unknown key of `config` may mean.

    They are the fields of this very name in other parts of the whole config, and the fields of `config` with one of the
    two most similar names; if there are none, such fields of the whole; if there are none either, all of `config`.

    path  that of `config` in the whole
    """
    here = [f"{path}.{field.name}" if path else field.name for field in fields(config)]
    everywhere = list(paths(whole))

    def similar(known: list[str], least: float = 0.6) -> list[str]:
        names = [name.rpartition(".")[2] for name in known]
        near = difflib.get_close_matches(key, dict.fromkeys(names), n=2, cutoff=least)
        return [place for name in near for place in known if place.rpartition(".")[2] == name]

    return similar(everywhere, 1.0) + similar(here) or similar(everywhere) or here


def _typed(value: Any, hint: Any, path: str) -> Any:
    """`value` in the type that the hint declares. ValueError, with the path, for a value of another type.

    A whole number becomes a float if a float is declared, and a list becomes a tuple if a tuple is declared.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if kind is NoneType and value is None:
            return None
        if (kind in (bool, int, str) and type(value) is kind) or (
            isinstance(kind, type) and is_dataclass(kind) and isinstance(value, kind)
        ):
            return value
        if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
        if get_origin(kind) is tuple and isinstance(value, list | tuple) and len(value) == len(get_args(kind)):
            return tuple(
                _typed(x, of, f"{path}[{i}]") for i, (x, of) in enumerate(zip(value, get_args(kind), strict=True))
            )
    raise ValueError(f"{path}: must be {' or '.join(map(_called, kinds))}; got {_as_json(value)}")


def _as_json(value: Any) -> str:
    """The value as a message shows it: as JSON if that is short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return shortly(value)
    return text if len(text) <= SHORT else shortly(value)


def _called(kind: Any) -> str:
    """A type in the words of JSON, for messages."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        NoneType: "null",
        dict: "an object",
        list: "a list",
    }
    return names.get(kind) or (f"a list of {len(get_args(kind))} numbers" if get_args(kind) else f"a {kind.__name__}")


@dataclass(frozen=True)
class Kept:
    """Answers by key in a JSON file of the cache folder, which later runs read again.

    `lmsys.attention.tuning` keeps tuned choices in this way, and `lmsys.kernels.trial` its verdicts.

    name    of the file
    what    the answers as a plural noun, such as "tuned choices", for messages
    again   a verb for making them anew, such as "tune", for messages
    parsed  turns a value of the file into an answer; ValueError for a wrong value
    """

    name: str
    what: str
    again: str
    parsed: Callable[[Any], Any]

    @property
    def path(self) -> Path:
        return cache_folder() / self.name

    def read(self) -> dict[str, Any]:
        """All answers by key. ValueError, with the path, when the file is not what `add` writes."""
        try:
            return {key: self.parsed(answer) for key, answer in self._content().items()}
        except ValueError as error:
            raise ValueError(
                f"{self.path}: {self.what} are corrupt ({str(error).removeprefix(f'{self.path}: ')}); delete the file"
                f" to {self.again} anew"
            ) from error

    def add(self, key: str, answer: Any) -> None:
        """Writes an answer into the file; warns if the file cannot be written.

        The file is read again first, since another process may have added answers. ValueError for an answer that
        `parsed` does not take, and for a file that holds no JSON object.
        """
        self.parsed(answer)
        try:  # stacklevel=3: the warning names the caller of the function that has called `add`
            write_json(self.path, dict(sorted((self._content() | {key: answer}).items())))
        except OSError as error:
            warnings.warn(f"{self.path}: {self.what} last for this process only: {error}", stacklevel=3)

    def _content(self) -> dict[str, Any]:
        """The object in the file; an empty one where there is no file."""
        content: dict[str, Any] = read_json(self.path) if self.path.is_file() else {}
        hold((isinstance(content, dict), f"{self.path}: it must be an object; got {shortly(content)}"))
        return content
