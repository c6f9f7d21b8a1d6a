"""Custom operators of torch, `torch.ops.lmsys.*`: torch.compile, torch.func and dispatch modes see a kernel as a node.

`lmsys/attention/custom_ops.py` and `lmsys/model/rotary.py` call `define` once for each operator; for a new operator,
call it once more. Functions of `lmsys/attention` that torch.compile must not trace have the decorator `constant`.
"""

from collections.abc import Callable
from typing import Any

import torch


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: torch.compile calls the function while it traces, and treats the result as a constant.

    Its arguments are plain values. `torch.compiler.assume_constant_result` does the same, but imports the compiler,
    which takes about a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any], batched: bool = False
) -> Any:
    """Registers the operator `lmsys::<name>` and returns it. Its implementation is opaque to tracers.

    schema    arguments and results, in the language of torch.library
    function  the implementation
    fake      makes empty results of the right shapes, for tracers
    batched   True if all tensors have a batch as their first dimension: `torch.func.vmap` folds its own into it. Such
              an operator must return a tuple of tensors

    Calls of an operator that `torch.library.custom_op` makes would take the host two to three times as long.
    """
    full = f"lmsys::{name}"
    torch.library.define(full, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(full, "default", function)  # "default": for tensors of all devices
    torch.library.register_fake(full, fake)
    operator = getattr(torch.ops.lmsys, name).default
    if batched:
        torch.library.register_vmap(full, _folding(operator))
    return operator


def _folding(operator: Any) -> Callable[..., Any]:
    """The vmap rule of an operator on tensors (B or 1, ...): one call on (V · B, ...), where V is vmap's batch size.

    The first argument must be a tensor with a batch of B. torch calls the rule with `in_dims`, the dimension of each
    argument that vmap maps over (None: it is not mapped), and takes (results, the dimension of V in each).
    """

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        def folded(x: Any, dim: Any) -> Any:
            """An argument as the operator takes it: a tensor with V folded into its batch, anything else as it is."""
            if not isinstance(x, torch.Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)

        batch = args[0].shape[1 if in_dims[0] == 0 else 0]
        results = operator(*torch.utils._pytree.tree_map(folded, args, in_dims))
        return tuple(x.unflatten(0, (info.batch_size, batch)) for x in results), (0,) * len(results)

    return rule
