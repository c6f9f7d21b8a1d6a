"""The log of a run: it has a line of JSON for every step and evaluation, and prints one now and then."""

import importlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmsys.files import replacing
from lmsys.strict_json import parse_json
from lmsys.training.config import RunConfig


class JsonLines:
    """A file with a JSON object a line, each with its `step`. Begins with what it holds up to `step`: a run that is
    resumed writes later steps anew, and a line that was cut off is gone."""

    def __init__(self, path: Path, step: int, others: "Sequence[TensorBoard | WandB]" = ()):
        self._others, path = others, Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(errors="replace") if path.is_file() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        kept = [line for line in whole if _step(line) <= step]
        with replacing(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())
        self._file = path.open("a")

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()
        for other in self._others:
            other.write(facts)

    def close(self) -> None:
        self._file.close()
        for other in self._others:
            other.close()


def _step(line: str) -> float:
    """The step of a line; infinity for what is none, which is dropped: the run can go on without it."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf


class TensorBoard:
    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            if name != "step":
                self._writer.add_scalar(name, value, facts["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, folder: Path, project: str, mode: str, settings: dict[str, Any]):
        import wandb

        self._run = wandb.init(project=project, dir=str(folder), mode=mode, config=settings)

    def write(self, facts: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in facts.items() if name != "step"}, step=facts["step"])

    def close(self) -> None:
        self._run.finish()


def check_packages(config: RunConfig) -> None:
    """ValueError, with the extra that would bring it, where a package of the other logs is missing."""
    asked = {"torch.utils.tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    try:
        for name in (name for name, is_asked in asked.items() if is_asked):
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"log: {error}; pip install 'lmsys[log]' brings it") from error


def others(config: RunConfig, step: int) -> list[TensorBoard | WandB]:
    """The other logs that the config asks for; `check_packages` has seen that their packages are there."""
    found: list[TensorBoard | WandB] = []
    if config.log.tensorboard:
        found.append(TensorBoard(config.folder / "tensorboard", step))
    if config.log.wandb is not None:
        found.append(WandB(config.folder, config.log.wandb, config.log.wandb_mode, asdict(config)))
    return found


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
