"""Vocabulary and merges in files, as GPT-2's: JSON and lines of text, with a printable character for each byte.

Source: Radford et al. 2019 (GPT-2), the released encoder.py, `bytes_to_unicode`.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path

from lmsys.files import replacing
from lmsys.strict_json import read_json
from lmsys.values import shortly

NAMES = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")
_VERSION = "#version: 0.2"
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHAR_OF = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTE_OF = {char: byte for byte, char in _CHAR_OF.items()}


def names(folder: Path) -> tuple[Path, Path]:
    """The vocabulary's and the merges' file. ValueError when the folder has no such pair."""
    for vocab, merges in NAMES:
        if (folder / vocab).is_file() and (folder / merges).is_file():
            return folder / vocab, folder / merges
    raise ValueError(f"{folder}: has neither {' nor '.join(' with '.join(pair) for pair in NAMES)}")


def save(
    folder: Path, vocab: Mapping[int, bytes], merges: Sequence[tuple[bytes, bytes]], special_tokens: Sequence[str]
) -> None:
    """Special tokens stand as they are.

    ValueError for one that an ordinary token is written as, and for a token that is neither a byte, made by a merge
    nor special: it would be read as special.
    """
    ordinary = {bytes([byte]) for byte in range(256)} | {left + right for left, right in merges}
    specials = {token.encode(): token for token in special_tokens}
    if strange := set(vocab.values()) - ordinary - specials.keys():
        raise ValueError(f"token {min(strange)!r} cannot be saved: no byte, made by no merge, and not special")
    if clash := {as_written(token) for token in ordinary}.intersection(special_tokens):
        raise ValueError(f"special token {min(clash)!r} cannot be saved: an ordinary token is written so")
    written = {specials.get(token) or as_written(token): number for number, token in sorted(vocab.items())}
    folder.mkdir(parents=True, exist_ok=True)
    vocab_name, merges_name = NAMES[0]
    content = json.dumps(written, ensure_ascii=False).encode()
    head = f"{_VERSION} {_told(len(merges), content)}"
    lines = [head, *(f"{as_written(left)} {as_written(right)}" for left, right in merges), ""]
    with replacing(folder / merges_name) as file:
        file.write("\n".join(lines).encode())
    with replacing(folder / vocab_name) as file:
        file.write(content)


def load(
    vocab: Path, merges: Path, named: Collection[str] = ()
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]:
    """Vocabulary, merges, and as special tokens what is neither a byte nor made by a merge.

    ValueError, with file and place, for what is not written like that, and for merges that were cut. Those are known by
    the first line, where it is ours; else by the vocabulary: what a merge made is two tokens of it put together. A
    special token hardly ever is: no ordinary token has letters beside signs, as <|endoftext|> has. One that is, such as
    </, is taken where it is `named`. A lost merge is not missed where another makes the same token.
    """
    head, lines = _lines(merges)
    pairs = [_read_merge(merges, number, line) for number, line in lines]
    ordinary = {*_BYTE_OF, *(left + right for left, right in pairs)}
    try:
        written = read_json(vocab)
    except FileNotFoundError as error:
        raise ValueError(f"{vocab}: cannot be read: {error.strerror}") from error
    if not isinstance(written, dict) or not all(type(number) is int for number in written.values()):
        raise ValueError(f'{vocab}: must be an object of token: id, as {{"!": 0, ...}}')
    if len(set(written.values())) != len(written):
        twice = next(number for number, count in Counter(written.values()).items() if count > 1)
        raise ValueError(f"{vocab}: id {twice} is given twice")
    found = {number: _bytes(text) if text in ordinary else text.encode() for text, number in written.items()}
    special_tokens = [text for text in sorted(written, key=written.__getitem__) if text not in ordinary]
    told = re.fullmatch(rf"{_VERSION} (merges: .+)", head.rstrip("\r"))
    if told and told[1] != _told(len(pairs), _content(vocab)):
        raise ValueError(f"{merges}: cut, or not of the tokenizer that {vocab} is of: make both anew")
    lost = [] if told else [text for text in special_tokens if text not in named and _is_pair(text, written)]
    if lost:
        such = f"{len(lost):,} of the tokens in {vocab}, such as {shortly(lost[0])}"
        raise ValueError(f"{merges}: lacks the merges of {such}: it is cut; or name them as special tokens")
    return found, [(_bytes(left), _bytes(right)) for left, right in pairs], special_tokens


def _is_pair(text: str, known: Container[str]) -> bool:
    return any(text[:place] in known and text[place:] in known for place in range(1, len(text)))


def _told(num_merges: int, vocab: bytes) -> str:
    """The words behind the version of a merges file of ours, by which a pair is known to be whole: others ignore it."""
    return f"merges: {num_merges} vocab: {hashlib.sha256(vocab).hexdigest()[:16]}"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot read it: {error.strerror}") from error


def _lines(path: Path) -> tuple[str, list[tuple[int, str]]]:
    """The first line, where it tells a version, and all others that are not empty, numbered."""
    try:
        text = _content(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start:,}") from None
    lines = list(enumerate(text.split("\n"), 1))  # splitlines would also split at characters that stand for bytes
    head = lines.pop(0)[1] if lines[0][1].startswith("#version") else ""
    return head, [(number, line) for number, line in lines if line]


def _read_merge(path: Path, number: int, line: str) -> tuple[str, str]:
    left, _, right = line.rstrip("\r").partition(" ")
    if not left or not right or not all(char in _BYTE_OF for char in left + right):
        raise ValueError(f"{path}, line {number}: {shortly(line)} is no merge; one is written as two tokens: 'Ġ t'")
    return left, right


def as_written(token: bytes) -> str:
    """The token with a printable character for each byte."""
    return "".join(map(_CHAR_OF.__getitem__, token))


def _bytes(text: str) -> bytes:
    return bytes(map(_BYTE_OF.__getitem__, text))
