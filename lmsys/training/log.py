"""The log of a run: it has a line of JSON for every step and evaluation, and prints one now and then."""

import json
import math
import time
from pathlib import Path
from typing import Any

from lmsys import files


class JsonLines:
    """A file with a JSON object a line, each with its `step`. JSON has no such numbers, so NaN and infinities are the
    strings "NaN", "Infinity" and "-Infinity", which float() reads.

    Begins with what it holds up to `step`: a run that is resumed writes later steps anew. The lines of these, and what
    is no such line, go to the end of a file beside it, NAME.replaced.
    """

    def __init__(self, path: Path, step: int):
        path = Path(path)
        kept, replaced = [], []
        for line in path.read_text(errors="surrogateescape").splitlines() if path.is_file() else ():
            facts = _facts_until(step, line)
            if facts is None:
                replaced.append(line + "\n")
            else:
                kept.append(_line(facts))
        if replaced:
            with path.with_name(path.name + ".replaced").open("a", errors="surrogateescape") as beside:
                beside.writelines(replaced)
        with files.replacing(path) as file:
            file.write("".join(kept).encode())
        self._file = path.open("a")

    def write(self, **facts: Any) -> None:
        self._file.write(_line(facts))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(facts: dict[str, Any]) -> str:
    odd = {name: json.dumps(x) for name, x in facts.items() if isinstance(x, float) and not math.isfinite(x)}
    return json.dumps(facts | odd) + "\n"


def _facts_until(step: int, line: str) -> dict[str, Any] | None:
    """None for a line of a later step, and for what is none: the run can go on without it. Earlier versions of this
    package wrote NaN without quotes."""
    try:
        facts = json.loads(line)
        return facts if float(facts["step"]) <= step else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class Progress:
    """The line for the reader: tokens/s since the last one, MFU where the device's peak is known, loss, time left."""

    def __init__(
        self, step: int, steps: int, tokens_per_step: int, flops_per_step: float, peak_flops_per_s: float | None
    ):
        self._steps, self._tokens, self._flops, self._peak = steps, tokens_per_step, flops_per_step, peak_flops_per_s
        self._last, self._since = step, time.perf_counter()

    def line(self, step: int, loss: float, lr: float) -> str:
        now = time.perf_counter()
        step_s = (now - self._since) / max(1, step - self._last)
        self._last, self._since = step, now
        left = round(step_s * (self._steps - step))
        rate = f"{self._tokens / step_s:,.0f} tokens/s{self.mfu('  ', step_s)}"
        return f"step {step:,}/{self._steps:,}  loss {loss:.4f}  lr {lr:.2e}  {rate}  ETA {left // 60}:{left % 60:02}"

    def mfu(self, between: str, step_s: float) -> str:
        """The share of the peak that a step of `step_s` reaches, behind `between`; nothing where no peak is known."""
        return "" if self._peak is None else f"{between}MFU {100 * self._flops / step_s / self._peak:.1f} %"
