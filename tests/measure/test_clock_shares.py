"""`CudaClock` (lmsys/measure/clock.py) against CUPTI, which sees each kernel begin and end. Needs a GPU.

The clock measures with pairs of CUDA events. A pair shows more than the span of the kernel between its events; this
excess is the clock's "share", which it subtracts from each reading. Here the times that it then shows are compared with
the spans of the same calls by CUPTI, from 5 microseconds to 5 milliseconds.
`python -m pytest -m gpu -s tests/measure/test_clock_shares.py` prints the table.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lmsys.attention import ATTENTION
from lmsys.attention.contract import adapt
from lmsys.measure import clock as clocks
from lmsys.measure.clock import CudaClock, nothing
from lmsys.measure.compare import Step, interleave, rounds_of

# (heads, length, head_dim)
SHAPES = ((8, 128, 64), (16, 512, 64), (16, 1024, 64), (16, 2048, 128), (16, 8192, 64), (16, 16384, 128))
CASES = [(shape, causal) for shape in SHAPES for causal in (True, False)]
ROWS = ("flash_gluon", "sdpa_cudnn")
LEAST_US = 5  # shorter calls are printed, and not judged
CALLS = 300  # of each row, that CUPTI and the clock both measure
# Columns of times: by the clock, by CUPTI, how far they are apart; the clock's share; and by the clock in the sampling.
HEAD = """
| | row | H | S | D | mask | shown | CUPTI | apart | allowed | share | in the sweep |
| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def step_of(name: str, shape: tuple[int, int, int], causal: bool, direction: str) -> Step:
    """A step that times one direction of attention, for a batch of 1 and a shape of (heads, length, head_dim)."""
    heads, length, head_dim = shape
    row = adapt(ATTENTION[name].load())
    inputs = torch.randn(4, 1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.clone().requires_grad_(direction == "bwd") for x in inputs[:3])

    def forward() -> torch.Tensor:
        return row(q, k, v, causal=causal, scale=None)

    if direction == "fwd":
        return Step(lambda _: forward())
    return Step(lambda o: torch.autograd.grad(o, (q, k, v), inputs[3]), prepare=forward)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_clocks_times_are_the_spans_that_cupti_sees(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock and CUPTI measure the same calls, which are not those on which the clock's share was measured.

    The times of each call are subtracted, and the median of these differences is judged: where a call takes one of two
    times, as cuDNN's backwards do, a difference of medians would vary by chance.
    """
    monkeypatch.undo()  # without the fixtures of all tests, which fill memory with NaN and choose the first tile
    clock, wrong = CudaClock(), []
    assert clock.share_by == "CUPTI" and 1e-6 < clock.share_s < 1e-5
    print(HEAD)
    for shape, causal in CASES:
        steps = {name: step_of(name, shape, causal, direction) for name in ROWS}
        sampled = interleave(steps, clock, seconds=0.05, min_rounds=20)
        by_cupti = clock.beside_cupti(partial(rounds_of, steps, clock, CALLS))
        assert by_cupti, "CUPTI gave nothing: another profiler has it, or the driver forbids it"
        for name in steps:
            share_us = sampled.share_s[name] * 1e6
            calls = [(pair_s * 1e6 - share_us, span_s * 1e6) for row, pair_s, span_s in by_cupti if row == name]
            shown_us, span_us = (statistics.median(times) for times in zip(*calls, strict=True))
            apart_us = statistics.median(shown - span for shown, span in calls)
            allowed_us = max(0.3, 0.01 * span_us)
            cells = direction, name, *shape, "causal" if causal else "full"
            times = shown_us, span_us, apart_us, allowed_us, share_us, statistics.median(sampled.samples[name]) * 1e6
            print("|", *(f"{cell} |" for cell in cells), *(f"{time:,.2f} |" for time in times))
            if span_us >= LEAST_US and abs(apart_us) > allowed_us:
                wrong.append(cells)
    assert not wrong


@pytest.mark.gpu
def test_gaps_between_kernels_are_a_part_of_the_time() -> None:
    x = torch.zeros(2**16, device="cuda")

    def twice(gap: Callable[[], Any]) -> None:
        x.add_(1)
        gap()
        x.add_(1)

    steps = {
        "close": Step(lambda _: twice(nothing)),
        "apart": Step(lambda _: twice(partial(torch.cuda._sleep, 40_000))),
    }
    sampled = interleave(steps, CudaClock(), seconds=0.05, min_rounds=20)
    close, apart = (statistics.median(sampled.samples[name]) for name in ("close", "apart"))
    assert apart - close > 1.5e-5  # 40,000 cycles take 20 microseconds at 2 GHz


@pytest.mark.gpu
def test_a_start_that_is_recorded_again_is_noticed() -> None:
    clock, x = CudaClock(), torch.zeros(2**26, device="cuda")

    def run(_: Any) -> None:
        for _ in range(10):
            x.add_(1)
        marks, _ = clock._marks[max(clock._marks)]
        marks[2].record(clock._stream)

    clock.wait(clocks.LEAD_S)
    with pytest.raises(clocks.ClockError, match="recorded again"):
        clock.read([clock.sample(run)[0] for _ in range(5)])
