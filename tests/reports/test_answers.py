"""The page begins with answers: who is fastest, over what, what was wrong, and what could not run."""

from itertools import chain
from pathlib import Path

from benchmarks.sweeps import SWEEPS
from lmsys.reports.words import VALUES
from tests.support.records import Record, built, cells, record, save

LENGTHS = (1024, 2048, 4096)


def comparison(length: int, seconds: dict[str, float]) -> list[dict]:
    return [record("attention", name, value, queries=length, keys=length) for name, value in seconds.items()]


def test_the_page_begins_with_them(tmp_path: Path) -> None:
    """A row that was wrong in a section is not the fastest there; a reason stands once, with all rows that have it."""
    records = [
        *comparison(1024, {"flash_triton": 1e-3, "sdpa_flash": 2e-3, "mine": 1e-4}),
        record("attention", "mine", outcome="wrong", reason="dk is off", queries=2048, keys=2048),
        *(
            record("attention", name, outcome="unsupported", reason="no wheel", queries=n, keys=n)
            for name in ("flash_attn_2", "flash_attn_4")
            for n in LENGTHS
        ),
    ]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    (fastest,) = cells(files, "fastest-attention")
    assert (fastest["fastest row"], fastest["speed"], fastest["first"]) == (
        "flash_triton",
        "2.00 × sdpa_flash",
        "1 of 1, 2 rows",
    )
    (wrong,) = cells(files, "wrong")
    assert (wrong["row"], wrong["cases"], wrong["the first of them"]) == ("mine", "1", "dk is off")
    (missing,) = cells(files, "not-run")
    assert (missing["row"], missing["why"], missing["cases"]) == ("flash_attn_2, flash_attn_4", "no wheel", "6")
    page = files["index.html"].decode()
    assert page.index("Fastest attention") < page.index("<nav>") < page.index("everything measured")
    assert page.count("no wheel") == 1
    assert "run of 2000-01-02, commit 0123456789: flash_triton, sdpa_flash took turns" in page


def test_a_row_that_another_run_has_is_said_to_have_run_there(tmp_path: Path) -> None:
    absent = [record("attention", name, outcome="unsupported", reason="no wheel") for name in ("flex", "flash_attn_2")]
    first = save(tmp_path / "1.json", [*comparison(1024, {"sdpa_flash": 2e-3}), *absent])
    later = save(tmp_path / "2.json", comparison(2048, {"flex": 1e-3, "sdpa_flash": 2e-3}), date="2000-01-03")
    (missing,) = cells(built(tmp_path / "out", first, later), "not-run")
    assert missing["why"] == "no wheel; in another run flex ran"


def test_the_fastest_is_of_the_run_that_sampled_most_rows(tmp_path: Path) -> None:
    """A later run of few rows says nothing of those that it left out."""
    first = save(tmp_path / "1.json", comparison(1024, {"flash_gluon": 1e-3, "flash_triton": 2e-3, "sdpa_flash": 3e-3}))
    later = [one for length in (2048, 4096) for one in comparison(length, {"flash_cuda": 1e-3, "sdpa_flash": 3e-3})]
    files = built(tmp_path / "out", first, save(tmp_path / "2.json", later, date="2000-01-03"))
    (fastest,) = cells(files, "fastest-attention")
    assert (fastest["fastest row"], fastest["first"]) == ("flash_gluon", "1 of 1, 3 rows")


def test_speed_and_order_are_of_the_same_rounds(tmp_path: Path) -> None:
    """Medians of samples that drift may order two rows otherwise than their rounds do."""
    times = {"flash_triton": [1.0, 2.0, 3.0, 4.0, 2.6], "sdpa_flash": [1.1, 2.2, 3.3, 0.1, 2.5]}
    records = [
        record("attention", name, sorted(samples)[2], samples_s=samples, comparison="a", queries=1024, keys=1024)
        for name, samples in times.items()
    ]
    (fastest,) = cells(built(tmp_path / "out", save(tmp_path / "r.json", records)), "fastest-attention")
    assert (fastest["fastest row"], fastest["speed"]) == ("flash_triton", "1.10 × sdpa_flash")


KINDS: dict[str, Record] = {
    "": {},
    "documents": {"documents": "mixed"},
    "window 1,024": {"window": 1024},
    "grouped heads": {"kv_heads": 2},
    "decoding": {"kv_heads": 2, "queries": 1, "keys": 2048, "offset": 2047},
    "Q ≠ K": {"queries": 512},
}


def test_each_kind_of_attention_has_an_answer_of_its_own(tmp_path: Path) -> None:
    """A row that is fast under one pattern says nothing of another, nor of none."""
    fast = dict.fromkeys(KINDS, "flash_gluon") | {"documents": "flash_triton", "decoding": "sdpa_flash"}
    records = [
        record("attention", name, 1e-3 if name == fast[kind] else 2e-3, **asked)
        for kind, asked in KINDS.items()
        for name in ("flash_gluon", "flash_triton", "sdpa_flash")
    ]
    found = cells(built(tmp_path / "out", save(tmp_path / "r.json", records)), "fastest-attention")
    told = {one["setting"].removeprefix("forward").removeprefix(", "): one["fastest row"] for one in found}
    assert told == fast


def test_each_section_has_a_title() -> None:
    grids = [grid for sweep in SWEEPS.values() for one in sweep.values() for grid in chain(*one.grids.values())]
    assert {grid.name for grid in grids} - {"anatomy"} <= VALUES["section"].keys()  # anatomy is a chapter


def test_a_limit_of_memory_is_told_with_what_did_not_run(tmp_path: Path) -> None:
    limited = record("attention", "naive", outcome="oom", reason="no room", memory_limit_bytes=24 * 2**30)
    (line,) = cells(built(tmp_path / "out", save(tmp_path / "r.json", [limited])), "not-run")
    assert line["why"] == "out of memory under the limit of 24 GiB that was asked for"


def test_ours_alone_are_no_answer(tmp_path: Path) -> None:
    records = comparison(1024, {"flash_triton": 1e-3, "naive": 2e-3})
    assert not [name for name in built(tmp_path / "out", save(tmp_path / "r.json", records)) if "fastest" in name]


def test_nothing_wrong_is_said(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [record("attention", "naive")]))
    (none,) = cells(files, "wrong")
    assert none["row"] == "none: all 1 cases that ran were right; attention ran 1 in bfloat16, and in no other dtype"
    assert not [name for name in files if "fastest" in name]
