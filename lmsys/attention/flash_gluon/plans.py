"""The settings of the kernels, by head dimension, mask and length, and why each won.

The figures are those of the prototypes of these kernels on one H200 (bfloat16, B S = 16,384 tokens, H D = 2048);
`python -m lmsys.attention.flash_gluon.tune` times every candidate again.

- Two consumers of 64 queries at head_dim 128, where a third has no registers; three at 64 from 4k keys on (1k full
  attention: two), whose 192 queries read each key tile less often.
- Ping-pong and release by named barriers: 3 to 6 % at head_dim 64, where a step is short; an mbarrier's arrive costs
  128 threads a BAR.SYNC. At 128 causal the consumers drift apart by themselves: none from 2k on.
- The counter: static orders lose 15 to 20 % at head_dim 128 causal from 4k on. Full attention needs none (1 to 2 %).
- Heads grouped for the L2 cache in a causal backward: 10 % at head_dim 64 and 1k. Full attention goes head by head.
- `recycled`: the kernels before and after the backward's main one took 122 us in every cell, a quarter of the time at
  1k. Not yet timed. (Rounding by the last CTA to add to a tile of dq cost registers: 332 TFLOP/s at head_dim 128 causal
  and 16k, where 553 had been seen; commit aab98e2, by `python -m lmsys.attention.flash_gluon.tune --planned`.)
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
    direct: bool  # dq is added from registers, rather than through shared memory by TMA
    ahead: bool  # the scores of a step are begun in the step before, to run while its dS is exchanged
    l2_mib: int  # of what heads worked on together read and add up


ANY = 2**31

# (head_dim, causal): (keys up to, plan), ...
FORWARD: dict[tuple[int, bool], tuple[tuple[int, ForwardPlan], ...]] = {
    (64, True): ((2048, ForwardPlan(2, 3, True, True, False, 32)), (ANY, ForwardPlan(3, 2, True, True, True, 32))),
    (64, False): ((1024, ForwardPlan(2, 3, True, True, True, 0)), (ANY, ForwardPlan(3, 2, True, True, False, 0))),
    (128, True): ((1024, ForwardPlan(2, 2, False, False, True, 32)), (ANY, ForwardPlan(2, 2, False, True, True, 32))),
    (128, False): ((1024, ForwardPlan(2, 2, True, True, False, 0)), (ANY, ForwardPlan(2, 2, False, True, False, 0))),
}
BACKWARD: dict[tuple[int, bool], tuple[tuple[int, BackwardPlan], ...]] = {
    (64, True): ((ANY, BackwardPlan(False, True, False, 11)),),
    (64, False): ((ANY, BackwardPlan(False, True, False, 0)),),
    (128, True): ((ANY, BackwardPlan(True, True, False, 11)),),
    (128, False): ((ANY, BackwardPlan(True, True, False, 0)),),
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
