"""Uninitialised memory that no test may mistake for a result."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def poison(replace: Callable[[Any, str, Any], Any]) -> None:
    """Uninitialised floating-point memory is NaN from now on, by `replace(owner, name, function)`. Once is enough."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and x.device.type != "meta":
                x.detach().fill_(float("nan"))
            return x

        wrapper.poisoned = True  # type: ignore[attr-defined]
        return wrapper

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]:
        if not hasattr(getattr(owner, name), "poisoned"):
            replace(owner, name, poisoned(getattr(owner, name)))
