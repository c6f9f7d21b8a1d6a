"""Writes the deliverables of CS336, assignment 2: a file for each problem, to paste into a report.

python -m dev.deliverables -o FOLDER [--problem benchmarking_script] [--row mine.py:f]

CS336 is Stanford's course on language models; the *handout* of an assignment is the text with its problems. The page
docs/cs336.md has, for each problem, the `lmsys bench` commands that answer it. This tool runs them and writes
FOLDER/PROBLEM.md: what the problem asks, the command, the mean and the standard deviation of every case, and the tables
and plots that the page names. To change such an answer, edit the page.

Problems that no benchmark answers are computed by the functions in COMPUTED: the ToyModel under autocast, the largest
contributors to saved memory, activation checkpointing, and, in `on_paper.py`, the problems for paper and pencil. A new
one is a function in COMPUTED, with a line in docs/cs336.md that names its file. Without a GPU all sizes are small, and
each file has the command for the full sizes.
"""

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dev import on_paper
from dev.on_paper import MIB, table
from lmsys import commands
from lmsys.attention import ATTENTION
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.measure.memory import peak_bytes, saved_bytes
from lmsys.model import TransformerLM
from lmsys.reports.load import file_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cs336.md"
GPU = torch.cuda.is_available()
SMALLER = {  # {benchmark: options that make it small, on a machine without a GPU}; None: it cannot run without GPUs
    "model": "--size tiny --context 32 --batch 2",
    "anatomy": "--size tiny --context 32,64 --batch 2",
    "data_parallel": "--size tiny --context 32 --batch 2 --world-size 2",
    "attention": "--length 256 --head-dim 16",
    "collectives": "--world-size 2,4 --axis megabytes=1,10,100",
    "steps": None,
    "precision": "",
}


@dataclass(frozen=True)
class Problem:
    """A problem that benchmarks answer: a row of the table in docs/cs336.md.

    title     the problem's name
    asked     what the problem asks for
    commands  each the arguments of an `lmsys bench` command; together the commands answer the problem
    files     patterns of the tables and plots of the report that show the answer: "tables/model-warmup-spread-*"
    """

    title: str
    asked: str
    commands: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        return file_name(self.title.replace("`", ""))


def problems() -> Iterator[Problem]:
    """Reads docs/cs336.md, and yields the problems that have a benchmark command."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        commands = re.findall(r"`lmsys bench ([^`]*)`", line)
        if line.startswith("| ") and len(cells) == 4 and commands:
            files = tuple(re.findall(r"`((?:tables|plots)/[^`]*)`", cells[3]))
            yield Problem(cells[0], cells[1], tuple(commands), files)


def command_of(command: str, result: Path, rows: Sequence[str]) -> list[str] | None:
    """The arguments of Python that run the page's command here; None if it needs GPUs and there are none.

    Without a GPU the sizes are those of SMALLER.

    command  the arguments of `lmsys bench`, as the page has them
    result   the path of the result file, which replaces that of the page
    rows     attention rows that `lmsys bench attention` measures beside `naive`; other benchmarks ignore them
    """
    benchmark, *words = shlex.split(re.sub(r" -o \S+| --traces \S+", "", command))
    smaller = "" if GPU else SMALLER[benchmark]
    if smaller is None:
        return None
    if rows and benchmark == "attention":
        words += [f"--attention=naive,{','.join(rows)}"]
    return ["-m", "lmsys.bench", benchmark, *words, *shlex.split(smaller), "-o", str(result)]


def write(problem: Problem, folder: Path, rows: Sequence[str]) -> Path:
    """Runs the problem's commands, writes its file, and returns its path. The file says what could not be run."""
    parts = [f"# {problem.title}", f"{problem.asked}."]
    for number, text in enumerate(problem.commands):
        name = problem.name + f"-{number}" * (number > 0)
        result = folder / "results" / f"{name}.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        command = command_of(text, result, rows)
        if command is None:
            parts.append(f"Not run: `lmsys bench {text}` needs GPUs.")
            continue
        parts.append(f"```sh\n{shlex.join(['python', *command])}\n```")
        if not GPU:
            parts.append(f"This machine has no GPU, so this is small. In full it is `lmsys bench {text}`.")
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        # `lmsys bench` refuses to overwrite the result of another command. Such a result may be there from an earlier
        # run of this tool, with other options.
        if "is the result of another command" in done.stdout + done.stderr:
            result.unlink()
            done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        if not result.is_file():
            parts.append(f"Not run:\n\n```text\n{done.stdout[-2000:]}\n```")
            continue
        report = ["-m", "lmsys.reports", str(result), "-o", str(folder / "reports" / name)]
        subprocess.run([sys.executable, *report], cwd=ROOT, check=True, capture_output=True)
        parts += [spread(result), *shown(folder / "reports" / name, problem.files, folder)]
    file = folder / f"{problem.name}.md"
    file.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return file


def spread(result: Path) -> str:
    """A Markdown table of the mean and the standard deviation of every case that was timed; "" if none was."""
    records = [record for record in json.loads(result.read_text())["lmsys"]["records"] if record.get("time_s")]
    rows = [
        (record["id"], f"{1e3 * record['mean_s']:.4g}", f"{1e3 * record['std_s']:.3g}", len(record["samples_s"]))
        for record in records
    ]
    heads = ("case", "mean, ms", "standard deviation, ms", "samples")
    return f"## Mean and deviation\n\n{table(heads, rows)}" if rows else ""


def shown(report: Path, patterns: Sequence[str], folder: Path) -> Iterator[str]:
    """Yields, as Markdown, the tables of a report that match `patterns`, and links to the plots that do.

    A file's name begins with the machine's name, which the patterns leave out.

    report    the folder of the report
    patterns  as in `Problem.files`, without the machine and the file's ending
    folder    the folder to which the links are relative
    """
    for file in sorted(report.rglob("*")):
        place = f"{file.parent.name}/{file.stem}"
        matches = any(fnmatch(place, pattern.replace("/", "/*", 1)) for pattern in patterns)
        if matches and file.suffix == ".md":
            yield file.read_text()
        elif matches and file.suffix == ".svg":
            yield f"![{file.stem}]({file.relative_to(folder)})"


def toy_model(_: Path) -> str:
    """A Markdown table of the dtypes of tensors in the handout's ToyModel (it has a layer norm) under autocast.

    The handout asks about a model on a GPU, and autocast has other rules on a CPU. So a table that is made on a CPU
    does not answer the problem, and a last sentence says so.
    """
    device, parts = "cuda" if GPU else "cpu", []
    for dtype in (torch.float16, torch.bfloat16):
        model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.LayerNorm(10), nn.Linear(10, 3)).to(device)
        dtypes = {"parameters": model[0].weight.dtype}
        with torch.autocast(device, dtype):
            x = torch.randn(6, 5, device=device)
            for name, module in zip(("fc1", "ReLU", "layer norm", "logits"), model, strict=True):
                x = module(x)
                dtypes[name] = x.dtype
            loss = nn.functional.cross_entropy(x, torch.arange(6, device=device) % 3)
        loss.backward()
        dtypes |= {"loss": loss.dtype, "gradients": model[0].weight.grad.dtype}
        rows = [(name, str(kept).removeprefix("torch.")) for name, kept in dtypes.items()]
        parts += [
            f"## On a {device}, autocast in {str(dtype).removeprefix('torch.')}",
            table(("tensor", "dtype"), rows),
        ]
    if not GPU:
        parts.append(
            "Autocast of a GPU has rules of its own: only there this answers the handout, whose model is on one."
        )
    return "\n\n".join(parts)


def built(size: str, context: int, batch: int, blocks: int) -> tuple[TransformerLM, torch.Tensor]:
    """(a model with float32 weights, tokens for it). `blocks` blocks make a checkpointed group; 0: no checkpointing."""
    device = "cuda" if GPU else "cpu"
    model = TransformerLM(model_config(size, context_length=context, checkpoint_blocks=blocks), device=device)
    return model, torch.zeros(batch, context, dtype=torch.long, device=device)


SHAPE = ("2.7b", 2048, 4) if GPU else ("tiny", 128, 2)  # size, context, batch
ABOUT = f"Size {SHAPE[0]}, context {SHAPE[1]}, batch {SHAPE[2]}, float32, on a {'GPU' if GPU else 'CPU'}."


def contributors(_: Path) -> str:
    """The five operations of a block that save most bytes for the backward, and the size of its gradients, as Markdown.

    Parameters do not count. A storage that several operations save counts once, for the first of them that is found.
    """
    (size, context, batch), device = SHAPE, "cuda" if GPU else "cpu"
    config = model_config(size, context_length=context, num_layers=1)
    model, attend = TransformerLM(config, device=device), ATTENTION["naive"].load()
    block, x = model.layers[0], torch.randn(batch, context, config.d_model, device=device, requires_grad=True)
    held = {p.untyped_storage().data_ptr() for p in block.parameters()}
    total, counts = Counter[str](), Counter[str]()
    for name, tensor in saved_by(block(x, attend, model.rope).grad_fn):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            held.add(storage.data_ptr())
            total[name] += storage.nbytes()
            counts[name] += 1
    whole, gradients = sum(total.values()), sum(p.nbytes for p in block.parameters())
    rows = [(name, counts[name], f"{n / MIB:.4g}", f"{n / whole:.0%}") for name, n in total.most_common(5)]
    heads = ("operation", "tensors", "MiB", "share of the block")
    return (
        f"{ABOUT} Plain attention. A block saves {whole / MIB:.4g} MiB beside its parameters; a tensor that several"
        f" operations save counts for the first of them in the backward.\n\n{table(heads, rows)}\n\n"
        f"In the backward a block makes gradients of its parameters, {gradients / MIB:.4g} MiB, and of its input,"
        f" {x.nbytes / MIB:.4g} MiB, while what it saved is freed."
    )


def saved_by(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (operation, tensor) for each tensor that a node of autograd's graph has saved.

    It walks the graph from `node`, the `grad_fn` of an output, towards the inputs.
    """
    nodes = [node]
    for node in nodes:  # the body appends nodes to the list: a breadth-first search
        kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        kept += getattr(node, "saved_tensors", ())
        tensors = [x for x in tree_leaves(kept) if isinstance(x, torch.Tensor)]
        yield from ((node.name().removesuffix("Backward0").removesuffix("Backward"), x) for x in tensors)
        nodes += [after for after, _ in node.next_functions if after is not None and after not in nodes]


def checkpointing(folder: Path) -> str:
    """Saved and peak memory by the number of blocks in a checkpointed group, beside the prediction, as Markdown.

    It also writes a plot, gradient_checkpointing.svg, into `folder`.
    """
    from matplotlib.figure import Figure

    size, context, batch = SHAPE
    measured = []
    for blocks in (n for n in (0, 1, 2, 4, 8) if n <= model_config(size).num_layers):
        model, tokens = built(*SHAPE, blocks=blocks)
        predicted = training_memory(
            model_config(size, context_length=context, checkpoint_blocks=blocks), batch, context, "fp32"
        )
        try:
            saved: float = saved_bytes(lambda: model.loss(tokens, tokens))  # noqa: B023  called at once
            peak: float = peak_bytes(lambda: model.loss(tokens, tokens).backward(), str(tokens.device))  # noqa: B023
        except torch.OutOfMemoryError:  # a gap in the plot
            saved = peak = math.nan
        measured.append(
            (blocks or "none", *(x / 2**20 for x in (saved, peak, predicted.activations, predicted.recomputed)))
        )
    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    for column, label in enumerate(("saved for the backward", "peak of forward and backward"), start=1):
        axes.plot([str(row[0]) for row in measured], [row[column] for row in measured], marker="o", label=label)
    axes.set(xlabel="blocks in a checkpointed group", ylabel="MiB", ylim=(0, None))
    axes.legend()
    figure.savefig(folder / "gradient_checkpointing.svg")
    heads = ("blocks in a group", "saved, MiB", "peak, MiB", "on paper: activations, MiB", "computed again, MiB")
    rows = [(row[0], *(f"{value:.4g}" for value in row[1:])) for row in measured]
    return f"{ABOUT} nan: out of memory.\n\n{table(heads, rows)}\n\n![memory](gradient_checkpointing.svg)"


# {name of a problem and of its file: a function that gets the output folder and returns the answer as Markdown}
COMPUTED: dict[str, Callable[[Path], str]] = {
    "benchmarking_mixed_precision-toy_model": toy_model,
    "memory_profiling-f-contributors": contributors,
    "gradient_checkpointing": checkpointing,
    "memory_on_paper": on_paper.sizes,
    "communication_accounting-2025": on_paper.accounting,
    "ddp_bucketed_benchmarking-b-2025": on_paper.buckets,
    "parallelism_calcs-2026": on_paper.parallel,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.deliverables", description=__doc__.splitlines()[0])
    parser.add_argument(
        "-o", "--output", type=commands.path, required=True, metavar="FOLDER", help="where the files are written"
    )
    parser.add_argument("--problem", action="append", default=[], metavar="NAME", help="those whose name begins so")
    parser.add_argument("--row", action="append", default=[], metavar="ROW", help="of attention, beside naive")
    given = parser.parse_args(arguments)
    found, begins = [*problems()], tuple(given.problem) or ("",)
    names = dict.fromkeys([*(problem.name for problem in found), *COMPUTED])
    for begin in begins:
        if not any(name.startswith(begin) for name in names):
            parser.error(f"--problem {begin}: no problem's name begins so; they are {', '.join(names)}")
    folder = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for problem in found:
        if problem.name.startswith(begins):
            print(write(problem, folder, given.row), flush=True)
    for name, answer in COMPUTED.items():
        if name.startswith(begins):
            file = folder / f"{name}.md"
            file.write_text(f"# {name}\n\n{answer(folder)}\n", encoding="utf-8")
            print(file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
