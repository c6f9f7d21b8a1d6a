"""Engines (lmsys/tokenizer/engines.py): packages that encode faster than our tokenizer, once their ids equal ours.

Each package that is installed is tested; the tests of others are skipped, with the command that installs them. `Fake`
is an engine that needs no such package, and gives one wrong id. `choose` compares pieces of the text, the first and
some that it draws, before it takes an engine.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmsys import strict_json
from lmsys.tokenizer import Tokenizer, chunks, engines
from lmsys.tokenizer.training import learn_merges
from lmsys.training import config, data
from tests.support.texts import END, PIECES, special_lists

ENGINES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"needs {name}: python -m pip install {name}"
        ),
    )
    for name in engines.ENGINES
]
# Packages know the letters of their version of Unicode, so characters that this Python does not know are left out.
characters = st.characters(exclude_categories=["Cs", "Cn"])
texts = st.lists(
    st.sampled_from([*PIECES, "the ", "\r\n\r\n", "x" * 300, "'" * 70, "é" * 90, " " * 80]) | characters, max_size=30
).map("".join)
words = st.dictionaries(st.text("abc é'", min_size=1, max_size=9).map(str.encode), st.integers(1, 5), max_size=12)


@cache
def trained(counts: tuple[tuple[bytes, int], ...], specials: tuple[str, ...]) -> Tokenizer:
    """A tokenizer that has learned 30 merges from counts of words, or fewer."""
    merges = learn_merges(dict(counts), 30)
    made = dict.fromkeys(left + right for left, right in merges)
    vocab = dict(enumerate([*(bytes([byte]) for byte in range(256)), *made]))
    return Tokenizer(vocab, merges, [special for special in specials if special.encode() not in made])


@pytest.mark.parametrize("name", ENGINES)
@given(words, special_lists, st.lists(texts, min_size=1, max_size=3))
def test_every_engine_has_our_ids(
    name: str, counts: dict[bytes, int], specials: list[str], documents: list[str]
) -> None:
    tokenizer = trained(tuple(counts.items()), tuple(specials))
    engine = engines.ENGINES[name](tokenizer)
    for document in documents:
        ids = engine.encode_array(document.encode())
        assert ids.dtype == tokenizer.dtype and ids.tolist() == tokenizer.encode(document)


def part(folder: Path, text: str) -> chunks.Chunk:
    """A file with this text, as tokenizing takes files."""
    file = folder / "text"
    file.write_bytes(text.encode())
    return chunks.whole(file)


@given(words, special_lists, st.text(max_size=60), st.sampled_from(["auto", "own", *engines.ENGINES]))
def test_a_short_text_has_our_ids_or_the_engine_is_refused(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[bytes, int], specials: list[str], text: str, name: str
) -> None:
    """Texts have any characters, also those of a later Unicode. Vocabularies may not be in the order of the merges."""
    assume(name in ("auto", "own") or importlib.util.find_spec(name) is not None)
    tokenizer = trained(tuple(counts.items()), tuple(specials))
    shuffled = dict(enumerate(reversed(tokenizer.vocab.values())))
    for ours in (tokenizer, Tokenizer(shuffled, tokenizer.merges, tokenizer.special_tokens)):
        text = text.encode(errors="replace").decode()
        file = part(tmp_path_factory.mktemp("text"), text)
        try:
            engine = engines.choose(name, ours, [file], say=lambda _: None)
        except ValueError as error:
            assert name != "auto" and "other ids than this library" in str(error)
        else:
            (ids,) = data.encode_files(ours, [file], engine=engine) if text else ([],)
            assert list(ids) == ours.encode(text) and (name != "own" or engine is None)


class Fake(engines.Engine):
    """An engine without a package: it gives our ids, but 0 in place of the id `wrong`."""

    package = "numpy"
    wrong = 256

    def _function(self, module: Any) -> Any:
        own = Tokenizer(self.tokenizer.vocab, self.tokenizer.merges)
        return lambda texts: [[0 if number == self.wrong else number for number in own.encode(text)] for text in texts]


class Right(Fake):
    wrong = -1


class Refusing(Fake):
    def _function(self, module: Any) -> Any:
        raise RuntimeError("no such vocabulary")


class Missing(Right):
    needs = ("no_such_package",)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the engines by fakes, and makes the compared pieces short: 3 first ones and 4 others, of 100 bytes."""
    kinds = {"missing": Missing, "refusing": Refusing, "wrong": Fake, "right": Right}
    monkeypatch.setattr(engines, "ENGINES", kinds)
    monkeypatch.setattr(engines, "FASTER", tuple(kinds))
    for name in ("PIECE", "FIRST", "DRAWN"):
        monkeypatch.setattr(engines, name, {"PIECE": 100, "FIRST": 3, "DRAWN": 4}[name])


AB = Tokenizer({number: bytes([number]) for number in range(256)} | {256: b"ab"}, [(b"a", b"b")], [END])


@pytest.mark.usefixtures("fakes")
def test_auto_passes_over_missing_and_wrong_engines_and_says_why(tmp_path: Path) -> None:
    lines = list[str]()
    engine = engines.choose("auto", AB, [part(tmp_path, f"cd é {END}ab")], say=lines.append)
    assert type(engine) is Right and engine.name.endswith("compared with ours on 21 of 21 bytes")
    assert [line.partition(" is not used: ")[0] for line in lines] == ["missing", "refusing", "wrong"]
    assert "No module named 'no_such_package'" in lines[0] and "python -m pip install missing brings it" in lines[0]
    assert lines[1].endswith("no such vocabulary")
    assert "from byte 19 of" in lines[2] and "b'ab': [0] in place of [256]" in lines[2]


@pytest.mark.usefixtures("fakes")
def test_a_named_engine_that_is_missing_or_wrong_is_refused(tmp_path: Path) -> None:
    text = part(tmp_path, "cd ab")
    for name, message in (
        ("missing", "engine='missing': No module named 'no_such_package'; python -m pip install missing brings it"),
        ("refusing", "engine='refusing': no such vocabulary"),
        ("wrong", r"engine='wrong': numpy .* has other ids than this library from byte 3 of .*text on"),
        ("gigatokens", "engine='gigatokens' must be one of own, auto, missing"),
    ):
        with pytest.raises(ValueError, match=message):
            engines.choose(name, AB, [text])
    assert engines.choose("own", AB, [text]) is None


@pytest.mark.usefixtures("fakes")
def test_pieces_of_a_long_text_are_compared(tmp_path: Path) -> None:
    """The first pieces are always compared. A wrong id elsewhere is noticed only if its piece is drawn."""
    refused = list[bool]()  # for each place of the only word with a wrong id
    for place in range(40):
        words_of_text = ["cd "] * 1400
        words_of_text[place * 35] = "ab "
        try:
            engine = engines.choose("wrong", AB, [part(tmp_path, "".join(words_of_text))])
            refused.append(False)
            assert engine is not None
            part_of_text, whole = re.findall(r"[\d,]+(?= of | bytes)", engine.name)
            assert 600 < int(part_of_text) < 800 and whole == "4,200"
        except ValueError:
            refused.append(True)
    assert all(refused[:2]) and 4 <= sum(refused) <= 16


def test_the_settings_name_the_engines() -> None:
    assert ("own", "auto", *engines.ENGINES) == config.ENGINES and set(engines.FASTER) < set(engines.ENGINES)


@pytest.mark.usefixtures("fakes")
def test_the_file_beside_the_tokens_names_the_engine(tmp_path: Path) -> None:
    text = part(tmp_path, f"cd ab é {END}{END} ab\r\n")
    for name, engine in (("own", None), ("engine", engines.choose("right", AB, [text]))):
        path = data.tokenize_files(AB, [text], tmp_path / f"{name}.npy", engine=engine)
        ids = data.open_tokens(path, AB)
        assert ids.dtype == np.uint16 and ids.tolist() == AB.encode(text.read())
        facts = strict_json.read_json(path.with_suffix(".json"))
        assert facts["engine"] == (engine.name if engine else "own")


def test_an_engine_of_another_tokenizer_is_refused_and_files_stay(tmp_path: Path) -> None:
    text, path = part(tmp_path, "cd ab"), tmp_path / "ids.npy"
    data.tokenize_files(AB, [text], path)
    other: list[Any] = [Right(Tokenizer(AB.vocab, [], [END])), "gigatoken"]
    for engine in other:
        with pytest.raises(ValueError, match="engine"):
            data.tokenize_files(AB, [text], path, engine=engine)
    assert data.open_tokens(path, AB).tolist() == AB.encode("cd ab") and path.with_suffix(".json").is_file()
    equal = Tokenizer(AB.vocab, AB.merges, AB.special_tokens)
    assert data.tokenize_files(AB, [text], path, engine=Right(equal)) == path


@pytest.mark.usefixtures("fakes")
def test_files_may_be_given_by_their_paths(tmp_path: Path) -> None:
    path = part(tmp_path, "cd ab").path
    assert type(engines.choose("right", AB, [path])) is Right
    with pytest.raises(ValueError, match="absent: there is no such file"):
        engines.choose("right", AB, [tmp_path / "absent"])
