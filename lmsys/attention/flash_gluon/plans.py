"""The settings (plans) of the kernels, by head dimension, mask and length, and the measurements that chose them.

`launch.py` asks `forward_plan` and `backward_plan` for the plan of a shape. To change one, edit FORWARD or BACKWARD, or
for a pattern (windows, documents) SHORT_SPAN and SHORT_SPAN_PLAN. A new setting is a field of `ForwardPlan` or
`BackwardPlan`, and a constant in `forward_options` or `backward_options` of launch.py and in the kernel's signature.
`python -m pytest dev/bench_plans.py --benchmark-only --axis plan=candidates` times every candidate again, beside SDPA
cuDNN.

How to read the lists: the words in backticks are fields of the two classes below. "64 causal" is head dimension 64
under a causal mask, "full" is without a mask, "16k" is 16,384 keys. A percentage is the change of speed that a setting
makes in an otherwise equal plan. Figures are of one H200, bfloat16, B S = 16,384 tokens, H D = 2048 (B batch, S keys, H
heads, D head dimension), unless another GPU is named. Hashes are commits with the alternative. A CTA is a program of a
kernel, an SM a multiprocessor, a wave the CTAs that the GPU runs at once. The *preprocess* and the *postprocess* are
the kernels that run before and after the backward: preprocess.py has both. The *fixed order* is that of additions to dq
in a deterministic backward.

The notes on the forward hold from 1k on, unless they name fewer keys. A plan for up to 512 keys is the fastest
candidate of a sweep, or within 1 % of it (`*_short.jsonl` and `*_short-64.jsonl` in reports/results/flash_gluon): there
is no other reason for its single settings, except at 64 full and 512 keys (see `dynamic`).

- `consumers`: two at head_dim 128, where no registers are left for a third. At 64 a third gains 1 to 4 % from 2k keys
  on and 8 to 9 % at 16k: tiles of queries have 192 rows then, and each key tile is read less often. At 1k a third
  costs 5 to 9 %.
- `stages`: at 128 three tiles of 128 keys find no room in shared memory. At 64, with two consumers, three stages gain
  1 to 4 % up to 4k. In the plans of three consumers they gain 4 % at 16k causal and lose 4 % at 2k causal; elsewhere
  two and three are within 2 %.
- `named`, the release of stages at named barriers, gains 1 to 5 % with two consumers. The alternative is an mbarrier:
  there Triton makes the 128 threads of a consumer wait for each other (BAR.SYNC) before they arrive. At 128 causal and
  1k `named` costs 3 %. With three consumers it costs up to 6 %: all plans of three have `ping_pong`, so the consumers
  wait for one another at named barriers already.
- `ping_pong` gains up to 4 % with three consumers. With two it costs up to 4 %, except in some shapes at 1k. In full
  attention at head_dim 128, and at 16k, the difference is noise.
- `dynamic`, a counter from which CTAs take tiles: static orders lose 6 to 15 % at 128 causal, 5 % at 64 causal and 16k,
  4 % at 64 full and 1k. In full attention at 128 the counter costs 1 %. At 64 full and 512 keys a static order costs
  2 %, but for a single sequence, replayed as a CUDA graph, the static order is 1.26 times as fast as cuDNN, and the
  counter 0.97 times.
- `l2_mib`, heads grouped for the L2 cache. In a causal forward 32 MiB gain 2 % at 64 and nothing at 128 (16k). With
  fewer keys, groups also mix long and short tiles: in a static order, head by head, some CTAs get none but long tiles,
  and at 512 keys 32 MiB gain 41 to 57 %. In a causal backward groups gained 10 % at 64 and 1k in a prototype of the
  kernels, before these figures were taken; groups of 5 to 22 MiB are within 3 % from 1k on. At 64, 5 MiB gains 5 % over
  11 at 256 keys and 2 % at 512. Full attention goes head by head.
- `ctas` 2 with `tile_k` 64 puts two CTAs on an SM. Plans at head_dim 64 have this from 256 to 512 keys, and if causal
  up to 1,024. One CTA computes while the other waits for its first keys or stores its last rows. The best such plan
  gains over the best with tiles of 128, by ratio to cuDNN: causal 21 % at 256 keys, 11 % at 512 and 4 % at 1,024; full
  3 % at 256, nothing at 512, and it loses 5 % at 1,024. At 128 keys two CTAs lose 2 to 6 %; one consumer and 3 or 4
  CTAs lose there too (9c5168b has them). At head_dim 128 a second CTA has no room; tiles of 64 gain 1 % at 256 causal.
  Under patterns two CTAs with such tiles win at head_dim 64: 26 to 31 % with documents and short windows, 5 % with a
  window of 1,024 (one H100, 16,384 keys, documents of up to 2,361). At head_dim 128, tiles of 64 keys gain up to 11 %
  with a window of 256, and 3 % at most with one of 1,024. Longer spans have not been timed.
- `chained`, a start while the kernel before it in the stream ends (programmatic dependent launch): at head_dim 64 it
  gains 5 % at 128 keys, and from 256 on it is noise. All other plans up to 512 keys were timed only with it.
- `prefetch`, the log-sum-exp loaded a step ahead, gains 2 to 8 % at 128; at 64 it costs 1 to 3 %. This field and those
  below are of the backward.
- `wide`, `late_dv` and `by_query` together gain 4 to 7 % at 128, and 4 to 8 % at 64 full. docs/flash_gluon.md has the
  figures of each of the three alone, and of other attempts.
- `fma_exp` gains 2 to 4 % at 64 full; at 128 its effect is noise.
- `peeled`: 64 causal gains by `wide`, `late_dv`, `by_query` and `fma_exp` only where tiles that need a mask have a loop
  of their own: 4 % at 1k, 7 % at 4k, 10 % at 16k, 7 to 11 % with grouped heads, in a fixed order and with a length that
  is not whole tiles. At 128 such a loop spills registers.
- In the backward, grouped heads, lengths that are not whole tiles, float16 and the fixed order of additions take the
  plan of plain attention. A pattern takes that of causal attention, without the loop of `peeled`. Compared with plans
  without `wide`, `late_dv` and `by_query`, at 4k and 16k, this gains 2 to 3 % under patterns at 128 and 4 to 6 % at 64;
  at 128 6 to 8 % with grouped heads and 1 % at most in a fixed order; at 64 full 10 % in a fixed order, 9 % with a
  length that is not whole tiles. The others have not been timed.

Choices that hold in every plan. "Lost" begins an alternative that was slower and is not in the code:

- The backward's own CTAs write the zeros of dq, if a CTA's share is small and heads go in groups: each writes those for
  CTAs that run a wave later, so that additions find the zeros in the L2 cache. Compared with 44415a2, where the
  preprocess writes all zeros, this gains 4 to 5 % at 128, except in full attention from 4k on, 2 to 3 % at 64 and 1k,
  and changes less than 2 % elsewhere. If CTAs write zeros for two waves later, the gain is 1 % less. Zeros that
  a CTA writes after its last loads, rather than after its first, gain no more.
- Evenly spread starts: the key tiles of a head begin at different tiles of queries. With the zeros above this gains
  nothing, except 4 to 5 % at 64 where the last key tile is not full.
- Lost: dq rounded by CTAs a wave later, through shared memory and TMA, in place of the postprocess. The main kernel
  became slower by as much as this saves (1.003 times as fast as 44415a2 in geometric mean, the zeros alone 1.015).
- Threads add to dq from registers, 16 bytes each. By way of shared memory and TMA, with a fence and two barriers in
  every step, the backward is 3 to 11 % slower, in all 12 shapes (e0dee24).
- On the diagonal a consumer computes half a tile, or none, where the rest is hidden: this gains 4 % at 64 and 1k.
- Lost: the scores of a step begun in the step before, to run while dS is exchanged. 3 to 10 % slower at 128, 0 to 3 %
  at 64 (e0dee24).
- The fixed order: the producer waits for a semaphore in global memory, tells the consumers through a barrier that they
  may add, and releases the semaphore. The key tiles of a head follow one another as a chain, the lowest first, in
  causal attention the highest (the shortest). The first CTA to come to a tile stores it, so no zeros have to be there.
  CTAs take turns between several heads: as many as touch 8 MiB, in full attention 16 (`launch.IN_ORDER_MIB`). This has
  0.86 to 1.07 of the default's speed on one H100; a ring of key tiles that began evenly spread had 0.84 to 1.00.
  Consumers that count and wait themselves, the longest key tile first, had 0.60 to 0.74 (f899023).
- Grouped causal heads of up to 32 key tiles walk down: each key tile begins at the last tile of queries, and takes it
  for all query heads of the group before the one below it. So the key tiles of a head come to a tile together: 1.00 to
  1.39 times as fast on one H100. With 64 key tiles walking down costs 2 %, with 128 of them 8 %. In fewer than four
  waves of CTAs all heads are worked on together, as in other causal backwards; this has not been timed at 4,096 keys.
- Lost: float32 dq in memory that is used again and again, in the L2 cache, and is rounded by the main kernel in place
  of the preprocess and the postprocess (122 us in every shape). 20 to 70 % slower at 1k, as its waits add 7 to 18 us to
  the 16 of a CTA; 1 to 2 % faster at 64 full from 4k on. Rounded by the last CTA to add to a tile it is slower still,
  as that spills registers (f56e3f0 and d363d9b; by the last CTA aab98e2).
- Lost: the first Q Kᵀ of a tile begun while the output of the tile before it is stored. 2 to 5 % slower (f56e3f0,
  compared with aab98e2).
- Lost: dk begun before the exchange of dS, 0 to 12 % slower. If the scores of the next step also begin, during the
  addition to dq: up to 10 % slower, 3 % faster in two of 60 pairs (c857bda).
- Lost: FlashAttention-4's lazy rescaling of the output. A warp skips the rescaling, by a branch, while no maximum has
  grown so far that weights could exceed 2^8. 0 to 5 % slower, 1 to 3 % faster in some plans of 128 causal, though it
  saves 5 to 12 % of a step's instructions (681f76f).
- Lost: all of the softmax forced ahead of the wait for P V, of which the assembler otherwise moves most behind that
  wait. 0 to 12 % slower (681f76f).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ForwardPlan:
    """How `forward_kernel` runs."""

    consumers: int  # warp groups that compute, 64 queries each
    stages: int  # places in the ring, each for a tile of keys and one of values
    ping_pong: bool  # consumers take turns at the tensor cores, so that one's softmax runs under another's matmul
    named: bool  # consumers release stages at named barriers, not at mbarriers
    dynamic: bool  # the next tile comes from a counter; False, a static order: it follows from the CTA's number
    l2_mib: int  # MiB that the keys and values of heads worked on together may take; 0: one head after another
    # Keys of a tile. It must be a multiple of 64, a consumer's queries: only then does a causal consumer mask just the
    # first tile that it visits.
    tile_k: int = 128
    ctas: int = 1  # on an SM at a time. Each of 2 has half the registers, so a step's scores begin only after P V
    chained: bool = False  # begins while the kernel before it in its stream ends: programmatic dependent launch


@dataclass(frozen=True)
class BackwardPlan:
    """How `backward_kernel` runs."""

    prefetch: bool  # the log-sum-exp is loaded a step ahead, rather than after the scores
    l2_mib: int  # MiB that heads worked on together may read and add to; 0: one head after another
    wide: bool = False  # P stays float32 until dS is made
    late_dv: bool = False  # the matmul for dV begins once dS is made: exponentials may run beside the making of dS
    by_query: bool = False  # dS is exchanged as rows of queries, which the matmul for dq reads untransposed
    fma_exp: bool = False  # one of eight exponentials is made of FMAs, beside the unit that makes the others
    peeled: bool = False  # causal tiles that need a mask have a loop of their own, except under a pattern


ANY = 2**31  # keys: more than any case has

# Positional arguments below are, in this order:
#   ForwardPlan   consumers, stages, ping_pong, named, dynamic, l2_mib
#   BackwardPlan  prefetch, l2_mib
# The plan of most short sequences at head_dim 64.
SHORT_64 = ForwardPlan(2, 3, False, False, True, 0, tile_k=64, ctas=2, chained=True)

# By head_dim: in the forward, a pattern whose queries see at most SHORT_SPAN keys each has the plan SHORT_SPAN_PLAN. At
# 64 that is 2,361, the longest span that has been timed, rounded up; at 128 it lies between 256, where the plan gains,
# and 1,024, where it gains little.
SHORT_SPAN = {64: 2560, 128: 512}
SHORT_SPAN_PLAN = {
    64: replace(SHORT_64, ping_pong=True, named=True, l2_mib=32, chained=False),
    128: ForwardPlan(2, 3, True, True, True, 32, tile_k=64),
}

# By (head_dim, causal): (the most keys that the plan is for, plan), from the shortest sequences to the longest.
FORWARD: dict[tuple[int, bool], tuple[tuple[int, ForwardPlan], ...]] = {
    (64, True): (
        (128, ForwardPlan(2, 3, True, True, False, 32, chained=True)),
        (512, SHORT_64),
        (1024, replace(SHORT_64, named=True, l2_mib=32)),
        (2048, ForwardPlan(3, 2, True, False, True, 32)),
        (ANY, ForwardPlan(3, 3, True, False, True, 32)),
    ),
    (64, False): (
        (128, ForwardPlan(2, 3, True, True, False, 0, chained=True)),
        (256, SHORT_64),
        (512, replace(SHORT_64, ping_pong=True, dynamic=False)),
        (1024, ForwardPlan(2, 3, False, True, True, 0)),
        (ANY, ForwardPlan(3, 3, True, False, True, 0)),
    ),
    (128, True): (
        (128, ForwardPlan(2, 2, True, True, True, 0, chained=True)),
        (256, ForwardPlan(2, 3, True, False, True, 0, tile_k=64, chained=True)),
        (512, ForwardPlan(2, 2, True, False, False, 32, chained=True)),
        (1024, ForwardPlan(2, 2, False, False, True, 32)),
        (ANY, ForwardPlan(2, 2, False, True, True, 32)),
    ),
    (128, False): (
        (128, ForwardPlan(2, 2, True, True, True, 0, chained=True)),
        (512, ForwardPlan(2, 2, True, True, False, 0, chained=True)),
        (1024, ForwardPlan(2, 2, True, True, False, 0)),
        (ANY, ForwardPlan(2, 2, False, True, False, 0)),
    ),
}
REORDERED = {"wide": True, "late_dv": True, "by_query": True}  # exponentials run beside the work that follows them
PEELED_64 = BackwardPlan(False, 11, **REORDERED, fma_exp=True, peeled=True)
BACKWARD: dict[tuple[int, bool], tuple[tuple[int, BackwardPlan], ...]] = {
    (64, True): ((1024, replace(PEELED_64, l2_mib=5)), (ANY, PEELED_64)),
    (64, False): ((ANY, BackwardPlan(False, 0, **REORDERED, fma_exp=True)),),
    (128, True): ((1024, BackwardPlan(True, 5, **REORDERED)), (ANY, BackwardPlan(True, 22, **REORDERED))),
    (128, False): ((ANY, BackwardPlan(True, 0, **REORDERED)),),
}


def forward_plan(head_dim: int, causal: bool, keys: int, span: int | None = None) -> ForwardPlan:
    """The plan for sequences of `keys` keys.

    `span` is the largest number of keys that a query sees under a pattern, None without a pattern. Under a pattern
    `causal` must be True.
    """
    if span is not None and span <= SHORT_SPAN[head_dim]:
        return SHORT_SPAN_PLAN[head_dim]
    return next(plan for longest, plan in FORWARD[head_dim, causal] if keys <= longest)


def bounded_plans(head_dim: int) -> list[ForwardPlan]:
    """The forward plans that a pattern may have: the self-test and the tests run each of them under a pattern.

    A span is never longer than the keys. So a span above SHORT_SPAN takes one of the plans for more than SHORT_SPAN
    keys, and plans for fewer keys are left out here.
    """
    others = [plan for longest, plan in FORWARD[head_dim, True] if longest > SHORT_SPAN[head_dim]]
    return [SHORT_SPAN_PLAN[head_dim], *others]


def backward_plan(head_dim: int, causal: bool, keys: int) -> BackwardPlan:
    """The plan for sequences of `keys` keys. Under a pattern `causal` must be True."""
    return next(plan for longest, plan in BACKWARD[head_dim, causal] if keys <= longest)


def heads_at_once(l2_mib: int, bytes_per_head: int) -> int:
    """The largest power of two for which so many heads take at most `l2_mib` MiB together; at least 1."""
    most = max(1, l2_mib * 2**20 // bytes_per_head)
    return 1 << most.bit_length() - 1
