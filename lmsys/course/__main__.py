"""`lmsys course FOLDER`: what of an assignment of CS336 is right, wrong, or not written.

FOLDER is a checkout of assignment 1 or 2, of 2025 or 2026, as it is. Each part runs in a process of its own.
Exit codes: 0 all that is written is right, 1 a part is wrong, 2 the folder is no such checkout, or does not load.
"""

import html
import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; without a GPU it can only interpret

from lmsys import commands, processes
from lmsys.check import laptop
from lmsys.course import checkout, parts

USAGE, SCHEMA, PART_S = 2, 1, 300.0
Answer = Mapping[str, Any]


def main(arguments: list[str] | None = None) -> int:
    parser = commands.parser("course")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of assignment 1 or 2")
    parser.add_argument("--json", action="store_true", help="a JSON object in a line for each part: docs/course.md")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the table as a page")
    given = parser.parse_args(arguments)
    answers = []
    try:
        for answer in _answers(checkout.root_of(given.folder)):
            answers.append(answer)
            print(json.dumps(answer) if given.json else _line(answer), flush=True)
    except ValueError as error:  # what does not load has no parts
        print(f"lmsys course: error: {error}", file=sys.stderr)
        return USAGE
    details = "".join(map(_details, answers))
    print("" if given.json else details, end="")
    if given.html is not None:
        given.html.write_text(
            "<!doctype html><meta charset='utf-8'><title>lmsys course</title><pre>"
            + html.escape("\n".join([*map(_line, answers), details]))
        )
    return int(any(answer["verdict"] == "wrong" for answer in answers))


def _answers(root: Path) -> Iterator[Answer]:
    """What is said of each part whose adapter the checkout has, asked in a process of its own."""
    path = [*checkout.path_of(root), *sys.path]
    new_process = partial(
        processes.Worker,
        {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "999"},  # pytest cuts what it says of a failure
        path=path,
        folder=root,
    )
    with new_process() as worker:
        worker.call(laptop.install)
        written = worker.call(checkout.written)
    for part, adapter in [(part, name) for part, (name, _) in parts.PARTS.items() if name in written]:
        answer: Answer = {"verdict": "not written"}
        if written[adapter]:
            try:
                with new_process() as worker:
                    answer = worker.call(parts.ask, part, parts.BEYOND_S, timeout_s=PART_S)
            except Exception as error:
                text = f"it raises {type(error).__name__}: {error}"
                answer = {"verdict": parts.verdict_of(text), "text": text, "mistake": None}
        yield {"schema": SCHEMA, "part": part, "adapter": adapter, **answer}


def _line(answer: Answer) -> str:
    held = [*answer.get("beyond", {}).values()]
    words = ["and", f"{held.count('right')} of {len(held)}", "aspects beyond the handout"] if held else []
    return " ".join([f"{answer['part']:40}{answer['verdict']:13}", *words]).rstrip()


def _details(answer: Answer) -> str:
    """What is wrong; beyond the handout, what is otherwise or refused; and notes."""
    lines = [answer["text"]] if "text" in answer else []
    for verdict, words in {"wrong": "gives another result", "refused": "raises an exception"}.items():
        aspects = ", ".join(aspect for aspect, held in answer.get("beyond", {}).items() if held == verdict)
        lines += [f"beyond the handout it {words}: {aspects}"] * bool(aspects)
    lines += answer.get("notes", [])
    return f"\n{answer['part']} ({answer['adapter']})\n" * bool(lines) + "".join(f"  {line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
