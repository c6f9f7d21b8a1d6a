"""What a run tells: a line of JSON for every step and evaluation, and now and then one for the reader."""

import json
import time
from pathlib import Path
from typing import Any

PEAK_FLOPS_PER_S = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16, of data sheets


class JsonLines:
    """A file with a JSON object a line, each with its `step`. Begins with what it holds up to `step`: a run that is
    resumed writes later steps anew, and a line that was cut off is gone."""

    def __init__(self, path: Path, step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.write_text("".join(line + "\n" for line in kept))
        unfinished.replace(path)
        self._file = path.open("a")

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log."""
    return [json.loads(line) for line in _whole_lines(path)]


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
        mfu = "" if self._peak is None else f"  MFU {100 * self._flops / step_s / self._peak:.1f} %"
        left = round(step_s * (self._steps - step))
        rate = f"{self._tokens / step_s:,.0f} tokens/s{mfu}"
        return f"step {step:,}/{self._steps:,}  loss {loss:.4f}  lr {lr:.2e}  {rate}  ETA {left // 60}:{left % 60:02}"


def peak_flops_per_s(gpu: str | None, precision: str, world_size: int) -> float | None:
    """Of all ranks together, where the data sheet's figure is known: for bf16."""
    known = [peak for name, peak in PEAK_FLOPS_PER_S.items() if gpu and name in gpu]
    return known[0] * world_size if known and precision == "bf16" else None


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
