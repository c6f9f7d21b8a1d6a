"""Byte-level BPE: `train` learns a `Tokenizer` from text files, which encodes and decodes.

codec.py encodes, training.py learns merges, pretokens.py splits text, chunks.py reads files, engines.py adapts other
people's tokenizers; naive.py is the definition with which codec.py and training.py are compared. Begin with codec.py.
"""

from lmsys.tokenizer.codec import Tokenizer
from lmsys.tokenizer.training import train

__all__ = ["Tokenizer", "train"]
