"""Byte-level BPE: training, encoding, decoding."""

from lmsys.tokenizer.codec import Tokenizer
from lmsys.tokenizer.training import train

__all__ = ["Tokenizer", "train"]
