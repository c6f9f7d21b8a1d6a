"""Attention: the questions it is asked, each held to a float64 oracle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, adapt, why_not_called, why_not_told
from lmsys.bench.findings import interpreted_kernels
from lmsys.check import extremes, laptop, patterns, question
from lmsys.check.cases import (
    LIKE,
    USES,
    Asked,
    Use,
    answer,
    cases,
    cases_of_options,
    larger,
    pattern_of,
    two_forwards,
    two_threads,
)
from lmsys.measure.repeats import apart, repeated
from lmsys.registry import Entry
from lmsys.testing import MEMORY, Oracle, make_inputs, run


def questions(entry: Entry, options: question.Options) -> Iterator[question.Question]:
    """The cases, from the simplest to the rarest."""
    with interpreted_kernels() as launched:
        row = _row(entry, options, launched)
        why_not = partial(_why_not, entry, launched)

        def bears(asked: Asked) -> bool:
            asked = replace(asked, case=replace(asked.case, dtype=able))
            return failure(row, asked, False, options.seed, named=False) is None

        simple = next(_cases(options)).case
        able = next((x for x in options.dtypes if why_not(replace(simple, dtype=x)) is None), simple.dtype)
        usual = _cases(options, bears if options.uses else lambda asked: True)
        with_options = (asked for asked in cases_of_options(simple) if why_not_told(row, asked.case.options) is None)
        more = larger(replace(simple, dtype=able)) if options.uses else ()
        for asked in () if options.extremes else chain(usual, with_options, more):
            yield question.Question(
                f"{asked.about}, {asked.case.dtype}",
                partial(failure, row, asked, options.grad, options.seed),
                f"{asked.about} ({asked})",
                laptop.NO_THREADS if launched and asked.use is two_threads else why_not(asked.case),
                aspect=asked.aspect,
            )
        for dtype in options.dtypes:
            yield from _of_extremes(why_not, row, replace(simple, dtype=dtype), options)
        if launched or laptop.running:
            reason = laptop.INTERPRETED * bool(launched) + laptop.PRETENDED * bool(laptop.running)
            yield question.Question("on a GPU", lambda: None, reason=reason.strip())


TESTED, SHORT = ((4, 128, 64), (1, 256, 32)), ((2, 16, 16),)  # (batch, length, head dimension)


def of_a_handout(
    entry: Entry,
    options: question.Options,
    causal: bool,
    shapes: Sequence[tuple[int, int, int]] = TESTED,
    use: Use | None = None,
) -> Iterator[question.Question]:
    """The promises of CS336's handout: one head, lengths that are powers of two, float32, and room for errors.

    shapes  TESTED: such as the course's tests have; SHORT: promised, but shorter than the tiles of many kernels
    use     what is done in place of a call and its backward
    """
    case = replace(next(_cases(options)).case, heads=1, kv_heads=1)
    asked = [
        Asked(
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
        row = _row(entry, options, launched, asked[0])
        for handed in asked:
            yield question.Question(
                handed.about, partial(failure, row, handed, options.grad, options.seed), aspect=handed.aspect
            )


def _row(entry: Entry, options: question.Options, launched: Sequence[Any], simple: Asked | None = None) -> Any:
    """The row as it is called; one from a file on a laptop is told that it is none where it else would not run."""
    row, simple = adapt(entry.load()), simple or next(_cases(options))
    row = _of_sequences(row) if options.layout == "bshd" else row

    def score(row: Any) -> int:
        before = len(launched)
        outputs, fault = answer(row, simple, make_inputs(simple.case, options.seed), options.grad)
        return bool(outputs) + (fault is None) + (len(launched) > before)

    return row if entry.supports or not options.uses else laptop.fitting(row, score)


def _of_sequences(row: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A row for (B, S, H, D) as one for (B, H, S, D). What is contiguous is so in either."""

    def exchanged(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if x.is_contiguous() else x.transpose(1, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return row(*map(exchanged, (q, k, v)), **options).transpose(1, 2)

    return call


def _why_not(entry: Entry, launched: Sequence[Any], case: AttentionCase) -> str | None:
    if launched and case.dtype == "bfloat16":
        return laptop.NO_BFLOAT16
    return entry.why_not(case) or why_not_called(entry.load(), case)


def _of_extremes(
    why_not: Callable[[AttentionCase], str | None], row: Any, case: AttentionCase, options: question.Options
) -> Iterator[question.Question]:
    simple = replace(case, heads=1, kv_heads=1, causal=False)
    cases_of_extremes = {
        "extreme scores": extremes.case_of_kinds(simple),
        "extreme scores, causal": extremes.case_of_kinds(replace(simple, causal=True)),
        "many equal keys": replace(
            simple, batch=1, heads=1, kv_heads=1, queries=extremes.FEW_QUERIES, keys=extremes.MANY_KEYS, causal=False
        ),
        "extreme scores, whole tiles": extremes.case_of_kinds(simple, extremes.WHOLE),
    }
    rms = why_not(replace(simple, dtype="float32")) is not None  # the stricter rule
    for about, case in cases_of_extremes.items():
        asked = Asked(about, case)
        yield question.Question(
            f"{about}, {case.dtype}",
            partial(extremes.failure, row, case, options.grad, options.seed, rms),
            f"{about} ({asked})",
            why_not(case),
            True,
            asked.aspect,
        )


def _cases(options: question.Options, bears: Callable[[Asked], bool] = lambda asked: True) -> Iterator[Asked]:
    """Those in the dtypes that are asked for, on a GPU where there is one."""
    cuda = torch.cuda.is_available()
    all_asked = cases(
        "cuda" if cuda else "cpu", torch.cuda.get_device_capability() if cuda else None, options.head_dim, bears
    )
    return (asked for asked in all_asked if asked.case.dtype in options.dtypes)


def remark(entry: Entry, options: question.Options) -> str:
    """Says whether the last case that the row can run has the same bits each time, and one of a batch of 2 alone.

    A kernel may have neither.
    """
    case = replace([x.case for x in _cases(options) if _why_not(entry, (), x.case) is None][-1], batch=2)
    if reason := entry.why_not(case):
        return f"not asked for the same bits: {reason}"
    pair = make_inputs(case, options.seed)
    with interpreted_kernels() as launched:
        call = partial(run, _row(entry, options, launched), causal=case.causal, scale=case.scale, grad=options.grad)
        if not launched:  # the case may be none that an interpreter can run
            call(pair.alone(0))
    if launched:  # the interpreter runs one program after another, in an order that no GPU keeps
        return "not asked for the same bits: Triton's interpreter is not the GPU"
    first, calls, differ = repeated(lambda: call(pair))
    alone = apart(call(pair.alone(0)), {name: x[:1] for name, x in first.items() if name not in differ})
    return f"the same bits in {calls} calls: {_but_for(differ)}; alone as in a batch of 2: {_but_for(alone)}"


def _but_for(differ: Mapping[str, float]) -> str:
    return f"no ({', '.join(differ)})" if differ else "yes"


def failure(row: Any, asked: Asked, grad: bool, seed: int, named: bool = True) -> question.Fault | None:
    """The fault of the row's results of a case; None where there is none."""
    case = asked.case
    inputs = make_inputs(case, seed, memory=asked.memory)
    pattern = pattern_of(case, seed) if case.options else None
    outputs, fault = answer(row, asked, inputs, grad, pattern)
    if not outputs:
        return fault
    oracle = Oracle(case, inputs, scale=case.scale, grad="dq" in outputs, pattern=pattern)
    oracle.budget = {name: budget + asked.room for name, budget in oracle.budget.items()}
    for name in [name for name in (*LIKE, "lse") if name in outputs]:
        ratio = oracle.error_ratios({name: outputs[name]})[name]
        if ratio > 1:
            mistake = None if case.options else ""  # nobody searches for it
            if named and (asked.use in USES.values() or asked.memory not in ("", "transposed")):
                mistake = _of_circumstances(row, asked, grad, seed, name)
            elif named and not case.options:
                mistake = patterns.explain(case, inputs, outputs, name, 2 * oracle.budget[name])
            return _fault(name, outputs, oracle, case, ratio, mistake)
    return fault


def _of_circumstances(row: Any, asked: Asked, grad: bool, seed: int, name: str) -> str | None:
    """The mistake of what is right in fresh memory, and in a call of its own."""
    if failure(row, replace(asked, memory="", use=None), grad, seed, named=False) is not None:
        return None
    if asked.use is two_forwards and name == "o":
        return "results share a buffer: the next call overwrites the result of the call before"
    return (
        f"{name} is right in a single call on contiguous inputs, and wrong for"
        f" {MEMORY[asked.memory][2] if asked.memory else asked.about}"
    )


def _fault(
    name: str, outputs: Mapping[str, Tensor], oracle: Oracle, case: AttentionCase, ratio: float, mistake: str | None
) -> question.Fault:
    output, budget = outputs[name], oracle.budget[name]
    expected = oracle.reference[name].unflatten(0, (case.batch, case.kv_heads)).flatten(1, 2)  # (B, H, S, D)
    at = question.worst(output, expected)
    wrong = ~((output.double() - expected).abs() <= budget)
    lines = [
        f"  {name}[{', '.join(map(str, at))}]: expected {expected[at].item():.6g}, got {output[at].item():.6g};"
        f" the largest error is {ratio:.3g} times what is allowed",
        f"  wrong at: {question.where(wrong)}",
    ]
    right = list(LIKE)[: list(LIKE).index(name)] if name in LIKE else []
    return question.Fault.explained("\n".join(lines), mistake, ratio, right)
