"""hypothesis profiles, and memory that no test may mistake for a result."""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point memory is NaN, so an output that a kernel does not write cannot pass."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and x.device.type != "meta" else x

        return wrapper

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
