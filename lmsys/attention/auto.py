"""The rows that `impl="auto"` tries for a case, in the order that was measured: `table.py` calls `fastest_first`.

Change FASTER after new measurements; `tests/attention/test_auto_order.py` compares it with committed results.
"""

import torch

from lmsys.attention.contract import FEW_QUERIES, AttentionCase


def is_measured(capability: tuple[int, int] | None) -> bool:
    """True for GPUs on which the rows of the table were timed: NVIDIA's Hopper, compute capability 9.0."""
    return capability == (9, 0) and torch.version.hip is None  # AMD's gfx90a has that number, too


ANY = 2**63  # more than any number of keys or queries: no limit
# Shapes in which another row than `flash_gluon` is the fastest, by (grad, head_dim, causal). Each is (row, most keys,
# least queries, most queries), where queries are counted over all heads and batch entries, B H Q. The rows of all
# entries that a case fits come first, in this order. `flash_gluon`, which follows them anyway, is listed where its
# entry is an exception to the next one.
FASTER: dict[tuple[bool, int, bool], tuple[tuple[str, int, int, int], ...]] = {
    (False, 64, True): (("flash_triton", ANY, 0, 32_768),),
    (False, 64, False): (("flash_triton", ANY, 0, 24_576), ("sdpa_cudnn", ANY, 0, 49_152)),
    (False, 128, True): (("flash_triton", ANY, 0, 12_288), ("sdpa_cudnn", 512, 0, ANY)),
    (False, 128, False): (("flash_triton", ANY, 0, 12_288), ("sdpa_cudnn", 512, 0, ANY)),
    (True, 64, True): (("flash_triton", 512, 0, ANY), ("flash_triton", 1024, 262_144, ANY)),
    (True, 64, False): (("flash_gluon", 128, 0, ANY), ("flash_triton", 512, 0, 24_576)),
    (True, 128, True): (("flash_triton", 256, 0, ANY), ("flash_triton", 512, 262_144, ANY)),
    (True, 128, False): (("flash_triton", 256, 0, ANY),),
}


def fastest_first(case: AttentionCase) -> tuple[str, ...]:
    """The names of the rows that "auto" tries, in order: on Hopper as measured, on other GPUs torch's choice first.

    On Hopper `flash_gluon` comes first, but for the shapes in FASTER. Where it cannot run, cuDNN has the faster
    forward, and above head_dim 64 the faster backward; up to 64 `flash_triton` trains faster. In float32 Triton
    multiplies without tensor cores, so SDPA's memory-efficient kernel comes first. With options, and for a forward of
    few queries on more keys, `flash_triton` comes first, in float32 too: it skips hidden tiles, keeps NaN in hidden
    keys out of the results by itself, and divides the keys of few queries among programs. The exception is a forward
    of few queries, without options, on 1 GiB of keys and values or more: there cuDNN comes first. A name may stand
    twice. On a CPU no row is tried that Triton would interpret.

    On other GPUs options, such as windows and documents, are an exception: SDPA needs a mask of Q x K bytes for them,
    and skips no tile. With options `flash_triton` comes first there, except on AMD's: it is known to compile without
    spills, but its speed is not known.
    """
    if case.device == "cpu":
        return "sdpa_flash", "vectorized"
    if not is_measured(case.capability):
        return (
            ("flash_triton", "sdpa", "vectorized")
            if case.options and torch.version.hip is None
            else ("sdpa", "flash_triton", "vectorized")
        )
    if case.options or (case.queries <= FEW_QUERIES and case.queries < case.keys and not case.grad):
        # From 1 GiB of keys and values on (2 * 2**28 numbers of 2 bytes), cuDNN is faster on an H200, and as fast on an
        # H100.
        is_large = not case.options and case.batch * case.kv_heads * case.keys * case.head_dim >= 2**28
        first = ("sdpa_cudnn", "flash_triton") if is_large else ("flash_triton", "sdpa_cudnn")
        return *first, "sdpa_efficient", "vectorized"
    if case.dtype == "float32":
        return "sdpa_efficient", "flash_triton", "vectorized"
    queries = case.batch * case.heads * case.queries
    faster = [
        row
        for row, keys, least, most in FASTER.get((case.grad, case.head_dim, case.causal), ())
        if case.keys <= keys and least <= queries <= most
    ]
    next_ = ("flash_triton", "sdpa_cudnn") if case.grad and case.head_dim <= 64 else ("sdpa_cudnn", "flash_triton")
    return *faster, "flash_gluon", *next_, "sdpa_flash", "sdpa_efficient", "vectorized"
