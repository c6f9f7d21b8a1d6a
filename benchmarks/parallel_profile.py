"""What of a training step communicates, and how much of that computation hides, as torch's profiler tells it."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from lmsys.measure.clock import synchronize
from lmsys.measure.profile import kind_of

PROFILED_STEPS = 3
WORK = {"cpu": ("cpu_op", "user_annotation"), "cuda": ("kernel", "gpu_memcpy", "gpu_memset")}  # categories of a trace
MOST_INTERVALS = 400  # of a timeline that travels with a result


def communication_of(
    step: Callable[[], Any], settle: Callable[[], None], group: Any, kind: str
) -> tuple[float, float | None, list[tuple[str, float, float]]]:
    """Seconds a step that anything communicates, how much of it computation hides, and the last step's intervals.

    On CUDA the host's calls are not recorded: that would slow down the host, which is what many a step waits for. Ranks
    begin together, after a step under the profiler: who comes early waits inside a collective, which counts as its own.
    `settle` waits for what a step leaves under way: nothing may be when a recording begins or ends, since torch's
    profiler may crash on what a thread of gloo's is recording.
    """
    activity = ProfilerActivity.CUDA if kind == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=1, active=1)) as recorded:
        step()
        settle()
        synchronize(kind)
        dist.barrier(group)
        recorded.step()
        for _ in range(PROFILED_STEPS):
            step()
        settle()
        synchronize(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    sending, computing = [], []
    for event in events:
        if event.get("cat") not in WORK[kind] or not event.get("dur"):
            continue
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if kind_of(event["name"]) != "communication":
            if event["cat"] != "user_annotation":
                computing.append(span)
        elif kind == "cuda" or event["name"].startswith("gloo:"):  # on a CPU not the call, but what its thread does
            sending.append(span)
    sending, computing = merged(sending), merged(computing)
    total = sum(end - start for start, end in sending)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sending for c, d in _near(computing, a, b))
    return total / PROFILED_STEPS, hidden / total if total else None, _timeline(sending, computing)


def _near(intervals: list[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    return [one for one in intervals if one[0] < end and one[1] > start]


def merged(intervals: list[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Their union, in order; those less than `gap` apart are one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _timeline(sending: list[Any], computing: list[Any]) -> list[tuple[str, float, float]]:
    """Of the last of the profiled steps, coarse enough to travel with a result."""
    if not computing:
        return []
    begin, end = computing[0][0], max(one[-1][1] for one in (sending, computing) if one)
    middle, gap = begin + (end - begin) * (PROFILED_STEPS - 1) / PROFILED_STEPS, (end - begin) / 2000
    rows = []
    for what, intervals in (("communication", sending), ("computation", computing)):
        late = [(max(a, middle) - middle, b - middle) for a, b in merged(intervals, gap) if b > middle]
        rows += [(what, float(f"{a:.5g}"), float(f"{b:.5g}")) for a, b in late[:MOST_INTERVALS]]
    return rows
