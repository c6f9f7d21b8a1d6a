"""What a kernel of ours needs around it: to be a node of torch.compile's graphs, and to be launched at little cost."""

from collections.abc import Callable
from typing import Any

import torch


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `lmsys::<name>`, into which torch.compile does not look; `fake` makes results of the right shapes.

    Defined the plain way: `torch.library.custom_op`, which can do more, costs the host two to three times as much.
    """
    name = f"lmsys::{name}"
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.lmsys, name.removeprefix("lmsys::")).default


_binaries: dict[Any, Any] = {}  # by kernel, too: kernels live as long as their modules


def launch(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int, int], args: list[Any], **options: int) -> None:
    """kernel[grid](*args, **options) of a Triton kernel, all arguments by position.

    `key` is all that a binary is specialised on: types, alignment, constants, options, device. To look it up here is
    quicker than to let Triton find it anew in every argument.
    """
    key = id(kernel), *key
    binary = _binaries.get(key)
    if binary is None:
        _binaries[key] = kernel[grid](*args, **options)  # None in Triton's interpreter
    else:
        binary[grid](*args)
