"""Lists the kinds of implementation that can be checked, tells the kind of a function or class, and asks its questions.

A *row* is one implementation, an entry of a table of `lmsys.registry`, or one made from a user's file. `lmsys check
TARGET` calls `check_target`. `lmsys check --all` calls `verdict_on` for each row of the tables in KINDS; the benchmark
of attention calls `verdict_on` for rows before it times them. `lmsys course` asks the questions of KINDS itself. A new
kind is a module with a function `questions`, an entry in KINDS, an entry in MARKS or a condition in `kind_of` by which
it is recognised, and a line in docs/check.md.
"""

import importlib
import inspect
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lmsys import attention, parallel, processes, registry, signature, values
from lmsys.check import laptop, question

LIMIT_S = 600.0  # check/__main__.py ends the check of one implementation after so many seconds


@dataclass(frozen=True)
class Kind:
    """A kind of implementation.

    table  the rows whose names can be given to `lmsys check` in place of a file
    asks   `module:function` of the function that yields its questions. The module may also have a function
           `remark(entry, options)`, which returns a last line for the report of a right implementation, or None
    """

    table: registry.Table
    asks: str

    def questions(self, entry: registry.Entry, options: question.Options) -> Iterator[question.Question]:
        yield from registry.load_target(self.asks)(entry, options)

    def remark(self, entry: registry.Entry, options: question.Options) -> str | None:
        remark = getattr(importlib.import_module(self.asks.partition(":")[0]), "remark", None)
        return remark(entry, options) if remark else None


KINDS = {
    "attention": Kind(attention.ATTENTION, "lmsys.check.attention:questions"),
    "strategy": Kind(parallel.STRATEGIES, "lmsys.check.strategy:questions"),
    # These kinds have no table elsewhere: our own implementation, if there is one, is the only row.
    "sharded_optimizer": Kind(
        registry.Table(
            "sharded_optimizer",
            [registry.Entry("ShardedOptimizer", "lmsys.parallel.sharded_optimizer:ShardedOptimizer")],
        ),
        "lmsys.check.strategy:optimizer_questions",
    ),
    "optimizer": Kind(
        registry.Table("optimizer", [registry.Entry("AdamW", "lmsys.training.optimizer:AdamW")]),
        "lmsys.check.optimizer:questions",
    ),
    "loss": Kind(
        registry.Table("loss", [registry.Entry("linear_cross_entropy", "lmsys.model.loss:linear_cross_entropy")]),
        "lmsys.check.loss:questions",
    ),
    "norm": Kind(
        registry.Table("norm", [registry.Entry("RMSNorm", "lmsys.model.transformer:RMSNorm")]),
        "lmsys.check.norm:questions",
    ),
    "rotary": Kind(registry.Table("rotary", []), "lmsys.check.rotary:questions"),
    "swiglu": Kind(registry.Table("swiglu", []), "lmsys.check.swiglu:questions"),
}
# {kind: names of parameters by which `kind_of` recognises it}. One such parameter, of the call or of the class's
# constructor, is enough. The first kind that fits is taken.
MARKS = {
    "loss": {"target", "targets", "label", "labels"},
    "rotary": {"positions", "token_positions", "position_ids", "cos"},
    "swiglu": {"gate", "w1", "w_gate"},
    "norm": {"eps", "epsilon", "variance_epsilon"},
}
OF_SHARDED_OPTIMIZERS = {"optimizer_cls", "optimizer_class"}  # names of the parameter that takes an optimizer's class


def find(target: str, kind: str | None) -> tuple[str, registry.Entry]:
    """(the kind, the row) of `target`, a name in a table or path.py:attribute.

    ValueError if there is no such target, or if its kind cannot be told.

    kind  a name in KINDS; None: the one that `target` looks like
    """
    if kind is None and ".py" not in target:
        kind = next((name for name, known in KINDS.items() if target in list(known.table)), "attention")
    if kind is not None:
        # Code from a file may have the name of a row, such as AdamW. In an empty table it is not taken for that row.
        table = KINDS[kind].table
        return kind, (registry.Table(kind, [], traits=table.traits) if ".py" in target else table).select([target])[0]
    return find(target, kind_of(registry.Table("implementation", []).select([target])[0].load()))


def kind_of(implementation: Any) -> str:
    """The name of the kind that an implementation looks like, by its class or the names of its parameters.

    ValueError if it looks like none. The message names all kinds.
    """
    try:
        # The second are, for a module's class, those of its forward, which are not those of its constructor.
        to_make, to_call = inspect.signature(implementation).parameters, signature.parameters_of(implementation)
        names = signature.names_of(to_make) | signature.names_of(to_call)
    except (TypeError, ValueError):
        raise ValueError(
            f"{implementation!r} has no parameters that can be read: wrap it in a def of q, k, v"
        ) from None
    is_class = inspect.isclass(implementation)
    is_other = names & {"params", "module"} or {"q", "k", "v"} <= names  # true for optimizers, strategies and attention
    kind = next(
        values.sentences_of(  # the texts whose conditions are true, in order; here texts are kinds
            (not OF_SHARDED_OPTIMIZERS.isdisjoint(to_make), "sharded_optimizer"),
            (is_class and issubclass(implementation, torch.optim.Optimizer), "optimizer"),
            *((names & marks and not is_other, kind) for kind, marks in MARKS.items()),
            (hasattr(implementation, "finish_gradient_synchronization") or list(to_make)[:1] == ["module"], "strategy"),
            # Three parameters of any names are q, k and v. A function that makes an optimizer is none of these kinds.
            (
                len(to_call) >= 3
                and list(to_make)[:1] != ["params"]
                and (signature.is_function(implementation) or not is_class),
                "attention",
            ),
        ),
        "",
    )
    values.hold(
        (
            kind,
            f"it cannot be told what {getattr(implementation, '__name__', implementation)!r} is: say --kind, one of"
            f" {', '.join(KINDS)}; attention is a function of q, k, v, not a module",
        )
    )
    return kind


RIGHT, WRONG = 0, 1  # the exit codes of `lmsys check`
ALLOWED = "  what is allowed: twice the error of plain PyTorch in this dtype, and a few roundings\n"
SCHEMA = 1  # the version of the JSON lines: docs/check.md


def check_target(target: str, kind: str | None, options: question.Options, as_json: bool = False) -> int:
    """Finds `target`, a name in a table or path.py:attribute, and runs `check` on it. ValueError as in `find`.

    `check_target` patches torch, and on a machine without a GPU also Triton, for the rest of this process
    (`laptop.install`, `question.poison`). So the process should serve this check alone.
    """
    laptop.install()
    with closing(processes.Outputs()) as mended:
        # A file may ask for a GPU, or allocate memory on one, when it is imported.
        with laptop.Laptop() if ".py:" in target else nullcontext():
            kind, entry = find(target, kind)
        return check(entry, options, kind, as_json, mended.mend)


def check(
    entry: registry.Entry,
    options: question.Options,
    kind: str = "attention",
    as_json: bool = False,
    mend_outputs: Callable[[], Any] = lambda: None,
) -> int:
    """Asks a row the questions of its kind, and prints for each if the answer is right. Returns RIGHT or WRONG.

    Attention is asked all questions, and a table of the answers is printed. Other kinds are asked up to the first wrong
    answer.

    as_json       True: each line is a JSON object (docs/check.md)
    mend_outputs  called before each line: puts back stdout, which the row may have closed
    """

    def say(text: str, /, **fields: Any) -> None:
        """Prints the text for people, or with `as_json` the fields as a JSON object in a line."""
        mend_outputs()
        if not as_json:
            print(text, end="", flush=True)
        elif fields:
            print(json.dumps({"schema": SCHEMA, "name": entry.name, "kind": kind, **fields}), flush=True)

    question.poison(setattr)  # for the rest of this process: memory that is left unwritten is NaN
    tally = question.Holds(options.grad) if kind == "attention" else None  # counts the answers
    start, answer = (
        time.perf_counter(),
        verdict_on(entry, options, kind, may_raise=tally is not None, say=say, tally=tally),
    )
    right = tally.right if tally else answer.right > 0 and not answer.fault
    if answer.fault and tally is None:
        say(
            f"\n{entry.name}: WRONG; {answer.asked} case{'s' * (answer.asked > 1)} asked, {answer.right} right;"
            " the check stops at the first wrong case\n",
            verdict="wrong",
        )
        return WRONG
    # "refused" is a verdict in the table of `Holds`.
    remark = KINDS[kind].remark(entry, options) if right and "refused" not in str(tally) else None
    seconds = time.perf_counter() - start
    lines = values.sentences_of(
        (answer.fault, f"the first wrong case: {answer.fault}"),
        (remark, str(remark)),
        (
            tally is not None and not tally.right_forwards and options.layout == "bhsd",
            "no case is right: if its tensors are (B, S, H, D), not (B, H, S, D), say --layout bshd; if its fourth"
            " parameter is `is_causal`, it gets (B, S, D): a function that takes (B, H, S, D) names it `causal`",
        ),
        (
            tally is not None and tally.right_forwards and not answer.right,
            "the forward is right where the backward is not: --forward asks for the forward alone",
        ),
        # Texts of cases that an exception refused begin with "refused": see the end of `verdict_on`.
        *((True, x if x.startswith("refused") else f"not asked: {x}") for x in answer.refused),
    )
    say(
        (f"\n{tally}\n\n" if tally else "")
        + "".join(f"  {line}\n" for line in lines)
        + f"\n{entry.name}:{' WRONG,' if answer.fault else ''} {answer.right} of {answer.asked} cases right on this"
        f" {question.device()},"
        f" in {seconds:.0f} s\n",
        verdict="right" if right else "wrong",
        right=answer.right,
        remark=remark,
        seconds=round(seconds, 3),
        **({"holds": tally.counts} if tally else {}),
    )
    return RIGHT if right else WRONG


@dataclass(frozen=True)
class Answer:
    """The findings on a row.

    right    how many cases are right
    refused  why cases were refused by an exception ("refused in ..."), or not asked, each reason once
    fault    the case and the fault of the first wrong answer; "" if none is wrong
    asked    how many cases were asked: those that are right or wrong, and those that an exception refused
    """

    right: int
    refused: tuple[str, ...]
    fault: str = ""
    asked: int = 0

    @property
    def verdict(self) -> str:
        return "wrong" if self.fault else "right" if self.right else "refused"

    def __str__(self) -> str:
        return self.fault or (f"{self.right} cases" if self.right else "; ".join(self.refused))


def verdict_on(
    entry: registry.Entry,
    options: question.Options,
    kind: str,
    may_raise: bool = False,
    most: int | None = None,
    say: Callable[..., None] = lambda text, /, **fields: None,
    tally: question.Holds | None = None,
) -> Answer:
    """Asks a row the questions of its kind, up to the first wrong answer, or with `tally` all. Returns the findings.

    may_raise  True: an exception counts as a refusal of the case, not as a fault
    most       how many right cases are enough; None: all are asked
    say        called for each case, as `say` in `check`
    tally      counts the answers; with it every question is asked, also after a wrong answer
    """
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")  # on masked lanes
    right, asked, refused, wrong = 0, 0, dict[str, list[str]](), ""
    for case in KINDS[kind].questions(entry, options):
        if case.reason is not None:
            refused.setdefault(case.reason, [])  # the empty list marks a reason for not asking
            say("", case=case.about, verdict="not asked", reason=case.reason)
            continue
        if right == most:
            break
        asked += 1
        say(f"  {case.about}: ")  # before it is judged: if the process dies, the reader knows in which case
        # Only attention is asked after a wrong answer, and only its first wrong answer is searched for a mistake.
        fault = case.judge(named=False) if wrong else case.judge()
        if tally is not None:
            tally.add(case.aspect, fault)
        if fault is None:
            say("right\n", case=case.about, verdict="right")
            right += 1
        elif may_raise and fault.raises:
            refused.setdefault(fault.line, []).append(case.about)
            say(
                "the forward is right, the backward " * fault.backward + "refused\n",
                case=case.about,
                verdict="refused",
                reason=fault.line,
            )
        else:
            shape = case.shape or case.about
            text = f"\n{shape}\n{fault.text}\n{ALLOWED * (fault.error_ratio is not None)}" + "\n" * (tally is not None)
            say(
                "wrong\n" + ("" if wrong else text),
                case=case.about,
                verdict="wrong",
                shape=shape,
                text=fault.text,
                mistake=fault.mistake,
                error_ratio=fault.error_ratio,
            )
            wrong = wrong or f"{case.about}: {fault.line}"
            if tally is None:
                break
    return Answer(
        right=right,
        refused=tuple(
            f"refused in {cases[0]}{f' and {len(cases) - 1} more' * (len(cases) > 1)}: {reason}" if cases else reason
            for reason, cases in refused.items()
        ),
        fault=wrong,
        asked=asked,
    )
