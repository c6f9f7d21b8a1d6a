"""Forged result files: `lmsys verify` refuses each, or calls its times not proved, with exit code 1.

A record has a proof: some of its timed calls with parts of their results, which verify judges again. A seal is a digest
that a record or the file has of its content. A forgery is a list of changes (tests/support/result_files.py) of an
honest file: one of attention from one H200, and one of the loss, which is measured here. To add one, write an entry of
FORGERIES, whose files are sealed again, or of another table below it. ACCEPTED are changes that leave nothing wrong.
"""

import json
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_loss import Loss
from lmsys import verify
from lmsys.bench.record import load, older_file_seal, others_seal, seal, summarize
from tests.benchmarks.test_bench_loss import records as loss_records
from tests.support.processes import ROOT
from tests.support.result_files import (
    BACKWARD,
    CALL,
    CALLS,
    FORWARD,
    LAST_RECORD,
    OTHER_CALL,
    OTHER_FORWARD,
    OTHER_RECORD,
    OURS,
    PART,
    PARTS,
    RECORD,
    RECORDS,
    REMOVED,
    RESULT,
    SAMPLES,
    STATISTICS,
    Change,
    Content,
    CopyOf,
    at,
    changed,
    h200,
    picked,
    scaled_alike,
    seal_again,
    seal_file,
    times,
)

BACKWARDS_CALL = (*LAST_RECORD, "proof", "calls", 0)
ENTRY = ("benchmarks", 0)
CANNOT = "it cannot be recomputed: "


def fields_of_record(*names: str) -> list[tuple[str | int, ...]]:
    """The places of fields of the first record."""
    return [(*RECORD, name) for name in names]


def faster_half(record: Content) -> Content:
    """The record without the slower half of its samples."""
    samples = sorted(record["samples_s"])[: len(record["samples_s"]) // 2]
    return record | {"samples_s": samples} | summarize(samples)


def half_of(text: str) -> str:
    """The first half of a text of base64."""
    return text[: len(text) // 2 // 4 * 4]


def another_row(row: int) -> int:
    """The number of a row that was not recorded."""
    return 0 if row else 1


Forgeries = dict[str, tuple[str, Sequence[Change]]]  # {name: (what verify must say, changes)}
FORGERIES: dict[str, Forgeries] = {  # {file: its forgeries}
    "attention": {
        # Times, work and rates.
        "a time scaled": ("time_s is", [((*RECORD, "time_s"), times(0.9))]),
        "statistics scaled": ("time_s is", [(place, times(0.9)) for place in fields_of_record(*STATISTICS)]),
        "samples and statistics scaled": (
            "flops_per_s is",
            [(place, times(0.9)) for place in fields_of_record(*STATISTICS, "samples_s")],
        ),
        "a sample left out": ("mean_s is", [((*SAMPLES, 0), REMOVED)]),
        "a sample lowered": ("mean_s is", [((*SAMPLES, 0), times(0.5))]),
        "slow samples left out": ("flops_per_s is", [(RECORD, faster_half)]),
        "samples of another row": ("mean_s is", [(SAMPLES, CopyOf((*OTHER_RECORD, "samples_s")))]),
        "samples that no machine reaches": ("time_s is", [(SAMPLES, times(0.01))]),
        "a rate improved": ("flops_per_s is", [((*RECORD, "flops_per_s"), times(1.1))]),
        "a share of the ceiling improved": (
            "matmul_ceiling_fraction is",
            [((*RECORD, "matmul_ceiling_fraction"), times(1.1))],
        ),
        "a ceiling lowered": (
            "matmul_ceiling_fraction is",
            [((*OURS, "machine", "ceilings", "matmul_flops_per_s", "bfloat16"), times(0.8))],
        ),
        "work enlarged": ("flops is", [((*RECORD, "flops"), times(2))]),
        # What a case says that it is.
        "heads doubled": ("its axes are those of", [((*RECORD, "heads"), times(2))]),
        "another dtype": ("its axes are those of", [((*RECORD, "dtype"), "float16")]),
        "a forward said to be a backward": ("its axes are those of", [((*RECORD, "direction"), "bwd")]),
        "the mask left out": ("its axes are those of", [((*RECORD, "causal"), False)]),
        "rows swapped": (
            "its axes are those of",
            [
                ((*RECORD, "impl"), CopyOf((*OTHER_RECORD, "impl"))),
                ((*OTHER_RECORD, "impl"), CopyOf((*RECORD, "impl"))),
            ],
        ),
        "an id that says it was not recomputed": (
            "time_s is",
            [
                *((place, f"{verify.NOT_RECOMPUTED}nothing") for place in fields_of_record("id", "section")),
                (SAMPLES, times(0.9)),
                (("benchmarks",), []),
            ],
        ),
        "a record left out": ("pytest-benchmark has it, and no record", [(RECORDS, picked(1))]),
        "a record twice": ("there are 2 such records", [(RECORDS, picked(0, 1, 0))]),
        # Errors.
        "an error ratio improved": ("has an error ratio above", [((*RECORD, "error_ratio"), 0.001)]),
        "all error ratios improved": (
            "error ratio",
            [((*RECORD, "error_ratio"), 0.001), *(((*CALLS, at, "error_ratios", "o"), 0.001) for at in range(2))],
        ),
        "wrong made ok": ("it is ok, with an error of 3 times", [((*RECORD, "error_ratio"), 3.0)]),
        "said to repeat": (
            "repeatable is",
            [((*RECORD, "same_bits", "differ"), {"dq": 1e-3}), ((*RECORD, "repeatable"), True)],
        ),
        "an error of a part improved": ("its recorded values are off by", [((*PART, "error"), times(0.1))]),
        "a budget enlarged": ("its budget should be at most about", [((*PART, "budget"), times(10))]),
        "zero error and budget": (CANNOT, [((*PART, "error"), 0.0), ((*PART, "budget"), 0.0)]),
        # Checked calls: their number, their keys, and the parts of results that they hold.
        "the last call left out": ("not proved: it holds 1 checked calls", [(CALLS, picked(0))]),
        "no calls": ("not proved: it holds 0 checked calls", [(CALLS, [])]),
        "no proof": ("not proved: it holds 0 checked calls", [((*RECORD, "proof"), REMOVED)]),
        "one call in place of all": ("not proved: it holds 1 checked calls", [(CALLS, picked(0, 0))]),
        "one call under other numbers": (
            "not proved: it holds 1 checked calls",
            [(CALLS, picked(0, 0)), ((*CALL, "call"), 0), ((*OTHER_CALL, "call"), 1)],
        ),
        "one draw as a number and as a text": (
            "not proved: it holds 1 checked calls",
            [
                (CALLS, picked(0, 0)),
                ((*OTHER_CALL, "call"), CopyOf((*OTHER_CALL, "call"))),
                ((*OTHER_CALL, "draw"), lambda draw: str(draw)),
            ],
        ),
        "one draw as two numbers": (
            "not proved: it holds 1 checked calls",
            [
                (CALLS, picked(0, 0)),
                ((*OTHER_CALL, "call"), CopyOf((*OTHER_CALL, "call"))),
                ((*OTHER_CALL, "draw"), lambda draw: float(draw)),
            ],
        ),
        "a call between two": ("is none of its", [((*CALL, "call"), 0.5)]),
        "another seed": ("its recorded values", [((*RECORD, "proof", "seed"), 7)]),
        "another draw": ("its recorded values", [((*CALL, "draw"), 1)]),
        "another key": ("is not what its key says", [((*CALL, "key"), 1)]),
        "a call after the last": ("is none of its", [((*CALL, "call"), CopyOf((*RECORD, "rounds")))]),
        "a call without a key": ("its evidence cannot be read: KeyError: 'key'", [((*CALL, "key"), REMOVED)]),
        "no errors": ("was wrong: {}", [((*CALL, "error_ratios"), {})]),
        "a part of a call left out": ("not proved: it has 1 parts, where its key says 2", [(PARTS, picked(0))]),
        "no parts": ("not proved: it has 0 parts, where its key says 2", [(PARTS, [])]),
        "a part more": ("not proved: it has 3 parts, where its key says 2", [(PARTS, picked(0, 1, 0))]),
        "a part twice": ("is not what its key says", [(PARTS, picked(0, 0))]),
        "parts of another call": ("is not what its key says", [(PARTS, CopyOf((*OTHER_CALL, "parts")))]),
        "other values": ("its recorded values", [((*PART, "values"), CopyOf((*PARTS, 1, "values")))]),
        "values cut short": ("its evidence cannot be read", [((*PART, "values"), half_of)]),
        "values that are no base64": ("values were recorded of a row of 64", [((*PART, "values"), "no values")]),
        # Records that no run has written.
        "a proof of null": (CANNOT, [((*RECORD, "proof"), None)]),
        "a proof that is a number": (CANNOT, [((*RECORD, "proof"), 3)]),
        "a call without anything": (CANNOT, [(CALLS, [{}])]),
        "no number of rounds": (CANNOT, [((*RECORD, "rounds"), None)]),
        "a dtype that is none": (CANNOT, [((*RECORD, "dtype"), "x")]),
        "no head dimension": (CANNOT, [((*RECORD, "head_dim"), None)]),
        "no heads": (CANNOT, [((*RECORD, "kv_heads"), 0)]),
    },
    "backward": {
        "no calls of a backward": ("not proved: it holds 0 checked calls", [((*LAST_RECORD, "proof", "calls"), [])]),
        "the proof of another row": (
            "not proved: it has 2 parts, where its key says 6",
            [((*LAST_RECORD, "proof"), CopyOf((*RECORD, "proof")))],
        ),
        "one tensor of a backward": (
            "not proved: it has 2 parts, where its key says 6",
            [((*BACKWARDS_CALL, "parts"), picked(4, 5))],
        ),
        "errors of one tensor of a backward": (
            "its errors are of dv, and not of dq, dk, dv",
            [((*BACKWARDS_CALL, "parts"), picked(4, 5)), ((*BACKWARDS_CALL, "error_ratios"), {"dv": 0.1})],
        ),
        "gradients named alike": (
            "not proved: dk of",
            [((*BACKWARDS_CALL, "parts", at, "tensor"), "dk") for at in range(6)],
        ),
    },
    "loss": {
        "no loss was checked": ("not proved: it holds 0 checked calls", [(CALLS, [])]),
        "one loss less": ("not proved: it holds 2 checked calls", [((*CALLS, -1), REMOVED)]),
        "one loss often": (
            "not proved: it holds 1 checked calls",
            [(CALLS, picked(0, 0, 0)), *(((*CALLS, at, "call"), at) for at in range(3))],
        ),
        "errors of one gradient": (
            "not proved: its errors are of gradient of hidden, and not of",
            [((*CALL, "error_ratios"), {"gradient of hidden": 0.0})],
        ),
        "no part of a loss": ("its evidence cannot be read: KeyError: 'part'", [((*CALL, "part"), REMOVED)]),
        # Which of the rows was recorded is drawn anew in each run.
        "another token": ("its recorded values are off by", [((*CALL, "part", "row"), another_row)]),
        "a token that is none": ("values of row 1000000000 were recorded", [((*CALL, "part", "row"), 10**9)]),
    },
}
A_SEAL = "its seal is not that of its content"
OTHERS_SEAL = "pytest-benchmark's part is not the one that was sealed"
NOT_SEALED: Forgeries = {  # the file keeps its old seals
    "a machine changed": (A_SEAL, [((*OURS, "machine", "name"), "another")]),
    "a row of a table renamed": (A_SEAL, [((*OURS, "rows", "attention", 0, "label"), "mine")]),
    "a field told otherwise": (A_SEAL, [((*OURS, "fields", "attention", -1, "about"), "something else")]),
    "another processor by pytest-benchmark": (OTHERS_SEAL, [(("machine_info", "processor"), "another")]),
    "another commit by pytest-benchmark": (OTHERS_SEAL, [(("commit_info", "id"), "0" * 40)]),
    "other statistics by pytest-benchmark": (OTHERS_SEAL, [((*ENTRY, "stats", "median"), times(0.5))]),
    "all seals left out": (
        "not proved: it has no seal",
        [*(((*RECORDS, at, "seal"), REMOVED) for at in range(2)), ((*OURS, "seal"), REMOVED)],
    ),
}
FILE_SEALED: Forgeries = {  # the file has a new seal, its records keep theirs
    "all figures scaled alike": (f"flash_gluon: {A_SEAL}", scaled_alike(0.96)),
    "the seal of a record left out": ("not proved: it has no seal", [((*RECORD, "seal"), REMOVED)]),
    "other samples by pytest-benchmark": ("has other samples", [((*ENTRY, "stats", "data", 0), times(0.5))]),
    "a number beyond every float": ("by pytest-benchmark it is 1000", [((*ENTRY, "extra_info", "time_s"), 10**400)]),
}
ELEMENTS = "not recomputed: {} elements".format
OF_A_WEIGHT = "not recomputed: a weight or hidden states of 16,000,000,000,000 elements"
NO_PATTERN = "is too large for a pattern"
# {name: (the file, what verify must say, fields of the first record)}
SIZES: dict[str, tuple[str, str, Content]] = {
    "a huge batch": ("attention", ELEMENTS("64,000,000,000"), {"batch": 10**9}),
    "a huge batch of short sequences": (
        "attention",
        ELEMENTS("1,000,000,000"),
        {"batch": 10**9, "queries": 1, "keys": 1, "head_dim": 1},
    ),
    "a huge group of heads": (
        "attention",
        ELEMENTS("32,768,000,000,000"),
        {"heads": 10**9, "kv_heads": 1, "keys": 1},
    ),
    "many queries": ("attention", "its axes are those of", {"queries": 10**12}),
    "many keys": ("attention", "its axes are those of", {"keys": 10**12}),
    "a huge head dimension": ("attention", "its axes are those of", {"head_dim": 10**12}),
    "a huge window": ("attention", NO_PATTERN, {"keys": 10**12, "window": 10**6}),
    "a huge batch of caches": ("attention", NO_PATTERN, {"batch": 10**9, "key_lengths": True}),
    "a huge number of tokens": ("loss", OF_A_WEIGHT, {"tokens": 10**12}),
    "a huge vocabulary": ("loss", OF_A_WEIGHT, {"vocab_size": 10**12}),
}


def with_older_seal(ours: Content) -> Content:
    """The part "lmsys" of a file with the seal of lmsys 0.1."""
    return ours | {"seal": older_file_seal(ours)}


def without_a_row(record: Content) -> Content:
    """The record of a row that no table has."""
    unknown = {"id": record["id"].replace(record["impl"], "unheard_of")}
    return record | unknown | {"impl": "unheard_of", "attention": "unheard_of"}


ACCEPTED: dict[str, tuple[str, Sequence[Change], bool]] = {  # {name: (what verify says, changes, if sealed again)}
    "nothing": ("4 timed calls judged again by 512 elements, nothing is wrong", [], False),
    # Nothing can find these two: the file agrees with itself.
    "all figures scaled alike": ("nothing is wrong", scaled_alike(0.96), True),
    "another machine": ("nothing is wrong", [((*OURS, "machine", "name"), "another")], True),
    "an older seal": (
        "does not cover fields, layouts, rows and pytest-benchmark's part",
        [(OURS, with_older_seal)],
        False,
    ),
    "no seal of the file": ("the file has no seal", [((*OURS, "seal"), REMOVED)], False),
    "no entries": ("the file is kept without pytest-benchmark's entries", [(("benchmarks",), [])], False),
    "no entries when it was sealed": ("nothing is wrong", [(("benchmarks",), [])], True),
    "an interrupt left entries out": ("nothing is wrong", [(ENTRY, REMOVED)], True),
    "an entry of a test that is no benchmark": (
        "nothing is wrong",
        [(ENTRY, {"name": "test_plain", "extra_info": {}, "stats": {}})],
        True,
    ),
    "a row that no table has": (
        "a record's row is not known here",
        [(RECORD, without_a_row), (("benchmarks",), [])],
        True,
    ),
}


@pytest.fixture(scope="module")
def honest() -> dict[str, Content]:
    """Result files: of two forwards, of a forward and a backward, which were measured on an H200, and of the loss.

    The loss is measured here, but its part about the machine is that of the H200. So its record must not say which
    share of this machine's matmul rate it reaches.
    """
    kept = [record for record in loss_records(row=("chunked",)).values() if record["outcome"] == "ok"]
    for record in kept:
        del record["matmul_ceiling_fraction"]
    return {
        "attention": h200(FORWARD, OTHER_FORWARD),
        "backward": h200(FORWARD, BACKWARD),
        "loss": seal_again({"benchmarks": [], "lmsys": load(RESULT) | {"records": kept}}),
    }


@pytest.fixture
def verified(
    honest: dict[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """A function that returns the exit code and the output of the command for a file of this content.

    verify is made to expect as many checked calls (`num_proofs`) as the files have.
    """
    monkeypatch.setattr(type(verify.benchmarks_in(ROOT / "benchmarks")["attention"]), "num_proofs", 2)
    monkeypatch.setattr(Loss, "num_proofs", min(Loss.num_proofs, len(at(honest["loss"], CALLS))))
    path = tmp_path / "result.json"

    def run(content: Content) -> tuple[int, str]:
        path.write_text(json.dumps(content))
        return verify.main(["--benchmarks", str(ROOT / "benchmarks"), str(path)]), capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_contradicts_nothing_passes_and_verify_says_what_it_leaves_out(
    name: str, honest: dict[str, Content], verified: Any
) -> None:
    says, changes, is_sealed = ACCEPTED[name]
    content = changed(honest["attention"], *changes)
    code, output = verified(seal_again(content) if is_sealed else content)
    assert code == 0 and says in output and "nothing is wrong\n" in output, output


@pytest.mark.parametrize(("file", "calls"), [("loss", "{} timed calls"), ("backward", "4 timed calls")])
def test_honest_files_pass(file: str, calls: str, honest: dict[str, Content], verified: Any) -> None:
    code, output = verified(honest[file])
    assert code == 0 and f"{calls.format(len(at(honest[file], CALLS)))} judged again" in output
    assert output.endswith(f"nothing is wrong\n{verify.NO_FILE_PROVES}\n")


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, several in FORGERIES.items() for name in several])
def test_a_file_that_is_sealed_again_contradicts_itself_or_is_not_proved(
    file: str, name: str, honest: dict[str, Content], verified: Any
) -> None:
    says, changes = FORGERIES[file][name]
    code, output = verified(seal_again(changed(honest[file], *changes)))
    assert code == 1 and says in output, output


@pytest.mark.parametrize("name", [*NOT_SEALED, *FILE_SEALED])
def test_a_change_breaks_the_seal_that_is_not_renewed(name: str, honest: dict[str, Content], verified: Any) -> None:
    """A number of hundreds of digits is told shortly."""
    says, changes = (NOT_SEALED | FILE_SEALED)[name]
    content = changed(honest["attention"], *changes)
    code, output = verified(seal_file(content) if name in FILE_SEALED else content)
    assert code == 1 and says in output and max(map(len, output.splitlines())) < 500, output


def test_a_time_that_is_not_proved_is_counted(honest: dict[str, Content], verified: Any) -> None:
    _, changes = FORGERIES["attention"]["no calls"]
    _, output = verified(seal_again(changed(honest["attention"], *changes)))
    assert output.endswith(f"nothing is wrong, 1 not proved\n{verify.NO_FILE_PROVES}\n")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_looked_at_before_memory_is_taken(name: str, honest: dict[str, Content], verified: Any) -> None:
    file, says, values = SIZES[name]
    content = seal_again(changed(honest[file], *(((*RECORD, field), value) for field, value in values.items())))
    tracemalloc.start()
    code, output = verified(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 1 and says in output and peak < 2**28, output
    assert "MemoryError" not in output and "can't allocate" not in output


def test_every_field_of_a_record_and_every_part_of_a_file_is_sealed(honest: dict[str, Content]) -> None:
    content = honest["backward"]
    ours = content["lmsys"]
    for record in ours["records"]:
        for name in record.keys() - {"seal"}:
            assert seal(record | {name: "changed"}) != record["seal"], name
    for name in content.keys() - {"lmsys"}:
        assert others_seal(content | {name: "changed"}) != ours["others"], name
    for name in ours.keys() - {"seal"}:
        assert seal(ours | {name: "changed"}) != ours["seal"], name


@pytest.mark.parametrize("file", ["attention", "loss"])
def test_any_number_in_a_record_may_be_huge(file: str, honest: dict[str, Content], verified: Any) -> None:
    """Six numbers of the first record become huge, one at a time; verify never ends in a traceback."""
    chance: Any = random.Random(0)
    names = [name for name, value in at(honest[file], RECORD).items() if isinstance(value, int)]
    for name in chance.sample(sorted(names), min(6, len(names))):
        code, _ = verified(seal_again(changed(honest[file], ((*RECORD, name), 10**15))))
        assert code in (0, 1), name
