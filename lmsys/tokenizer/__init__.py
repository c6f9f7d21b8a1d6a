"""Byte-level BPE: `train` learns a `Tokenizer` from text files, which encodes and decodes.

codec.py encodes, training.py learns merges, pretokens.py splits text, chunks.py reads files; naive.py is the definition
that the others are tested against.
"""

from lmsys.tokenizer.codec import Tokenizer
from lmsys.tokenizer.training import train

__all__ = ["Tokenizer", "train"]
