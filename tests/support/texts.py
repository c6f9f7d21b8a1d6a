"""Random texts for tests of the tokenizer: they try every rule by which text is split, and contain special tokens."""

from itertools import pairwise

from hypothesis import strategies as st

from lmsys.tokenizer.pretokens import PAD, Pretokenizer

END = "<|endoftext|>"
SPECIALS = [
    END,
    "<|end|>",
    "<|endoftext|><|end|>",
    "aab",
    "ba",
    "a b",
    "'s",
    "l-",
]  # they contain and overlap each other
# Pieces for every rule of the pattern: letters, digits, blanks, contractions, wide spaces and digits, marks.
PIECES = "a b é ß 中 1 ½ ٣ ' 's 'll 't 'LL . - _ \x1c \u0301 🙂 \x00".split(" ")
PIECES += [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u2003", "\u3000", "\x85", *SPECIALS]
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=40
)
special_lists = st.lists(st.sampled_from(SPECIALS), unique=True, max_size=4)


def pretokens(text: bytes, specials: list[str]) -> list[bytes]:
    """The pre-tokens of a text, in order; joined they are the text."""
    padded = text + bytes(PAD)
    starts = Pretokenizer(specials).starts(padded)
    return [padded[start:end] for start, end in pairwise(starts.tolist())]
