"""Custom operators: they make a kernel of ours a node that torch.compile, torch.func and dispatch modes see."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of plain values, which torch.compile calls as it traces.

    `torch.compiler.assume_constant_result` does it, too, but imports the compiler, which takes about a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any], batched: bool = False
) -> Any:
    """The operator `lmsys::<name>`, into which nobody looks; `fake` makes results of the right shapes.

    `batched`: all tensors have a batch as their first dimension, into which `torch.func.vmap` folds its own.

    It is defined by torch.library's lower-level calls: `torch.library.custom_op` costs the host two to three times as
    much.
    """
    full = f"lmsys::{name}"
    torch.library.define(full, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(full, "default", function)
    torch.library.register_fake(full, fake)
    operator = getattr(torch.ops.lmsys, name).default
    if batched:
        torch.library.register_vmap(full, _folding(operator))
    return operator


def _folding(operator: Any) -> Callable[..., Any]:
    """The rule of vmap for an operator of batches (B or 1, ...): it is called once, on (V · B, ...)."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        def folded(x: Any, dim: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)

        batch = args[0].shape[1 if in_dims[0] == 0 else 0]
        results = operator(*tree_map(folded, args, in_dims))
        return tuple(x.unflatten(0, (info.batch_size, batch)) for x in results), (0,) * len(results)

    return rule
