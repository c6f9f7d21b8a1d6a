"""The verdict on an implementation, question by question, for people or for programs."""

import json
import math
import time
import warnings
from typing import Any

import torch

from lmsys.check.kinds import KINDS
from lmsys.check.poison import poison
from lmsys.check.question import Fault, Options
from lmsys.registry import Entry

RIGHT, WRONG = 0, 1
SCHEMA = 1  # of the lines for programs: docs/check.md


def check(entry: Entry, options: Options, kind: str = "attention", as_json: bool = False) -> int:
    """Says of each question whether the answer is right, up to the first wrong one; RIGHT or WRONG."""
    poison(setattr)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")  # of masked lanes

    def say(text: str, /, **values: Any) -> None:
        """People read the text, and programs a JSON object of the values, in a line."""
        if not as_json:
            print(text, end="", flush=True)
        elif values:
            print(json.dumps({"schema": SCHEMA, "name": entry.name, "kind": kind, **values}), flush=True)

    right, refused, start = 0, dict[str, None](), time.perf_counter()
    for question in KINDS[kind].questions(entry, options):
        if question.reason is not None:
            refused[question.reason] = None
            say("", case=question.about, verdict="not asked", reason=question.reason)
            continue
        say(f"  {question.about}: ")  # should the process die, the case is known
        if fault := question.judge():
            shape = question.shape or question.about
            values = {"shape": shape, "text": fault.text, "mistake": fault.mistake, "error_ratio": _number(fault)}
            say(f"wrong\n\n{shape}\n{fault.text}\n", case=question.about, verdict="wrong", **values)
            say("", verdict="wrong")
            return WRONG
        say("right\n", case=question.about, verdict="right")
        right += 1
    remark = KINDS[kind].remark(entry, options) if right else None
    seconds, device = time.perf_counter() - start, "cuda" if torch.cuda.is_available() else "cpu"
    lines = ([remark] if remark else []) + [f"not asked: {reason}" for reason in refused]
    text = "".join(f"  {line}\n" for line in lines)
    text += f"\n{entry.name}: {right} cases right on this {device}, in {seconds:.0f} s\n"
    say(text, verdict="right" if right else "wrong", right=right, remark=remark, seconds=round(seconds, 3))
    return RIGHT if right else WRONG


def _number(fault: Fault) -> float | None:
    """JSON has no infinity."""
    return fault.error_ratio if fault.error_ratio is not None and math.isfinite(fault.error_ratio) else None
