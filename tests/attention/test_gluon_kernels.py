"""The kernels of `flash_gluon` without a GPU: simulated on a CPU, with their launchers, and compiled for sm_90a.

`tests/support/gluon_simulator.py` is the simulator. A few tests also plant faults into kernels, which it must notice.
"""

import itertools
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 for the Gluon kernels")

import torch  # noqa: E402
import triton  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lmsys.attention import AttentionCase, Pattern  # noqa: E402
from lmsys.attention.flash_gluon import plans, selftest, support  # noqa: E402
from lmsys.attention.flash_gluon.support import flash_gluon_supports  # noqa: E402
from lmsys.attention.naive import naive  # noqa: E402
from lmsys.kernels import trial  # noqa: E402
from lmsys.kernels.tritons import KNOWN_TRITON, ON_GPUS, is_known, version  # noqa: E402
from lmsys.registry import load_target  # noqa: E402
from lmsys.testing import Oracle, make_inputs, run  # noqa: E402
from tests.support import gluon_simulator  # noqa: E402
from tests.support.attention_rows import assert_within_budget, growing  # noqa: E402
from tests.support.gluon_simulator import assert_right, gluon, plans_taken, simulated  # noqa: E402
from tests.support.processes import ROOT, compiling  # noqa: E402
from tests.support.trials import COUNT  # noqa: E402
from tests.support.variants import few_by_default  # noqa: E402

known = pytest.mark.skipif(not is_known(), reason=f"pip install triton=={KNOWN_TRITON[0]}, for which they are written")
CASE = AttentionCase(1, 2, 2, 64, 64, 64, "bfloat16", grad=True)
lengths = st.one_of(st.sampled_from([1, 64, 65, 128, 129, 192, 193, 256, 257]), st.integers(1, 420))
cases = st.builds(
    lambda heads, **fields: AttentionCase(heads=heads[0], kv_heads=heads[1], grad=True, **fields),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 1)]),
    batch=st.integers(1, 2),
    queries=lengths,
    keys=lengths,
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    causal=st.booleans(),
)


def every_plan(direction: str) -> list[tuple[int, bool, Any]]:
    table = plans.FORWARD if direction == "forward" else plans.BACKWARD
    return [(*key, plan) for key, entries in table.items() for _, plan in entries]


@known
@settings(max_examples=4)
@given(case=cases, seed=st.integers(0, 2**31), scale=st.sampled_from([None, 0.3, -0.2]))
def test_simulated_it_matches_the_oracle(case: AttentionCase, seed: int, scale: float | None) -> None:
    inputs = make_inputs(case, seed, memory="" if seed % 2 else "transposed")
    with simulated():
        outputs = run(gluon().flash_gluon, inputs, causal=case.causal, scale=scale, lse=True)
    assert_within_budget(Oracle(case, inputs, scale).error_ratios(outputs, rms=True))


@known
@settings(max_examples=2)
@given(length=st.integers(1, 420), seed=st.integers(0, 2**31), group=st.sampled_from([1, 3]))
@pytest.mark.parametrize(("head_dim", "causal", "plan"), few_by_default(every_plan("forward"), one_in=6))
def test_every_forward_plan(head_dim: int, causal: bool, plan: Any, length: int, seed: int, group: int) -> None:
    case = AttentionCase(1, 3, 3 // group, length, 1 + seed % 420, head_dim, "bfloat16", causal)
    assert_right(case, make_inputs(case, seed), forward=plan)


def small_tiles() -> list[tuple[int, Any]]:
    """Candidates for short sequences with tiles of 64 keys."""
    from dev.plan_cases import SHORT, candidates

    plans = [(head_dim, plan) for head_dim in (64, 128) for plan in candidates("fwd", head_dim, False, SHORT)]
    return [(head_dim, plan) for head_dim, plan in plans if plan.tile_k == 64 and not plan.dynamic]


@known
@settings(max_examples=1)
@given(
    queries=lengths, keys=lengths, seed=st.integers(0, 2**31), group=st.sampled_from([1, 3]), causal=st.booleans(),
    dynamic=st.booleans(),
)  # fmt: skip
@example(queries=512, keys=512, seed=0, group=1, causal=True, dynamic=True)
@example(queries=256, keys=256, seed=0, group=1, causal=False, dynamic=False)
@pytest.mark.parametrize(("head_dim", "plan"), few_by_default(small_tiles(), one_in=9) if is_known() else [])
def test_small_tiles_of_keys(
    head_dim: int, plan: Any, queries: int, keys: int, seed: int, group: int, causal: bool, dynamic: bool
) -> None:
    """On a GPU of two multiprocessors, so that a CTA comes to several tiles."""
    case = AttentionCase(2, 3, 3 // group, queries, keys, head_dim, "bfloat16", causal)
    plan = replace(plan, dynamic=dynamic, l2_mib=seed % 2)
    with patch.object(gluon_simulator, "PROCESSORS", 2):
        assert_right(case, make_inputs(case, seed), forward=plan)


@known
@pytest.mark.parametrize("causal", few_by_default([True, False], one_in=2))
@settings(max_examples=4)
@given(
    growth=st.lists(st.sampled_from([-20.0, 0.0, 3.0, 7.9, 30.0, 200.0]), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
@example(growth=[7.9] * 8, seed=0)
def test_maxima_may_grow(causal: bool, growth: list[float], seed: int) -> None:
    assert_right(*growing(growth, causal, seed, "cpu"))


STEP = "wide", "late_dv", "by_query", "fma_exp", "peeled"


@known
@pytest.mark.parametrize(
    ("deterministic", "prefetch"),
    few_by_default([(False, True), (False, False), (True, True), (True, False)], one_in=2),
)
@pytest.mark.parametrize("causal", few_by_default([True, False], one_in=2))
@settings(max_examples=3)
@given(
    length=st.integers(1, 420),
    seed=st.integers(0, 2**31),
    group=st.sampled_from([1, 3]),
    many=st.booleans(),
    step=st.fixed_dictionaries(dict.fromkeys(STEP, st.booleans())),
)
@example(length=200, seed=198, group=3, many=False, step=dict.fromkeys(STEP, True))
def test_every_way_through_the_backward(
    deterministic: bool, prefetch: bool, causal: bool, length: int, seed: int, group: int, many: bool,
    step: dict[str, bool],
) -> None:  # fmt: skip
    """`many`: as on a GPU that has few processors for these CTAs, where heads are worked on in groups.

    Then grouped heads do not walk down either.
    """
    head_dim, keys = [64, 128][seed % 2], 1 + seed % 420
    case = AttentionCase(1, 3, 3 // group, length, keys, head_dim, "bfloat16", causal, grad=True)
    plan = plans.BackwardPlan(prefetch, seed % 3, **step)
    long = {"FEW_WAVES": 0, "MOST_DOWN": 0, "IN_ORDER_MIB": dict.fromkeys((False, True), 0)}
    with patch.multiple(gluon(), **long) if many else nullcontext():
        assert_right(case, make_inputs(case, seed), backward=plan, fixed_orders=[deterministic])


ORDERED = (1100, 520), (130, 1100), (700, 700)  # queries, keys


@known
@pytest.mark.on_request
@pytest.mark.parametrize(
    ("queries", "keys", "in_order_mib", "causal"),
    [(*size, *way) for size in ORDERED for way in itertools.product((0, 32), (True, False))],
)
def test_the_deterministic_order_does_not_hang_on_few_processors_and_repeats(
    queries: int, keys: int, in_order_mib: int, causal: bool
) -> None:
    """Head by head, and with heads that alternate. The six simulated processors are fewer than a head's key tiles."""
    case = AttentionCase(2, 2, 1, queries, keys, 64, "bfloat16", causal, grad=True)
    x = make_inputs(case, 0)
    with simulated(), patch.object(gluon(), "IN_ORDER_MIB", dict.fromkeys((False, True), in_order_mib)):
        o, lse = gluon()._forward(x.q, x.k, x.v, causal, 0.125)
        found = [gluon()._backward(x.q, x.k, x.v, o, lse, x.do, causal, 0.125, True) for _ in range(2)]
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))


@given(
    num_tiles=st.integers(1, 40),
    num_key_tiles=st.integers(1, 40),
    causal=st.booleans(),
    block_q=st.sampled_from([64, 128]),
    num_heads=st.integers(1, 12),
    at_once=st.integers(1, 12),
)
def test_every_key_tile_waits_for_a_value_of_its_own_at_every_tile_of_queries(
    num_tiles: int, num_key_tiles: int, causal: bool, block_q: int, num_heads: int, at_once: int
) -> None:
    """At each tile of queries the values are 0, 1, 2 ... in the order of the CTAs, so none waits for a later CTA."""
    backward = gluon_simulator.kernels("backward")
    sizes = num_key_tiles, num_heads, min(at_once, num_heads)
    visits = Counter[tuple[int, int]]()
    for index in range(num_heads * num_key_tiles):
        head, n = backward["_assignment"](*map(torch.tensor, (index, *sizes)), True, causal)
        for m in range(int(n) * 128 // block_q if causal else 0, num_tiles):
            value = backward["semaphore_value"](n, torch.tensor(m), sizes[0], None, None, causal, block_q)
            assert int(value) == visits[int(head), m]
            visits[int(head), m] += 1
    assert len(visits) == num_heads * num_tiles


@given(
    at_once=st.integers(1, 20),
    num_key_tiles=st.integers(1, 20),
    num_heads=st.integers(1, 60),
    processors=st.integers(1, 80),
)
def test_ctas_wait_only_for_ctas_of_lower_numbers(
    at_once: int, num_key_tiles: int, num_heads: int, processors: int
) -> None:
    """The CTAs that zero dq of a head have lower numbers than all CTAs of that head, which may fill all processors."""
    at_once = min(at_once, num_heads)
    ahead = gluon().ahead_of(at_once, num_key_tiles, num_heads, processors)
    owned_tile = gluon_simulator.kernels("hopper")["owned_tile"]
    numbers: dict[int, list[int]] = {}
    for index in range(num_heads * num_key_tiles):
        head, _ = owned_tile(*map(torch.tensor, (index, num_key_tiles, num_heads, at_once)))
        numbers.setdefault(int(head), []).append(index)
    assert 1 <= ahead <= num_heads
    assert ahead == num_heads or ahead * num_key_tiles >= processors
    assert all(max(numbers[head - ahead]) < min(numbers[head]) for head in range(ahead, num_heads))


@known
@pytest.mark.parametrize("causal", few_by_default([True, False], one_in=2))
@settings(max_examples=1)
@given(group=st.integers(1, 2), queries=st.integers(1, 300), keys=st.integers(1, 300), seed=st.integers(0, 2**31))
@example(group=2, queries=200, keys=300, seed=0)
def test_ctas_of_earlier_heads_zero_dq(causal: bool, group: int, queries: int, keys: int, seed: int) -> None:
    """They do so for all heads but the first ones, here on a GPU of two multiprocessors."""
    plan, head_dim = plans.BackwardPlan(False, 1), [64, 128][seed % 2]
    case = AttentionCase(2, 2 * group, 2, queries, keys, head_dim, "bfloat16", causal, grad=True)
    with (
        patch.object(gluon_simulator, "PROCESSORS", 2),
        patch.multiple(gluon(), FEW_WAVES=0, MOST_CLEARED=100, heads_at_once=lambda *_: 1),
    ):
        assert_right(case, make_inputs(case, seed), backward=plan, fixed_orders=[False])


MUTANTS = [  # (module, its right source, faulty source): each would give wrong results or hang on a GPU, now and then
    ("forward", "mbarrier.wait(ring.v_full.index(before), ((fill - 1) // STAGES) & 1)\n    product", "product"),
    ("forward", "_await_free(ring.k_empty, stage, fill, NAMED, K_FREE, WGS, STAGES)\n", "pass\n"),
    ("forward", "mbarrier.wait(queries.empty.index(slot), ((turn >> 1) & 1) ^ 1)\n", "pass\n"),
    ("forward", "            tma.store_wait(0)\n            thread_barrier()", "            thread_barrier()"),
    ("forward", "(acc.to(DTYPE))\n            fence_async_shared()", "(acc.to(DTYPE))"),
    ("backward", "    _await_free(step, DO_FREE)\n    mbarrier", "    mbarrier"),
    ("backward_steps", '    named_barrier("sync", EXCHANGE, 256)\n', ""),
    ("backward", '    named_barrier("sync", EXCHANGE, 256)  # the other', "    #"),
    ("dq", "        semaphore_release(order.semaphore + (bh", "        (lambda *_: None)(order.semaphore + (bh"),
    ("backward_steps", "        await_acquired(DQ_ACQUIRED + WG)\n    dq", "        pass\n    dq"),
    ("dq", "        semaphore_acquire(order.semaphore", "        (lambda *_: None)(order.semaphore"),
    ("dq", "    if step <= walk.steps:", "    if step < walk.steps:"),
    ("backward", "        _await_free(step, Q_FREE)\n        if DETERMINISTIC", "        if DETERMINISTIC"),
    ("backward", "        n = num_key_tiles - 1 - n", "        pass"),
    ("dq", "((m + 1) * BLOCK_Q - 1) // BLOCK_K) - n", "((m + 1) * BLOCK_Q - 1) // BLOCK_K)"),
    ("dq", "        return n\n", "        return n + 1\n"),
    ("dq", "        return n\n", "        return num_key_tiles - 1 - n\n"),
    ("backward", ">= K if STORES else", "> K if STORES else"),
    ("backward", "masked_until = (n + 1)", "masked_until = n"),
    ("backward_steps", "if m < masked.until if CAUSAL", "if m <= masked.until if CAUSAL"),
    ("backward_steps", "else n == 0:\n", "else n < 0:\n"),
    ("backward_steps", "            store_registers(", "            add_registers("),
    ("backward", "start = num_tiles - 1", "start = 0"),
    ("dq", "m - 1, m)", "m + 1, m)"),
    ("dq", "bh + 1 - walk.G, bh + 1)", "bh + 1, bh + 1)"),
    ("dq", "        semaphore_release(order.semaphore + later", "        (lambda *_: None)(order.semaphore + later"),
    ("dq", "    semaphore_wait(order.semaphore", "    (lambda *_: None)(order.semaphore"),
    ("dq", "gl.where(is_first, 0, order.num_key_tiles)", "0"),
    ("dq", "        thread_barrier()\n", ""),
    ("backward", "        await_acquired(DQ_ACQUIRED + WG)\n    mbarrier", "        pass\n    mbarrier"),
]  # fmt: skip
# Queries, keys, causal, query heads for each key head.
SIZES = (200, 300, False, 1), (200, 200, True, 3), (300, 256, True, 1), (600, 600, True, 1), (1500, 60, True, 1)
# Values of LANDINGS_S: loads land after a while, or only once they are waited for, so that none is in time by chance.
AS_THEY_COME, ONCE_WAITED_FOR = (0.0, 0.002, 0.02), (None,)


@known
@pytest.mark.parametrize("mutant", few_by_default([(one,) for one in MUTANTS], one_in=15), ids=range(len(MUTANTS)))
def test_the_simulation_notices_a_fault(mutant: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, faulty = mutant
    read = Path.read_text
    # Not in `mutated`: there `wrong` would take a failure of this assertion for one of the simulation.
    count = read(gluon_simulator.SOURCES / f"{module}.py").count(right)
    assert count == 1, f"{module}.py has {right!r} {count} times, not once; name the line anew"

    def mutated(path: Path, *args: Any, **options: Any) -> str:
        text = read(path, *args, **options)
        return text.replace(right, faulty) if path.name == f"{module}.py" else text

    monkeypatch.setattr(Path, "read_text", mutated)
    if any(wrong(*size) for size in SIZES):
        return
    monkeypatch.setattr(gluon_simulator, "LANDINGS_S", ONCE_WAITED_FOR)
    assert any(wrong(*size) for size in SIZES), right


def wrong(queries: int, keys: int, causal: bool, group: int) -> bool:
    """True if a simulated run of this size fails an assertion, hangs, gives wrong results, or does not repeat."""
    plan = plans.BackwardPlan(False, 1)
    case = AttentionCase(1, 3, 3 // group, queries, keys, 64, "bfloat16", causal, grad=True)
    x = make_inputs(case, 0)
    arguments = x.q, x.k, x.v
    try:
        with simulated(), patch.object(gluon(), "FEW_WAVES", 0):  # heads in groups, that clear for those after them
            o, lse = gluon()._forward(*arguments, causal, 0.125)
            arguments = *arguments, o, lse, x.do, causal, 0.125
            grads, *repeats = (gluon()._backward(*arguments, mode, plan) for mode in (False, True, True))
    except AssertionError:
        return True
    outputs = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))
    ratios = Oracle(case, x).error_ratios(outputs, rms=True)
    return max(ratios.values()) > 1 or not all(torch.equal(*both) for both in zip(*repeats, strict=True))


@known
@pytest.mark.on_request
@pytest.mark.parametrize("landings", [AS_THEY_COME, ONCE_WAITED_FOR])
def test_the_simulation_notices_nothing_in_the_right_kernels(landings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_simulator, "LANDINGS_S", landings)
    assert not any(wrong(*size) for size in SIZES)


# By version of Triton: the most loads, and the most stores, of spilt registers. 3.9.0 also spills within the steps.
SPILT = {"3.9.0": 150}


@known
@pytest.mark.on_request  # `nox -s tritons` compiles them, with each Triton
@pytest.mark.parametrize("head_dim", [128, 64])
def test_the_kernels_for_hopper_are_well_made(head_dim: int) -> None:
    found = compiling("tests.support.sass_gluon", head_dim)
    assert {line["kernel"] for line in found} == {"forward", "backward", "preprocess", "postprocess"}
    for line in found:
        if line["kernel"] in ("preprocess", "postprocess"):
            assert line["registers"] <= 255 and line["LDL"] == line["STL"] == 0, line
            continue
        forward = line["kernel"] == "forward"
        walks = 1 + (line["ragged"] or line.get("peeled", False))  # loops over steps
        consumers, ctas, tile_k = line.get("consumers", 2), line.get("ctas", 1), line.get("tile_k", 128)
        assert line["registers"] * 128 * (1 + consumers) * ctas <= 65536, line
        assert (line["shared"] + 1024) * ctas <= 228 * 1024, line
        # In the first tile and in a step Q K^T takes D / 16, P V tile_k / 16. Causal, half a first tile of 128 keys
        # for those consumers whose queries may begin with it: of two the first, of three, or under a pattern, any.
        may_begin = consumers if line.get("bounded") else {2: 1, 3: 3}[consumers]
        halves = line["causal"] * (tile_k == 128) * may_begin * head_dim // 16
        expected = consumers * 2 * (head_dim + tile_k) // 16 + halves if forward else walks * 2 * 32
        assert line["HGMMA"] == expected, line
        assert line["waits"] <= line["HGMMA"] // 3, f"a wait after every matmul: the compiler serialised them: {line}"
        assert line["UTMALDG"] >= (2 + consumers if forward else 6), line
        assert line["UTMASTG"] == (consumers if forward else 4), line
        # In a fixed order the first CTA stores; where causal masks have a loop of their own, it alone stores.
        first_stores = bool(line.get("deterministic")) and not line.get("bounded")
        adds = 0 if forward else (walks - (first_stores and line.get("peeled", False))) * 16
        assert (line["UTMAREDG"], line["REDG"]) == (0, adds), line
        if line.get("deterministic"):  # by default some write zeros
            assert line["STG"] == (16 if first_stores else 0), line
        assert line["SYNCS"] >= 20 and line["BAR"] >= 20, line
        assert line["hazards"] == line["reused"] == line["restarts"] == 0, line
        if forward:
            registers, cap = gluon().REGISTERS[consumers, ctas]  # consumers that ask for more than there are, hang
            assert line["registers"] == cap and 24 + consumers * registers <= (1 + consumers) * cap, line
            assert line["ACQBULK"] == line["PREEXIT"] == line["chained"], line
            assert line["LDL"] == line["STL"] == 0, f"registers spill: {line}"
        else:
            # 168 registers are all that there are. What is spilt is what the end needs; see `backward.py`.
            spilt = SPILT.get(triton.__version__.split("+")[0], 60)
            assert line["LDL"] <= spilt and line["STL"] <= spilt, line
            assert line["fences"] == (2 if line.get("deterministic") else 1), line


@known
@pytest.mark.parametrize(("head_dim", "causal"), [*itertools.product((64, 128), (False, True))])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_a_pattern_and_a_fixed_order_take_the_plan_of_plain_attention(
    head_dim: int, causal: bool, deterministic: bool, window: int | None
) -> None:
    """Under a pattern it is that of causal attention."""
    case = AttentionCase(1, 2, 1, 70, 70, head_dim, "bfloat16", causal, grad=True)
    x = make_inputs(case, 0)
    pattern = None if window is None else Pattern(True, window)
    lse = torch.empty(1, 2, 70)
    with plans_taken("_Backward") as taken:
        gluon()._backward(x.q, x.k, x.v, x.do, lse, x.do, causal, 1.0, deterministic, None, pattern)
    assert taken == [plans.backward_plan(head_dim, causal or window is not None, 70)]


def test_a_hang_is_reported_and_ends_the_process() -> None:
    """`time_limit` does so even if the main thread is in a wait that no exception can interrupt."""
    script = "from tests.support.time_limit import time_limit\nimport time\n"
    script += "with time_limit('this form', 5.0): pass\nwith time_limit('that form', 0.1): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "no end after 0.1 s: that form"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on CUDA"),
        (
            {"device": "cpu", "causal": True, "window": 5, "offset": 3, "softcap": 2.0, "documents": True},
            "knows no offset and no softcap",
        ),
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 96}, "head_dim 64 and 128, not 96"),
        ({"capability": (10, 0)}, "10.0"),
        *([({}, None), ({"causal": True, "window": 5}, None)] if version() in ON_GPUS else []),
    ],
)
def test_it_says_what_it_cannot_run(changes: dict[str, Any], reason: str | None) -> None:
    found = flash_gluon_supports(replace(CASE, **{"device": "cuda", "capability": (9, 0)} | changes))
    assert found is None if reason is None else reason in str(found)


def test_an_untested_triton_is_tried_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    monkeypatch.setattr(trial, "refusal", lambda *asked: tried.append(asked))
    case = replace(CASE, device="cuda", capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = str(flash_gluon_supports(case))
    assert "has to be tried on a GPU before it runs on triton 3.99.0" in reason and not tried
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert flash_gluon_supports(replace(case, head_dim=96)) is not None and not tried
    assert flash_gluon_supports(case) is None
    ((row, function, sources, capability),) = tried
    assert (row, capability) == ("flash_gluon", (9, 0))
    assert load_target(function).__name__ == "run" and all(source.exists() for source in sources)


def test_an_untested_triton_is_tried_from_within_compiled_functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(COUNT, str(tmp_path / "count"))
    monkeypatch.setattr(trial, "_verdicts", {})
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    monkeypatch.setattr(support, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(support, "SELFTEST", "tests.support.trials:right")
    case = replace(CASE, device="cuda", capability=(9, 0))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if support.flash_gluon_supports(case) is None else x

    assert torch.compile(doubled, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len((tmp_path / "count").read_text().split()) == 1


@pytest.mark.parametrize(("head_dim", "causal", "window"), [(64, True, None), (128, False, None), (64, True, 40)])
def test_the_selftest_is_exact(head_dim: int, causal: bool, window: int | None) -> None:
    """The results that it expects are whole numbers or halves, and those of `naive` within float64's rounding."""
    shape = selftest.Shape(1, 4, 2, 150, 150 if window else 90, head_dim, causal, window)
    q, k, v, do, weights = selftest.draw(shape, 0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = naive(*leaves, pattern=Pattern(causal, window), scale=selftest.SCALE)
    found = dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, do)), strict=True))
    expected = selftest.truth(shape, q, k, v, do, weights)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert right.any() and torch.equal(right, (4 * right).round() / 4), name
        torch.testing.assert_close(found[name].detach(), right, rtol=0, atol=1e-9)


def test_the_selftest_runs_every_plan_and_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs them on the first GPU of the capability."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 0), (9, 0), (9, 0)].__getitem__)
    monkeypatch.setattr(selftest, "check", lambda *arguments: asked.append(arguments))
    selftest.run((9, 0))
    assert {device for *_, device in asked} == {torch.device("cuda", 1)}
    assert {dtype for _, dtype, *_ in asked} == {torch.bfloat16, torch.float16}
    forward, backward = ({*every_plan(direction)} for direction in ("forward", "backward"))
    assert {(x.head_dim, x.causal, both[0]) for x, _, both, *_ in asked if not x.window} == forward
    assert {(x.head_dim, both[0]) for x, _, both, *_ in asked if x.window} == {
        (head_dim, plan) for head_dim in (64, 128) for plan in plans.bounded_plans(head_dim)
    }
    for special in (False, True):  # in a fixed order, or under a window
        of_these = [(x, both[1]) for x, _, both, fixed, *_ in asked if (fixed or bool(x.window)) == special]
        assert {(x.head_dim, x.causal, plan) for x, plan in of_these} == backward
    orders = {(x.head_dim, x.causal, fixed) for x, _, _, fixed, *_ in asked}
    assert orders == set(itertools.product((64, 128), (False, True), (False, True)))
    assert {(64, True, False), (64, True, True), (128, True, False), (128, True, True)} == {
        (x.head_dim, x.causal, fixed) for x, _, _, fixed, *_ in asked if x.window
    }


@known
@pytest.mark.parametrize("fault", [None, "o", "dq", "dk", "dv"])
@pytest.mark.parametrize(
    ("head_dim", "causal", "deterministic", "window"),
    few_by_default([(128, True, True, 70), (64, True, False, None), (128, False, True, None)], one_in=3),
)
def test_the_selftest_refuses_what_is_not_exact(
    head_dim: int,
    causal: bool,
    deterministic: bool,
    window: int | None,
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault changes one number of a result by the smallest amount that its dtype can represent."""

    def nudged(x: torch.Tensor, name: str) -> torch.Tensor:
        if name == fault:
            bits = x.view(torch.int16)
            bits.view(-1)[x.abs().argmax()] ^= 1
        return x

    forward, backward = gluon()._forward, gluon()._backward

    def run_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = forward(*args)
        if fault != "o":
            return o, lse
        return nudged(o.clone(), "o"), lse

    def run_backward(*args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(nudged(x, name) for name, x in zip(("dq", "dk", "dv"), backward(*args), strict=True))

    monkeypatch.setattr(gluon(), "_forward", run_forward)
    monkeypatch.setattr(gluon(), "_backward", run_backward)
    shape = selftest.Shape(1, 2, 1, 200, 200 if window else 150, head_dim, causal, window)
    both = plans.forward_plan(head_dim, causal, 150), plans.backward_plan(head_dim, causal, 150)
    with simulated(), nullcontext() if fault is None else pytest.raises(ValueError, match=f"^{fault} is wrong"):
        selftest.check(shape, torch.bfloat16, both, deterministic, 0, torch.device("cpu"))
