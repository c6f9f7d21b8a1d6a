"""The Transformer language model. Begin with `transformer.py`, which calls the other files.

Training, benchmarks and tests import the names in `__all__` from here.
"""

from lmsys.model.transformer import BLOCKS_PER_GRAPH, Loss, TransformerLM

__all__ = ["BLOCKS_PER_GRAPH", "Loss", "TransformerLM"]
