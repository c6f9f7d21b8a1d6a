"""The table of attention rows: `attention` picks one of them, benchmarks measure them, reports list them in this order.

A new kernel is a file beside this one and a row below. Our own rows come first, then peers (other people's code).
`_ours` and `_peer` name the function of a row and its `supports`, which returns None or why the row cannot run a case
(a call, as `AttentionCase` describes it). Their other keywords are the row's traits, which `lmsys/traits.py` and
`Traits` in `lmsys/registry.py` explain. `kernels`, for example, is a regular expression that matches the names of a
row's device kernels, and speedups are relative to the timed row with the largest `baseline`. If you rename a kernel,
change `kernels` here.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from lmsys.attention.auto import fastest_first
from lmsys.registry import Entry, Table
from lmsys.traits import AttentionTraits

# Values of the trait `mask`: "module:function", which makes the intervals or the mask that a row reads in place of a
# pattern.
INTERVALS = "lmsys.attention.pattern:intervals"
BOOLEAN = "lmsys.attention.peers:boolean_mask"  # of rows of SDPA


def _ours(name: str, module: str, label: str, *, extra: str = "", supports: str | None = "", **traits: Any) -> Entry:
    """A row whose function is `name` in a module of this package.

    label     the row's name in plots and tables
    extra     the extra of lmsys that installs the packages that the row needs; "": it needs none
    supports  "module:function" of its `supports`; "": `<name>_supports` of the row's module; None: the row runs every
              case
    traits    fields of `AttentionTraits`
    """
    if supports is not None:
        supports = f"lmsys.attention.{supports or f'{module}:{name}_supports'}"
    return Entry(
        name,
        f"lmsys.attention.{module}:{name}",
        label,
        supports=supports or "",
        extra=extra,
        traits=AttentionTraits.checked(name, traits),
    )


def _peer(
    name: str, label: str, extra: str = "peers", install: str = "", module: str = "peers", **traits: Any
) -> Entry:
    """A row that calls other people's code.

    extra    the extra of lmsys that installs its package; "": none does
    install  what pip installs for it, where no extra does; it stands in the message where the package is missing
    """
    return replace(_ours(name, module, label, extra=extra, **traits), peer=True, install=install)


_flash_attn = partial(_peer, module="peers_flash_attn")

ATTENTION = Table(
    "attention",
    [
        _ours("naive", "naive", "naive PyTorch", supports=None, color="#00bbff", keeps_scores=True, baseline=1),
        _ours("naive_compiled", "naive", "naive, torch.compile", color="#cc6611", keeps_scores=True, compiles=True),
        _ours("vectorized", "vectorized", "vectorized PyTorch", supports=None, color="#445511", keeps_scores=True),
        _ours("flash_torch", "flash_torch", "FlashAttention-2, PyTorch", color="#7700ee", mask=INTERVALS),
        _ours(
            "flash_triton_torch_bwd",
            "flash_triton",
            "Triton forward, PyTorch backward",
            supports="flash_triton:flash_triton_supports",
            extra="triton",
            color="#ddaa00",
            mask=INTERVALS,
            kernels=r"^_(fwd|split_keys|combine)_kernel$",
        ),
        _ours(
            "flash_triton",
            "flash_triton",
            "FlashAttention-2, Triton",
            extra="triton",
            color="#ff88aa",
            isolates=True,
            mask=INTERVALS,
            kernels=r"^_(fwd|split_keys|combine|dq|dq_again|dkdv|dkdv_again)_kernel$",
        ),
        _ours(
            "flash_gluon",
            "flash_gluon.launch",
            "Gluon, Hopper",
            supports="flash_gluon.support:flash_gluon_supports",
            extra="triton",
            color="#111188",
            isolates=True,
            mask=INTERVALS,
            kernels=r"^(forward|preprocess|backward|postprocess|_(fwd|dq|dkdv)_again)_kernel$",
        ),
        _ours(
            "flash_cuda",
            "flash_cuda",
            "FlashAttention-2, CUDA C++",
            color="#552222",
            kernels=r"^(fwd|dq|dkdv)_kernel\b",
        ),
        _peer("sdpa", "SDPA, PyTorch's choice", color="#111122", baseline=3, mask=BOOLEAN),
        _peer("sdpa_math", "SDPA math", color="#994477", keeps_scores=True, mask=BOOLEAN),
        _peer("sdpa_efficient", "SDPA efficient", color="#442255", mask=BOOLEAN),
        _peer("sdpa_flash", "SDPA flash", color="#9977ff", baseline=2, mask=BOOLEAN),
        _peer("sdpa_cudnn", "SDPA cuDNN", color="#aabb55", mask=BOOLEAN),
        _peer("flex", "FlexAttention", color="#4455aa", compiles=True, mask="lmsys.attention.peers:block_mask"),
        _flash_attn("varlen_attn", "torch varlen_attn", extra="", color="#77bb77"),
        _flash_attn(
            "flash_attn_2", "flash-attn 2", extra="", install="flash-attn --no-build-isolation", color="#bb77bb"
        ),
        _flash_attn(
            "flash_attn_3",
            "flash-attn 3, Hopper",
            extra="",
            install="flash-attn-3 from PyTorch's own package index, as docs/install.md says,",
            color="#dd0044",
        ),
        _flash_attn("flash_attn_4", "flash-attn 4 (CuTe)", color="#008855"),
    ],
    group="lmsys.attention",  # the entry-point group by which other packages add rows
    auto=fastest_first,
    traits=AttentionTraits,
)
