"""References are computed once for all rows that are asked the same: they take two thirds of a check."""

import hashlib
from typing import Any

import pytest
import torch

from lmsys.attention import AttentionCase
from lmsys.check import attention, extremes
from lmsys.testing import Inputs, Oracle

KEPT: dict[Any, dict[str, Any]] = {}


def digest(inputs: Inputs) -> bytes:
    """A digest of every bit, however the tensors lie."""
    sha = hashlib.sha256()
    for x in inputs.tensors.values():
        sha.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha.digest()


class KeptOracle(Oracle):
    """An oracle that is the one before of the same case, inputs and options; of patterns there is a new one each."""

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
