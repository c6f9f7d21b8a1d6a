"""The page begins with answers: who is fastest, over what, what was wrong, and what could not run."""

from pathlib import Path

from tests.support.records import built, cells, record, save

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
    assert (fastest["fastest row"], fastest["speed"], fastest["in"]) == (
        "flash_triton",
        "2.00 × sdpa_flash",
        "1 of 1",
    )
    (wrong,) = cells(files, "wrong")
    assert (wrong["row"], wrong["cases"], wrong["the first of them"]) == ("mine", "1", "dk is off")
    (missing,) = cells(files, "not-run")
    assert (missing["row"], missing["why"], missing["cases"]) == ("flash_attn_2, flash_attn_4", "no wheel", "6")
    page = files["index.html"].decode()
    assert page.index("Fastest attention") < page.index("<nav>") < page.index("everything measured")
    assert page.count("no wheel") == 1


def test_ours_alone_are_no_answer(tmp_path: Path) -> None:
    records = comparison(1024, {"flash_triton": 1e-3, "naive": 2e-3})
    assert not [name for name in built(tmp_path / "out", save(tmp_path / "r.json", records)) if "fastest" in name]


def test_nothing_wrong_is_said(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [record("attention", "naive")]))
    (none,) = cells(files, "wrong")
    assert none["row"].startswith("none") and not [name for name in files if "fastest" in name]
