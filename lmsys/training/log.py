"""Writes a run's log.jsonl, with a line for every step and evaluation, and makes the lines on progress that it prints.

pipeline.py opens a `JsonLines`; the training loop (loop.py) writes to it, and makes a `Progress`. What a line of the
log holds is decided there, by `Trainer._tell` and `Trainer.fit`. docs/training.md shows how other tools, such as
TensorBoard, load log.jsonl.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from lmsys import files


class JsonLines:
    """A file with a JSON object in each line, which has a `step`.

    NaN and infinities, which JSON lacks, are written as the strings "NaN", "Infinity" and "-Infinity", which float()
    reads. If the file exists, it keeps its lines up to `step`, since a run that resumes from that step writes later
    steps anew. Lines of later steps, and lines that hold no object with a `step`, are moved to the end of a file beside
    it, NAME.replaced.

    step  the last step that is done: 0 in a new run
    """

    def __init__(self, path: Path, step: int):
        path = Path(path)
        kept, replaced = [], []
        for line in path.read_text(errors="surrogateescape").splitlines() if path.is_file() else ():
            if (facts := _facts_until(step, line)) is None:
                replaced.append(line + "\n")
            else:
                kept.append(_line(facts))
        if replaced:
            with path.with_name(path.name + ".replaced").open("a", errors="surrogateescape") as beside:
                beside.writelines(replaced)
        with files.replacing(path) as file:
            file.write("".join(kept).encode())
        self._file = path.open("a", buffering=1)  # each line is written at once

    def write(self, **facts: Any) -> None:
        """Appends a line with these facts; `step` must be one of them."""
        self._file.write(_line(facts))

    def close(self) -> None:
        self._file.close()


def _line(facts: dict[str, Any]) -> str:
    """The line of JSON for these facts."""
    odd = {name: json.dumps(x) for name, x in facts.items() if isinstance(x, float) and not math.isfinite(x)}
    return json.dumps(facts | odd) + "\n"


def _facts_until(step: int, line: str) -> dict[str, Any] | None:
    """The facts of a line of a step up to `step`; None for other lines, without which the run can go on.

    Earlier versions of this package wrote NaN without quotes, which is read as well.
    """
    try:
        facts = json.loads(line)
        return facts if float(facts["step"]) <= step else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class Progress:
    """Makes the printed lines: a step's loss and learning rate, tokens/s and MFU since the line before, the time left.

    MFU, model FLOPs utilization, is the share of the peak that the model's operations reach. The time left includes
    evaluations and checkpoints: as much per step as they have taken so far.

    step              the number of steps done when this object is made
    seconds           the time that these steps have taken, without evaluations and checkpoints
    steps             the number of steps of the whole run
    tokens_per_step   of all ranks together, as is flops_per_step
    peak_flops_per_s  of all ranks together; None: not known, and lines have no MFU
    """

    def __init__(
        self,
        step: int,
        seconds: float,
        steps: int,
        tokens_per_step: int,
        flops_per_step: float,
        peak_flops_per_s: float | None,
    ):
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak_flops_per_s
        self._first, self._began = step, time.perf_counter() - seconds
        self._last = step, seconds

    def line(self, step: int, seconds: float, loss: float, lr: float) -> str:
        """The line after a step; `lr` is its learning rate, `seconds` is as in the constructor."""
        step_s = (seconds - self._last[1]) / (step - self._last[0])
        self._last = step, seconds
        aside_s = (time.perf_counter() - self._began - seconds) / (step - self._first)
        left = round((step_s + aside_s) * (self._steps - step))
        rate = f"{self._tokens / step_s:,.0f} tokens/s{self.mfu('  ', step_s)}"
        return f"step {step:,}/{self._steps:,}  loss {loss:.4f}  lr {lr:.2e}  {rate}  ETA {left // 60}:{left % 60:02}"

    def mfu(self, between: str, step_s: float) -> str:
        """The text `between` and the MFU of a step that takes `step_s` seconds; "" where no peak is known."""
        return "" if self._peak is None else f"{between}MFU {100 * self._flops / step_s / self._peak:.1f} %"
