"""Attention: one signature, many implementations. `call.py` has the public function `attention`.

Users import the names in `__all__` from here. A *row* is an implementation in the table of `table.py`, with the cases
(calls, `AttentionCase`) that it supports and facts about it (`AttentionTraits`). A new kernel is a file in this folder
and one row in the table: see CONTRIBUTING.md. `contract.py` says what `attention` expects of a row, and `pattern.py`
has the options of a call, such as windows and documents.
"""

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
