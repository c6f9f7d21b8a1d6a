"""The log of a run: it has a line of JSON for every step and evaluation, and prints one now and then."""

import importlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmsys import commands, files
from lmsys.training.config import RunConfig


class JsonLines:
    """A file with a JSON object a line, each with its `step`. JSON has no such numbers, so NaN and infinities are the
    strings "NaN", "Infinity" and "-Infinity", which float() reads.

    Begins with what it holds up to `step`: a run that is resumed writes later steps anew. The lines of these, and what
    is no such line, go to the end of a file beside it, NAME.replaced.
    """

    def __init__(self, path: Path, step: int, others: "Sequence[TensorBoard | WandB]" = ()):
        self._others, path = others, Path(path)
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
        for other in self._others:
            other.write(facts)

    def close(self) -> None:
        self._file.close()
        for other in self._others:
            other.close()


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


class TensorBoard:
    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        self.close = self._writer.close

    def write(self, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if name != "step":
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(name, value, facts["step"])


class WandB:
    def __init__(self, folder: Path, project: str, mode: str, settings: dict[str, Any]):
        import wandb

        self._run = wandb.init(project=project, dir=str(folder), mode=mode, config=settings)
        self.close = self._run.finish

    def write(self, facts: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in facts.items() if name != "step"}, step=facts["step"])


def check_packages(config: RunConfig) -> None:
    """ValueError, with the extra that would bring it, where a package of the other logs is missing."""
    try:
        if config.log.tensorboard:
            importlib.import_module("torch.utils.tensorboard")
        if config.log.wandb is not None:
            importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(f"log: {error}; {commands.with_extra('log')} brings it") from error


def others(config: RunConfig, step: int) -> list[TensorBoard | WandB]:
    """The other logs that the config asks for; `check_packages` has seen that their packages are there."""
    logs = list[TensorBoard | WandB]()
    if config.log.tensorboard:
        logs.append(TensorBoard(config.folder / "tensorboard", step))
    if config.log.wandb is not None:
        logs.append(WandB(config.folder, config.log.wandb, config.log.wandb_mode, asdict(config)))
    return logs


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
