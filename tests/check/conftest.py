"""In these tests a reference (`lmsys.testing.Oracle`) is computed once for all rows that are checked on equal inputs.

Without that, references would take two thirds of the time of a check. The fixture below replaces `Oracle` in
lmsys/check by `KeptOracle` for every test of this folder.
"""

import hashlib
from typing import Any

import pytest
import torch

from lmsys.attention import AttentionCase
from lmsys.check import attention, extremes
from lmsys.testing import Inputs, Oracle

KEPT: dict[Any, dict[str, Any]] = {}  # the attributes of each oracle, by its case, inputs and options


def digest(inputs: Inputs) -> bytes:
    """A digest of the values of all input tensors, whatever their strides are."""
    sha = hashlib.sha256()
    for x in inputs.tensors.values():
        sha.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.digest()


class KeptOracle(Oracle):
    """An oracle that takes its results from an earlier one of the same case, inputs and options, if there was one.

    With a `pattern` among the options it always computes anew, since tensors in a pattern cannot be part of a key.
    """

    def __init__(self, case: AttentionCase, inputs: Inputs, **options: Any):
        if options.get("pattern") is not None:
            super().__init__(case, inputs, **options)
            return
        key = case, inputs.seed, digest(inputs), *sorted(options.items(), key=str)
        if key not in KEPT:
            super().__init__(case, inputs, **options)
            KEPT[key] = vars(self).copy()
        vars(self).update(KEPT[key])


@pytest.fixture(autouse=True)
def references_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, extremes):
        monkeypatch.setattr(module, "Oracle", KeptOracle)
