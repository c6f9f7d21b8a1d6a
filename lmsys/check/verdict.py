"""The verdict on an implementation, question by question, for people or for programs."""

import json
import math
import time
import warnings
from typing import Any

import torch

from lmsys.check.kinds import KINDS
from lmsys.check.poison import poison
from lmsys.check.question import Fault, Options, Question
from lmsys.registry import Entry

RIGHT, WRONG = 0, 1
SCHEMA = 1  # of the lines for programs: docs/check.md


def check(entry: Entry, options: Options, kind: str = "attention", as_json: bool = False) -> int:
    """Says of each question whether the answer is right, up to the first wrong one; RIGHT or WRONG."""
    poison(setattr)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")  # of masked lanes
    teller = (ForPrograms if as_json else ForPeople)(entry.name, kind)
    right, refused, start = 0, dict[str, None](), time.perf_counter()
    for question in KINDS[kind].questions(entry, options):
        if question.reason is not None:
            refused[question.reason] = None
            teller.not_asked(question)
            continue
        teller.asks(question)
        if fault := question.judge():
            teller.wrong(question, fault)
            return WRONG
        teller.right(question)
        right += 1
    remark = KINDS[kind].remark(entry, options) if right else None
    teller.ends(right, list(refused), remark, time.perf_counter() - start)
    return RIGHT if right else WRONG


class ForPeople:
    """Prints a line for each question that is asked."""

    def __init__(self, name: str, kind: str):
        self.name = name

    def not_asked(self, question: Question) -> None:
        pass

    def asks(self, question: Question) -> None:
        print(f"  {question.about}: ", end="", flush=True)  # should the process die, the case is known

    def right(self, question: Question) -> None:
        print("right", flush=True)

    def wrong(self, question: Question, fault: Fault) -> None:
        print(f"wrong\n\n{question.shape or question.about}\n{fault.text}", flush=True)

    def ends(self, right: int, refused: list[str], remark: str | None, seconds: float) -> None:
        if remark:
            print(f"  {remark}", flush=True)
        for reason in refused:
            print(f"  not asked: {reason}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"\n{self.name}: {right} cases right on this {device}, in {seconds:.0f} s", flush=True)


class ForPrograms:
    """Prints a JSON object in a line for each question, and one for the whole."""

    def __init__(self, name: str, kind: str):
        self.name, self.kind = name, kind

    def _print(self, **values: Any) -> None:
        print(json.dumps({"schema": SCHEMA, "name": self.name, "kind": self.kind, **values}), flush=True)

    def not_asked(self, question: Question) -> None:
        self._print(case=question.about, verdict="not asked", reason=question.reason)

    def asks(self, question: Question) -> None:
        pass

    def right(self, question: Question) -> None:
        self._print(case=question.about, verdict="right")

    def wrong(self, question: Question, fault: Fault) -> None:
        told = {"shape": question.shape or question.about, "text": fault.text, "mistake": fault.mistake}
        ratio = fault.error_ratio if fault.error_ratio is None or math.isfinite(fault.error_ratio) else None
        self._print(case=question.about, verdict="wrong", **told, error_ratio=ratio)
        self._print(verdict="wrong")

    def ends(self, right: int, refused: list[str], remark: str | None, seconds: float) -> None:
        self._print(verdict="right" if right else "wrong", right=right, remark=remark, seconds=round(seconds, 3))
