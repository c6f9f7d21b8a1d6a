"""Figures of README and docs/results.md: those of committed runs, and of the report that `python -m reports` makes."""

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from itertools import product
from typing import Any

import pytest

from dev.plan_cases import name_of, plan_called
from lmsys.attention import ATTENTION
from lmsys.attention.flash_gluon.plans import BackwardPlan, backward_plan
from lmsys.bench.verdict import ratio_of
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.cost.operations import attention_flops, block_matrices
from tests.support.pages import PAGES
from tests.support.processes import ROOT

PUBLISHED = ROOT / "reports" / "published"
README, RESULTS = PAGES["README.md"], PAGES["docs/results.md"]
SAID = " ".join(RESULTS.split())  # in one line
H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
NOTES = "⁰¹²³⁴⁵⁶⁷⁸⁹"
BESIDE_LLAMA = f"{H200}-model-peers-step-beside-llama"
ATTENTION_RUN = "attention-bf16", H200  # which sampled all rows of the tables of attention together


@cache
def run(name: str, machine: str = H100, folder: str | None = None) -> dict[str, Any]:
    """Our part of a committed file, and when the run ended; a machine's own folder has the runs of its page."""
    folder = {H100: "h100", H200: ""}[machine] if folder is None else folder
    (path,) = (ROOT / "reports" / "results" / folder).glob(f"{machine}_*_{name}.json")
    content = json.loads(path.read_text())
    return {"ended": content.get("datetime"), **content["lmsys"]}


def published(table: str) -> list[list[str]]:
    """The rows of a published table, its head first."""
    return rows((PUBLISHED / H200 / "tables" / f"{table}.md").read_text())


def rows(text: str) -> list[list[str]]:
    """The cells of tables, without the lines below their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def tables(text: str, *head: str) -> list[list[list[str]]]:
    """The tables whose heads begin so."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [rows(one) for one in found if rows(one)[0][: len(head)] == list(head)]


def rates(direction: str) -> list[list[str]]:
    """TFLOP/s at 16,384 tokens, by mask, D and S, in the order of the table of rows."""
    found = {
        ("causal" if one["causal"] else "not causal", one["head_dim"], one["keys"], one["impl"]): one["flops_per_s"]
        for one in run(*ATTENTION_RUN)["records"]
        if one["section"] == "tokens16k" and one["direction"] == direction
    }
    names = [name for name in ATTENTION if any(key[3] == name for key in found)]
    cases = sorted({key[:3] for key in found})
    body = [
        [case[0], str(case[1]), f"{case[2]:,}", *(f"{found[*case, n] / 1e12:.3g}" for n in names)] for case in cases
    ]
    return [["mask", "D", "S", *names], *body]


def test_tables_of_attention_are_those_of_one_run() -> None:
    assert tables(README, "mask", "D", "S") == [rates("fwd")]
    assert tables(RESULTS, "mask", "D", "S") == [rates("fwd"), rates("bwd")]
    assert not re.search(f"[{NOTES}]", README + RESULTS), "a table needs no notes where its rows are of one run"


def test_the_published_table_has_the_same_figures() -> None:
    head, *body = published(f"{H200}-tokens16k-bfloat16-fwd-tflops")
    found = [dict(zip(head, line, strict=True)) for line in body]
    told_head, *told = rates("fwd")
    assert [[line[name].rstrip(NOTES) for name in told_head] for line in found] == told


def test_what_was_measured_is_told_with_the_table() -> None:
    for text in (README, RESULTS):
        machine = run(*ATTENTION_RUN)["machine"]
        assert machine["commit"][:10] in text and machine["date"][:10] in text and not machine["dirty"]
        assert all(f"{one} {machine[one]}" in text for one in ("torch", "triton", "driver"))


@pytest.mark.parametrize("text", [README, RESULTS])
def test_the_command_is_that_of_the_run(text: str) -> None:
    known = run(*ATTENTION_RUN)["machine"]["command"]
    options = [re.search(f"{one} (\\S+)", known) for one in ("--sweep", "--attention", "--benchmark-max-time")]
    (line,) = (
        one
        for one in text.splitlines()
        if one.startswith('python -m pytest benchmarks/bench_attention.py -k "tokens16k') and "--sweep full" in one
    )
    assert all(option and option[0] in line for option in options)


def leads(direction: str, ours: str, theirs: str) -> list[float]:
    head, *body = rates(direction)
    return [float(line[head.index(ours)]) / float(line[head.index(theirs)]) for line in body]


def test_what_is_said_of_the_tables() -> None:
    forward, backward = (leads(direction, "flash_gluon", "flash_attn_4") for direction in ("fwd", "bwd"))
    assert f"in {sum(one > 1 for one in forward)} of 12 shapes" in README
    assert f"{min(forward):.2f} to {max(forward):.2f} times" in README
    assert f"{min(backward):.2f} to {max(backward):.2f} times" in README
    assert all(one >= 1 for direction in ("fwd", "bwd") for one in leads(direction, "flash_gluon", "sdpa"))
    assert all(one > 1 for one in leads("fwd", "flash_triton", "sdpa_flash"))
    assert all(one < 1 for one in leads("fwd", "flash_triton", "sdpa_cudnn"))


def test_means_over_shapes_are_those_of_the_run() -> None:
    times: dict[tuple[str, str], dict[str, float]] = {}
    for one in run(*ATTENTION_RUN)["records"]:
        if one["section"] == "tokens16k" or one["queries"] == 16384:
            times.setdefault((one["direction"], one["comparison"]), {})[one["impl"]] = one["time_s"]
    by = {direction: [x for key, x in times.items() if key[0] == direction] for direction in ("fwd", "bwd", "fwdbwd")}
    assert [len(found) for found in by.values()] == [12, 12, 1]
    (both,) = by["fwdbwd"]
    means, shares = [], []
    for direction in ("fwd", "bwd"):
        found = by[direction]
        means.append(f"{statistics.geometric_mean(x['flash_attn_4'] / x['flash_gluon'] for x in found):.2f}")
        shares.append(f"{statistics.geometric_mean(min(x.values()) / x['flash_triton'] for x in found):.2f}")
    better = [min(x["flash_attn_4"], x["sdpa_cudnn"]) / x["flash_gluon"] for x in by["fwd"]]
    mean, least = f"{statistics.geometric_mean(better):.2f}", f"{min(better):.2f}"
    assert "is {} times as fast in the forward and {} times in the backward".format(*means) in SAID
    assert f"is {mean} times as fast, and at least {least} times in each shape" in SAID
    assert "reaches {} of the fastest row in the forward, and {} in the backward".format(*shares) in SAID
    took = [f"`{name}` {1e3 * both[name]:.2f} ms" for name in ("flash_gluon", "flash_attn_4")]
    assert f"that takes {' and '.join(took)}" in SAID


def test_what_is_said_of_an_h100_is_of_its_run() -> None:
    times: dict[tuple[str, str], dict[str, float]] = {}
    for one in run("attention")["records"]:
        if one["section"] == "tokens16k":
            times.setdefault((one["direction"], one["comparison"]), {})[one["impl"]] = one["time_s"]
    forward = [
        min(x["flash_attn_4"], x["sdpa_cudnn"]) / x["flash_gluon"] for (way, _), x in times.items() if way == "fwd"
    ]
    backward = [x["flash_attn_4"] / x["flash_gluon"] for (way, _), x in times.items() if way == "bwd"]
    assert len(forward) == len(backward) == 12
    mean, least = f"{statistics.geometric_mean(forward):.2f}", f"{min(forward):.2f}"
    assert f"is {mean} times as fast as the better of the two in the forward, at least {least} times" in SAID
    assert f"{statistics.geometric_mean(backward):.2f} times as fast as FlashAttention-4 in the backward" in SAID
    assert f"at least {least} times as fast in each shape" in " ".join(README.split())


def test_speedups_are_the_published_ones() -> None:
    (told,) = tables(RESULTS, "row", "forward, causal")
    summary = {line[0]: line for line in published(f"{H200}-tokens16k-summary")}
    for name, *cells in told[1:]:
        found = summary[name]
        forward, backward, forward_full, backward_full = [cell.removesuffix(" (6)") for cell in found[1:]]
        assert cells == [forward, forward_full, backward, backward_full], name


def cell(table: str, key: list[str], column: str) -> str:
    """The first word of a cell of a published table, in the one row that begins with `key`."""
    head, *body = published(table)
    (line,) = (line for line in body if line[: len(key)] == key)
    return line[head.index(column)].split()[0]


def test_steps_beside_llama_are_the_published_ones() -> None:
    (told,) = tables(RESULTS, "size", "batch")
    for *key, speedup, mfu, theirs, memory in told[1:]:
        found = [
            cell(BESIDE_LLAMA, key, one) for one in ("speedup, ×", "MFU, %", "Llama MFU, %", "memory over Llama's, ×")
        ]
        assert [speedup, mfu, theirs, memory] == found, key
    head, *body = published(BESIDE_LLAMA)
    assert {line[head.index("Llama run as")] for line in body} == {"graphed"}
    times = {
        (one["size"], one["impl"]): one["time_s"] for one in run("model-peers", H200)["records"] if _is_compiled(one)
    }
    told = [f"{times[size, 'llama'] / times[size, 'auto']:.2f}" for size in ("small", "medium")]
    assert "is {} times as fast as Llama's at small, and {} times at medium".format(*told) in SAID


SIZES_TOLD = "small", "medium", "xl"


def test_errors_of_gradients_are_those_of_the_runs() -> None:
    records = [one for name in ("model-peers", "model-peers-xl") for one in run(name, H200)["records"]]
    errors = {(one["size"], one["impl"], one["compile"], one["residual"]): one.get("gradient_error") for one in records}
    ours = [("auto", way, stream) for stream, way in product(("wide", "narrow"), ("graphed", "fused"))]
    ways = [("llama", "graphed", "wide"), *ours]
    (told,) = tables(RESULTS, "size", "Llama, wide")
    assert told[1:] == [[size, *(f"{1e3 * errors[size, *way]:.4f}" for way in ways)] for size in SIZES_TOLD]
    wide = [errors[size, "auto", "fused", "wide"] / errors[size, "auto", "graphed", "wide"] - 1 for size in SIZES_TOLD]
    assert f"err as much as compiled ones, within {100 * max(map(abs, wide)):.2f} %" in SAID
    for way, end in (("graphed", "where they are compiled"), ("fused", "where they are fused")):
        found = [errors[size, "auto", way, "narrow"] / errors[size, "auto", way, "wide"] for size in SIZES_TOLD]
        assert re.search(f"{min(found):.2f} to {max(found):.2f} times (as much as with a wide one )?{end}", SAID)
    for size, impl, compile, residual in errors:  # a graphed step computes what a compiled one does
        if compile == "compiled":
            assert errors[size, impl, compile, residual] == errors[size, impl, "graphed", residual]


def _is_compiled(one: dict[str, Any]) -> bool:
    return one["compile"] == "compiled" and one["residual"] == "wide"


def test_steps_beside_torch_are_the_published_ones() -> None:
    (told,) = tables(RESULTS, "row", "as fast as")
    for name, other, launched, *cells in told[1:]:
        end = {"graphed": ", as one CUDA graph", "eager": ""}[launched]
        for count, text in zip((2, 4), cells, strict=True):
            mean = [f"geometric mean, {count} ranks{end}"]
            assert text == cell(f"{count}-nvidia-h200-data-parallel-sizes-peers", mean, f"{name} / {other}"), name


def test_compiled_steps_of_copy_engines_beside_torch_are_the_published_ones() -> None:
    table, mean = "2-nvidia-h200-data-parallel-sizes-peers", ["geometric mean, 2 ranks, blocks compiled"]
    pairs = ("copy_engine", "torch_ddp_tuned"), ("copy_engine_zero1", "torch_zero1")
    found = [f"{float(cell(table, mean, f'{ours} / {theirs}')):.2f}" for ours, theirs in pairs]
    assert f"`copy_engine` has {found[0]} of the speed of `torch_ddp_tuned`, and" in SAID
    assert f"`copy_engine_zero1` {found[1]} of that of `torch_zero1`" in SAID


def test_compiled_steps_beside_torch_are_those_of_one_run() -> None:
    sizes: dict[str, dict[str, dict[str, Any]]] = {}
    for one in run("data-parallel-zero2", H200, "apart")["records"]:
        if one["world_size"] == 2:
            sizes.setdefault(one["size"], {})[one["strategy"]] = one

    def told(ours: str, theirs: str) -> str:
        ratios = [ratio_of(found[ours], found[theirs]) for found in sizes.values()]
        return f"{statistics.geometric_mean(one for one in ratios if one):.2f}"

    assert [*sizes] == ["small", "medium", "xl"]
    assert f"`fsdp` is {told('fsdp', 'torch_fsdp2')} times as fast as `torch_fsdp2`" in SAID
    assert f"`zero1` is {told('zero1', 'torch_fsdp2_zero2')} times as fast as `torch_fsdp2_zero2`" in SAID
    assert f"has {told('zero1', 'torch_zero1')} of the speed of `torch_zero1`" in SAID


def _by_steps(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for one in run(name, H200, "apart")["records"]:
        groups.setdefault(f"{one['compile']} {one['size']}", {})[one["impl"]] = one
    return groups


def test_larger_buckets_of_zero1_are_those_of_two_runs() -> None:
    """In the first run the row `Zero128` is what `zero1` is in the second."""
    before, now = _by_steps("data-parallel-zero1-buckets"), _by_steps("data-parallel-zero1")
    assert {rows["zero1"]["bucket_mb"] for rows in before.values() if "zero1" in rows} == {32}
    assert {rows["zero1"]["bucket_mb"] for rows in now.values()} == {before["compiled small"]["Zero128"]["bucket_mb"]}

    def told(rows: dict[str, dict[str, Any]], ours: str, theirs: str) -> str:
        return f"{ratio_of(rows[ours], rows[theirs]):.2f}"

    wider = [told(before[case], "Zero128", "zero1") for case in ("compiled small", "compiled xl", "graphed small")]
    assert "are {} times as fast as with 32 MiB at small, and {} times at xl".format(*wider) in SAID
    assert f"Graphed steps of small, which ask nothing of the host, have {wider[2]} of their speed" in SAID
    (table,) = tables(RESULTS, "steps", "small")
    for way, *cells in table[1:]:
        first = told(before[f"{way} small"], "Zero128", "torch_zero1")
        assert cells == [first, *(told(now[f"{way} {size}"], "zero1", "torch_zero1") for size in ("medium", "xl"))]


EIGHT = run("steps-8b", H200)


def test_steps_of_8_billion_parameters_are_those_of_one_run() -> None:
    (told,) = tables(RESULTS, "strategy", "model")
    first = EIGHT["records"][0]
    assert first["strategy"] == "fsdp"
    for one, row in zip(EIGHT["records"], told[1:], strict=True):
        times = f"{one['time_s']:.2f}", f"{one['time_s'] / first['time_s']:.2f}"
        rest = (
            f"{one['mfu']:.3f}",
            f"{one['total_bytes'] / 2**30:.0f}",
            f"{one['power_w']:.0f}",
            f"{one['sm_clock_mhz']:.0f}",
        )
        assert row == [one["strategy"], one["model"], one["checkpoint"].replace("*", "\\*"), *times, *rest]
        assert one["rounds"] == 20
        assert [f"{one[name]:.2f}" for name in ("first_loss", "last_loss")] == ["11.78", "10.16"]
    assert "for 20 steps each" in SAID and "falls from 11.78 to 10.16" in SAID
    began, ended = (datetime.fromisoformat(text) for text in (EIGHT["machine"]["date"], EIGHT["ended"]))
    assert "it took less than ten minutes" in SAID and ended - began < timedelta(minutes=10)


def test_llama_runs_out_of_memory_at_the_level_of_our_rows() -> None:
    level = EIGHT["records"][0]["checkpoint"]
    found = [one for one in run("steps-8b", H200, "apart")["records"] if one["model"] == "llama"]
    assert [(one["checkpoint"], one["outcome"]) for one in found] == [(level, "oom")]


def test_steps_of_other_sizes_and_lengths_are_those_of_the_runs() -> None:
    (told,) = tables(RESULTS, "size", "tokens")
    shapes: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for name in ("steps-1b-3b-4096", "steps-8b-4096", "steps-1b-32768", "steps-3b-32768"):
        for one in run(name, H200)["records"]:
            shapes.setdefault((name, one["size"], one["context"]), []).append(one)
    whole = [found for found in shapes.values() if len(found) == 3]  # not where the run was interrupted
    assert told[1:] == [_row_beside(one, found[0]) for found in whole for one in found]
    assert all(one["last_loss"] < one["first_loss"] for found in whole for one in found)
    short = [[_share_at_work(one) for one in found] for found in whole if found[0]["context"] == 4096]
    assert all(fsdp > 0.99 for fsdp, *_ in short) and len(short) == 3
    (_, fsdp2, llama), (_, *both) = short[:2]
    assert f"take {100 * fsdp2:.0f} % of a step of `torch_fsdp2` and {100 * llama:.0f} % of one of `llama`" in SAID
    assert "in `3b` {:.0f} and {:.0f} %".format(*(100 * share for share in both)) in SAID
    long = [found for found in whole if found[0]["context"] == 32768]
    large = shapes["steps-8b-4096", "8b", 4096]
    assert all("power cap" in one["clock_reasons"] for found in (*long, large) for one in found)
    assert f"attention takes {_shares('attention', *long)} % of the time" in SAID
    assert f"and matmuls take {_shares('matmul', large)} % of the time" in SAID
    assert all(theirs["time_s"] < 1.01 * ours["time_s"] for ours, theirs, _ in long)  # of our model, by both strategies


def _row_beside(one: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A line of the table: a step beside that of the first row."""
    keys = [one["size"], f"{one['context']:,}", one["strategy"], one["model"]]
    speed, memory = f"{one['time_s'] / first['time_s']:.2f}", f"{one['total_bytes'] / 2**30:.0f}"
    return [*keys, f"{1e3 * one['time_s']:,.0f}", speed, f"{one['mfu']:.3f}", memory]


def _shares(kind: str, *shapes: list[dict[str, Any]]) -> str:
    """The least and the largest share of a profiled step that kernels of a kind take, in percent."""
    found = [100 * one[f"{kind}_s"] / one["profiled_s"] for steps in shapes for one in steps]
    return f"{min(found):.0f} to {max(found):.0f}"


def _share_at_work(one: dict[str, Any]) -> float:
    """The share of a step that its kernels and exposed communication take."""
    kinds = "matmul", "attention", "elementwise", "reduction", "copy", "other", "optimizer", "exposed"
    return float(sum(one[f"{kind}_s"] for kind in kinds) / one["time_s"])


def test_why_the_matrix_of_trainings_does_not_rank_strategies() -> None:
    cases = run("training-matrix", H200)["records"]
    found = {(one["attention"], one["strategy"]): one for one in cases}
    steps = cases[0]["steps"] / cases[0]["epochs"]
    eager = [f"{1e3 * found['sdpa_cudnn', name]['time_s'] / steps:.0f}" for name in ("naive", "bucketed")]
    assert "a step takes {} ms with `naive` and {} ms with `bucketed`".format(*eager) in SAID
    graphed = {
        (one["strategy"], one["bucket_mb"]): f"{1e3 * one['time_s']:.0f}"
        for one in run("data-parallel-graphed", H200)["records"]
        if one["size"] == "small" and one["context"] * one["batch"] == cases[0]["context"] * cases[0]["batch"]
    }
    times = graphed["naive", None], graphed["bucketed", found["sdpa_cudnn", "bucketed"]["bucket_mb"]]
    assert "with as many tokens, takes {} and {} ms".format(*times) in SAID
    spread = max(max(one["samples_s"]) / min(one["samples_s"]) for one in cases)
    assert {one["rounds"] for one in cases} == {8} and f"differ by up to {spread:.2f} times" in SAID
    ratios = [
        found[attention, "bucketed"]["time_s"] / found[attention, "naive"]["time_s"]
        for attention in {one["attention"] for one in cases}
    ]
    assert f"`naive` has {min(ratios):.2f} to {max(ratios):.2f} times the speed of `bucketed`" in SAID


def test_time_and_memory_by_level_are_those_of_the_run_and_of_the_prediction() -> None:
    (told,) = tables(PAGES["docs/training.md"], "level", "residual")
    expected, errors = [], {}
    for one in run("model-levels", H200)["records"]:
        settings = {"checkpoint_blocks": one["checkpoint"], "residual": one["residual"]}
        config = replace(model_config(one["size"], context_length=one["context"]), **settings)
        predicted = training_memory(config, one["batch"], one["context"], one["precision"]).peak
        gib = (f"{size / 2**30:.1f}" for size in (one["total_bytes"], predicted))
        expected.append([one["checkpoint"], one["residual"], f"{1e3 * one['time_s']:.1f}", *gib])
        errors[one["checkpoint"], one["residual"]] = one["total_bytes"] / predicted - 1
    assert told[1:] == expected
    assert "take up to 6 % more than predicted at `whole`" in PAGES["docs/training.md"]
    assert f"{100 * max(errors.values()):.0f}" == "6" and max(errors, key=lambda key: errors[key])[0] == "whole"


def test_four_gpus_are_nearly_twice_two() -> None:
    four, two = run("steps-8b-four", H200), run("steps-8b-two", H200, "apart")
    assert [one["machine"]["commit"] for one in (four, two)] == ["05a286d57960fede739efde584bee7966f31a6cf"] * 2
    times = [one["records"][0]["time_s"] for one in (four, two)]
    assert f"takes {times[0]:.2f} s a step, and {times[1]:.2f} s on two GPUs of the same machine" in SAID
    assert f"train {times[1] / times[0]:.2f} of twice the tokens" in SAID


def test_what_bounds_a_step_of_8_billion_parameters() -> None:
    config = model_config("8b")
    one, rate = EIGHT["records"][0], EIGHT["machine"]["sustained"]["matmul_flops_per_s"]["bfloat16"]
    tokens, heads = one["batch"] * one["context"], config.num_heads
    again = 12 * 2 * config.d_model * config.d_ff  # W1 and W3 of the blocks of the level "attention"
    weights = config.num_layers * block_matrices(config) + config.vocab_size * config.d_model
    pass_of_layer = attention_flops(1, heads, tokens, tokens, config.head_dim, causal=True, direction="fwdbwd")
    work = {"matmuls": 2 * tokens * (3 * weights + again), "attention": config.num_layers * pass_of_layer}
    kinds = {
        "matmuls": one["matmul_s"],
        "attention": one["attention_s"],
        "elementwise, reductions, copies": one["elementwise_s"] + one["reduction_s"] + one["copy_s"],
        "optimizer": one["optimizer_s"],
        "exposed communication": one["exposed_s"],
    }
    (told,) = tables(RESULTS, "kind", "time, ms")
    expected = []
    for kind, time_s in kinds.items():
        least = work[kind] / rate if kind in work else 0.0
        expected.append(
            [kind, f"{1e3 * time_s:,.0f}", f"{1e3 * least:,.0f}" * bool(least), f"{1e3 * max(time_s - least, 0):,.0f}"]
        )
    assert told[1:] == expected
    seconds, kept = 2 * tokens * again / rate, 12 * 2 * tokens * config.d_ff * 2
    assert f"Of the matmuls, {1e3 * seconds:.0f} ms at the sustained rate are computed again" in SAID
    assert f"{kept / 2**30:.0f} GiB would have to go there and back" in SAID
    assert f"That could save {100 * seconds / one['time_s']:.1f} % of the step at most" in SAID


def means(name: str, section: str, head_dims: tuple[int, ...], direction: str, ours: str, theirs: str) -> str:
    """How many times as fast one row is as another: the geometric mean over the shapes of a run."""
    times: dict[str, dict[str, float]] = {}
    for one in run(name)["records"]:
        if one["section"] == section and one["direction"] == direction and one["head_dim"] in head_dims:
            times.setdefault(one["comparison"], {})[one["impl"]] = one["time_s"]
    return f"{statistics.geometric_mean(found[theirs] / found[ours] for found in times.values()):.2f}"


PATTERNS = {
    "documents": ("documents-and-windows", "documents", (64, 128)),
    "windows, D 64": ("documents-and-windows", "window", (64,)),
    "windows, D 128": ("windows-128", "window", (128,)),
    "grouped heads, D 128": ("grouped", "grouped", (128,)),
}


def test_documents_windows_and_grouped_heads_are_those_of_the_runs() -> None:
    told = tables(RESULTS, "cases", "row")
    assert [line[0] for table in told for line in table[1:]] == [case for case in PATTERNS for _ in range(2)]
    for head, *body in told:
        for case, row, *cells in body:
            for column, text in zip(head[2:], cells, strict=True):
                direction, theirs = column.split(", over ")
                assert text == means(*PATTERNS[case], {"forward": "fwd", "backward": "bwd"}[direction], row, theirs)


def test_decoding_is_that_of_its_run() -> None:
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for one in run("decode")["records"]:
        if one["outcome"] == "ok":
            found.setdefault((str(one["batch"]), f"{one['keys']:,} keys"), {})[one["impl"]] = one
    (told,) = tables(RESULTS, "batch", "1,024 keys")
    head, *body = told
    for batch, *cells in body:
        for keys, text in zip(head[1:], cells, strict=True):
            rows = found.get((batch, keys), {})
            assert ("flash_triton" in rows) == bool(text)
            if text:
                ours = rows.pop("flash_triton")
                lead = min(one["time_s"] for one in rows.values()) / ours["time_s"]
                assert text == f"{lead:.2f} ({ours['copy_ceiling_fraction']:.2f})"


def fixed_order(machine: str) -> tuple[str, str]:
    """The speed of the fixed order over that of the default one, and over that of FlashAttention-4's fixed order."""
    times: dict[tuple[int, bool, int], dict[tuple[str, bool], float]] = {}
    for one in run("fixed-order", machine, "flash_gluon")["records"]:
        shape = one["head_dim"], one["causal"], one["keys"]
        times.setdefault(shape, {})[one["impl"], bool(one["deterministic"])] = one["time_s"]
    assert len(times) == 12
    others = ("flash_gluon", False), ("flash_attn_4", True)
    default, peer = (
        statistics.geometric_mean(found[other] / found["flash_gluon", True] for found in times.values())
        for other in others
    )
    return f"{default:.2f}", f"{peer:.2f}"


def test_what_is_said_of_the_fixed_order_is_what_its_runs_say() -> None:
    default, peer = fixed_order(H200)
    assert f"has {default} of the speed of the default one on one H200, and {peer} times that" in SAID
    assert "on one H100 it has {} and {}.".format(*fixed_order(H100)) in SAID


def test_the_notebook_of_flash_gluon_says_what_its_runs_of_short_plans_say() -> None:
    """Each plan beside the one before, and that the fastest of them up to 1,024 keys is the plan now."""
    lengths: dict[int, dict[str, dict[str, Any]]] = {}
    for name in ("short-backwards", "short-backwards-2"):
        for one in run(name, H200, "flash_gluon")["records"]:
            lengths.setdefault(one["length"], {})[one["plan"] or one["impl"]] = one
    order = "wide+late_dv+by_query+fma_exp+peeled"
    names = f"l2_mib5+{order}", f"l2_mib22+{order}", "l2_mib5", "sdpa_cudnn"
    (told,) = tables(PAGES["docs/flash_gluon.md"], "plan", "256 keys")
    for name, (_, *cells) in zip(names, told[1:], strict=True):
        ratios = [ratio_of(lengths[keys][name], lengths[keys][f"l2_mib11+{order}"]) for keys in sorted(lengths)]
        assert cells == [f"{ratio:.2f}" for ratio in ratios], name
    for keys in (256, 512, 1024):
        assert names[0] == min(lengths[keys], key=lambda name: lengths[keys][name]["time_s"])
        assert plan_called(names[0]) == backward_plan(64, True, keys)


ALL_THREE = {"wide": True, "late_dv": True, "by_query": True}
IDEAS: dict[str, dict[str, Callable[[Any], Any]]] = {  # the plan of each line, from the one that the row takes
    "bwd": {
        "none of the fields": lambda own: BackwardPlan(own.prefetch, own.l2_mib),
        "none, `prefetch` the other way": lambda own: BackwardPlan(not own.prefetch, own.l2_mib),
        "`wide`": lambda own: BackwardPlan(own.prefetch, own.l2_mib, wide=True),
        "`late_dv`": lambda own: BackwardPlan(own.prefetch, own.l2_mib, late_dv=True),
        "`by_query`": lambda own: BackwardPlan(own.prefetch, own.l2_mib, by_query=True),
        "all three": lambda own: BackwardPlan(own.prefetch, own.l2_mib, **ALL_THREE),
        "all three, `fma_exp`": lambda own: BackwardPlan(own.prefetch, own.l2_mib, **ALL_THREE, fma_exp=True),
    },
    "fwd": {
        "`ping_pong` the other way": lambda own: replace(own, ping_pong=not own.ping_pong),
        "`named` the other way, no `ping_pong`": lambda own: replace(own, named=not own.named, ping_pong=False),
        "`dynamic` the other way": lambda own: replace(own, dynamic=not own.dynamic),
        "one head after another": lambda own: replace(own, l2_mib=0),
        "two consumers, `named`, no `ping_pong`": lambda own: replace(own, consumers=2, named=True, ping_pong=False),
    },
}


def _with(found: dict[str, dict[str, Any]], direction: str, idea: str) -> dict[str, Any]:
    """The case of the plan that the idea makes of the row's own."""
    return found[name_of(IDEAS[direction][idea](plan_called(found["own"]["plan"])))]


def test_the_notebook_of_flash_gluon_says_what_its_runs_say_of_energy() -> None:
    cells: dict[str, list[dict[str, dict[str, Any]]]] = {"bwd": [], "fwd": []}
    for cell in ("64-causal", "64-full", "128-causal", "128-full"):
        rows: dict[str, dict[str, dict[str, Any]]] = {"bwd": {}, "fwd": {}}
        for one in run(f"energy-{cell}", H200, "flash_gluon")["records"]:
            rows[one["direction"]] |= {one["plan"] or one["impl"]: one} | ({"own": one} if one["planned"] else {})
        for direction, found in rows.items():
            cells[direction].append(found)
    page = PAGES["docs/flash_gluon.md"]
    for direction, head in (("bwd", "backward"), ("fwd", "forward")):
        ((_, joules, *told),) = (one for one in tables(page, head, "64 causal") if "joules" in one[1][0])
        assert joules[1:] == [f"{found['own']['energy_j']:.2f}" for found in cells[direction]]
        assert [idea for idea, *_ in told] == [*IDEAS[direction], "SDPA cuDNN"]
        for idea, *texts in told:
            for found, text in zip(cells[direction], texts, strict=True):
                own = found["own"]
                one = found["sdpa_cudnn"] if idea == "SDPA cuDNN" else _with(found, direction, idea)
                figures = f"{ratio_of(one, own):.2f}, {one['energy_j'] / own['energy_j']:.2f}"
                assert text == ("is the plan" if one is own else figures), (direction, idea)
    said = " ".join(page.split())
    every = [(found, one) for groups in cells.values() for found in groups for one in found.values()]
    power = [one["energy_power_w"] for _, one in every]
    assert f"draws {min(power):.0f} to {max(power):.0f} W" in said
    least = min(one["energy_j"] / found["own"]["energy_j"] for found, one in every)
    assert f"takes {least:.3f} of it" in said and f"within {100 * (1 - least):.1f} %" in said
    none = [(found["own"], _with(found, "bwd", "none of the fields")) for found in cells["bwd"]]
    faster = [100 * (ratio_of(own, one) - 1) for own, one in none]
    saved = [100 * (1 - own["energy_j"] / one["energy_j"]) for own, one in none]
    assert f"gain {min(faster):.0f} to {max(faster):.0f} % in time" in said
    assert f"save {min(saved):.0f} to {max(saved):.0f} % of the energy" in said


def test_the_notebooks_say_what_a_run_says_of_the_energy_of_other_rows() -> None:
    joules = {(one["impl"], one["direction"]): one["energy_j"] for one in run("attention", H200, "energy")["records"]}

    def told(row: str) -> list[str]:
        return [
            f"{joules[row, direction] / joules['flash_gluon', direction]:.2f} times" for direction in ("fwd", "bwd")
        ]

    triton, gluon = (" ".join(PAGES[f"docs/{row}.md"].split()) for row in ("flash_triton", "flash_gluon"))
    theirs = "takes {} the energy of one of `flash_gluon` in the forward, and {} in the backward"
    assert theirs.format(*told("flash_triton")) in triton
    peers = "takes {} as much as `flash_gluon` in the forward, and {} in the backward"
    assert peers.format(*told("flash_attn_4")) in gluon


def test_the_notebook_of_flash_triton_says_what_its_run_says() -> None:
    """The forms of its forward, each beside today's loop with the same tiles, and its share of the fastest row."""
    page = "docs/flash_triton.md"
    (path,) = (ROOT / "reports" / "results" / "flash_triton").glob(f"{H100}_*_forward-forms.jsonl")
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    (told,) = tables((ROOT / page).read_text(), "form", "D 64")
    for (_, *cells), form in zip(told[1:], ("sums", "lazy", "ahead", "behind"), strict=True):
        for head_dim, text in zip((64, 128), cells, strict=True):
            ratios = []
            for one in (run for run in runs if run["D"] == head_dim):
                found = {tuple(name.split("(", 1)): rate for name, rate in one["tflops"].items()}
                same = [tile for name, tile in found if name == form]
                ratios.append(max(found[form, tile] for tile in same) / max(found["base", tile] for tile in same))
            assert len(ratios) == 6 and text == f"{statistics.geometric_mean(ratios):.2f}", form
    times: dict[tuple[str, str], dict[str, float]] = {}
    for one in run("attention")["records"]:
        if one["section"] == "tokens16k" and one["direction"] in ("fwd", "bwd"):
            times.setdefault((one["direction"], one["comparison"]), {})[one["impl"]] = one["time_s"]
    shares = {
        way: statistics.geometric_mean(
            min(found.values()) / found["flash_triton"] for (direction, _), found in times.items() if direction == way
        )
        for way in ("fwd", "bwd")
    }
    said = " ".join((ROOT / page).read_text().split())
    assert f"its forward has {shares['fwd']:.3f} of the speed" in said and f"backward {shares['bwd']:.2f}." in said


def emulated() -> list[dict[str, Any]]:
    """Milliseconds by row and direction, or by kernel, form and tile, as code for sm_80 on an H100; a line a shape."""
    (path,) = (ROOT / "reports" / "results" / "emulated").glob(f"{H100}_*_tiles-sm80.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def fastest(shape: dict[str, Any], form: str) -> float:
    """The least time of a form's tiles that were compiled without a bound on registers."""
    return min(ms for name, ms in shape["ms"].items() if re.fullmatch(rf"{form}, \d+ × \d+, \d, \d", name))


def test_the_notebook_of_flash_triton_says_what_its_emulation_says() -> None:
    """As install.md does of the means, and both call it an emulation."""
    text, install = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("flash_triton", "install"))
    ((_, *told),) = tables(text, "emulated", "D")
    speeds = []
    for line in told[:-1]:
        (shape,) = (
            one
            for one in emulated()
            if [one["causal"], f"{one['D']}", f"{one['S']:,}"] == [line[0] == "causal", *line[1:3]]
        )
        flash, cuda = ([shape["ms"][f"{row} {way}"] for way in ("fwd", "bwd")] for row in ("sdpa_flash", "flash_cuda"))
        forward = fastest(shape, "fwd, mask added, sums by columns")
        backward = fastest(shape, "dq, mask added") + fastest(shape, "dkdv, mask added")
        times = forward, backward, *cuda
        speeds.append([of / time for of, time in zip(flash * 2, times, strict=True)])
        assert line[3:] == [f"{speed:.2f}" for speed in speeds[-1]]
    means = [f"{statistics.geometric_mean(column):.2f}" for column in zip(*speeds, strict=True)]
    assert len(speeds) == len(emulated()) == 12 and told[-1] == ["geometric mean", "", "", *means]
    ((_, *forms),) = tables(text, "emulated form", "D 64")
    for form, *cells in forms:
        for head_dim, cell in zip((64, 128), cells, strict=True):
            shapes = [one for one in emulated() if one["D"] == head_dim]
            ratios = [one["ms"]["sdpa_flash fwd"] / fastest(one, f"fwd, {form}") for one in shapes]
            assert cell == f"{statistics.geometric_mean(ratios):.2f}", (form, head_dim)
    least = min(speed for line in speeds for speed in line[:2])
    said = " ".join(install.split())
    assert (
        f"have {means[0]} of the speed of SDPA's flash attention in the forward and {means[1]} in the backward" in said
    )
    assert f"and {least:.2f} at least" in said and "In this emulation" in said and "It gives no time of an A100" in text


def test_pairs_of_versions_are_those_of_the_run() -> None:
    (path,) = (ROOT / "reports" / "results" / "apart").glob("*_step-versions.md")
    _, _, *pairs = rows(path.read_text())
    assert len(pairs) == 21 and {held for _, _, held, _ in pairs} == {"tolerance"}
    errors: dict[str, float] = {}
    for first, second, _, ratios in pairs:
        errors |= zip((first, second), map(float, ratios.split(" and ")), strict=True)
    fsdp = {f"{error:.3f}" for name, error in errors.items() if name.startswith("fsdp")}
    others = [error for name, error in errors.items() if not name.startswith("fsdp")]
    assert len(errors) == 7 and fsdp == {"0.415"}
    told = f"0.42 of what is allowed with `fsdp`, and {min(others):.2f} to {max(others):.2f} with the others"
    assert told in " ".join(PAGES["docs/strategy.md"].split())
