"""The rows that `impl="auto"` tries for a case, in the order that was measured."""

import torch

from lmsys.attention.contract import FEW_QUERIES, AttentionCase


def is_measured(capability: tuple[int, int] | None) -> bool:
    """True for NVIDIA GPUs of a kind on which the rows of the table were timed: Hopper."""
    return capability == (9, 0) and torch.version.hip is None  # AMD's gfx90a has that number, too


ANY = 2**63  # more than any number of keys or queries
# Shapes in which another row than `flash_gluon` is the fastest, by (grad, head_dim, causal): the row, the most keys,
# and the least and the most queries of all heads and batch entries. `tests/attention/test_auto_order.py` holds them.
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
    """The rows that "auto" tries: on Hopper in the order measured there, on other GPUs torch's own choice first.

    Where `flash_gluon` cannot run, cuDNN has the faster forward, and above head_dim 64 the faster backward; up to 64
    `flash_triton` trains faster. None has a fast float32: there Triton multiplies without tensor cores. Under a pattern
    the first is the one that skips hidden tiles and needs nobody to keep hidden memory apart, and for few queries the
    one that divides the keys among programs. On a CPU there is none that Triton would interpret.

    On GPUs that nobody timed, options are an exception: SDPA has nothing for them but a mask of Q x K bytes, and skips
    no tile. There `flash_triton` is known to compile without spills; how fast it is, is not known.
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
        # Keys and values of 1 GiB or more cuDNN reads faster on an H200, and as fast on an H100.
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
