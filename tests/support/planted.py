"""Attention rows with a known slowdown, and runs that compare them with earlier versions, for tests of verdicts.

A verdict says if a row has become slower or faster than it was in an earlier folder (`--against`). A planted row takes
a known share longer than the row that it calls, by an idle loop: on a GPU in a kernel after it, else in Python. The
earlier folder has the same rows without the loop. Tests write both folders by `plant`, and get verdicts by `changes`.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench_attention import Attention
from lmsys.bench import Settings
from lmsys.bench.changes import Change
from lmsys.bench.checkout import Checkout
from lmsys.bench.fields import Record
from lmsys.bench.results import MARGIN_IN_TURNS, Session
from tests.support.harness import MACHINE

NUM_ROWS = 8
# The text of planted.py, before its rows.
SOURCE = '''
import statistics
import time

import torch

from lmsys.attention.flash_triton import flash_triton
from lmsys.attention.vectorized import vectorized

SHARE = {share}
LEAD, PROBE = 2 * 10**6, 4 * 10**4  # cycles
cycles = {{}}


def timed(*calls):
    """Milliseconds, while the host is ahead: its own work is not in them."""
    torch.cuda._sleep(LEAD)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def added(call, cycles):
    """The share by which a loop of so many cycles behind a call takes longer; the two in turns, as clocks move."""
    loop = lambda: torch.cuda._sleep(cycles)
    return statistics.median(timed(call, loop) / timed(call) for _ in range(60)) - 1


def cycles_of(call, key):
    """Cycles of a loop that adds SHARE, what its launch takes included; learnt in the first call."""
    if key not in cycles:
        launch = added(call, 1)
        rate = (added(call, PROBE) - launch) / PROBE
        cycles[key] = max(1, int((SHARE - launch) / rate))
    return cycles[key]


def row(q, k, v, causal, scale):
    if q.device.type == "cuda":
        call = lambda: flash_triton(q, k, v, causal=causal, scale=scale)
        o = call()
        if SHARE:
            torch.cuda._sleep(cycles_of(call, q.shape))
        return o
    start = time.perf_counter()
    o = vectorized(q, k, v, causal=causal, scale=scale)
    until = time.perf_counter() + SHARE * (time.perf_counter() - start)
    while time.perf_counter() < until:
        pass
    return o
'''
ROW = """

def planted_{number}(q, k, v, *, causal=False, scale=None):
    return row(q, k, v, causal, scale)
"""


def plant(folder: Path, share: float) -> Path:
    """Writes planted.py into the folder, with rows that take `share` longer, and returns the folder."""
    folder.mkdir(exist_ok=True)
    rows = (ROW.format(number=number) for number in range(NUM_ROWS))
    (folder / "planted.py").write_text("".join([SOURCE.format(share=share), *rows]))
    return folder


PLANTED = ",".join(f"planted.py:planted_{number}" for number in range(NUM_ROWS))


@contextmanager
def session(
    device: str, seconds: float, margin: float = MARGIN_IN_TURNS, against: str = "", **axes: str
) -> Iterator[Session]:
    """A session of the benchmark of attention with all its cases selected, whose rows run in processes of their own.

    against  a folder of earlier rows, as in --against
    axes     values of the benchmark's axes, as texts
    """
    temporary = tempfile.TemporaryDirectory()
    checkout = Checkout(against, Path(temporary.name)) if against else None
    texts = {f"--{name.replace('_', '-')}": text for name, text in axes.items()}
    settings = Settings(device=device, seconds_per_row=seconds)
    made = Session(settings, texts=texts, isolated=True, checkout=checkout, margin=margin)
    for runner in (made.runner, getattr(made.runner, "earlier", made.runner)):
        runner._machine = MACHINE
    try:
        made.select([("attention", name) for name in made.add(Attention)])
        yield made
    finally:
        made.close()
        temporary.cleanup()


def records(device: str, seconds: float, **axes: str) -> list[Record]:
    """The records of a run of these axes, with `seconds` for each row."""
    with session(device, seconds, **axes) as opened:
        return _measured(opened)


def changes(device: str, seconds: float, against: str, margin: float = MARGIN_IN_TURNS, **axes: str) -> list[Change]:
    """The verdicts of such a run against the earlier rows in a folder."""
    with session(device, seconds, margin, against, **axes) as opened:
        _measured(opened)
        return opened.changes


def _measured(session: Session) -> list[Record]:
    for key in session._cases:
        session.result(key)
    return session.records
