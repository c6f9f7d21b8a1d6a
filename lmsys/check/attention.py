"""Attention: the questions that a kernel is asked, each judged by a float64 oracle.

A *row* is an implementation of attention that is checked, and a *task* is one call that it is asked to run. A question
(`question.py`) is a task with the function that judges it. `kinds.py` calls `questions` and `remark`; `lmsys course`
calls `questions` and `of_a_handout`. The tasks come from `cases.py`: add usual cases there. A case with extreme
inputs goes into `_of_extremes` below; a new kind of such inputs goes into lmsys/extremes/attention.py, as its docstring
says. `failure` runs one task and asks `attention_mistakes.py` to explain a wrong result.

Legend: B batch, H heads, S sequence length, D head dimension.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from lmsys.attention.contract import AttentionCase, adapt, why_not_called, why_not_given
from lmsys.bench.findings import interpreted_kernels
from lmsys.check import attention_mistakes, cases, extremes, laptop, question
from lmsys.measure.repeats import apart, repeated
from lmsys.registry import Entry
from lmsys.testing import MEMORY, Oracle, make_inputs, run


def questions(entry: Entry, options: question.Options) -> Iterator[question.Question]:
    """Yields a question for each task, from the simplest to the rarest; those with extreme inputs come last."""
    with interpreted_kernels() as launched:  # empty where no kernel runs in Triton's interpreter
        row = _row(entry, options, launched)
        why_not = partial(_why_not, entry, launched)

        def passes(task: cases.Task) -> bool:
            """True if the row is right in a task."""
            return failure(row, task, grad=False, seed=options.seed, named=False) is None

        first = next(_cases(options))

        def asked() -> Iterator[cases.Task]:
            """Yields the tasks; a full check asks all of them in the first dtype in which the row passes `first`."""
            yield first  # before `passes`: a row that ends the process then does so in a task that was announced
            in_dtypes = (replace(first.case, dtype=name) for name in options.dtypes if options.uses)
            runs = (case for case in in_dtypes if why_not(case) is None and passes(replace(first, case=case)))
            case = next(runs, first.case)
            usual = _cases(options, passes, case.dtype) if options.uses else _cases(options)
            more = cases.larger(case) if options.uses else ()
            with_options = (
                task for task in cases.tasks_of_options(case) if why_not_given(row, task.case.options) is None
            )
            # `first` is left out, since it was asked already. No other of the usual tasks has its case.
            yield from chain((task for task in usual if task.case != first.case), with_options, more)

        for task in () if options.extremes else asked():
            yield question.Question(
                f"{task.about}, {task.case.dtype}",
                partial(failure, row, task, options.grad, options.seed),
                shape=f"{task.about} ({task})",
                reason=laptop.NO_THREADS if launched and task.use is cases.two_threads else why_not(task.case),
                aspect=task.aspect,
            )
        for dtype in options.dtypes:
            yield from _of_extremes(why_not, row, replace(first.case, dtype=dtype), options)
        if launched or laptop.running:
            reason = laptop.INTERPRETED * bool(launched) + laptop.PRETENDED * bool(laptop.running)
            # A question with a reason is never asked. This one only tells the reader that no GPU gave the answers.
            yield question.Question("on a GPU", lambda: None, reason=reason.strip())


# Shapes (batch, length, head dimension). TESTED: those of the course's tests. SHORT: one that the handout allows, too.
TESTED, SHORT = ((4, 128, 64), (1, 256, 32)), ((2, 16, 16),)


def of_a_handout(
    entry: Entry,
    options: question.Options,
    causal: bool,
    shapes: Sequence[tuple[int, int, int]] = TESTED,
    use: cases.Use | None = None,
) -> Iterator[question.Question]:
    """Questions with inputs that CS336's handout promises to a kernel: one head, lengths of powers of two, float32.

    Errors may be 1e-2 larger than usual, as in the course's tests.

    causal  True: there are also questions with a causal mask
    shapes  TESTED or SHORT. Tiles of many kernels are longer than SHORT, so the questions have an aspect of their own
    use     what is done in place of a single call and its backward: see `cases.Use`
    """
    case = replace(next(_cases(options)).case, heads=1, kv_heads=1)
    promises = [
        cases.Task(
            f"{length} queries{', causal' * masked}",
            replace(case, batch=batch, queries=length, keys=length, head_dim=head_dim, causal=masked),
            aspect="lengths of 16",
            room=1e-2,
            use=use,
        )
        for batch, length, head_dim in shapes
        for masked in (False, True)[: 1 + causal]
    ]
    with interpreted_kernels() as launched:
        row = _row(entry, options, launched, promises[0])
        for task in promises:
            yield question.Question(
                task.about, partial(failure, row, task, options.grad, options.seed), aspect=task.aspect
            )


def _row(entry: Entry, options: question.Options, launched: Sequence[Any], simple: cases.Task | None = None) -> Any:
    """The row's function; on a machine without a GPU it may run in `laptop.Laptop`.

    `Laptop` pretends that tensors are on a GPU. A row from a file runs there if it gets further there than without.

    launched  the list to which each kernel is added that Triton's interpreter runs
    simple    the task that the row runs both ways, to find this out
    """
    row, simple = adapt(entry.load()), simple or next(_cases(options))
    row = partial(_of_sequences, row) if options.layout == "bshd" else row

    def score(row: Any) -> int:
        """0 to 3: a point each for results, for no fault, and for a kernel that was launched."""
        before = len(launched)
        outputs, fault = cases.answer(row, simple, make_inputs(simple.case, options.seed), options.grad)
        return bool(outputs) + (fault is None) + (len(launched) > before)

    # Rows of tables that say by `supports` what they can run stay as they are, and so do all rows in the quick check
    # before a benchmark (`uses` is False).
    return row if entry.supports or not options.uses else laptop.fitting(row, score)


def _of_sequences(
    row: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Calls a row that works on (B, S, H, D) with tensors (B, H, S, D). Contiguous inputs stay contiguous."""

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous() if x.is_contiguous() else x.transpose(1, 2)

    return row(*map(exchanged, (q, k, v)), **options).transpose(1, 2)


def _why_not(entry: Entry, launched: Sequence[Any], case: AttentionCase) -> str | None:
    """None, or why the row cannot run a case here.

    launched  the kernels that Triton's interpreter has run so far
    """
    if launched and case.dtype == "bfloat16":
        return laptop.NO_BFLOAT16
    return entry.why_not(case) or why_not_called(entry.load(), case)


def _of_extremes(
    why_not: Callable[[AttentionCase], str | None], row: Any, case: AttentionCase, options: question.Options
) -> Iterator[question.Question]:
    """The questions with extreme inputs, whose cases are made from `case`, a simple one."""
    simple = replace(case, heads=1, kv_heads=1, causal=False)
    cases_of_extremes = {
        "extreme scores": extremes.case_of_kinds(simple),
        "extreme scores, causal": extremes.case_of_kinds(replace(simple, causal=True)),
        "many equal keys": replace(
            simple, batch=1, heads=1, kv_heads=1, queries=extremes.EQUAL_QUERIES, keys=extremes.EQUAL_KEYS, causal=False
        ),
        "extreme scores, whole tiles": extremes.case_of_kinds(simple, extremes.WHOLE),
    }
    # If a row cannot run float32, its errors are also judged in root mean square: in a narrow dtype the bound on the
    # largest error is so wide that it hides some mistakes.
    rms = why_not(replace(simple, dtype="float32")) is not None
    for about, case in cases_of_extremes.items():
        task = cases.Task(about, case)
        yield question.Question(
            f"{about}, {case.dtype}",
            partial(extremes.failure, row, case, options.grad, options.seed, rms),
            shape=f"{about} ({task})",
            reason=why_not(case),
            extreme=True,
            aspect=task.aspect,
        )


def _cases(
    options: question.Options,
    passes: Callable[[cases.Task], bool] = lambda task: True,
    dtype: str = cases.DTYPES[0],
) -> Iterator[cases.Task]:
    """The tasks in the dtypes of `options`, on a GPU if there is one. `passes`, `dtype`: see `cases.tasks`."""
    device, capability = ("cuda", torch.cuda.get_device_capability()) if torch.cuda.is_available() else ("cpu", None)
    all_tasks = cases.tasks(device, capability, options.head_dim, passes, dtype)
    return (task for task in all_tasks if task.case.dtype in options.dtypes)


def remark(entry: Entry, options: question.Options) -> str:
    """A line for the report: if repeated calls return the same bits, and if a batch entry alone has those of a batch.

    The batch has 2 entries. Both are tried on the last case that the row can run. A kernel need not have either.
    """
    case = replace([x.case for x in _cases(options) if _why_not(entry, launched=(), case=x.case) is None][-1], batch=2)
    if reason := entry.why_not(case):
        return f"not asked for the same bits: {reason}"
    pair = make_inputs(case, options.seed)
    with interpreted_kernels() as launched:
        call = partial(run, _row(entry, options, launched), causal=case.causal, scale=case.scale, grad=options.grad)
        # A call shows if kernels are interpreted. It is left out if `_row` has seen that already, since the interpreter
        # may be unable to run this case.
        if not launched:
            call(pair.alone(0))
    if launched:  # the interpreter runs one program after another, in an order that no GPU keeps
        return "not asked for the same bits: Triton's interpreter is not the GPU"
    first, calls, differ = repeated(lambda: call(pair))
    alone = apart(call(pair.alone(0)), {name: x[:1] for name, x in first.items() if name not in differ})
    return f"the same bits in {calls} calls: {_but_for(differ)}; alone as in a batch of 2: {_but_for(alone)}"


def _but_for(differ: Mapping[str, float]) -> str:
    """The word "yes" if no result differs, else "no" with the names of those that do."""
    return f"no ({', '.join(differ)})" if differ else "yes"


def failure(row: Any, task: cases.Task, grad: bool, seed: int, named: bool = True) -> question.Fault | None:
    """The fault of the row's results of a task; None if they are right.

    grad   True: gradients are asked for and judged, too
    named  True: a known mistake is searched for that explains the fault
    """
    case = task.case
    inputs = make_inputs(case, seed, memory=task.memory)
    pattern = cases.pattern_of(case, seed) if case.options else None
    outputs, fault = cases.answer(row, task, inputs, grad, pattern)
    if not outputs:
        return fault
    oracle = Oracle(case, inputs, scale=case.scale, grad="dq" in outputs, pattern=pattern)
    oracle.budget = {name: budget + task.room for name, budget in oracle.budget.items()}
    for name in filter(outputs.__contains__, list(cases.LIKE) + ["lse"]):
        ratio = oracle.error_ratios({name: outputs[name]})[name]
        if ratio > 1:
            # `mistake` is None if no known mistake gives this result, as always with options, and "" if none was
            # searched for. A task with transposed memory goes to `explain`, which knows how a row that ignores strides
            # is wrong.
            mistake = None if case.options else ""
            if named and (task.use in cases.USES.values() or task.memory not in ("", "transposed")):
                mistake = _of_circumstances(row, task, grad, seed, name)
            elif named and not case.options:
                mistake = attention_mistakes.explain(case, inputs, outputs, name, 2 * oracle.budget[name])
            return _fault(name, outputs, oracle, case, ratio, mistake)
    return fault


def _of_circumstances(row: Any, task: cases.Task, grad: bool, seed: int, name: str) -> str | None:
    """The mistake of a row whose result `name` is wrong only with the task's layout of memory, or its way of calling.

    None if the row is also wrong in a single call on contiguous inputs: then these are not the cause.
    """
    if failure(row, replace(task, memory="", use=None), grad, seed, named=False) is not None:
        return None
    if task.use is cases.two_forwards and name == "o":
        return "results share a buffer: the next call overwrites the result of the call before"
    return (
        f"{name} is right in a single call on contiguous inputs, and wrong for"
        f" {MEMORY[task.memory][2] if task.memory else task.about}"
    )


def _fault(
    name: str,
    outputs: Mapping[str, torch.Tensor],
    oracle: Oracle,
    case: AttentionCase,
    ratio: float,
    mistake: str | None,
) -> question.Fault:
    """The fault of the result `name`: where it is wrong, by how much (`ratio`, its error over the budget), and why."""
    output, budget = outputs[name], oracle.budget[name]
    expected = oracle.reference[name].unflatten(0, (case.batch, case.kv_heads)).flatten(1, 2)  # (B, H, S, D)
    at = question.worst(output, expected)
    wrong = ~((output.double() - expected).abs() <= budget)
    lines = [
        f"  {name}[{', '.join(map(str, at))}]: expected {expected[at].item():.6g}, got {output[at].item():.6g};"
        f" the largest error is {question.times_allowed(ratio)}",
        f"  wrong in {question.where(wrong)}",
    ]
    right = list(cases.LIKE)[: list(cases.LIKE).index(name)] if name in cases.LIKE else []  # those judged before it
    return question.Fault.explained("\n".join(lines), mistake, ratio, right)
