"""The attention table. A new kernel is a file beside this one and a row below."""

from torch import Tensor

from lmsys.attention.contract import AttentionCase, adapt, as_4d, case_of, check_inputs
from lmsys.registry import Entry, Table

__all__ = ["ATTENTION", "AttentionCase", "attention"]


def _ours(name: str, module: str, label: str, extra: str = "") -> Entry:
    module = f"lmsys.attention.{module}"
    return Entry(name, f"{module}:{name}", label, supports=f"{module}:{name}_supports", extra=extra)


def _peer(name: str, label: str, extra: str = "peers") -> Entry:
    module = "lmsys.attention.peers"
    return Entry(name, f"{module}:{name}", label, peer=True, supports=f"{module}:{name}_supports", extra=extra)


def _fastest_first(case: AttentionCase) -> tuple[str, ...]:
    """What "auto" tries, in the order measured on an H200; on a CPU nothing that Triton would interpret.

    Where `flash_gluon` cannot run, cuDNN has the faster forward, and above head_dim 64 the faster backward; up to 64
    `flash_triton` trains faster. None has a fast float32: there Triton multiplies without tensor cores.
    """
    if case.device == "cpu":
        return "sdpa_flash", "vectorized"
    if case.dtype == "float32":
        return "sdpa_efficient", "flash_triton", "vectorized"
    next_ = ("flash_triton", "sdpa_cudnn") if case.grad and case.head_dim <= 64 else ("sdpa_cudnn", "flash_triton")
    return "flash_gluon", *next_, "sdpa_flash", "sdpa_efficient", "vectorized"


ATTENTION = Table(
    "attention",
    [
        Entry("naive", "lmsys.attention.naive:naive", "naive PyTorch"),
        _ours("naive_compiled", "naive", "naive, torch.compile"),
        Entry("vectorized", "lmsys.attention.vectorized:vectorized", "vectorized PyTorch"),
        _ours("flash_torch", "flash_torch", "FlashAttention-2, PyTorch"),
        _ours("flash_triton", "flash_triton", "FlashAttention-2, Triton", extra="triton"),
        _ours("flash_triton_torch_bwd", "flash_triton", "Triton forward, PyTorch backward", extra="triton"),
        _ours("flash_cuda", "flash_cuda", "FlashAttention-2, CUDA C++"),
        Entry(
            "flash_gluon",
            "lmsys.attention.flash_gluon.kernels:flash_gluon",
            "Gluon, Hopper",
            supports="lmsys.attention.flash_gluon.support:flash_gluon_supports",
            extra="triton",
        ),
        _peer("sdpa_math", "SDPA math"),
        _peer("sdpa_flash", "SDPA flash"),
        _peer("sdpa_efficient", "SDPA efficient"),
        _peer("sdpa_cudnn", "SDPA cuDNN"),
        _peer("flex", "FlexAttention"),
        _peer("flash_attn_2", "flash-attn 2", extra=""),
        _peer("flash_attn_4", "flash-attn 4 (CuTe)"),
    ],
    group="lmsys.attention",
    auto=_fastest_first,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, impl: str = "auto"
) -> Tensor:
    """softmax(scale · q kᵀ) v, by the row `impl` of the table.

    q (..., H, Q, D), k and v (..., Hkv, K, D) with H a multiple of Hkv (grouped-query heads), or all
    three (B, S, D); one dtype and device. `causal`: query i sees keys j <= i, aligned at the top left
    as in torch SDPA, also for Q != K. `scale` defaults to D ** -0.5. Returns o, of q's shape and dtype;
    differentiable once. "auto" takes the fastest row that supports the case, on a CPU none that Triton
    interprets; a named row that cannot run it is a ValueError that says why.
    """
    check_inputs(q, k, v, scale)
    scale = None if scale is None else float(scale)
    q4, k4, v4 = as_4d(q), as_4d(k), as_4d(v)
    entry = ATTENTION.pick(impl, case_of(q4, k4, v4, causal=causal, scale=scale))
    return adapt(entry.load())(q4, k4, v4, causal=causal, scale=scale).reshape(q.shape)
