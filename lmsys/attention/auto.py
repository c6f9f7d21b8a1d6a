"""The order in which `attention(..., impl="auto")` tries the rows of the table for a case, the fastest first.

A row is an implementation of attention, and a case describes one call (`AttentionCase`). `table.py` passes
`fastest_first` to the table, which takes the first row of the order that can run the case. The order comes from
measurements on Hopper: after new ones change FASTER, and for options the constants below it.
`tests/attention/test_auto_order.py` compares the choice with the fastest row of the committed results.
"""

import torch

from lmsys.attention.contract import FEW_QUERIES, AttentionCase


def is_measured(capability: tuple[int, int] | None) -> bool:
    """True for GPUs on which the rows of the table were timed: NVIDIA's Hopper, compute capability 9.0."""
    return capability == (9, 0) and torch.version.hip is None  # AMD's gfx90a has that number, too


ANY = 2**63  # more than any number of keys or queries: no limit
# Shapes in which another row than `flash_gluon` is the fastest, on Hopper. The keys of the dict are (grad, head_dim,
# causal). An entry is (row, most keys, least queries, most queries), where queries are counted over all heads and batch
# entries, B H Q. For a case the rows of all entries that it fits come first, in this order, and then `flash_gluon`. An
# entry of `flash_gluon` itself keeps its shapes for `flash_gluon`, although they also fit the entry behind it.
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


# Shapes under a causal window or documents in which `flash_gluon` was the fastest, on one H200. They have at least
# MANY_QUERIES queries over all heads and batch entries (B H Q), LONG queries in a sequence and as many keys, and a
# window of LEAST_WINDOW keys, or of the number that WIDER_WINDOW has for (grad, head_dim). Smaller shapes were slower,
# or have not been timed. Under documents `flash_triton` trains as fast at head_dim 64, or faster, from
# MOST_IN_DOCUMENTS queries (B H Q) on.
MANY_QUERIES, LONG, LEAST_WINDOW, MOST_IN_DOCUMENTS = 2**18, 1024, 256, 2**19
WIDER_WINDOW = {(True, 64): 512}


def fastest_first(case: AttentionCase) -> tuple[str, ...]:
    """The names of the rows that "auto" tries, in order: on Hopper as measured, on other GPUs torch's choice first.

    Options are the arguments of `attention` in `pattern.OPTIONS`, such as windows and documents. A name may occur
    twice.

    On a CPU, kernels of Triton would run in its interpreter, so only torch's and our plain rows are tried.

    On Hopper:
    - `flash_gluon` comes first, except in the shapes of FASTER. Behind it, for cases that it cannot run, comes cuDNN:
      its forward is faster than `flash_triton`'s, and above head_dim 64 its backward, too. With gradients and a
      head_dim of at most 64 `flash_triton` comes before cuDNN, since it trains faster.
    - In float32 SDPA's memory-efficient kernel comes first, as Triton multiplies without tensor cores there.
    - With options, and for a forward of few queries on more keys, `flash_triton` comes first, in float32 too: it skips
      hidden tiles, keeps NaN in hidden keys out of the results by itself, and divides the keys of few queries among
      programs. If a forward of few queries has no options, and 1 GiB of keys and values or more, cuDNN comes first.
    - Under a causal window or documents, or both, `flash_gluon` comes before these in large calls (`_suits_gluon`).

    On other GPUs torch's own choice, `sdpa`, comes first. With options `flash_triton` comes first on NVIDIA's GPUs:
    SDPA needs a mask of Q x K bytes for options, and skips no tile. On AMD's GPUs `flash_triton` is known to compile
    without spills, but its speed is not known, so `sdpa` stays first.
    """
    if case.device == "cpu":
        return "sdpa_flash", "vectorized"
    if not is_measured(case.capability):
        return (
            ("flash_triton", "sdpa", "vectorized")
            if case.options and torch.version.hip is None
            else ("sdpa", "flash_triton", "vectorized")
        )
    queries = case.batch * case.heads * case.queries
    if case.options or (case.queries <= FEW_QUERIES and case.queries < case.keys and not case.grad):
        # From 1 GiB of keys and values on (2 * 2**28 numbers of 2 bytes), cuDNN is faster on an H200, and as fast on an
        # H100.
        is_large = not case.options and case.batch * case.kv_heads * case.keys * case.head_dim >= 2**28
        first = ("sdpa_cudnn", "flash_triton") if is_large else ("flash_triton", "sdpa_cudnn")
        gluon = ("flash_gluon",) if _suits_gluon(case, queries) else ()
        return *gluon, *first, "sdpa_efficient", "vectorized"
    if case.dtype == "float32":
        return "sdpa_efficient", "flash_triton", "vectorized"
    faster = [
        row
        for row, keys, least, most in FASTER.get((case.grad, case.head_dim, case.causal), ())
        if case.keys <= keys and least <= queries <= most
    ]
    next_ = ("flash_triton", "sdpa_cudnn") if case.grad and case.head_dim <= 64 else ("sdpa_cudnn", "flash_triton")
    return *faster, "flash_gluon", *next_, "sdpa_flash", "sdpa_efficient", "vectorized"


def _suits_gluon(case: AttentionCase, queries: int) -> bool:
    """True for cases with options in which `flash_gluon` comes first on Hopper. queries: B H Q."""
    if not (case.options and case.options.keys() <= {"window", "documents"} and case.causal):
        return False
    least = WIDER_WINDOW.get((case.grad, case.head_dim), LEAST_WINDOW)
    most = MOST_IN_DOCUMENTS if case.documents and case.grad and case.head_dim == 64 else ANY
    return (
        MANY_QUERIES <= queries < most
        and LONG <= case.queries == case.keys
        and not (isinstance(case.window, int) and case.window < least)
    )
