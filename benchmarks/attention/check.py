"""Checks attention rows (implementations): whole calls before timing, and parts of timed calls.

`benchmarks.bench_attention` calls these checks. A result is right if its error is at most its budget, the error that
`lmsys.testing.Oracle` allows. Before timing, `check_float32`, `Gate` and `check_small` judge a row. A `Gate` also fails
a row that returns a cached answer, changes its inputs, or leaves work on a stream that nobody waits for.

A *unit* is one pair (batch entry, key head), with the query heads that share this key head. A *spot* is the part of a
timed call's results that is judged: of a forward some query rows of one unit; of a backward a whole unit, since each
row of dk and dv is a sum over all queries. Only spots are copied after the timed window. The *key*, a random number
that is drawn after the call, chooses them, so no implementation can foresee them. One row of each spot's tensors goes
into the record, so that `repeat`, for `lmsys verify`, can judge it again on a machine without a GPU.

A *draw* is a number that decides, with the run's seed, the inputs of a call. In some draws one unit has extreme inputs
(`lmsys.extremes.attention`): then one spot is of this unit, with a budget that allows for them. To change how much is
checked, edit the constants above `Spots`.
"""

import base64
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from benchmarks.models import BUDGET_RTOL, ERROR_RTOL
from lmsys.attention import AttentionCase, Pattern, contract
from lmsys.attention.pattern import PLAIN
from lmsys.bench import Candidate, Entry, Failure, Kept, Record, Traits, plain
from lmsys.bench.case import verdict
from lmsys.check import kinds, question
from lmsys.extremes.attention import AttentionDraws, Unit, drawn_unit, extreme_of
from lmsys.measure import clock, compare
from lmsys.testing import Inputs, Oracle, Spot, make_inputs, pick, run

HAS_FLOAT32 = "has float32"  # the `state` of a candidate that `check_float32` has judged


def check_float32(candidates: Sequence[Candidate], case: AttentionCase, pattern: Pattern, seed: int) -> None:
    """Fails each candidate that can run in float32 and is wrong there.

    A candidate that was judged here has the state HAS_FLOAT32: later checks in its own dtype then leave out the
    root-mean-square rule, which is for rows without a float32 form (`lmsys.testing`).

    case  the candidates' case in float32, with gradients if any candidate needs them
    """
    able = [row for row in candidates if row.entry.why_not(replace(case, grad=row.case.asked.grad)) is None]
    if not able:
        return
    in_float32 = Gate(make_inputs(case, seed), case, pattern)
    for candidate in able:
        candidate.state = HAS_FLOAT32
        failure = in_float32.check(candidate)
        if failure and failure[0] == "wrong":
            candidate.failed(*failure)
        elif failure:
            candidate.state = None  # it could not be judged in float32: it ran out of memory, for example


def check_small(candidates: Sequence[Candidate]) -> None:
    """Fails each candidate that is wrong in the small cases of `lmsys check`, and names its mistake.

    These cases have several tiles, odd lengths, Q != K, grouped heads, a scale, other strides, and extreme scores. A
    row from a user's file gets all of them. A row of the table gets only the extreme scores, because kernels compile
    for minutes; `lmsys check --all` runs the other cases, too.

    A row is checked once for each dtype, head dimension and direction. A row is not checked if it would compile anew
    for these cases, if Triton's interpreter runs it (such a row is never timed), or if its case has options such as
    windows. A row may refuse a small case by raising an exception.
    """
    for candidate in candidates:
        is_slow = candidate.interpreted or Traits.of(candidate.entry).compiles
        if is_slow or candidate.outcome not in ("ok", "wrong") or candidate.case.asked.options:
            continue
        asked = candidate.case.asked
        # The target of a row from a user's file is "path.py:name".
        dtypes, of_table = tuple(dict.fromkeys(("float32", asked.dtype))), ".py:" not in candidate.entry.target
        options = question.Options(
            head_dim=asked.head_dim, grad=asked.grad, dtypes=dtypes, uses=False, extremes=of_table
        )
        answer, failure = candidate.watched(_answer, candidate.entry, options)
        candidate.notes["quick_check"] = str(answer or failure)
        if candidate.outcome == "wrong" and answer and answer.fault:
            candidate.reason = f"{candidate.reason}; in small cases: {answer}"
        elif candidate.outcome == "ok" and (failure or answer.fault):
            candidate.failed(*(failure or ("wrong", f"lmsys check: {answer}")))


@cache
def _answer(entry: Entry, options: question.Options) -> kinds.Answer:
    """The answer of `lmsys check` about a row; cached, as cases of several lengths ask the same question."""
    return kinds.verdict_on(entry, options, "attention", may_raise=True)


class Gate:
    """The inputs of one case, a copy of them, and the case's oracle; `check` judges one candidate after another.

    `check_float32` makes a gate whose case is in float32, for candidates whose own dtype is another.
    """

    def __init__(self, inputs: Inputs, case: AttentionCase, pattern: Pattern):
        self.inputs, self.case, self.pattern = inputs, case, pattern
        self._tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._saved = [x.clone() for x in self._tensors]
        self._oracle: Oracle | None = None

    def check(self, candidate: Candidate) -> Failure | None:
        """None if the row is right, else (outcome, reason).

        The candidate's `error_ratio` becomes the ratio that failed, or the largest one in its own dtype.
        """
        outputs, failure = candidate.watched(self._outputs, candidate)
        if failure and failure[0] == "oom" and self._oracle is not None:
            # The row has not failed if it fits without the oracle beside it. Its outputs go to the host, so that the
            # oracle, which is made again, has room on the device.
            self._oracle = None
            compare.release_memory()
            outputs, failure = candidate.watched(
                lambda: {name: x.cpu() for name, x in self._outputs(candidate).items()}
            )
        if failure:
            return failure
        changed = not all(torch.equal(x, saved) for x, saved in zip(self._tensors, self._saved, strict=True))
        self.restore()
        judged, failure = self._judge(outputs, rms=False)
        if failure:
            return failure
        # A row without a float32 form must also meet the root-mean-square rule.
        strictly = judged if candidate.state == HAS_FLOAT32 else self._judge(outputs, rms=True)[0]
        worst, wrong = verdict(strictly, self.case.dtype)
        if wrong:
            candidate.error_ratio = worst
            return wrong
        if self.case.dtype == candidate.case.dtype:
            candidate.error_ratio = max(*judged.values(), candidate.error_ratio or 0.0)
        return ("wrong", "the row changes its inputs") if changed else None

    def restore(self) -> None:
        """Copies the saved values back into the inputs."""
        for x, saved in zip(self._tensors, self._saved, strict=True):
            x.data.copy_(saved)

    def _outputs(self, candidate: Candidate) -> dict[str, torch.Tensor]:
        """Calls the row on inputs that get their values at the last moment, and returns copies of its outputs.

        Until then the inputs hold half of these values, so an answer that was computed earlier is wrong. They change
        through `x.data`, of which no version counter tells. On CUDA the current stream first sleeps and then writes
        the values, while the host goes on. So a row that works on another stream without waiting reads the old values.
        If nobody waits for that other stream, the copies are taken before it has written the results.
        """
        for x in self._tensors:
            x.data.mul_(0.5)
        clock.synchronize(self.case.device)
        if self.case.device == "cuda":
            # Clock cycles, about 20 ms: the host of a warm call needs less to launch the first kernel.
            torch.cuda._sleep(4 * 10**7)
        self.restore()
        outputs = run(
            candidate.call,
            self.inputs,
            pattern=self.pattern,
            scale=self.case.scale,
            grad=candidate.case.asked.grad,
        )
        for name, x in outputs.items():
            plain.check_plain(name, x, self.inputs.tensors[LIKE[name]], self._tensors)
        return {name: x.clone() for name, x in outputs.items() if name != "lse"}

    def _judge(self, outputs: dict[str, torch.Tensor], rms: bool) -> tuple[dict[str, float], Failure | None]:
        """({tensor: its error over its budget}, None), or (None, how the comparison failed).

        The oracle is made at the first call. With `rms` the root-mean-square rule counts, too.
        """
        if self._oracle is None:
            self._oracle = Oracle(self.case, self.inputs, scale=self.case.scale, pattern=self.pattern)
        oracle, device = self._oracle, self.inputs.q.device
        judged, failure = compare.attempt(
            lambda: oracle.error_ratios({k: x.to(device) for k, x in outputs.items()}, rms=rms)
        )
        assert not (failure and failure[0] == "oom"), f"the oracle does not fit beside {self.case}: {failure}"
        return judged, failure


NUM_KEPT = 8  # timed calls of a row that are checked
NUM_SPOTS, SPOT_ROWS = 2, 16  # spots of a forward, and query rows of each
NUM_HEADS, SPOT_SCORES = 2, 2**27  # most units of a backward that are checked, and most scores of them if several
GRADIENTS = ("dq", "dk", "dv")
# By output: the input whose shape and dtype it must have.
LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}
# A recorded budget may be at most this many times the budget that `repeat` computes on a CPU. Plain PyTorch on a GPU
# may divide a product into parts and round the sum of each: where all keys are equal, this made the budget of dq twice
# as large as on a CPU.
MOST_BUDGET = 4
MOST_SCORES = 2**25  # the most scores of a part that `repeat` computes again: they take seconds on a CPU
MOST_ELEMENTS = 2**26  # the most elements of an input that `repeat` draws again: a forged file may name any size


class Spots:
    """Copies and judges spots of timed calls; a call's key chooses them. `Attention.setup` makes one for a group.

    draws    the generator that fills the inputs; its `extreme` is (unit, kind) of the present draw, or None
    inputs   the tensors that all rows of the group read
    pattern  None: plain attention, causal as the case says
    """

    def __init__(self, case: AttentionCase, draws: AttentionDraws, inputs: Inputs, pattern: Pattern | None = None):
        self.case, self.draws, self.inputs, self.pattern = case, draws, inputs, pattern or PLAIN[case.causal]

    def keep(self, backward: bool, result: Any, key: int | None) -> Any:
        """For each spot that the key selects {tensor: a copy of its part}; None without a key.

        backward  True: `result` is (dq, dk, dv); False: it is o

        `check_plain` raises `Failed` for a tensor that is not plain.
        """
        outputs = dict(zip(GRADIENTS, result, strict=True)) if backward else {"o": result}
        tensors = self.inputs.tensors
        for name, x in outputs.items():
            plain.check_plain(name, x, tensors[LIKE[name]], tensors.values())
        spots = None if key is None else self._spots(backward, key)
        return spots and [{name: pick(x, spot, self.case.kv_heads) for name, x in outputs.items()} for spot in spots]

    def _spots(self, backward: bool, key: int) -> list[Spot]:
        """The spots of a call on the inputs as they stand."""
        return spots_of(self.case, backward, key, self.draws.extreme and self.draws.extreme[0])

    def judge(self, backward: bool, kept: Kept, rms: bool) -> Mapping[str, float]:
        """{tensor: its worst error over its budget}; leaves one row of each spot's tensors in `kept.evidence`.

        With `rms` the root-mean-square rule counts, too.
        """
        worst, parts = dict[str, float](), kept.evidence.setdefault("parts", [])
        for spot, part in zip(self._spots(backward, kept.key), kept.result, strict=True):
            oracle = Oracle(self.case, self.inputs, grad=backward, spot=spot, pattern=self.pattern)
            for name, ratio in oracle.judge(part, rms).items():
                worst[name] = max(ratio, worst.get(name, 0.0))
            chance = random.Random(kept.key)
            parts += [_evidence(name, x, spot, oracle, chance) for name, x in part.items()]
        return worst


def spots_of(case: AttentionCase, backward: bool, key: int, extreme: Unit | None) -> list[Spot]:
    """The spots that a key selects; the last one is of the draw's extreme unit, if there is one."""
    chance, rows = random.Random(key), list[slice | None]()
    units = range(case.batch * case.kv_heads)  # numbers of units; no list, since a file may name huge sizes
    if backward:
        scores = case.heads // case.kv_heads * case.queries * case.keys
        numbers = chance.sample(units, min(len(units), max(1, min(NUM_HEADS, SPOT_SCORES // scores))))
        rows = [None] * len(numbers)  # None: all query rows
    else:
        starts = [chance.randrange(max(1, case.queries - SPOT_ROWS + 1)) for _ in range(NUM_SPOTS)]
        rows = [slice(start, min(start + SPOT_ROWS, case.queries)) for start in starts]
        numbers = [chance.choice(units) for _ in rows]
    chosen = [divmod(number, case.kv_heads) for number in numbers]
    if extreme is not None and not (backward and extreme in chosen):
        chosen[-1] = extreme
    return [Spot(units=(unit,), rows=part, extreme=unit == extreme) for unit, part in zip(chosen, rows, strict=True)]


def _evidence(name: str, part: torch.Tensor, spot: Spot, oracle: Oracle, chance: random.Random) -> Record:
    """Evidence for a record: one row of a spot's tensor, the row's largest error, and the tensor's budget.

    "at" says which row: the number of the head within the unit, and that of the row within the spot. "values" are the
    row's bytes, in base64.
    """
    group, row = chance.randrange(part.shape[-3]), chance.randrange(part.shape[-2])
    values, right = (x[..., group, row, :].reshape(-1) for x in (part, oracle.reference[name]))
    return {
        "tensor": name,
        "unit": list(spot.units[0]),
        "rows": None if spot.rows is None else [spot.rows.start, spot.rows.stop],
        "at": [group, row],
        "values": base64.b64encode(values.cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "error": (values.double() - right).abs().max().item(),
        "budget": oracle.budget[name],
    }


def repeat(
    case: AttentionCase, backward: bool, proof: Record, call: Record, make_pattern: Callable[[], Pattern | None]
) -> Iterator[str | int]:
    """Judges a call of a record again: its inputs are drawn and its oracle is made anew. `Attention.repeat` calls it.

    proof         the record's `proof`, with the seed and the generator of its inputs
    call          the evidence of the call: its draw, its key, its error ratios, and its `parts`, as of `_evidence`
    make_pattern  makes the case's pattern; called only for sizes that are small enough

    Yields a sentence for each thing that is wrong or too large to be made again, and for each judged part the number of
    its elements.
    """
    size = max(case.batch, case.heads // case.kv_heads * case.queries, case.keys) * case.head_dim
    if size > MOST_ELEMENTS:
        yield f"not recomputed: {size:,} elements of a head (at most {MOST_ELEMENTS:,} here)"
        return
    pattern, tensors, oracles = make_pattern(), GRADIENTS if backward else ("o",), dict[str, Oracle]()
    extreme = extreme_of(case, proof["seed"], call["draw"], proof["generator"])
    spots = spots_of(case, backward, call["key"], extreme and extreme[0])
    expected = [(spot, name) for spot in spots for name in tensors]
    if set(call["error_ratios"]) != set(tensors):
        yield f"its errors are of {', '.join(call['error_ratios'])}, and not of {', '.join(tensors)}"
    if len(call["parts"]) != len(expected):
        yield f"not proved: it has {len(call['parts'])} parts, where its key says {len(expected)}"
    for (spot, name), part in zip(expected, call["parts"], strict=False):
        rows = part["rows"] if part["rows"] is None else slice(*part["rows"])
        if (part["unit"], rows, part["tensor"]) != (list(spot.units[0]), spot.rows, name):
            yield f"not proved: {part['tensor']} of {part['unit']}, rows {part['rows']}, is not what its key says"
            continue
        scores = case.heads // case.kv_heads * (case.queries if rows is None else rows.stop - rows.start) * case.keys
        if scores > MOST_SCORES:
            yield f"not recomputed: {name} of a head with {scores:,} scores (at most {MOST_SCORES:,} here)"
            continue
        if str(spot) not in oracles:
            oracles[str(spot)] = _oracle(case, proof, call["draw"], spot, backward, pattern)
        yield from _differences(case, part, oracles[str(spot)], call["error_ratios"][name])


def _differences(case: AttentionCase, part: Record, oracle: Oracle, ratio: float) -> Iterator[str | int]:
    """Judges the recorded row of a part, and yields as `repeat`. ratio: the error ratio that the record states."""
    name, (group, row) = part["tensor"], part["at"]
    values = torch.frombuffer(bytearray(base64.b64decode(part["values"])), dtype=contract.DTYPES[case.dtype])
    reference = oracle.reference[name][0, group, row]
    if values.shape != reference.shape:
        yield f"{name}: {values.numel()} values were recorded of a row of {reference.numel()}"
        return
    error = (values.double() - reference).abs().max().item()
    if not abs(error - part["error"]) <= ERROR_RTOL * oracle.budget[name]:
        yield f"{name}: its recorded values are off by {error:.4g} from the oracle, and it says {part['error']:.4g}"
    budget = oracle.budget[name]
    if not 0 < part["budget"] <= budget * MOST_BUDGET:  # a budget that is too small only makes ratios larger
        yield f"{name}: its budget should be at most about {budget:.3g}, and it says {part['budget']:.3g}"
    elif error > budget * (1 + BUDGET_RTOL):  # a larger budget must not excuse an error that is too large here
        yield f"{name}: its error {error:.3g} is more than its budget should be, about {budget:.3g}"
    if ratio < (row_ratio := part["error"] / part["budget"]) * (1 - ERROR_RTOL):
        yield f"{name}: its error ratio {ratio:.4g} is less than that of its own row, {row_ratio:.4g}"
    yield values.numel()


def _oracle(
    case: AttentionCase, proof: Record, draw: int, spot: Spot, backward: bool, pattern: Pattern | None
) -> Oracle:
    """The oracle of one unit on a CPU. Only the inputs of this unit are drawn again, so in them it is unit (0, 0)."""
    (unit,) = spot.units
    tensors = drawn_unit(
        case,
        proof["seed"],
        draw,
        unit,
        causal=(pattern or PLAIN[case.causal]).causal,
        generator=proof["generator"],
    )
    return Oracle(
        replace(case, batch=1, heads=case.heads // case.kv_heads, kv_heads=1, grad=backward, device="cpu"),
        Inputs(**tensors, seed=proof["seed"]),
        grad=backward,
        spot=replace(spot, units=((0, 0),)),
        pattern=pattern and pattern.of_entries([unit[0]]),
    )
