"""The deliverables of CS336, assignment 2: a file for each problem, to paste into a report.

python -m dev.deliverables -o FOLDER [--problem benchmarking_script] [--row mine.py:f]

Runs the commands that docs/cs336.md has for each problem, and writes FOLDER/PROBLEM.md: what is asked, the command, the
mean and the deviation of every case, and the tables and plots that the page names. The ToyModel under autocast, the
largest contributors to saved memory, checkpointing, and memory on paper are computed here. Without a GPU all is small.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import nn

from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.measure.memory import peak_bytes, saved_bytes
from lmsys.model import TransformerLM
from lmsys.reports.load import file_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cs336.md"
GPU = torch.cuda.is_available()
SMALLER = {  # options of a machine without a GPU, by benchmark
    "model": "--size tiny --context 32 --batch 2",
    "anatomy": "--size tiny --context 32 --batch 2",
    "data_parallel": "--size tiny --context 32 --batch 2 --world-size 2",
    "attention": "--length 256 --head-dim 16",
    "collectives": "--world-size 2 --axis megabytes=10",
    "steps": None,
    "precision": "",
}
GIB = 2**30


@dataclass(frozen=True)
class Problem:
    """A row of the page: what is asked, by which command it is answered, and which files of a report say it."""

    title: str
    asked: str
    commands: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        return file_name(self.title.replace("`", ""))


def problems() -> Iterator[Problem]:
    """Those of the page that a benchmark answers."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        commands = re.findall(r"`lmsys bench ([^`]*)`", line)
        if line.startswith("| ") and len(cells) == 4 and commands:
            files = tuple(re.findall(r"`((?:tables|plots)/[^`]*)`", cells[3]))
            yield Problem(cells[0], cells[1], tuple(commands), files)


def command_of(command: str, result: Path, rows: Sequence[str]) -> list[str] | None:
    """The page's command with its result elsewhere, small where there is no GPU; None where it needs one."""
    benchmark, *words = shlex.split(re.sub(r" -o \S+| --traces \S+", "", command))
    smaller = "" if GPU else SMALLER[benchmark]
    if smaller is None:
        return None
    if rows and benchmark == "attention":
        words += [f"--attention=naive,{','.join(rows)}"]
    return ["-m", "lmsys.bench", benchmark, *words, *shlex.split(smaller), "-o", str(result)]


def write(problem: Problem, folder: Path, rows: Sequence[str]) -> Path:
    """Runs the problem's commands and writes its file; what could not be run is said there."""
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
    """A table of the mean and the deviation of every case that was timed."""
    records = [one for one in json.loads(result.read_text())["lmsys"]["records"] if one.get("time_s")]
    rows = [
        (one["id"], f"{1e3 * one['mean_s']:.4g}", f"{1e3 * one['std_s']:.3g}", len(one["samples_s"])) for one in records
    ]
    heads = ("case", "mean, ms", "standard deviation, ms", "samples")
    return f"## Mean and deviation\n\n{table(heads, rows)}" if rows else ""


def shown(report: Path, patterns: Sequence[str], folder: Path) -> Iterator[str]:
    """The tables of a report that the page names, and links to its plots. A name there begins with the machine's."""
    for file in sorted(report.rglob("*")):
        place = f"{file.parent.name}/{file.stem}"
        matches = any(fnmatch(place, pattern.replace("/", "/*", 1)) for pattern in patterns)
        if matches and file.suffix == ".md":
            yield file.read_text()
        elif matches and file.suffix == ".svg":
            yield f"![{file.stem}]({file.relative_to(folder)})"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def toy_model(_: Path) -> str:
    """The dtypes of a small model with a layer norm under autocast."""
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
    return "\n\n".join(parts)


def built(size: str, context: int, batch: int, blocks: int) -> tuple[TransformerLM, torch.Tensor]:
    device = "cuda" if GPU else "cpu"
    model = TransformerLM(model_config(size, context_length=context, checkpoint_blocks=blocks), device=device)
    return model, torch.zeros(batch, context, dtype=torch.long, device=device)


SHAPE = ("2.7b", 2048, 4) if GPU else ("tiny", 128, 2)  # size, context, batch
ABOUT = f"Size {SHAPE[0]}, context {SHAPE[1]}, batch {SHAPE[2]}, float32, on a {'GPU' if GPU else 'CPU'}."


def contributors(_: Path) -> str:
    """The five largest contributors to what a forward saves for its backward."""
    model, tokens = built(*SHAPE, blocks=0)
    held: dict[int, tuple[str, int]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        shape = " x ".join(map(str, x.shape))
        held[storage.data_ptr()] = f"{shape}, {str(x.dtype).removeprefix('torch.')}", storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _loss = model.loss(tokens, tokens)  # what it keeps lives as long
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total, counts = Counter[str](), Counter[str]()
    for place, (name, size) in held.items():
        if place not in parameters:
            total[name] += size
            counts[name] += 1
    whole = sum(total.values())
    rows = [(name, counts[name], f"{n / 2**20:.3g}", f"{n / whole:.0%}") for name, n in total.most_common(5)]
    heads = ("saved tensors of shape", "how many", "MiB", "share")
    return f"{ABOUT} {whole / GIB:.3g} GiB are saved beside parameters.\n\n{table(heads, rows)}"


def checkpointing(folder: Path) -> str:
    """Saved memory and the peak by size of the checkpointed groups, beside what they are on paper; and a plot."""
    from matplotlib.figure import Figure

    size, context, batch = SHAPE
    found = []
    for blocks in (n for n in (0, 1, 2, 4, 8) if n <= model_config(size).num_layers):
        model, tokens = built(*SHAPE, blocks=blocks)
        paper = training_memory(
            model_config(size, context_length=context, checkpoint_blocks=blocks), batch, context, "fp32"
        )
        saved = saved_bytes(lambda: model.loss(tokens, tokens))  # noqa: B023  called at once
        peak = peak_bytes(lambda: model.loss(tokens, tokens).backward(), str(tokens.device))  # noqa: B023
        found.append((blocks or "none", *(x / 2**20 for x in (saved, peak, paper.activations, paper.recomputed))))
    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    for column, label in enumerate(("saved for the backward", "peak of forward and backward"), start=1):
        axes.plot([str(row[0]) for row in found], [row[column] for row in found], marker="o", label=label)
    axes.set(xlabel="blocks in a checkpointed group", ylabel="MiB", ylim=(0, None))
    axes.legend()
    figure.savefig(folder / "gradient_checkpointing.svg")
    heads = ("blocks in a group", "saved, MiB", "peak, MiB", "on paper: activations, MiB", "computed again, MiB")
    rows = [(row[0], *(f"{value:.4g}" for value in row[1:])) for row in found]
    return f"{ABOUT}\n\n{table(heads, rows)}\n\n![memory](gradient_checkpointing.svg)"


def on_paper(_: Path) -> str:
    """The memory of a training step of each size, context 512 and batch 4, float32."""
    rows = []
    for size in ("small", "medium", "large", "xl", "2.7b", "10b"):
        footprint = asdict(training_memory(model_config(size, context_length=512), 4, 512, "fp32"))
        rows.append((size, *(f"{value / GIB:.2f}" for value in footprint.values())))
    return "GiB by size.\n\n" + table(("size", *footprint), rows)


COMPUTED: dict[str, Callable[[Path], str]] = {
    "benchmarking_mixed_precision-toy_model": toy_model,
    "memory_profiling-f-contributors": contributors,
    "gradient_checkpointing": checkpointing,
    "memory_on_paper": on_paper,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dev.deliverables", description=__doc__.splitlines()[0])
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="where the files are written"
    )
    parser.add_argument("--problem", action="append", default=[], metavar="NAME", help="those whose name begins so")
    parser.add_argument("--row", action="append", default=[], metavar="ROW", help="of attention, beside naive")
    given = parser.parse_args(arguments)
    folder = given.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begins = tuple(given.problem) or ("",)
    for problem in problems():
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
