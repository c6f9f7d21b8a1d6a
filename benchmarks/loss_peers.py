"""Other people's heads and losses, as rows (implementations) of `benchmarks.bench_loss`, whose table LOSSES names them.

docs/measurement.md says which of their settings are chosen here. A row maps hidden states (N tokens, M features), a
weight (V classes, M), both float32, and targets (N) to the mean loss. In bf16 and fp16 it is called under autocast; a
row that autocast does not reach casts its inputs itself. `<row>_supports` returns None, or why the row cannot run a
case. A new row is a function here, with its `_supports`, and an `Entry` of LOSSES. Packages are imported on first use,
as most machines have none of them.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import DTYPES
from lmsys import values
from lmsys.model import linear


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own loss, in chunks of tokens. Autocast does not reach inside, so inputs are cast before.

    torch 2.13 takes chunks of one or two tokens if the vocabulary is large and the features are few, such as 10,000 and
    64. On an AMD EPYC matrix products of such chunks sum over the vocabulary term by term. In float32 the gradient of
    hidden then has several times the error that it has in the usual loss, and the benchmark calls it wrong.
    """
    return torch.nn.functional.linear_cross_entropy(
        *_cast(hidden, weight), targets, options=torch.nn.LinearCrossEntropyOptions()
    )


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's loss, in chunks. `accum_dtype` makes it add up the gradient of the weight in float32.

    Autocast would reach its matmuls, but would cast the whole weight twice for each chunk. So inputs are cast before.
    """
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy(
        *_cast(hidden, weight), targets, accum_dtype=torch.float32
    )


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, impl: str = "cce") -> Tensor:
    """Apple's loss, which follows autocast.

    impl  the package's name of a way to add up gradients, which also decides whether small terms are left out
    """
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, targets, impl=impl)


# In float32 the benchmark calls these two rows wrong. On one H200, with 101 tokens and 517 classes, the error of the
# gradient of hidden was 2.4 and 1.9 times its budget. The loss and the gradient of the weight were right there; with
# 104 tokens and 640 classes, and in bfloat16, all results were right.
cut_cross_entropy_kahan = partial(cut_cross_entropy, impl="cce_kahan_full_c")
cut_cross_entropy_exact = partial(cut_cross_entropy, impl="cce_exact")


def quack(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """QuACK's loss, in chunks, which follows autocast and adds the gradient of the weight in float32."""
    return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(hidden, weight, targets)


def _cast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that autocast gives a matmul."""
    return [x.to(linear.matmul_dtype(x)) for x in tensors]


def torch_chunked_supports(_: object) -> str | None:
    """None, or why this torch cannot run `torch_chunked`, whatever the case."""
    able = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if able else f"torch {torch.__version__} cannot make this loss in chunks; torch 2.13 and later can"


def _why_not(
    case: Any, module: str, least: tuple[int, int], precisions: tuple[str, ...] = tuple(DTYPES), multiple: int = 1
) -> str | None:
    """None, or why a package cannot run a case. ImportError without the package, which `Entry.why_not` explains.

    module      the package's module that computes the loss
    least       the lowest compute capability that it runs on
    precisions  the precisions that it supports
    multiple    the numbers of tokens, features and classes must be multiples of this
    """
    package = module.partition(".")[0]
    reasons = values.sentences_of(
        (case.device != "cuda", f"{package} runs on CUDA only"),
        (
            case.precision not in precisions,
            f"{package} knows {' and '.join(precisions)}, not {case.precision}",
        ),
        (
            any(size % multiple for size in (case.tokens, case.d_model, case.vocab_size)),
            f"{package} takes multiples of {multiple} as tokens, d_model and vocab_size; got {case.tokens},"
            f" {case.d_model} and {case.vocab_size}",
        ),
    )
    if (reason := next(reasons, None)) is not None:
        return reason
    importlib.import_module(module)  # only to raise an ImportError where the package is missing
    capable = torch.cuda.get_device_capability() >= least
    return None if capable else f"{package} needs a GPU of compute capability {least[0]}.{least[1]} or later"


liger_supports = partial(_why_not, module="liger_kernel.transformers.functional", least=(7, 0))
# PyPI's version, 25.1.1, has no such module: it does not follow autocast, and adds gradients in bfloat16 alone.
cut_cross_entropy_supports = partial(_why_not, module="cut_cross_entropy.cce_utils", least=(8, 0))
quack_supports = partial(
    _why_not, module="quack.linear_cross_entropy", least=(9, 0), precisions=("bf16", "fp16"), multiple=8
)
