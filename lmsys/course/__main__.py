"""Says of each part of a CS336 assignment whether it is right, wrong, refused, not written, or not judged.

FOLDER is a checkout of assignment 1 or 2, of 2025 or 2026, as it is. It runs in the Python that runs lmsys: install
there what the checkout imports. The parts run in processes of their own.

A part is right where it does what the handout (the text of the assignment) and the course's tests ask. "Beyond" the
handout are aspects that real models need, such as odd lengths or bfloat16: they never change the verdict. Asking about
them takes at most 20 s a part. A finished assignment 2 takes about 3 minutes on two cores.

Exit codes: 0 all that is written is right, 1 a part is wrong or refuses what the handout asks, 2 the folder is no such
checkout, or does not load, 3 nothing is wrong, but a part could not be judged or measured, 130 interrupted (Ctrl-C).
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys import commands, processes, values
from lmsys.bench.fields import grouped
from lmsys.course import checkout, parts, systems
from lmsys.reports import page

# checkout.py finds and imports a checkout. parts.py lists the parts: add one there. basics.py and basics_training.py
# have the questions about assignment 1. systems.py wraps adapters as functions and classes, so that `lmsys check` can
# ask them and the bench can measure them. This file starts the processes that ask, prints the verdicts, and has
# `measure`, by which --measure times the parts that are right.

# An exit code, the version of the JSON, and the most seconds of a part.
UNJUDGED, SCHEMA, PART_S = 3, 1, 120.0
NO_GPU = not torch.cuda.is_available()
ON_A_LAPTOP = (
    "Without a GPU Triton's interpreter ran the kernels, and torch.compile compiled nothing: a GPU runs other code."
)
Answer = Mapping[str, Any]  # the verdict on a part and what explains it, as `--json` prints it: docs/course.md


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser("course")
    parser.description = __doc__
    parser.add_argument("folder", type=commands.path, metavar="FOLDER", help="a checkout of assignment 1 or 2")
    parser.add_argument(
        "--part", default="", metavar="TEXT", help="only parts with this in their name or their adapter's: attention"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object in a line for each part: docs/course.md")
    parser.add_argument("--html", type=commands.path, metavar="FILE", help="the table as a page")
    parser.add_argument(
        "--measure",
        type=commands.path,
        metavar="FOLDER",
        help="then measure the parts that are right, and write a report there",
    )
    given = parser.parse_args(arguments)
    answers, width = list[Answer](), shutil.get_terminal_size((120, 24)).columns
    try:
        # Before minutes of questions: a checkout that is none, and places that cannot be written, are refused.
        root = checkout.root_of(given.folder)
        values.hold(
            (
                not given.measure or "," not in str(given.measure.resolve()),
                f"--measure {given.measure}: its path has a comma, at which the bench splits it: name another folder",
            ),
            (not (given.html and given.html.is_dir()), f"--html {given.html}: it is a folder, and a file is written"),
        )
        for folder in filter(None, (given.html and given.html.parent, given.measure)):
            folder.mkdir(parents=True, exist_ok=True)
        for answer in answers_of(root, given.part):
            answers.append(answer)
            print(json.dumps(answer) if given.json else _line(answer, width), flush=True)
        if not given.json:
            details = [f"{x['part']} ({x['adapter']})\n  {x['text']}\n" for x in answers if "text" in x]
            print("\n".join(["", *details, *_summary(answers)]))
        if given.html is not None:
            given.html.write_text(_page(given.folder, answers), encoding="utf-8")
        is_measured = given.measure is None or measure(
            root,
            {answer["part"] for answer in answers if answer["verdict"] == parts.RIGHT},
            given.measure.resolve(),
        )
    except BrokenPipeError:  # the reader of stdout has gone: `lmsys.__main__` ends the command
        raise
    except (OSError, ValueError) as error:  # what does not load has no parts
        return commands.refused(parser.prog, error)
    verdicts = {answer["verdict"] for answer in answers}
    return (
        1 if verdicts & {parts.WRONG, parts.REFUSED} else UNJUDGED * (parts.NOT_JUDGED in verdicts or not is_measured)
    )


def answers_of(root: Path, text: str = "") -> Iterator[Answer]:
    """Yields the verdict on each part whose adapter the checkout has.

    ValueError: the adapters do not load, or there is no such part.

    text  only parts with this text in their name or their adapter's, in upper or lower case, are asked
    """
    with tempfile.TemporaryDirectory() as folder:
        path = [*checkout.path_of(root), *sys.path]
        # Without a GPU a C++ compiler may be missing, and interpreted kernels cannot be compiled.
        environment = {"PYTHONPATH": os.pathsep.join(path)} | ({"TORCHDYNAMO_DISABLE": "1"} if NO_GPU else {})
        with processes.Worker(environment, path=path, folder=root) as worker:
            worker.call(systems.prepare)  # before the checkout is imported, which may ask for a GPU
            written = worker.call(checkout.written)
            named = {
                name: part.adapter
                for name, part in parts.PARTS.items()
                if part.adapter in written and text.lower() in f"{name} {part.adapter}".lower()
            }
            values.hold((named, f"{checkout.ADAPTERS} of {str(root)!r} has no part {text}".rstrip()))
            for part, adapter in named.items():
                is_written, progress = written[adapter], Path(folder, "progress")
                answer = _answer(worker, part, progress) if is_written else {"verdict": parts.NOT_WRITTEN}
                yield {"schema": SCHEMA, "part": part, "adapter": adapter, **answer}
                if is_written and adapter not in parts.IN_ONE_PROCESS:
                    worker.kill()  # a kernel may have written outside of its tensors; the next call starts a new one


def _answer(worker: processes.Worker, part: str, progress: Path) -> Answer:
    """The verdict on a part, even if it ends the worker's process.

    progress  a file in which the worker notes what is asked now, as JSON: [question, its aspect, the answer so far].
              The answer is None until all that the handout asks is right
    """
    progress.write_text(json.dumps(("as it loads", "", None)))
    try:
        return worker.call(parts.ask, part, parts.BEYOND_S, progress, timeout_s=PART_S)
    except processes.ProcessError as error:  # the process has died, or was killed after PART_S
        about, aspect, so_far = json.loads(progress.read_text())
        text = f"{about}: {str(error).splitlines()[0]}"
        if so_far:  # the handout's questions were right, so that only what goes beyond it is refused
            return so_far | {"beyond": so_far["beyond"] | {aspect: "refused"}, "notes": so_far["notes"] + [text]}
        return {"verdict": parts.REFUSED, "text": text, "mistake": None}


def _beyond(answer: Answer) -> str:
    """How many aspects beyond the handout are right, and the names of the others; "" where none was asked."""
    # By verdict: the aspects that have it.
    aspects = grouped((verdict, aspect) for aspect, verdict in answer.get("beyond", {}).items())
    lacking = [f"{verdict}: {', '.join(names)}" for verdict, names in aspects.items() if verdict != parts.RIGHT]
    count = f"{len(aspects.get(parts.RIGHT, []))} of {sum(map(len, aspects.values()))} right"
    return f"beyond: {'; '.join([count, *lacking])}" if aspects else ""


def _line(answer: Answer, width: int) -> str:
    """A part in a line of the terminal: its verdict, and the mistake, or what goes beyond the handout."""
    more = " ".join((answer.get("mistake") or answer.get("text") or _beyond(answer)).split())
    line = f"{answer['part']:36}{answer['verdict']:13}{more}".rstrip()
    return line if len(line) <= width else f"{line[: width - 4]} ..."


def _summary(answers: Sequence[Answer]) -> list[str]:
    """The last lines: how many parts have which verdict, and what was not asked."""
    counts = Counter(answer["verdict"] for answer in answers)
    notes = dict.fromkeys(note for answer in answers for note in answer.get("notes", []))
    return [
        "By what the handout asks: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        *["Beyond: aspects that the handout does not ask; they change no verdict."] * any(map(_beyond, answers)),
        *[f"Not asked: {'; '.join(notes)}"] * bool(notes),
        *[ON_A_LAPTOP] * NO_GPU,
    ]


def _page(folder: Path, answers: Sequence[Answer]) -> str:
    """The answers as HTML."""
    rows = [
        (
            *(answer["part"], answer["verdict"]),
            "; ".join(filter(None, (answer.get("mistake"), answer.get("text"), _beyond(answer)))),
            *(parts.PARTS[answer["part"]].asks, answer["adapter"]),
        )
        for answer in answers
    ]
    return page.render(
        "course.html",
        folder=folder.resolve().name,
        heads=("part", "verdict", "what is wrong; what holds beyond the handout", "the handout asks", "adapter"),
        rows=rows,
        bad=(parts.WRONG, parts.REFUSED),
        summary=_summary(answers),
    )


# `measure` writes this text into a file, rows.py. Each key of its PARTS is the name of a row; the value names the
# function or class of systems.py that calls the student's part. To measure another part, add it here and to WORKLOADS.
ROWS = '''"""The parts of {root} as rows of a benchmark."""

import sys

import torch

sys.path[:0] = {path}
from lmsys.course import checkout, systems

PARTS = {{
    "student_pytorch": "flash_pytorch",
    "student_triton": "flash_triton",
    "student_ddp": "Ddp",
    "student_individual": "Individual",
    "student_bucketed": "Bucketed",
}}
if not torch.cuda.is_available():  # NVTX does nothing
    vars(torch.cuda.nvtx).update(dict.fromkeys(("range_push", "range_pop", "mark"), lambda *_: None))
checkout.load()


def __getattr__(name):
    """A part, when it is asked for: others may not be written."""
    if name not in PARTS:
        raise AttributeError(name)
    return getattr(systems, PARTS[name])
'''
# By benchmark: ({part: its row in rows.py}, options, options that make it smaller where there is no GPU). --no-check
# leaves checks out, since what goes beyond the handout may be wrong; the timed calls are judged all the same.
WORKLOADS = {
    "attention": (
        {
            "FlashAttention in PyTorch, backward": "student_pytorch",
            "FlashAttention in Triton, backward": "student_triton",
        },
        "-k leaderboard --sweep full --no-check",
        "--length 256 --head-dim 16 --dtype float32",
    ),
    "data_parallel": (
        {"DDP": "student_ddp", "DDP, each parameter": "student_individual", "DDP, bucketed": "student_bucketed"},
        "-k buckets --sweep full --world-size 2",
        "--size tiny --context 32 --batch 2 --bucket-mb 1",
    ),
}


def measure(root: Path, right: Collection[str], folder: Path) -> bool:
    """Runs the benchmarks of the `right` parts, and builds their report in folder/site. True if no command failed.

    The parts are rows of the bench, beside others, on the workloads of the handout. A command that fails prints why,
    and the others go on; the report leaves out its file, which would be that of an earlier run.

    folder  exists
    """
    (folder / "rows.py").write_text(ROWS.format(root=root, path=checkout.path_of(root)), encoding="utf-8")
    has_run = dict[str, bool]()  # by result file
    for benchmark, (rows, options, small) in WORKLOADS.items():
        names = [f"--row={folder / 'rows.py'}:{name}" for part, name in rows.items() if part in right]
        words = ["-o", str(folder / f"{benchmark}.json")] + shlex.split(options + f" {small}" * NO_GPU)
        if names:
            has_run[words[1]] = _has_run("lmsys.bench", benchmark, *names, *words)
    whole = list(filter(has_run.get, has_run))
    return (not whole or _has_run("lmsys.reports", *whole, "-o", str(folder / "site"))) and all(has_run.values())


def _has_run(*words: str) -> bool:
    """Prints and runs `python -m words ...`. True if it ended as a whole run of the bench: with 0, or 1 (wrong row)."""
    print(shlex.join(["python", "-m", *words]), flush=True)
    return subprocess.run([sys.executable, "-m", *words], check=False).returncode in (0, 1)


if __name__ == "__main__":
    sys.exit(main())
