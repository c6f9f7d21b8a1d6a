"""One signature, many implementations: `table.py` has the rows, `call.py` the function that calls them."""

from lmsys.attention.auto import is_measured
from lmsys.attention.call import attention, row_of
from lmsys.attention.contract import AttentionCase
from lmsys.attention.documents import Documents
from lmsys.attention.lse import merge
from lmsys.attention.pattern import Pattern
from lmsys.attention.table import ATTENTION
from lmsys.traits import AttentionTraits

__all__ = [
    "ATTENTION",
    "AttentionCase",
    "AttentionTraits",
    "Documents",
    "Pattern",
    "attention",
    "is_measured",
    "merge",
    "row_of",
]
