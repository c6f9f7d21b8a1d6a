"""The figures in README and docs are those of the committed runs, and claims in words about them are true."""

from datetime import datetime, timedelta

import pytest

from dev.figures.__main__ import pages
from dev.figures.attention import RUN, shapes_of
from dev.figures.notebooks import ORDER
from dev.figures.pages import Sentence, Table
from dev.figures.runs import H200, grouped, records, run, speedups
from dev.figures.steps import complete_shapes, share_at_work
from dev.plan_cases import plan_called
from lmsys.attention.flash_gluon.plans import backward_plan
from tests.support.pages import PAGES

TEXT = "of rows:\n\n| row | 2 GPUs |\n| --- | ---: |\n| a | 1.00 |\n\nIt is 1.10 times\nas fast, and 1.20 times.\n"


def test_figures_of_pages_are_those_of_the_runs() -> None:
    """If this fails, write them again with `python -m dev.figures`."""
    made = dict(pages())
    assert made.keys() >= {"README.md", "docs/results.md", "docs/flash_gluon.md", "docs/strategy.md"}
    assert made == {page: PAGES[page] for page in made}


def test_a_figure_is_written_wherever_lines_break_and_missing_words_are_an_error() -> None:
    text = Table("page", ("row",), [["a", "1.01"], ["b", ""]]).filled(TEXT)
    text = Sentence("page", "is {} times as fast, and {} times.", ["2.5", "1,024"]).filled(text)
    assert text == TEXT.replace("1.00 |", "1.01 |\n| b | |").replace("1.10", "2.5").replace("1.20", "1,024")
    with pytest.raises(ValueError, match="page has 0 times, not once: was {} times"):
        Sentence("page", "was {} times", ["1"]).filled(TEXT)
    with pytest.raises(ValueError, match="page has 1 tables that begin with"):
        Table("page", ("row",), [], place=1).filled(TEXT)


def test_the_run_behind_attentions_tables_was_clean_and_had_the_pages_command() -> None:
    machine = run(*RUN)["machine"]
    assert not machine["dirty"]
    for page in ("README.md", "docs/results.md"):
        begins = 'python -m pytest benchmarks/bench_attention.py -k "tokens16k'
        (line,) = (line for line in PAGES[page].splitlines() if line.startswith(begins) and "--sweep full" in line)
        for option in ("--sweep", "--attention", "--benchmark-max-time"):
            words = machine["command"].split()
            assert f"{option} {words[words.index(option) + 1]}" in line, (page, option)


def test_claims_of_pages_about_attention_are_true() -> None:
    forward, backward = (shapes_of(direction, *RUN).values() for direction in ("fwd", "bwd"))
    assert len(forward) == len(backward) == len(shapes_of("fwd", "attention", "nvidia-h100-80gb-hbm3")) == 12
    assert min(speedups([*forward, *backward], "flash_gluon", "sdpa")) > 0.995
    assert (
        min(speedups(forward, "flash_triton", "sdpa_flash")) > 1 > max(speedups(forward, "flash_triton", "sdpa_cudnn"))
    )
    lengths = grouped(records("short-backwards", H200, "flash_gluon"), "length", row="plan")
    lengths |= grouped(records("short-backwards-2", H200, "flash_gluon"), "length", row="plan")
    for keys in (256, 512, 1024):
        fastest = min((case for case in lengths[keys].values()), key=lambda case: case["time_s"])
        assert fastest["plan"] == f"l2_mib5+{ORDER}" and plan_called(fastest["plan"]) == backward_plan(64, True, keys)


def test_claims_of_pages_about_steps_are_true() -> None:
    shapes = complete_shapes()
    assert len(shapes) == 5 and all(case["last_loss"] < case["first_loss"] for cases in shapes for case in cases)
    assert all(share_at_work(cases[0]) > 0.99 for cases in shapes if cases[0]["context"] == 4096)
    long = [cases for cases in shapes if cases[0]["context"] == 32768]
    at_limit = [*long, *(cases for cases in shapes if cases[0]["size"] == "8b")]
    assert all("power cap" in case["clock_reasons"] for cases in at_limit for case in cases)
    assert all(theirs["time_s"] < 1.01 * ours["time_s"] for ours, theirs, _ in long)
    eight = run("steps-8b", H200)
    llama = records("steps-8b", H200, "apart", model="llama")
    assert [(case["checkpoint"], case["outcome"]) for case in llama] == [(eight["records"][0]["checkpoint"], "oom")]
    began, ended = (datetime.fromisoformat(text) for text in (eight["machine"]["date"], eight["ended"]))
    assert ended - began < timedelta(minutes=10)
    hosts = [run("steps-8b-four", H200)["machine"], run("steps-8b-two", H200, "apart")["machine"]]
    assert hosts[0]["commit"] == hosts[1]["commit"]
    errors = grouped(records("model-peers", H200), "size", "impl", "residual", row="compile").values()
    assert all(rows["compiled"].get("gradient_error") == rows["graphed"].get("gradient_error") for rows in errors)
