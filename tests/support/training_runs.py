"""Small training runs for tests: settings, and functions that run them in this process, in another, or on ranks.

`config` makes the settings of a run, `trainer` makes a Trainer in this process, and `start` starts the command in
another process. Tests run functions that say "on a rank" by a group of ranks.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Container
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmsys.config import ModelConfig
from lmsys.model import fused
from lmsys.parallel.collectives import size_and_rank
from lmsys.parallel.group import device
from lmsys.training import pipeline
from lmsys.training.checkpoint import newest
from lmsys.training.config import RunConfig
from lmsys.training.data import fixed_windows
from lmsys.training.loop import Trainer
from lmsys.training.reproducible import Tree, weights_sha256
from tests.support.processes import STARTUP
from tests.support.ranks import group_of, use

# The model and the settings of every run. Tests depend on them. A run gets others by `config(output, *settings)`.
MODEL = ModelConfig(16, 32, 2, 2, vocab_size=300, context_length=16, attention="naive")
SETTINGS = [
    *(
        "train.steps=8",
        "train.warmup_steps=2",
        "train.batch_size=8",
        "train.micro_batch_size=2",
        "train.log_interval=4",
    ),
    *("train.device=cpu", "evaluate.interval=4", "evaluate.windows=4", "checkpoint.interval=3", "checkpoint.keep=3"),
    *("generate.max_new_tokens=5", "data.processes=1"),
]
SETTINGS += [f"model.{name}={getattr(MODEL, name)}" for name in ("d_model", "d_ff", "num_layers", "num_heads")]
SETTINGS += [f"model.{name}={getattr(MODEL, name)}" for name in ("vocab_size", "context_length", "attention")]
STARTED: list[subprocess.Popen[str]] = []  # processes that `end_all` ends
MUON = "train.optimizer=muon", "train.undecayed=ln|embeddings"
CPU = torch.device("cpu")
END_OF_TEXT = 7  # an id
ROOT = Path(__file__).parents[2]
WORDS = "the cat sat on a mat and saw that the rat had eaten all of the oats\n"


class Ids:
    """A source of given token ids. end_of_text: the id that ends a document."""

    def __init__(self, ids: Any, end_of_text: int = END_OF_TEXT):
        self._ids, self.end_of_text = np.asarray(ids), end_of_text

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]


def random_ids(vocab_size: int, length: int, longest: int | None = None) -> Ids:
    """A source of `length` random token ids, for runs that need to learn nothing.

    longest  each id whose index is a positive multiple of this is an end of text; None: no id is
    """
    ids = np.random.default_rng(0).integers(vocab_size, size=length)
    ids[slice(longest, None, longest) if longest else []] = END_OF_TEXT
    return Ids(ids)


def config(output: Path, *settings: str) -> RunConfig:
    """The configuration of a run in the folder `output`: SETTINGS, then `settings` such as "train.steps=3"."""
    return RunConfig(str(output)).changed([*SETTINGS, *settings])


def on(strategy: str) -> tuple[str, ...]:
    """The settings of a strategy, in which "+sharded" stands for train.sharded_optimizer."""
    name = strategy.removesuffix("+sharded")
    return f"train.strategy={name}", f"train.sharded_optimizer={str(name != strategy).lower()}"


def corpus(folder: Path) -> Path:
    """Writes a text of a few words into the folder, and returns its path."""
    path = folder / "text.txt"
    path.write_text("".join(WORDS[i % 40 :] for i in range(400)))
    return path


def copy_of(data: Path, folder: Path) -> Path:
    """Makes `folder` the folder of another run on the same text, tokenizer and tokens, and returns it."""
    folder.mkdir(parents=True)
    for name in ("tokenizer", "tokens", "text.txt"):
        (folder / name).symlink_to(data / name)
    return folder


def source_of(run: RunConfig) -> Ids:
    """2,000 random ids; if documents are packed, they have at most 6 tokens."""
    return random_ids(300, 2000, 6 if run.data.packing == "documents" else None)


def trainer(
    run: RunConfig, resume: bool | str | Path = False, device: torch.device = CPU, group: Any = None
) -> Trainer:
    """A Trainer on `source_of(run)`.

    resume  True: from the newest checkpoint of the run's folder; a path: from that of this folder, if there is any
    """
    source, folder = source_of(run), run.folder / "checkpoints" if resume is True else resume
    end = END_OF_TEXT if run.data.packing == "documents" else None
    windows = fixed_windows(source, run.model.context_length, run.evaluate.windows, end)
    return Trainer(run, source, windows, device, newest(Path(folder)) if folder else None, group=group)


def first_losses(run: RunConfig, steps: int) -> list[float]:
    """On a rank, or on one process: the losses of the first steps."""
    training = trainer(run)
    return [training.train_step()[0].loss for _ in range(steps)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log with a JSON object in each line; a last line that is still being written is left out."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(output: Path) -> list[float]:
    """The logged losses of the run in a folder."""
    return [line["loss"] for line in read_lines(output / "log.jsonl") if "loss" in line]


def weights(output: Path) -> dict[str, Any]:
    """The model's state dict in the newest checkpoint of the run in a folder."""
    checkpoint = newest(output / "checkpoints")
    assert checkpoint is not None
    return checkpoint.shared()["model"]


def train_on_rank(run: RunConfig) -> int:
    """On a rank: runs the training step alone, on prepared data; the exit code."""
    return pipeline.run(run, ("train",))


def nan_on_one_rank(run: RunConfig) -> list[bool]:
    """On a rank: trains four steps; for each, True if the weights were updated. The loss of rank 1 is NaN in step 2."""
    training = trainer(run)
    loss_of = training.model.loss
    training.model.loss = lambda *batch: (
        loss_of(*batch) * (torch.nan if (training.rank, training.step) == (1, 2) else 1.0)
    )
    taken = [training.train_step()[0].taken for _ in range(4)]
    assert all(x.isfinite().all() for x in training.strategy.full_state_dict().values())
    return taken


def scaled(first: float, growth: int) -> Any:
    """A context in which trainings in float16 begin with this loss scale; it grows after `growth` steps in a row."""
    return use((torch.amp, "GradScaler", lambda cls: partial(cls, init_scale=first, growth_interval=growth)))


def infinite_on_one_rank(training: Trainer, steps: Container[int], rank: int = 0) -> None:
    """Makes the gradients of a rank infinite in these steps, and the loss stays what it is."""
    loss_of = training.model.loss

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        value = loss_of(*batch)
        if training.rank == rank and training.step in steps and value.requires_grad:
            value.register_hook(lambda grad: grad * torch.inf)
        return value

    training.model.loss = loss


def scales_on_rank(
    run: RunConfig,
    first: float,
    growth: int,
    steps: int,
    world_size: int = 1,
    folder: str = "",
    infinite: Container[int] = (),
) -> tuple[list[float], list[float], str]:
    """On a rank, or on one process: (losses, loss scales, the sha256 of the weights) of a training up to `steps` steps.

    first, growth  of `scaled`
    folder         a folder of checkpoints: training resumes from the newest, and saves a new one at the end
    infinite       steps in which the gradients of the last rank are infinite
    Ranks beyond `world_size` take no part.
    """
    group = group_of(world_size) if world_size > 1 else None
    if world_size > 1 and size_and_rank(None)[1] >= world_size:
        return [], [], ""
    with scaled(first, growth):
        training = trainer(run, folder, group=group)
    infinite_on_one_rank(training, infinite, world_size - 1)
    taken = [training.train_step()[0] for _ in range(training.step, steps)]
    if folder:
        training.save(Path(folder))
    digest = weights_sha256(training.strategy.full_state_dict())
    return [step.loss for step in taken], [step.scale for step in taken], digest


def error_on_rank(run: RunConfig) -> str:
    """On a rank: trains, and returns the message of the ValueError, or "nothing"; the rank can be used again."""
    try:
        train_on_rank(run)
    except ValueError as error:
        return str(error)
    return "nothing"


def error_of_different_ranks(run: RunConfig, setting: str) -> str:
    """On a rank: `error_on_rank`, where all ranks but the first have another setting."""
    return error_on_rank(run.changed([setting]) if size_and_rank(None)[1] else run)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the Python processes that a process has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "python" in Path(f"/proc/{pid}/cmdline").read_text()]


def is_alive(pid: int) -> bool:
    """True if the process exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(output: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts `python -m lmsys.training`, or `python LAUNCHER -m lmsys.training`, in another process, as a user does.

    Its path lacks STARTUP, so that it imports torch's compiler where a user's process does.
    """
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    line = [sys.executable, *launcher, "-m", "lmsys.training", *settings, "--output", str(output), *options]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(STARTUP)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    STARTED.append(subprocess.Popen(line, cwd=ROOT, env=os.environ | variables, start_new_session=True, **pipes))
    return STARTED[-1]


def end_all() -> None:
    """Ends all processes that `start` has started, with their ranks, for instance after a failed test."""
    while STARTED:
        if (process := STARTED.pop()).poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reproduced(run: RunConfig, world_size: int, steps: int, folder: str = "", one_by_one: bool = False) -> str:
    """On a rank: trains `steps` steps, and returns the sha256 of the weights; "" on ranks beyond `world_size`.

    folder      a folder of checkpoints: training resumes from the newest, and saves a new one at the end
    one_by_one  gradients are added one after another, and not as a tree, so that their bits depend on the ranks
    """
    group = group_of(world_size)
    if size_and_rank(None)[1] >= world_size:
        return ""
    training = trainer(run, folder, device(), group)
    with use((Tree, "add", lambda _: _add_one_by_one)) if one_by_one else nullcontext():
        while training.step < steps:
            training.train_step()
    if folder:
        training.save(Path(folder))
    return weights_sha256(training.strategy.full_state_dict())


def fused_anywhere(run: RunConfig, world_size: int, steps: int) -> str:
    """`reproduced` with fused blocks. On a CPU they are computed by PyTorch."""
    with use((fused, "why_not", lambda _: lambda device: "")):
        return reproduced(run, world_size, steps)


def _add_one_by_one(self: Tree, gradients: list[Any]) -> None:
    """Replaces Tree.add: adds to a single sum."""
    if self._sums:
        (_, before), self._sums = self._sums[0], []
        gradients = [a + b for a, b in zip(before, gradients, strict=True)]
    self._sums.append((1, gradients))
