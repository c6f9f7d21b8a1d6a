"""Forged result files: `lmsys verify` refuses each, or calls its times not proved, with exit code 1.

A record has a proof: some of its timed calls with parts of their results, which verify judges again. A seal is a digest
that a record or a file has of its content. A forger is a function that changes the content of a file. The file is
sealed again afterwards, unless the seal is what the forger changes. To add one, write a function with @forger(the file,
what verify must say), or an entry of SIZES. Honest files pass: one of attention from one H200, and one of the loss,
which is measured here. `tests/test_verify.py` has more alterations.
"""

import copy
import json
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_loss import Loss
from lmsys import verify
from lmsys.bench.record import load, older_file_seal, others_seal, seal
from tests.benchmarks.test_bench_loss import records as loss_records
from tests.test_verify import Content, entry, first_record, put, records, seal_again, seal_file

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "data" / "attention_h200.json"
Forger = Callable[[Content], None]
FORGERS: dict[str, tuple[str, str, Forger]] = {}  # by name: ("attention" or "loss", what verify must say, function)
UNSEALED: set[str] = set()  # names of forgers after which the file is not sealed again


def forger(file: str, says: str, seals: bool = True) -> Callable[[Forger], Forger]:
    """A decorator that puts a function into FORGERS. It forges `file`; of the result verify must say `says`.

    seals  True: the file is sealed again afterwards
    """

    def register(function: Forger) -> Forger:
        FORGERS[function.__name__] = file, says, function
        if not seals:
            UNSEALED.add(function.__name__)
        return function

    return register


def calls(content: Content, direction: str = "fwd") -> list[Content]:
    """The checked calls, which may be changed, of the first record of attention in this direction."""
    kept = [record for record in records(content) if record["direction"] == direction]
    checked: list[Content] = kept[0]["proof"]["calls"]
    return checked


def losses(content: Content) -> list[Content]:
    """The checked calls, which may be changed, of the first record of the loss."""
    checked: list[Content] = records(content)[0]["proof"]["calls"]
    return checked


@forger("attention", "not proved: it holds 1 checked calls")
def last_call_left_out(content: Content) -> None:
    calls(content).pop()


@forger("attention", "not proved: it holds 0 checked calls")
def no_calls(content: Content) -> None:
    calls(content).clear()


@forger("attention", "not proved: it holds 0 checked calls")
def no_proof(content: Content) -> None:
    del records(content)[0]["proof"]


@forger("attention", "not proved: it holds 0 checked calls")
def no_proof_of_a_backward(content: Content) -> None:
    calls(content, "bwd").clear()


@forger("attention", "not proved: it holds 1 checked calls")
def one_call_in_place_of_all(content: Content) -> None:
    kept = calls(content)
    kept[:] = [copy.deepcopy(kept[0]) for _ in kept]


@forger("attention", "not proved: it holds 1 checked calls")
def one_call_under_other_numbers(content: Content) -> None:
    kept = calls(content)
    kept[:] = [copy.deepcopy(kept[0]) | {"call": number} for number in range(len(kept))]


@forger("attention", "not proved: it has 1 parts, where its key says 2")
def part_of_a_call_left_out(content: Content) -> None:
    calls(content)[0]["parts"].pop()


@forger("attention", "not proved: it has 0 parts, where its key says 2")
def no_parts(content: Content) -> None:
    calls(content)[0]["parts"] = []


@forger("attention", "is not what its key says")
def a_part_twice(content: Content) -> None:
    parts = calls(content)[0]["parts"]
    parts[-1] = copy.deepcopy(parts[0])


@forger("attention", "not proved: it has 3 parts, where its key says 2")
def a_part_more(content: Content) -> None:
    parts = calls(content)[0]["parts"]
    parts.append(copy.deepcopy(parts[0]))


@forger("attention", "not proved: it has 2 parts, where its key says 6")
def one_tensor_of_a_backward(content: Content) -> None:
    call = calls(content, "bwd")[0]
    call["parts"] = [part for part in call["parts"] if part["tensor"] == "dv"]


@forger("attention", "its errors are of dv, and not of dq, dk, dv")
def errors_of_one_tensor_of_a_backward(content: Content) -> None:
    call = calls(content, "bwd")[0]
    call["error_ratios"] = {"dv": call["error_ratios"]["dv"]}
    call["parts"] = [part for part in call["parts"] if part["tensor"] == "dv"]


@forger("attention", "not proved: dk of")
def gradients_named_alike(content: Content) -> None:
    for part in calls(content, "bwd")[0]["parts"]:
        part["tensor"] = "dk"


@forger("attention", "is not what its key says")
def parts_of_another_call(content: Content) -> None:
    kept = calls(content)
    kept[0]["parts"] = copy.deepcopy(kept[1]["parts"])


@forger("attention", "not proved: it has 2 parts, where its key says 6")
def proof_of_another_row(content: Content) -> None:
    first, *_, last = records(content)
    last["proof"] = copy.deepcopy(first["proof"])


@forger("attention", "its evidence cannot be read")
def values_cut_short(content: Content) -> None:
    part = calls(content)[0]["parts"][0]
    part["values"] = part["values"][: len(part["values"]) // 2 // 4 * 4]


@forger("attention", "values were recorded of a row of 64")
def values_that_are_no_base64(content: Content) -> None:
    calls(content)[0]["parts"][0]["values"] = "no values"


@forger("attention", "it cannot be recomputed")
def zero_error_and_budget(content: Content) -> None:
    calls(content)[0]["parts"][0] |= {"error": 0.0, "budget": 0.0}


@forger("attention", "its evidence cannot be read: KeyError: 'key'")
def a_call_without_a_key(content: Content) -> None:
    del calls(content)[0]["key"]


@forger("attention", "is none of its")
def a_call_after_the_last(content: Content) -> None:
    calls(content)[0]["call"] = records(content)[0]["rounds"]


@forger("attention", "time_s is")
def samples_that_no_machine_reaches(content: Content) -> None:
    record = records(content)[0]
    record["samples_s"] = [sample / 100 for sample in record["samples_s"]]


@forger("attention", "not proved: it has no seal", seals=False)
def seal_of_a_record_left_out(content: Content) -> None:
    del records(content)[0]["seal"]
    seal_file(content)


@forger("attention", "time_s is")
def an_id_that_says_it_was_not_recomputed(content: Content) -> None:
    record = records(content)[0]
    record |= {"id": f"{verify.NOT_RECOMPUTED}nothing", "section": verify.NOT_RECOMPUTED}
    record["samples_s"] = [0.9 * sample for sample in record["samples_s"]]
    content["benchmarks"] = []


@forger("attention", "not proved: it has no seal", seals=False)
def all_seals_left_out(content: Content) -> None:
    for record in content["lmsys"]["records"]:
        record["label"] = "mine"
        del record["seal"]
    del content["lmsys"]["seal"]


@forger("attention", "its seal is not that of its content", seals=False)
def machine_changed(content: Content) -> None:
    content["lmsys"]["machine"]["name"] = "another"


@forger("attention", "its seal is not that of its content", seals=False)
def row_of_a_table_renamed(content: Content) -> None:
    next(iter(content["lmsys"]["rows"].values()))[0]["label"] = "mine"


@forger("attention", "its seal is not that of its content", seals=False)
def field_told_otherwise(content: Content) -> None:
    content["lmsys"]["fields"]["attention"][-1]["about"] = "something else"


@forger("attention", "pytest-benchmark's part is not the one that was sealed", seals=False)
def processor_of_pytest_benchmark_changed(content: Content) -> None:
    content["machine_info"]["processor"] = "another"


@forger("attention", "pytest-benchmark's part is not the one that was sealed", seals=False)
def commit_of_pytest_benchmark_changed(content: Content) -> None:
    content["commit_info"]["id"] = "0" * 40


@forger("attention", "pytest-benchmark's part is not the one that was sealed", seals=False)
def statistics_of_pytest_benchmark_changed(content: Content) -> None:
    content["benchmarks"][0]["stats"]["median"] /= 2


@forger("loss", "not proved: it holds 0 checked calls")
def no_loss_was_checked(content: Content) -> None:
    losses(content).clear()


@forger("loss", "not proved: it holds 2 checked calls")
def one_loss_less(content: Content) -> None:
    losses(content).pop()


@forger("loss", "not proved: it holds 1 checked calls")
def one_loss_often(content: Content) -> None:
    kept = losses(content)
    kept[:] = [copy.deepcopy(kept[0]) | {"call": number} for number in range(len(kept))]


@forger("loss", "not proved: its errors are of gradient of hidden, and not of")
def errors_of_one_gradient(content: Content) -> None:
    for call in losses(content):
        call["error_ratios"] = {"gradient of hidden": call["error_ratios"]["gradient of hidden"]}


@forger("loss", "its evidence cannot be read: KeyError: 'part'")
def no_part_of_a_loss(content: Content) -> None:
    del losses(content)[0]["part"]


@forger("loss", "its recorded values are off by")
def another_token(content: Content) -> None:
    part = losses(content)[0]["part"]
    part["row"] = 0 if part["row"] else 1  # which of the rows was recorded is drawn anew in each run


@forger("loss", "values of row 1000000000 were recorded")
def a_token_that_is_none(content: Content) -> None:
    losses(content)[0]["part"]["row"] = 10**9


# Values of fields of the first record: by name the file, what verify must say, and the values.
SIZES: dict[str, tuple[str, str, Content]] = {
    "huge_batch": ("attention", "not recomputed: 64,000,000,000 elements", {"batch": 10**9}),
    "huge_batch_of_short_sequences": (
        "attention",
        "not recomputed: 1,000,000,000 elements",
        {"batch": 10**9, "queries": 1, "keys": 1, "head_dim": 1},
    ),
    "huge_group_of_heads": (
        "attention",
        "not recomputed: 32,768,000,000,000 elements",
        {"heads": 10**9, "kv_heads": 1, "keys": 1},
    ),
    "huge_window": ("attention", "is too large for a pattern", {"keys": 10**12, "window": 10**6}),
    "huge_batch_of_caches": ("attention", "is too large for a pattern", {"batch": 10**9, "key_lengths": True}),
    "no_heads": ("attention", "it cannot be recomputed", {"kv_heads": 0}),
    "huge_number_of_tokens": (
        "loss",
        "not recomputed: a weight or hidden states of 16,000,000,000,000 elements",
        {"tokens": 10**12},
    ),
    "huge_vocabulary": (
        "loss",
        "not recomputed: a weight or hidden states of 16,000,000,000,000 elements",
        {"vocab_size": 10**12},
    ),
}
FORGERS |= {name: (file, says, partial(put, first_record, values)) for name, (file, says, values) in SIZES.items()}


def attention() -> Content:
    """A result file with a forward and a backward of attention, measured on an H200, each with two checked calls."""
    content: Content = json.loads(RESULT.read_text())
    timed = records(content)
    kept = [next(record for record in timed if record["direction"] == direction) for direction in ("fwd", "bwd")]
    for record in kept:
        del record["proof"]["calls"][2:]
    content["lmsys"]["records"] = kept
    content["benchmarks"] = [entry(content, record) for record in kept]
    content["benchmarks"][0]["stats"]["median"] = kept[0]["time_s"]
    content |= {"machine_info": {"processor": "x86_64"}, "commit_info": {"id": "1" * 40}}
    return content


@pytest.fixture(scope="module")
def measured() -> Content:
    """A result file of the loss, measured here.

    Its part about the machine is taken from the file of attention. So the record must not say which share of this
    machine's matmul rate the loss reaches.
    """
    kept = [record for record in loss_records(row=("chunked",)).values() if record["outcome"] == "ok"]
    for record in kept:
        del record["matmul_ceiling_fraction"]
    return {"benchmarks": [], "lmsys": load(RESULT) | {"records": kept}}


@pytest.fixture
def honest(measured: Content, monkeypatch: pytest.MonkeyPatch) -> dict[str, Content]:
    """The two files, sealed. verify is made to expect as many checked calls (`num_proofs`) as they have."""
    known = verify.benchmarks_in(ROOT / "benchmarks")
    monkeypatch.setattr(type(known["attention"]), "num_proofs", 2)
    monkeypatch.setattr(Loss, "num_proofs", min(Loss.num_proofs, len(losses(measured))))
    files = {"attention": attention(), "loss": copy.deepcopy(measured)}
    for content in files.values():
        seal_again(content)
    return files


def verified(content: Content, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the output of the command."""
    path = folder / "result.json"
    path.write_text(json.dumps(content))
    return verify.main(["--benchmarks", str(ROOT / "benchmarks"), str(path)]), capsys.readouterr().out


def test_honest_files_pass_and_verify_says_how_much_it_judged(
    honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = verified(honest["attention"], tmp_path, capsys)
    elements = sum(
        record["head_dim"] * len(call["parts"])
        for record in records(honest["attention"])
        for call in record["proof"]["calls"]
    )
    assert code == 0 and f"2 records, 4 timed calls judged again by {elements:,} elements, nothing is wrong\n" in output
    code, output = verified(honest["loss"], tmp_path, capsys)
    record = records(honest["loss"])[0]
    judged = f"{len(record['proof']['calls'])} timed calls judged again"
    assert code == 0 and judged in output and output.endswith(f"{verify.NO_FILE_PROVES}\n")


@pytest.mark.parametrize("name", FORGERS)
def test_a_forged_file_is_refused_or_not_proved(
    name: str, honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verify says why, and does not allocate memory for the sizes that the file claims."""
    file, says, forge = FORGERS[name]
    content = honest[file]
    forge(content)
    if name not in UNSEALED:
        seal_again(content)
    tracemalloc.start()
    code, output = verified(content, tmp_path, capsys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 1 and says in output and peak < 2**28, output
    assert "MemoryError" not in output and "can't allocate" not in output


def test_every_field_of_a_record_is_sealed(honest: dict[str, Content]) -> None:
    for record in records(honest["attention"]):
        for name in record.keys() - {"seal"}:
            assert seal(record | {name: "changed"}) != record["seal"], name


def test_every_part_of_a_file_is_sealed(honest: dict[str, Content]) -> None:
    content = honest["attention"]
    for name in content.keys() - {"lmsys"}:
        assert others_seal(content | {name: "changed"}) != content["lmsys"]["others"], name
    for name in content["lmsys"].keys() - {"seal"}:
        assert seal(content["lmsys"] | {name: "changed"}) != content["lmsys"]["seal"], name


def test_a_file_may_be_kept_without_the_entries_of_pytest_benchmark(
    honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest["attention"]["benchmarks"] = []
    code, output = verified(honest["attention"], tmp_path, capsys)
    assert code == 0 and "the file is kept without pytest-benchmark's entries" in output


def test_an_older_seal_passes_and_verify_says_what_it_leaves_out(
    honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = honest["attention"]
    content["lmsys"]["seal"] = older_file_seal(content["lmsys"])
    code, output = verified(content, tmp_path, capsys)
    assert code == 0 and "does not cover fields, layouts, rows and pytest-benchmark's part" in output
    del content["lmsys"]["seal"]
    code, output = verified(content, tmp_path, capsys)
    assert code == 0 and "the file has no seal" in output


def test_verify_says_that_no_table_has_a_row(
    honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = records(honest["attention"])[0]
    record["id"] = record["id"].replace(record["impl"], "unheard_of")
    record["impl"] = record["attention"] = "unheard_of"
    honest["attention"]["benchmarks"] = []
    seal_again(honest["attention"])
    code, output = verified(honest["attention"], tmp_path, capsys)
    assert code == 0 and "a record's row is not known here" in output


def test_any_number_in_a_record_may_be_huge(
    honest: dict[str, Content], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six numbers of the first record of each file become huge, one at a time; verify never ends in a traceback."""
    chance: Any = random.Random(0)
    for file in ("attention", "loss"):
        names = [name for name, value in records(honest[file])[0].items() if isinstance(value, int)]
        for name in chance.sample(sorted(names), min(6, len(names))):
            content = copy.deepcopy(honest[file])
            records(content)[0][name] = 10**15
            seal_again(content)
            code, _ = verified(content, tmp_path, capsys)
            assert code in (0, 1), name
