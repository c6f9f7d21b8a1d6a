"""`flash_gluon` on a GPU: results exact to the bit where arithmetic allows it, repeats, graphs, streams, views.

Hypothesis draws `shapes`; patterns are in PATTERNS, and a new plan of the row is tested without a change here.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import ATTENTION, Documents, Pattern
from lmsys.measure.repeats import MOST, repeated
from lmsys.testing import Oracle, make_inputs, run
from tests.support.attention_rows import Row, assert_within_budget, growing
from tests.support.gluon_simulator import gluon

ROW = Row("flash_gluon", "cuda")
REASON = ROW.why_not(ROW.case(head_dim=64)) if torch.cuda.is_available() else "needs a CUDA device, and there is none"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

lengths = st.one_of(
    st.sampled_from([1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 1024, 2049]), st.integers(1, 1500)
)
shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.sampled_from([(1, 1), (3, 3), (4, 2), (8, 1)]),
        "queries": lengths,
        "keys": lengths,
        "head_dim": st.sampled_from([64, 128]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "causal": st.booleans(),
        "transposed": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def drawn(shape: dict[str, Any], make: Callable[..., Tensor]) -> list[Tensor]:
    """[q, k, v, do] by `make(*size)`; if `transposed`, as views of (B, S, H, D) memory. `shape`: one of `shapes`."""
    heads, kv_heads = shape["heads"]
    found = []
    for h, length in ((heads, "queries"), (kv_heads, "keys"), (kv_heads, "keys"), (heads, "queries")):
        size = shape["batch"], h, shape[length], shape["head_dim"]
        x = make(*size).to(shape["dtype"])
        found.append(x.transpose(1, 2).contiguous().transpose(1, 2) if shape["transposed"] else x)
    return found


def check_selection(shape: dict[str, Any], deterministic: bool) -> None:
    """Every query gives all its weight to one key: o is that key's value, dv a sum of whole numbers, dq and dk zero."""
    generator = torch.Generator("cuda").manual_seed(shape["seed"])
    whole_numbers = lambda *size: torch.randint(-3, 4, size, generator=generator, device="cuda").float()  # noqa: E731
    q, k, v, do = drawn(shape, whole_numbers)
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    k.copy_(torch.randint(0, 2, k.shape, generator=generator, device="cuda") * 2 - 1)
    # No two keys are equal: the first elements spell the key's index in base 2; the others are random.
    bits = torch.arange(keys, device="cuda")[:, None] >> torch.arange(12, device="cuda") & 1
    k[..., :12] = (bits * 2 - 1).to(k.dtype)
    last = torch.arange(queries, device="cuda").clamp(max=keys - 1) + 1 if shape["causal"] else keys
    pick = (torch.rand(batch, heads, queries, generator=generator, device="cuda") * last).long().clamp(max=keys - 1)
    if shape["causal"]:
        pick = torch.minimum(pick, last - 1)
    of_query = lambda x: x.repeat_interleave(heads // kv_heads, dim=1)  # noqa: E731
    index = pick[..., None].expand(-1, -1, -1, head_dim)
    q.copy_(of_query(k).gather(2, index))
    o, lse = gluon()._forward(q, k, v, shape["causal"], 64.0)
    dq, dk, dv = gluon()._backward(q, k, v, o, lse, do, shape["causal"], 64.0, deterministic)
    expected = torch.zeros(batch, heads, keys, head_dim, device="cuda", dtype=torch.float64)
    expected.scatter_add_(2, index, do.double())
    expected = expected.unflatten(1, (kv_heads, -1)).sum(2)
    assert torch.equal(o, of_query(v).gather(2, index))
    assert torch.equal(dv, expected.to(dv.dtype))
    assert not dq.any() and not dk.any()


@settings(max_examples=60)
@given(shape=shapes, deterministic=st.booleans())
def test_a_selection_is_exact(shape: dict[str, Any], deterministic: bool) -> None:
    check_selection(shape, deterministic)


@settings(max_examples=2500)
@given(shape=shapes)
def test_soak(shape: dict[str, Any]) -> None:
    """Thousands of shapes run one after another in a process. A missing wait shows as a wrong bit or as a hang."""
    check_selection(shape, deterministic=False)


@settings(max_examples=40)
@given(
    shape=shapes,
    log_keys=st.integers(0, 11),
    of_queries=st.booleans(),
    deterministic=st.booleans(),
    many=st.none() | st.tuples(st.integers(60, 140), st.integers(1, 300)),
)
def test_gradients_of_whole_numbers_are_exact(
    shape: dict[str, Any], log_keys: int, of_queries: bool, deterministic: bool, many: tuple[int, int] | None
) -> None:
    """With equal weights of 2 ** -n, dq and dk are whole numbers over 2 ** n, in whatever order they are added up.

    `log_keys` is n, for 2 ** n keys. `of_queries`: the keys are zero, so that dk is tested; otherwise the queries are,
    so that dq is. `many`: (batch size, queries) in place of the shape's, for more CTAs than the GPU runs at once.
    """
    if many:
        shape |= {"batch": many[0], "queries": many[1]}
        log_keys %= 9  # at most 256 keys, since the reference below holds all scores in float64
    shape |= {"keys": 2**log_keys, "causal": False}
    generator = torch.Generator("cuda").manual_seed(shape["seed"])
    q, k, v, do = drawn(shape, lambda *size: torch.randint(-1, 2, size, generator=generator, device="cuda").float())
    (k if of_queries else q).zero_()
    if log_keys:
        v[:, :, 1::2] = -v[:, :, ::2]  # so that o is zero
    else:
        v.zero_()
    o, lse = gluon()._forward(q, k, v, False, 0.125)
    dq, dk, _ = gluon()._backward(q, k, v, o, lse, do, False, 0.125, deterministic)
    group = shape["heads"][0] // shape["heads"][1]
    q64, do64, k64, v64 = q.double(), do.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    ds = do64 @ v64.mT * 2.0**-log_keys
    assert not o.any()
    assert torch.equal(dq, (ds @ k64 * 0.125).to(dq.dtype))
    expected = (ds.mT @ q64 * 0.125).unflatten(1, (-1, group)).sum(2)
    # dS is rounded before it is used: it is exact while do · v has few bits.
    assert torch.equal(dk, expected.to(dk.dtype))


@settings(max_examples=10)
@given(shape=shapes)
def test_repeats_are_bitwise_equal(shape: dict[str, Any]) -> None:
    generator = torch.Generator("cuda").manual_seed(shape["seed"])
    q, k, v, do = drawn(shape, lambda *size: torch.randn(size, generator=generator, device="cuda"))
    causal = shape["causal"]
    o, lse = gluon()._forward(q, k, v, causal, 0.125)
    first = (o, lse, *gluon()._backward(q, k, v, o, lse, do, causal, 0.125, True))
    for _ in range(20):
        again = gluon()._forward(q, k, v, causal, 0.125)
        again = *again, *gluon()._backward(q, k, v, o, lse, do, causal, 0.125, True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("row", "deterministic", "differing"), [("flash_gluon", False, {"dq"}), ("flash_gluon", True, set()),
    ("flash_triton", False, set())],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_which_results_repeat_on_a_busy_gpu(row: str, deterministic: bool, differing: set[str], causal: bool) -> None:
    """By default dq of `flash_gluon` is added up in no fixed order, and so differs from call to call; all else repeats.

    In the deterministic mode this dq repeats, too. That of `flash_triton`, which a kernel of its own computes, always
    does.

    differing  the results that must differ in some call
    """
    asked = Row(row, "cuda")
    case = asked.case(batch=2, heads=8, kv_heads=8, queries=4096, keys=4096, head_dim=128, causal=causal, grad=True)
    inputs = make_inputs(case, 0)
    torch.use_deterministic_algorithms(deterministic)
    try:
        _, calls, differ = repeated(lambda: run(asked.call, inputs, causal=causal), 60.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == MOST and differ.keys() == differing


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "processors", "in_order"),
    [(700, 3000, 6, 1), (3000, 3000, 7, 3), (600, 17000, None, 4), (6000, 6000, None, 4), (100, 129, None, 8)],
)
def test_ctas_that_add_in_order_follow_one_another(
    queries: int, keys: int, processors: int | None, in_order: int, causal: bool, head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The fixed order of additions is right, and repeats, where a head has more key tiles than CTAs can run at once.

    processors  the number of multiprocessors that the launcher is told; None: the real one
    in_order    between how many of the four key heads (2 sequences x 2) CTAs take turns; 8: between all four
    """
    monkeypatch.setattr(gluon(), "heads_at_once", lambda *_: in_order)
    monkeypatch.setattr(gluon(), "_launches", {})
    if processors is not None:
        major, minor = torch.cuda.get_device_capability()
        few = SimpleNamespace(multi_processor_count=processors, major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    case = ROW.case(
        batch=2, heads=4, kv_heads=2, queries=queries, keys=keys, head_dim=head_dim, causal=causal, grad=True,
        dtype="bfloat16",
    )  # fmt: skip
    x, scale = make_inputs(case, 0), head_dim**-0.5
    o, lse = gluon()._forward(x.q, x.k, x.v, causal, scale)
    first, again = (gluon()._backward(x.q, x.k, x.v, o, lse, x.do, causal, scale, True) for _ in range(2))
    assert_within_budget(Oracle(case, x).error_ratios(dict(zip(("dq", "dk", "dv"), first, strict=True)), rms=True))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def plans() -> list[Any]:
    """(direction, head dimension, causal, plan) for every plan of the row."""
    from lmsys.attention.flash_gluon import plans

    table = [("forward", plans.FORWARD), ("backward", plans.BACKWARD)]
    return [(name, *key, plan) for name, of in table for key, entries in of.items() for _, plan in entries]


@pytest.mark.parametrize(("direction", "head_dim", "causal", "plan"), plans() if REASON is None else [])
@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 2, 129), (48, 32, 129), (7, 32, 1000), (1, 2, 2048)])
def test_every_plan_is_right_at_any_length(
    direction: str, head_dim: int, causal: bool, plan: Any, batch: int, heads: int, length: int
) -> None:
    """Some shapes have more CTAs than the GPU runs at once. dq is added up in both orders, the free and the fixed one.

    With the free order grouped causal heads walk down, as `MOST_DOWN` of launch.py has it: each key tile begins at the
    last queries. With a `MOST_DOWN` of 0 they walk up.
    """
    case = ROW.case(
        batch=batch, heads=heads, kv_heads=heads // 2, queries=length, keys=length, head_dim=head_dim, causal=causal,
        grad=True, dtype="bfloat16",
    )  # fmt: skip
    inputs = make_inputs(case, 0)
    fwd, bwd = (plan, None) if direction == "forward" else (None, plan)
    scale = head_dim**-0.5
    o, lse = gluon()._forward(inputs.q, inputs.k, inputs.v, causal, scale, fwd)
    oracle = Oracle(case, inputs)
    for deterministic, most_down in ((False, gluon().MOST_DOWN), (False, 0), (True, 0)):
        with patch.multiple(gluon(), MOST_DOWN=most_down, _launches={}):
            grads = gluon()._backward(
                inputs.q, inputs.k, inputs.v, o, lse, inputs.do, causal, scale, deterministic, bwd
            )
        outputs = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
        assert_within_budget(oracle.error_ratios(outputs, rms=True))


def short_plans() -> list[Any]:
    """(head dimension, plan) for every forward plan that is worth timing with SHORT keys, which are few, or fewer.

    Plans without a causal mask stand for all: those of a causal one differ in `l2_mib` alone, which the test sets.
    """
    from dev.plan_cases import SHORT, candidates

    return [
        (head_dim, plan) for head_dim in (64, 128) for plan in candidates("fwd", head_dim, causal=False, keys=SHORT)
    ]


@pytest.fixture
def uncaptured(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Turns off pytest's capture, so that `time_limit` can print before it ends the process."""
    with capfd.disabled():
        yield


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize(("head_dim", "plan"), short_plans() if REASON is None else [])
@pytest.mark.parametrize("causal", [False, True])
def test_every_candidate_for_short_sequences_alone_and_in_a_chain(head_dim: int, plan: Any, causal: bool) -> None:
    """In a chain each forward reads the result of the one before. Bits are those of calls that wait for one another.

    Batches are large enough that there are more tiles than CTAs run at once. A hang ends the process, which first
    prints what hung.
    """
    from tests.support.time_limit import time_limit

    batch, length = (50, 256) if plan.dynamic else (100, 129)
    case = ROW.case(
        batch=batch, heads=16, kv_heads=8, queries=length, keys=length, head_dim=head_dim, causal=causal,
        dtype="bfloat16",
    )  # fmt: skip
    x, plan = make_inputs(case, 0), replace(plan, l2_mib=32 if causal else 0)
    what = f"{plan}, {causal=}, {batch=}, {length=}"

    def chain(wait: bool) -> list[Tensor]:
        outputs, q = [], x.q
        for _ in range(20):
            q, lse = gluon()._forward(q, x.k, x.v, causal, head_dim**-0.5, plan)
            outputs += [q, lse]
            if wait:
                torch.cuda.synchronize()
        return outputs

    def differing(found: list[Tensor]) -> list[int]:
        return [i for i, (one, other) in enumerate(zip(found, alone, strict=True)) if not torch.equal(one, other)]

    gluon()._forward(x.q, x.k, x.v, causal, head_dim**-0.5, plan)  # compiles
    with time_limit(f"one by one: {what}"):
        alone = chain(wait=True)
    assert_within_budget(Oracle(case, x).error_ratios({"o": alone[0], "lse": alone[1]}, rms=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(wait=False)
    for _ in range(5):
        with time_limit(f"a graph: {what}"):
            graph.replay()
            assert differing(captured) == [], "a graph differs"
        with time_limit(f"one after another: {what}"):
            assert differing(chain(wait=False)) == [], "one after another differ"


def test_processes_that_take_turns_on_a_gpu(tmp_path: Path) -> None:
    """Four processes run the row on one GPU at the same time: see `tests/support/turns.py`."""
    seconds, processes = 15, 4
    command = [sys.executable, "-m", "tests.support.turns", str(seconds), str(tmp_path), str(processes)]
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(processes)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, printed


@pytest.mark.parametrize("causal", [False, True])
@settings(max_examples=40)
@given(
    growth=st.lists(st.sampled_from([-20.0, 0.0, 3.0, 7.9, 30.0, 200.0]), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
)
def test_maxima_may_grow(causal: bool, growth: list[float], seed: int) -> None:
    """A forward is right where the largest score of a query grows, or falls, from one key tile to the next."""
    case, inputs = growing(growth, causal, seed, "cuda")
    o, lse = gluon()._forward(inputs.q, inputs.k, inputs.v, causal, case.head_dim**-0.5)
    assert_within_budget(Oracle(case, inputs).error_ratios({"o": o, "lse": lse}, rms=True))


def both(x: Any, causal: bool) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) of a forward and a deterministic backward."""
    o, lse = gluon()._forward(x.q, x.k, x.v, causal, 0.125)
    return o, lse, *gluon()._backward(x.q, x.k, x.v, o, lse, x.do, causal, 0.125, True)


@pytest.mark.parametrize("causal", [False, True])
def test_graphs_replay_and_streams_do_not_disturb_one_another(causal: bool) -> None:
    """Each stream has a counter of tiles of its own, and so has each graph."""
    case = ROW.case(batch=2, heads=4, kv_heads=4, queries=700, keys=700, head_dim=64, causal=causal)
    inputs = [make_inputs(case, seed) for seed in range(4)]
    expected = [both(x, causal) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = both(x, causal)
        graphs.append((graph, found))
    torch.cuda.synchronize()
    for _ in range(20):
        eager = []
        for stream, x, (graph, _) in zip(streams, inputs, graphs, strict=True):
            with torch.cuda.stream(stream):
                eager.append(both(x, causal))
                graph.replay()
        torch.cuda.synchronize()
        for one, (_, replayed), other in zip(eager, graphs, expected, strict=True):
            for mine, its, right in zip(one, replayed, other, strict=True):
                assert torch.equal(mine, right) and torch.equal(its, right)


@settings(max_examples=40)
@given(
    length=st.integers(1, 1024), window=st.integers(1, 1100), head_dim=st.sampled_from([64, 128]),
    kv_heads=st.sampled_from([1, 2, 4]), dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    deterministic=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_whole_numbers_under_a_window_are_exact(
    length: int, window: int, head_dim: int, kv_heads: int, dtype: torch.dtype, deterministic: bool, seed: int
) -> None:
    from lmsys.attention.flash_gluon import selftest

    shape = selftest.Shape(
        batch=3, heads=4, kv_heads=kv_heads, queries=length, keys=length, head_dim=head_dim, causal=True, window=window
    )
    selftest.check(shape, dtype, (None, None), deterministic, seed, torch.device("cuda"))  # by the row's own plans


PATTERNS: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 1024},
    "narrow window": {"causal": True, "window": 65},
    "documents": {"lengths": [1, 700, 63, 64, 129, 2000, 1043]},
    "causal documents": {"causal": True, "lengths": [500] * 8},
    "window and documents": {"causal": True, "window": 300, "lengths": [1] * 100 + [1900, 2000]},
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_patterns_match_the_oracle_in_both_orders_and_in_graphs(name: str, head_dim: int) -> None:
    """Heads are grouped, and there are more CTAs than the GPU runs at once. The fixed order and graphs repeat bits."""
    options = dict(PATTERNS[name])
    documents = Documents(options.pop("lengths"), "cuda") if "lengths" in options else None
    pattern = Pattern(**options, documents=documents)
    case = ROW.case(
        batch=2, heads=8, kv_heads=2, queries=4000, keys=4000, head_dim=head_dim, causal=pattern.causal, grad=True,
        dtype="bfloat16", window=pattern.window, documents=documents is not None,
    )  # fmt: skip
    x, scale = make_inputs(case, 0), head_dim**-0.5

    def run_both(deterministic: bool) -> tuple[Tensor, ...]:
        o, lse = gluon()._forward(x.q, x.k, x.v, case.causal, scale, pattern=pattern)
        arguments = x.q, x.k, x.v, o, lse, x.do, case.causal, scale, deterministic
        return o, lse, *gluon()._backward(*arguments, pattern=pattern)

    oracle = Oracle(case, x, pattern=pattern)
    for deterministic in (False, True):
        found = run_both(deterministic)
        ratios = oracle.error_ratios(dict(zip(("o", "lse", "dq", "dk", "dv"), found, strict=True)), rms=True)
        assert max(ratios.values()) <= 1, (deterministic, ratios)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_both(True)
    for again in (run_both(True), captured):
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_a_backward_may_be_the_first_cuda_work_of_its_thread() -> None:
    x = make_inputs(ROW.case(queries=128, keys=128, head_dim=64), 0)
    o, lse = gluon()._forward(x.q, x.k, x.v, True, 0.125)
    arguments = x.q, x.k, x.v, o, lse, x.do, True, 0.125, True
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        found = fresh_thread.submit(gluon()._backward, *arguments).result()
    assert all(torch.equal(one, other) for one, other in zip(found, gluon()._backward(*arguments), strict=True))


def test_views_that_tma_cannot_address_and_expanded_gradients() -> None:
    case = ROW.case(heads=2, kv_heads=2, queries=100, keys=100, head_dim=64, causal=True)
    x = make_inputs(case, 0)
    expected = ROW.run(case, x)["o"]
    odd = torch.empty(1, 2, 100, 65, dtype=x.q.dtype, device="cuda")[..., 1:].copy_(x.q)  # 2 bytes off, odd strides
    flipped = x.k.mT.contiguous().mT  # keys lie next to one another
    leaves = [t.detach().requires_grad_() for t in (odd, flipped, x.v)]
    o = ATTENTION["flash_gluon"].load()(*leaves, causal=True)
    assert torch.equal(o, expected)
    with torch.random.fork_rng(devices=[0]):
        torch.use_deterministic_algorithms(True)
        try:
            found = torch.autograd.grad(o.sum(), leaves, retain_graph=True)  # the gradient of a sum has strides of 0
            right = torch.autograd.grad(o, leaves, torch.ones_like(o))
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_compiled_without_a_graph_break() -> None:
    case = ROW.case(heads=4, kv_heads=2, queries=256, keys=256, head_dim=64, causal=True, grad=True, dtype="bfloat16")
    x = make_inputs(case, 0)
    attend = ATTENTION["flash_gluon"].load()

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 2, k, v, causal=True, scale=0.0625) * 2

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    o = torch.compile(twice, fullgraph=True)(*leaves)
    found = dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, x.do)), strict=True))
    found = {name: y.detach() / 2 for name, y in found.items()}  # halves of even numbers: exact
    assert_within_budget(Oracle(case, x).error_ratios(found, rms=True))
