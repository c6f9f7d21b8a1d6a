"""The README's figures are those of the published report, which `python -m reports` makes of committed runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "reports" / "published" / "nvidia-h200" / "tables"
README = (ROOT / "README.md").read_text()
RESULTS = README[README.index("## Results") : README.index("## Bring your own kernel")]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_table_is_the_published_one() -> None:
    assert rows(RESULTS) == rows((TABLES / "nvidia-h200-tokens16k-bfloat16-fwd-tflops.md").read_text())


def test_the_commits_are_those_of_the_table() -> None:
    caption = (TABLES / "nvidia-h200-tokens16k-bfloat16-fwd-tflops.md").read_text()
    told, known = (
        re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{10}\b", text) for text in (RESULTS, caption)
    )
    assert told == known


def test_the_speedups_are_the_published_ones() -> None:
    told = re.search(
        r"forward (\S+) \(causal\) and (\S+) times as fast, backward (\S+) and (\S+) times, "
        r"where SDPA's cuDNN is forward\s(\S+) and (\S+), backward (\S+) and (\S+) times",
        RESULTS,
    )
    assert told is not None, "the sentence that gives the geometric means is gone"
    known = []
    for name in ("Gluon", "cuDNN"):
        (row,) = (row for row in rows((TABLES / "nvidia-h200-tokens16k-summary.md").read_text()) if name in row)
        forward, backward, forward_full, backward_full = re.findall(r"([\d.]+) \(6\)", row)
        known += [forward, forward_full, backward, backward_full]
    assert list(told.groups()) == known


def test_files_that_it_shows_are_there() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"\]\(([^):#]+)\)", README))
