"""The Transformer language model. `transformer.py` first; what it is made of stands beside it."""

from lmsys.model.transformer import BLOCKS_PER_GRAPH, Loss, TransformerLM

__all__ = ["BLOCKS_PER_GRAPH", "Loss", "TransformerLM"]
