"""The Transformer language model. Begin with `transformer.py`; the other files are what it calls."""

from lmsys.model.transformer import BLOCKS_PER_GRAPH, Loss, TransformerLM

__all__ = ["BLOCKS_PER_GRAPH", "Loss", "TransformerLM"]
