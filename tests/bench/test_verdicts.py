"""Verdicts of `--against` on real runs: code that did not change is "same", and a planted slowdown is found.

The tests take minutes, so they run on request:

    python -m pytest tests/bench/test_verdicts.py -m on_request -s                # on the CPU
    python -m pytest tests/bench/test_verdicts.py -m "on_request and gpu" -s      # on a GPU, some 16 minutes

LMSYS_PAIRS sets how many pairs of fresh processes are measured; the default is 5. Each pair prints its counts, what
changed, and what stayed unclear. tests/support/planted.py makes the slow rows.
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lmsys.bench.changes import BAD, FASTER, MARGIN, SAME, SLOWER, UNCLEAR, Change, compare, lines
from lmsys.bench.fields import Record
from lmsys.bench.results import MARGIN_IN_TURNS
from tests.support.planted import PLANTED, changes, plant, records
from tests.support.processes import ROOT

pytestmark = pytest.mark.on_request
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAIRS = int(os.environ.get("LMSYS_PAIRS", "5"))
OPTIONS = {  # of the benchmark of attention, by device, for 60 cases
    "cpu": {
        "attention": "naive,vectorized,sdpa_math,sdpa_flash,flash_torch", "length": "64,96,128,192",
        "batch": "1", "heads": "4", "head_dim": "32", "dtype": "float32", "causal": "yes",
        "direction": "fwd,bwd,fwdbwd",
    },
    "cuda": {
        "attention": "flash_triton,sdpa,sdpa_flash,sdpa_cudnn,sdpa_efficient", "length": "512,1024,2048",
        "batch": "4", "heads": "16", "head_dim": "64,128", "dtype": "bfloat16", "causal": "yes", "direction": "fwd,bwd",
    },
}  # fmt: skip
SHAPE = {"cpu": {"length": "256", "batch": "1"}, "cuda": {"length": "4096", "batch": "4"}}
COMMON = {"heads": "8", "head_dim": "64", "causal": "no", "direction": "fwd"}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
SECONDS = {"cpu": 0.2, "cuda": 0.1}  # of sampling, for each row
# {device: (share by which rows are slowed down, margin beyond which a verdict must say "slower")}
PLANTS = {"cuda": (0.02, 0.01), "cpu": (1.0, MARGIN_IN_TURNS)}
ACROSS_FILES = {"cuda": 0.06, "cpu": 1.0}  # {device: that share, if two files are compared}


@pytest.mark.parametrize("device", DEVICES)
def test_unchanged_code_is_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is compared with itself. A busy CPU leaves much unclear; on a GPU nearly all must be the same."""
    monkeypatch.chdir(ROOT)
    pair = partial(changes, device, SECONDS[device], str(ROOT), **OPTIONS[device])
    counts = counts_of(f"{device}, A/A in turns", MARGIN_IN_TURNS, pair)
    assert counts.total() == 60 * PAIRS
    false = sum(counts[verdict] for verdict in (*BAD, FASTER))
    assert false <= (0.01 * counts.total() if device == "cuda" else 0)
    assert device == "cpu" or counts[SAME] >= 0.95 * counts.total()


@pytest.mark.parametrize("device", DEVICES)
def test_a_planted_slowdown_is_found_in_turns(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, margin = PLANTS[device]
    earlier = plant(tmp_path / "earlier", 0.0)
    monkeypatch.chdir(plant(tmp_path / "today", share))
    options = SHAPE[device] | COMMON | {"attention": PLANTED, "dtype": DTYPE[device]}
    pair = partial(changes, device, SECONDS[device], str(earlier), margin, **options)
    check_planted(device, counts_of(f"{device}, {share:.0%} planted, in turns", margin, pair))


@pytest.mark.parametrize("device", DEVICES)
def test_a_planted_slowdown_is_found_across_files(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = ACROSS_FILES[device]
    options = SHAPE[device] | COMMON | {"attention": f"{PLANTED},sdpa_flash", "dtype": DTYPE[device]}

    def pair() -> list[Change]:
        runs: list[list[Record]] = []
        for name, planted in (("earlier", 0.0), ("today", share)):
            monkeypatch.chdir(plant(tmp_path / name, planted))
            runs.append(records(device, SECONDS[device], **options))
        return [change for change in compare(runs[0], runs[1]) if not change.new["peer"]]

    check_planted(device, counts_of(f"{device}, {share:.0%} planted, across files", MARGIN, pair))


def counts_of(title: str, margin: float, pair: Callable[[], list[Change]]) -> Counter[str]:
    """{verdict: number} of all pairs. Each pair's verdicts are printed when it has ended."""
    counts: Counter[str] = Counter()
    for number in range(1, PAIRS + 1):
        verdicts = pair()
        print(f"{title}, pair {number} of {PAIRS}:", *lines(verdicts, margin), sep="\n")
        for change in verdicts:
            if change.verdict == UNCLEAR:
                print(f"unclear: {change.new['id']} {change.interval}")
        counts += Counter(change.verdict for change in verdicts)
    return counts


def check_planted(device: str, counts: Counter[str]) -> None:
    """AssertionError unless a GPU finds nearly all slow rows. A busy CPU may leave some unclear, but none "same"."""
    assert counts.total() == 8 * PAIRS
    assert counts[SLOWER] >= (0.95 * counts.total() if device == "cuda" else 1)
    assert not counts[SAME] and not counts[FASTER]
