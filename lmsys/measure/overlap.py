"""How long a step communicates, and how much of that computation hides, read off the trace of torch.profiler."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from lmsys.measure.clock import synchronize
from lmsys.measure.profile import kind_of

PROFILED_STEPS = 3
WORK = {"cpu": ("cpu_op", "user_annotation"), "cuda": ("kernel", "gpu_memcpy", "gpu_memset")}  # categories of a trace
MOST_INTERVALS = 400  # of a timeline that travels with a result
Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class Communication:
    """Seconds of a step with a collective in flight, on one rank.

    overlap_fraction  the share of that time in which something computes, None where nothing is sent
    timeline          (what, start_s, end_s) of the last step, of "communication" and "computation"
    """

    time_s: float
    overlap_fraction: float | None
    timeline: list[tuple[str, float, float]]


def communication_of(
    step: Callable[[], Any], finish: Callable[[], Any], begin: Callable[[], Any], device: str
) -> Communication:
    """Profiles a few steps on each rank. `finish` waits for what a step leaves under way; `begin` is a barrier.

    On CUDA the host's calls are not recorded: that would slow down the host, which is what many a step waits for. Ranks
    begin together, after a step under the profiler: one that comes early waits inside a collective, which counts as its
    own time. Nothing may be under way when a recording begins or ends, since torch's profiler may crash on what a
    thread of gloo's is recording.
    """
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=1, active=1)) as recorded:
        step()
        finish()
        synchronize(device)
        begin()
        recorded.step()
        for _ in range(PROFILED_STEPS):
            step()
        finish()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return read_overlap(events, device, PROFILED_STEPS)


def read_overlap(events: list[dict[str, Any]], device: str, steps: int) -> Communication:
    """The communication of a step in the `traceEvents` of a trace over so many."""
    sending, computing = _intervals(events, device)
    total = sum(end - start for start, end in sending)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sending for c, d in computing if c < b and d > a)
    return Communication(total / steps, hidden / total if total else None, _timeline(sending, computing, steps))


def _intervals(events: list[dict[str, Any]], device: str) -> tuple[Intervals, Intervals]:
    """When anything communicates and when anything computes, in seconds."""
    sending, computing = [], []
    for event in events:
        if event.get("cat") not in WORK[device] or not event.get("dur"):
            continue
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if kind_of(event["name"]) != "communication":
            if event["cat"] != "user_annotation":
                computing.append(span)
        elif device == "cuda" or event["name"].startswith("gloo:"):  # on a CPU not the call, but what its thread does
            sending.append(span)
    return merged(sending), merged(computing)


def merged(intervals: Intervals, gap: float = 0.0) -> Intervals:
    """Their union, in order; those less than `gap` apart are one."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _timeline(sending: Intervals, computing: Intervals, steps: int) -> list[tuple[str, float, float]]:
    """The last of the steps, coarse enough to travel with a result."""
    if not computing:
        return []
    begin, end = computing[0][0], max(one[-1][1] for one in (sending, computing) if one)
    middle, gap = begin + (end - begin) * (steps - 1) / steps, (end - begin) / 2000
    rows = []
    for what, intervals in (("communication", sending), ("computation", computing)):
        late = [(max(a, middle) - middle, b - middle) for a, b in merged(intervals, gap) if b > middle]
        rows += [(what, float(f"{a:.5g}"), float(f"{b:.5g}")) for a, b in late[:MOST_INTERVALS]]
    return rows
