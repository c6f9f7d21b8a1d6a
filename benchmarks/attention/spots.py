"""Timed calls of attention, checked at spots that no row can know.

Of a forward some rows of some heads are looked at; of a backward some whole heads, since each row of dk and dv is a sum
over all queries. What is copied behind the clock is these parts alone. Of each part a row goes into the record, by
which others can repeat the check on a machine without a GPU: `repeat`.
"""

import base64
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.arithmetic import BUDGET_RTOL, ERROR_RTOL
from lmsys import draws
from lmsys.attention import AttentionCase, Pattern
from lmsys.attention.contract import DTYPES
from lmsys.bench import Record
from lmsys.bench.plain import check_plain
from lmsys.measure.compare import Kept
from lmsys.testing import Inputs, Oracle, Spot, pick

NUM_KEPT = 8  # timed calls of a row
NUM_SPOTS, SPOT_ROWS = 2, 16  # of a forward
NUM_HEADS, SPOT_SCORES = 2, 2**27  # of a backward: so many heads, fewer where they have more scores
GRADIENTS = ("dq", "dk", "dv")
LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}
MOST_SCORES = 2**25  # of a part that `repeat` makes again: seconds on a CPU


class Spots:
    """Copies and judges parts of timed calls, by the key of each."""

    def __init__(self, case: AttentionCase, inputs: Inputs, pattern: Pattern | None = None):
        self.case, self.inputs, self.pattern = case, inputs, pattern

    def keep(self, backward: bool, result: Any, key: int | None) -> Any:
        """The parts of what a row returned that the key says, by name; None without a key. See `check_plain`."""
        outputs = dict(zip(GRADIENTS, result, strict=True)) if backward else {"o": result}
        tensors = self.inputs.tensors
        for name, x in outputs.items():
            check_plain(name, x, tensors[LIKE[name]], tensors.values())
        if key is None:
            return None
        return [
            {name: pick(x, spot, self.case.kv_heads) for name, x in outputs.items()}
            for spot in spots_of(self.case, backward, key)
        ]

    def judge(self, backward: bool, kept: Kept, rms: bool) -> Mapping[str, float]:
        """The worst error over its budget of each tensor; leaves one row of each part as evidence."""
        worst: dict[str, float] = {}
        parts = kept.evidence.setdefault("parts", [])
        for spot, found in zip(spots_of(self.case, backward, kept.key), kept.result, strict=True):
            oracle = Oracle(self.case, self.inputs, grad=backward, spot=spot, pattern=self.pattern)
            for name, ratio in oracle.judge(found, rms).items():
                worst[name] = max(ratio, worst.get(name, 0.0))
            chance = random.Random(kept.key)
            parts += [_evidence(name, x, spot, oracle, chance) for name, x in found.items()]
        return worst


def spots_of(case: AttentionCase, backward: bool, key: int) -> list[Spot]:
    chance = random.Random(key)
    units = [(batch, head) for batch in range(case.batch) for head in range(case.kv_heads)]
    if backward:
        scores = case.heads // case.kv_heads * case.queries * case.keys
        count = min(len(units), max(1, min(NUM_HEADS, SPOT_SCORES // scores)))
        return [Spot((unit,)) for unit in chance.sample(units, count)]
    starts = [chance.randrange(max(1, case.queries - SPOT_ROWS + 1)) for _ in range(NUM_SPOTS)]
    rows = [slice(start, min(start + SPOT_ROWS, case.queries)) for start in starts]
    return [Spot((chance.choice(units),), one) for one in rows]


def _evidence(name: str, found: Tensor, spot: Spot, oracle: Oracle, chance: random.Random) -> Record:
    """One row of a part: its values, its largest error, and the part's budget."""
    group, row = chance.randrange(found.shape[-3]), chance.randrange(found.shape[-2])
    values = found[..., group, row, :].reshape(-1)
    error = values.double() - oracle.reference[name][..., group, row, :].reshape(-1)
    return {
        "tensor": name,
        "unit": list(spot.units[0]),
        "rows": None if spot.rows is None else [spot.rows.start, spot.rows.stop],
        "at": [group, row],
        "values": base64.b64encode(values.cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "error": error.abs().max().item(),
        "budget": oracle.budget[name],
    }


def repeat(case: AttentionCase, seed: int, call: Record, pattern: Pattern | None = None) -> Iterator[str]:
    """Sentences on what is wrong with a call of a record, or could not be made again: inputs, oracle and errors."""
    backward, oracles = "o" not in call["error_ratios"], dict[str, Oracle]()
    expected = [(list(one.units[0]), one.rows) for one in spots_of(case, backward, call["key"])]
    for part in call["parts"]:
        rows = None if part["rows"] is None else slice(*part["rows"])
        if (part["unit"], rows) not in expected:
            yield f"its part {part['unit']}, rows {part['rows']}, is not one that its key says"
            continue
        scores = case.heads // case.kv_heads * (case.queries if rows is None else rows.stop - rows.start) * case.keys
        if scores > MOST_SCORES:
            yield f"not recomputed: {part['tensor']} of a head with {scores:,} scores (at most {MOST_SCORES:,} here)"
            continue
        place = str((part["unit"], part["rows"]))
        if place not in oracles:
            oracles[place] = _oracle(case, seed, call["draw"], tuple(part["unit"]), rows, backward, pattern)
        yield from _differences(case, part, oracles[place], call["error_ratios"][part["tensor"]])


def _differences(case: AttentionCase, part: Record, oracle: Oracle, ratio: float) -> Iterator[str]:
    name, (group, row) = part["tensor"], part["at"]
    values = torch.frombuffer(bytearray(base64.b64decode(part["values"])), dtype=DTYPES[case.dtype])
    reference = oracle.reference[name][0, group, row]
    if values.shape != reference.shape:
        yield f"{name}: {values.numel()} values were recorded of a row of {reference.numel()}"
        return
    error = (values.double() - reference).abs().max().item()
    if not abs(error - part["error"]) <= ERROR_RTOL * oracle.budget[name]:
        yield f"{name}: its recorded values are off by {error:.4g} from the oracle, and it says {part['error']:.4g}"
    if not 0 < part["budget"] <= oracle.budget[name] * (1 + BUDGET_RTOL):  # a smaller one is to its own harm
        yield f"{name}: its budget should be at most about {oracle.budget[name]:.3g}, and it says {part['budget']:.3g}"
    if ratio < (own := part["error"] / part["budget"]) * (1 - ERROR_RTOL):
        yield f"{name}: its error ratio {ratio:.4g} is less than that of its own row, {own:.4g}"


def _oracle(
    case: AttentionCase,
    seed: int,
    draw: int,
    unit: tuple[int, int],
    rows: slice | None,
    backward: bool,
    pattern: Pattern | None,
) -> Oracle:
    """The oracle of one head, whose inputs alone are drawn again."""
    (batch, head), group = unit, case.heads // case.kv_heads

    def part(name: str, heads: int, length: int) -> Tensor:
        each = heads // case.kv_heads * length * case.head_dim  # elements of a unit
        first = (batch * case.kv_heads + head) * each
        found = draws.part(seed, draw, name, first, each, DTYPES[case.dtype])
        return found.view(1, heads // case.kv_heads, length, case.head_dim)

    q, do = (part(name, case.heads, case.queries) for name in ("q", "do"))
    k, v = (part(name, case.kv_heads, case.keys) for name in ("k", "v"))
    alone = AttentionCase(
        1, group, 1, *(case.queries, case.keys, case.head_dim, case.dtype, case.causal, backward, "cpu")
    )
    own = pattern and pattern.of_entries([batch])
    return Oracle(alone, Inputs(q, k, v, do, seed), grad=backward, spot=Spot(((0, 0),), rows), pattern=own)
