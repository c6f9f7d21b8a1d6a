"""The command `lmsys train [STEP] [--config FILE.json]`, which makes a trained model from text.

Without STEP all steps run: tokenizer, tokenize, train, evaluate, generate (pipeline.py). The command runs in one
process, as a rank of torchrun, or starts ranks of its own (--ranks 2). Settings are the fields of config.py; a short
option for one of them, such as --steps, is an entry of SHORT here and a row of the table in docs/training.md.

Exit codes: 0 done; 2 a setting or input is wrong; 3 the loss was not finite for too long; 1 anything else; 130 (Ctrl-C)
and 143 (SIGTERM): interrupted. In the step `train`, an interrupted run first ends its training step and writes a
checkpoint. In other steps, and if a second signal ends the run at once (stopping.py), no checkpoint is written. Earlier
ones stay in any case.
"""

import argparse
import builtins
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from lmsys import commands, doing, files, values, watchdog

if __name__ == "__main__" and watchdog.under_torchrun():
    watchdog.begin()  # before torch is imported, which takes seconds

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys.config import SIZES
from lmsys.parallel.group import ERRORS_S, TorchrunGroup, WorkerError, WorkerGroup, is_lost_peer
from lmsys.training import checkpoint, loop, pipeline
from lmsys.training.config import RunConfig

TIMEOUT_S = 1800.0  # the timeout of a collective, in which ranks wait while rank 0 trains the tokenizer
FOREVER_S = 20 * 86_400.0  # the timeout of a whole training
BAD_INPUT, NONFINITE, FAILED = 2, 3, 1  # exit codes; 2 is also argparse's for words that it does not know
# By the class of an error whose message says all, the exit code; the first class counts that the error is of. An
# OSError is of the system: a full disk, a broken connection. But a file that is missing may be a fault of the program.
CODES: dict[type[BaseException], int] = {
    loop.NonFiniteError: NONFINITE,
    ValueError: BAD_INPUT,
    FileNotFoundError: 0,
    checkpoint.SaveError: FAILED,
    OSError: FAILED,
}
SHORT = {  # settings that have an option of their own, by its name: (setting, word for its value in the help)
    "attention": ("model.attention", "ROW"),
    "strategy": ("train.strategy", "ROW"),
    "output": ("output", "DIR"),
    "corpus": ("data.corpus", "FILE"),
    "steps": ("train.steps", "N"),
    "keep": ("checkpoint.keep", "N"),
    "max_seconds": ("train.max_seconds", "SECONDS"),
}


def parser() -> argparse.ArgumentParser:
    """The options of the command. Those of SHORT append PATH=VALUE to `set`, as --set does."""
    options = commands.parser("train")
    options.add_argument(
        "step", nargs="?", choices=pipeline.STEPS, metavar="STEP", help=f"alone, of {', '.join(pipeline.STEPS)}"
    )
    options.add_argument("--config", type=Path, metavar="FILE.json", help="settings; those not given have defaults")
    options.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="one: train.lr=3e-4")
    options.add_argument("--print-config", action="store_true", help="all settings as JSON, and no more")
    options.add_argument("--skip-data", action="store_true", help="take tokenizer and tokens as they are")
    options.add_argument("--ranks", type=int, metavar="N", help="start so many processes of its own, with a GPU each")
    options.add_argument("--size", choices=list(SIZES), metavar="NAME", help=f"of the model: {', '.join(SIZES)}")
    for name, (path, word) in SHORT.items():
        options.add_argument(
            # The function `type` turns the option's value into PATH=VALUE.
            f"--{name.replace('_', '-')}", dest="set", action="append", type=f"{path}={{}}".format, metavar=word,
            help=f"the same as --set {path}={word}",
        )  # fmt: skip
    return options


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """The config: the defaults, changed by the file's settings, then by --size, then by the other options, in order.

    ValueError for a wrong setting; the message names the file if it is in the file.
    """
    config = RunConfig()
    if arguments.config is not None:
        text = files.read_text(arguments.config)
        try:
            config = RunConfig.from_json(text)
        except ValueError as error:
            raise ValueError(f"{arguments.config}: {error}") from error
    settings = [f"model.{name}={value}" for name, value in SIZES.get(arguments.size, {}).items()]
    return config.changed([*settings, *arguments.set])


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code; what went wrong is a line on standard error."""
    given = parser().parse_args(arguments)
    try:
        config = read_config(given)
        if not given.print_config:
            return start(config, (given.step,) if given.step else pipeline.STEPS, given.skip_data, given.ranks)
    except KeyboardInterrupt:
        return _failed(128 + signal.SIGINT, "interrupted at once; what was saved before stands")
    except WorkerError as error:
        kinds = vars(builtins) | {kind.__name__: kind for kind in CODES}
        code = _code_of(kinds.get(error.kind, Exception))
        return _failed(code or FAILED, error.failure[1] if code else str(error))  # failure[1]: the reason in one line
    except Exception as error:
        if code := _code_of(type(error)):
            return _failed(code, str(error))
        if not watchdog.under_torchrun():
            raise
        if not is_lost_peer(type(error).__name__, str(error)):
            return _failed(FAILED, f"\n{traceback.format_exc()}")
        code = _failed(FAILED, f"another rank is gone: {error}")
        time.sleep(ERRORS_S)  # torchrun blames the rank that ends first, which should be the one that failed first
        return code
    print(config.to_json())
    return 0


def _code_of(kind: type[BaseException]) -> int:
    """The exit code for an error of this class, whose message says all; 0: it needs its traceback."""
    return next((code for known, code in CODES.items() if issubclass(kind, known)), 0)


def start(config: RunConfig, steps: tuple[str, ...], skip_data: bool, ranks: int | None) -> int:
    """Runs the pipeline, and returns the exit code.

    It runs on `ranks` new processes; or, if `ranks` is None, in this process, alone or as a rank of torchrun.
    """
    if watchdog.under_torchrun():
        values.hold((ranks is None, "--ranks starts processes of its own; torchrun has started them already"))
        joined = TorchrunGroup(_backend(config), TIMEOUT_S)
        code = pipeline.run(config, steps, skip_data)
        joined.close()  # not after an error: it would wait for other ranks, which wait in a collective
        return code
    if ranks is None:
        return pipeline.run(config, steps, skip_data)
    with WorkerGroup(ranks, _backend(config), TIMEOUT_S, with_last_words=True) as group:
        received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(_pass_on, group, received))
        code = max(group.run(pipeline.run, config, steps, skip_data, timeout_s=FOREVER_S))  # of each rank's code
        return 128 + received[0] if code and received else code


def _backend(config: RunConfig) -> str | None:
    """The backend of torch.distributed for the config's device; None: NCCL where there are GPUs, else gloo."""
    return {"cpu": "gloo", "cuda": "nccl"}.get(config.train.device or "")


def _pass_on(group: WorkerGroup, received: list[int], number: int, _: object) -> None:
    """A handler of signals that sends SIGTERM to the ranks: they save and end, and this process with them.

    received  gets the signal's number, from which `start` makes the exit code
    """
    received.append(number)
    for pid in group.pids:
        os.kill(pid, signal.SIGTERM)


def _failed(code: int, message: str) -> int:
    """Prints why the command fails, under torchrun also the rank and what it was doing; returns the exit code."""
    rank = f"rank {os.environ['RANK']} failed {doing.last()}: " if watchdog.under_torchrun() else ""
    print(f"lmsys train: {rank}{message}", file=sys.stderr)
    return code


def _leave(code: int) -> None:
    """Called by a rank of torchrun at its end. Returns if the rank is done or was interrupted; if it has failed, exits.

    Before it returns it ends the rank's watchdog. A rank that has failed exits without cleaning up, as its process
    group cannot end while other ranks wait. Its watchdog then ends the other ranks.
    """
    if code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        watchdog.tell_reported()  # tells the watchdog that the failure is reported already, by `_failed`
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    watchdog.end()


if __name__ == "__main__":
    code = main()
    if watchdog.under_torchrun():
        _leave(code)
    sys.exit(code)
