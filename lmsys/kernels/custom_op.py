"""Custom operators: they make a kernel of ours a node of torch.compile's graphs."""

from collections.abc import Callable
from typing import Any

import torch


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `lmsys::<name>`, into which torch.compile does not look; `fake` makes results of the right shapes.

    It is defined by torch.library's lower-level calls: `torch.library.custom_op` costs the host two to three times as
    much.
    """
    name = f"lmsys::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.lmsys, name.removeprefix("lmsys::")).default
