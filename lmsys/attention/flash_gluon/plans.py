"""The settings of the kernels, by head dimension, mask and length, and why each won.

Found by `python -m lmsys.attention.flash_gluon.tune` on one H200 (bfloat16, 16,384 tokens, H D = 2048).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardPlan:
    """How `forward_kernel` runs."""

    consumers: int  # warp groups that compute, 64 queries each
    stages: int  # tiles of keys, and of values, in the ring
    ping_pong: bool  # consumers take turns at the tensor cores, so that one's softmax runs under another's matmul
    named: bool  # stages are released through a named barrier: an mbarrier costs 128 threads a BAR.SYNC
    dynamic: bool  # the next tile comes from a counter, not from the CTA's number
    l2_mib: int  # of keys and values that heads worked on together may take; 0: one head after another


@dataclass(frozen=True)
class BackwardPlan:
    """How `backward_kernel` runs."""

    prefetch: bool  # the log-sum-exp is loaded a step ahead, rather than after the scores
    named: bool
    fused: bool  # the last CTA to add to a tile of dq rounds it, rather than a kernel after all
    l2_mib: int  # of what heads worked on together read and add up


Plans = dict[tuple[int, bool], tuple[tuple[int, ForwardPlan], ...]]
ANY = 2**31

# (head_dim, causal): (keys up to, plan), ...
FORWARD: dict[tuple[int, bool], tuple[tuple[int, ForwardPlan], ...]] = {
    (64, True): ((2048, ForwardPlan(2, 3, True, True, True, 32)), (ANY, ForwardPlan(3, 2, True, True, True, 32))),
    (64, False): ((1024, ForwardPlan(2, 3, True, True, True, 0)), (ANY, ForwardPlan(3, 2, True, True, False, 0))),
    (128, True): ((1024, ForwardPlan(2, 2, True, False, True, 32)), (ANY, ForwardPlan(2, 2, False, False, True, 32))),
    (128, False): ((ANY, ForwardPlan(2, 2, True, True, False, 0)),),
}
BACKWARD: dict[tuple[int, bool], tuple[tuple[int, BackwardPlan], ...]] = {
    (64, True): ((ANY, BackwardPlan(False, True, True, 5)),),
    (64, False): ((ANY, BackwardPlan(False, True, True, 0)),),
    (128, True): ((ANY, BackwardPlan(True, False, True, 11)),),
    (128, False): ((ANY, BackwardPlan(True, True, True, 0)),),
}


def forward_plan(head_dim: int, causal: bool, keys: int) -> ForwardPlan:
    return next(plan for longest, plan in FORWARD[head_dim, causal] if keys <= longest)


def backward_plan(head_dim: int, causal: bool, keys: int) -> BackwardPlan:
    return next(plan for longest, plan in BACKWARD[head_dim, causal] if keys <= longest)


def heads_at_once(l2_mib: int, bytes_per_head: int) -> int:
    """A power of two of heads that fit together."""
    heads = 1
    while 2 * heads * bytes_per_head <= l2_mib * 2**20:
        heads *= 2
    return heads
