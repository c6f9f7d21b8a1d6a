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


def cell(table: str, row: str, column: str) -> str:
    """The first word of a cell of a published table, in the one row that begins with `row`."""
    head, _, *body = rows((TABLES / f"{table}.md").read_text())
    (found,) = (line for line in body if line.startswith(f"| {row} |"))
    texts = (dict(zip(head.split("|"), found.split("|"), strict=True))[f" {column} "]).split()
    return texts[0]


def test_the_steps_beside_others_are_the_published_ones() -> None:
    """Each number of the paragraph, in its order."""
    start = RESULTS.index("A compiled training step")
    told = re.findall(r"\d\.\d\d", RESULTS[start : RESULTS.index("Everything else")])
    llama, parallel = "model-peers-step-beside-llama", "2-nvidia-h200-data-parallel-sizes-peers"
    eager = "geometric mean, 2 ranks"
    graphed = f"{eager}, as one CUDA graph"
    assert told == [
        cell(f"nvidia-h200-{llama}", "small | 16 | compiled", "speedup, ×"),
        cell(f"nvidia-h200-{llama}", "medium | 8 | compiled", "speedup, ×"),
        cell(f"nvidia-h200-{llama}", "xl | 4 | compiled", "speedup, ×"),
        cell(parallel, graphed, "copy_engine / torch_ddp_tuned"),
        cell(parallel, graphed, "bucketed / torch_ddp_tuned"),
        cell(parallel, graphed, "bucketed / naive"),
        cell(parallel, graphed, "zero1 / torch_zero1"),
        cell(parallel, graphed, "copy_engine_zero1 / torch_zero1"),
        cell(parallel, eager, "fsdp / torch_fsdp2"),
        *(
            cell("4-nvidia-h200-data-parallel-sizes-peers", "geometric mean, 4 ranks, as one CUDA graph", ours)
            for ours in ("copy_engine / torch_ddp_tuned", "zero1 / torch_zero1", "copy_engine_zero1 / torch_zero1")
        ),
        cell("4-nvidia-h200-data-parallel-sizes-peers", "geometric mean, 4 ranks", "fsdp / torch_fsdp2"),
    ]


def test_files_that_it_shows_are_there() -> None:
    assert all((ROOT / path).exists() for path in re.findall(r"\]\(([^):#]+)\)", README))
