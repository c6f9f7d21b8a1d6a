"""The page begins with answers: the fastest row and its speed over the next, wrong rows, rows that could not run.

Tests make up runs of rows (`comparison`), build a report, and read its tables "fastest-...", "wrong" and "not-run". A
law that needs no more is an entry of ANSWERS.
"""

from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layouts import WORDS
from benchmarks.sweeps import SWEEPS
from lmsys.parallel import STRATEGIES
from lmsys.reports.load import Machine, run_names
from lmsys.reports.words import number
from tests.support.records import NOT, Record, built, cells, hold_shown, numbers, record, report, save

LENGTHS = (1024, 2048, 4096)


def comparison(length: int, seconds: dict[str, float], **axes: object) -> list[Record]:
    """Records of rows that were sampled together at a length: {row: seconds}."""
    return [record("attention", name, value, queries=length, keys=length, **axes) for name, value in seconds.items()]


def steps(seconds: dict[tuple[str, str], float], **axes: Any) -> list[Record]:
    """Records of training steps that were sampled together: {(row, how it was run): seconds}. "llama" is a peer."""
    shared = {"mode": "step", "comparison": "one 1"} | axes
    return [
        record("model", name, value, compile=way, peer=name == "llama", **shared)
        for (name, way), value in seconds.items()
    ]


def parallel(seconds: dict[str, float], compared: str) -> list[Record]:
    """Records of strategies of data parallelism that were sampled together: {row: seconds}."""
    return [record("data_parallel", name, value, comparison=compared, strategy=name) for name, value in seconds.items()]


def drifting(**samples: list[float]) -> list[Record]:
    """Records of two rows with these samples: {row: seconds of each round}."""
    return [
        record("attention", name, sorted(several)[2], samples_s=several, comparison="a")
        for name, several in samples.items()
    ]


def test_the_page_begins_with_them(tmp_path: Path) -> None:
    """A row that was wrong in a section is not its fastest. A reason not to run is told once, with all of its rows."""
    records = [
        *comparison(1024, {"flash_triton": 1e-3, "sdpa_flash": 2e-3, "mine": 1e-4}),
        record("attention", "mine", outcome="wrong", reason="dk is off", queries=2048, keys=2048),
        *(
            record("attention", name, outcome="unsupported", reason="no wheel", queries=n, keys=n)
            for name in ("flash_attn_2", "flash_attn_4")
            for n in LENGTHS
        ),
    ]
    files = report(tmp_path, records)
    (fastest,) = cells(files, "fastest-attention")
    assert (fastest["fastest row"], fastest["speed"]) == ("flash_triton (of 2 rows)", "2.00 × sdpa_flash")
    (wrong,) = cells(files, "wrong")
    assert (wrong["row"], wrong["cases"], wrong["the first of them"]) == ("mine", "1", "dk is off")
    (missing,) = cells(files, "not-run")
    assert (missing["row"], missing["why"], missing["cases"]) == ("flash_attn_2, flash_attn_4", "no wheel", "6")
    page = files["index.html"].decode()
    assert page.index("Fastest attention") < page.index("<nav>") < page.index("everything measured")
    assert page.count("no wheel") == 1
    assert "run of 2000-01-02 03:04, commit 0123456789; flash_triton, sdpa_flash took turns; in 1 of 1 shape no" in page


@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=len(LENGTHS)))
@settings(max_examples=5)
def test_time_and_rate_are_of_the_fastest_row_where_it_takes_longest(
    tmp_path_factory: pytest.TempPathFactory, seconds: list[float]
) -> None:
    cases = [
        case
        for length, time in zip(LENGTHS, seconds, strict=False)
        for case in comparison(length, {"flash_triton": time, "sdpa_flash": 3 * time})
    ]
    folder = tmp_path_factory.mktemp("longest")
    files = report(folder, cases)
    longest = max(cases[::2], key=lambda case: case["time_s"])
    ((values,), (line,)) = numbers(files, "fastest-attention"), cells(files, "fastest-attention")
    assert float(values["time_s"]) == longest["time_s"] and float(values["flops_per_s"]) == longest["flops_per_s"]
    assert line["time"] == f"{number(1e3 * longest['time_s'])} ms"
    assert line["rate"] == f"{number(longest['flops_per_s'] / 1e12)} TFLOP/s"
    assert len(seconds) == 1 or f"its longest shape: queries {longest['queries']:,}" in files["index.html"].decode()


def test_each_line_says_its_run_and_each_run_its_command_once(tmp_path: Path) -> None:
    """Runs of one day are named with their time. A run without a line in the table is not listed."""
    files = []
    for length, hour, dtype in ((1024, 1, "bfloat16"), (1024, 2, "float16"), (2048, 3, "float32")):
        rows = {"flash_triton": 1e-3, "sdpa_flash": 2e-3} if dtype != "float32" else {"naive": 1e-3}
        axes = {"queries": length, "keys": length, "dtype": dtype}
        records = [record("attention", name, value, **axes) for name, value in rows.items()]
        date, command = f"2000-01-02T0{hour}:00:00+00:00", f"measure {dtype} & <report>"
        path = tmp_path / f"{dtype}.json"
        files.append(save(path, records, date=date, command=command, commit=f"{hour}" * 12, dirty=hour == 2))
    made = built(tmp_path / "out", *files)
    lines = {line["setting"]: line["run"] for line in cells(made, "fastest-attention")}
    assert lines == {"bfloat16": "A", "float16": "B"}
    text = made["tables/synthetic-gpu-fastest-attention.md"].decode()
    assert "Runs: A of 2000-01-02 01:00, B of 2000-01-02 02:00." in text
    assert "Run A, of 2000-01-02 01:00, commit 1111111111, made by: `measure bfloat16 & <report>`" in text
    assert "commit 2222222222 with local changes, made by: `measure float16 & <report>`" in text
    assert "measure float32" not in text
    answer = made["index.html"].decode().partition("Machine, versions and runs</summary>")[0]
    assert answer.count("<code>measure bfloat16 &amp; &lt;report&gt;</code>") == 1
    assert [line["commit"] for line in numbers(made, "fastest-attention")] == ["1" * 12, "2" * 12]


def test_the_command_of_what_was_wrong_is_below_it(tmp_path: Path) -> None:
    bad = record("attention", "mine", outcome="wrong", reason="dk is off")
    files = [save(tmp_path / "1.json", [bad], command="measure mine")]
    files.append(save(tmp_path / "2.json", [record("attention", "naive")], command="another", date="2000-01-03"))
    text = built(tmp_path / "out", *files)["tables/synthetic-gpu-wrong.md"].decode()
    assert "made by: `measure mine`" in text and "another" not in text


@settings(max_examples=50, deadline=None)
@given(dates=st.lists(st.datetimes() | st.none(), min_size=1, max_size=4))
def test_names_of_runs_tell_them_apart(dates: list[datetime | None]) -> None:
    runs = [{"date": date and date.isoformat()} for date in dates]
    names = run_names(Machine("slug", "title", runs, [], {}, {}), range(len(runs)))
    assert len(set(names.values())) == len(runs)
    assert all(name.startswith(str(runs[at]["date"] or "undated")[:10]) for at, name in names.items())


LATER = [
    case | {"comparison": f"{case['comparison']} later"}
    for case in comparison(1024, {"flash_cuda": 1e-3, "flash_triton": 1.97e-3, "sdpa_flash": 3e-3})
]
WIDE = {("auto", "eager"): 4e-3, ("auto", "fused"): 1e-3, ("llama", "eager"): 3e-3, ("llama", "graphed"): 2e-3}
FUSED = {"fastest row": "auto, fused (of 2 rows)", "speed": "2.00 × llama, graphed"}
SLOWER_WAYS = {("auto", "eager"): 4e-3, ("llama", "eager"): 5e-3, ("llama", "compiled"): 6e-3}
MORE = {"flash_triton": 1e-3, "flash_attn_4": 2e-3, "sdpa": 5e-3, "naive": 6e-3, "vectorized": 7e-3}
KINDS: dict[str, Record] = {
    "": {},
    "documents": {"documents": "mixed"},
    "Q ≠ K": {"queries": 512},
    "decoding": {"kv_heads": 2, "queries": 1, "keys": 2048, "offset": 2047},
    "grouped heads": {"kv_heads": 2},
    "window 1,024": {"window": 1024},
}
FASTEST_OF = dict.fromkeys(KINDS, "flash_gluon") | {"documents": "flash_triton", "decoding": "sdpa_flash"}
BACKWARD = {"direction": "bwd", "repeatable": True}
CALM = {"samples_s": [1.0] * 5, "p20_s": 1.0, "p80_s": 1.0, "comparison": "a"}


def spread(share: float) -> list[Record]:
    """Records of two rows. The samples of the slower one spread by this share of their median."""
    wide = CALM | {"samples_s": [1.5] * 5, "p20_s": 1.5, "p80_s": 1.5 * (1 + share)}
    return [record("attention", "flash_triton", 1.0, **CALM), record("attention", "sdpa", 1.5, **wide)]


# {law: (runs by date, the rows of these tables with some of their cells, lines of text that files have)}
ANSWERS: dict[str, tuple[list[list[Record]], dict[str, list[dict[str, Any]]], dict[str, str]]] = {
    "A later run of few rows does not tell if the rows that it left out are slower": (
        [
            comparison(1024, {"flash_gluon": 1e-3, "flash_triton": 2e-3, "sdpa_flash": 3e-3}),
            [case for n in (2048, 4096) for case in comparison(n, {"flash_cuda": 1e-3, "sdpa_flash": 3e-3})],
        ],
        {
            "fastest-attention": [
                {"fastest row": "flash_gluon (of 3 rows)", "over the next fastest": "2.00 × flash_triton"}
            ]
        },
        {},
    ),
    "The answer is of a run that has torch's tuned DDP: without it even the fastest row may be slow": (
        [
            parallel({"naive": 2e-3, "torch_ddp_tuned": 3e-3}, "a"),
            parallel({"zero1": 4e-3, "fsdp": 5e-3, "torch_fsdp2": 9e-3}, "b"),
        ],
        {"fastest-data-parallel": [{"fastest row": "naive (of 2 rows)", "speed": "1.50 × torch_ddp_tuned"}]},
        {},
    ),
    "Speed and order are medians of ratios by rounds: medians of drifting samples may give another order": (
        [drifting(flash_triton=[1.0, 2.0, 3.0, 4.0, 2.6], sdpa_flash=[1.1, 2.2, 3.3, 0.1, 2.5])],
        {"fastest-attention": [{"fastest row": "flash_triton (of 2 rows)", "speed": "1.10 × sdpa_flash"}]},
        {},
    ),
    "Rows within the margin are ordered by rounds, too": (
        [drifting(flash_triton=[1.0, 2.0, 3.0, 4.0, 5.0], sdpa_flash=[0.99, 1.98, 3.01, 3.96, 4.95])],
        {"fastest-attention": [{"fastest row": "sdpa_flash (of 2 rows)", "speed": "1.01 × flash_triton"}]},
        {},
    ),
    "A row's fastest way is compared with the peer's fastest way": (
        [steps(WIDE)],
        {"fastest-step": [FUSED | {"setting": "small"}]},
        {},
    ),
    "Wide residual streams are named only if there are narrow ones, too": (
        [steps(WIDE) + steps({("auto", "eager"): 1e-4}, residual="narrow")],
        {"fastest-step": [FUSED | {"setting": "small, wide"}]},
        {},
    ),
    "A later run of slower ways takes no answer's place, and leaves no mark of unsteadiness": (
        [
            steps({("auto", "fused"): 1e-3, ("llama", "graphed"): 2e-3})
            + steps({("auto", "eager"): 4e-3}, p20_s=2e-3, p80_s=8e-3),
            steps(SLOWER_WAYS, comparison="one 2", p20_s=2e-3, p80_s=8e-3),
        ],
        {"fastest-step": [FUSED]},
        {},
    ),
    "A run of rows that won elsewhere is asked rather than one of many others": (
        [
            comparison(2048, {"flash_triton": 2e-3, "flash_attn_4": 1e-3, "sdpa": 5e-3}),
            comparison(1024, {name: s for name, s in MORE.items() if name != "flash_attn_4"} | {"flash_torch": 8e-3}),
        ],
        {"fastest-attention": [{"fastest row": "flash_attn_4 (of 3 rows)"}]},
        {},
    ),
    "A run with more shapes of the rows that won is asked rather than one of more rows": (
        [
            [
                case
                for n in (1024, 2048)
                for case in comparison(n, {"flash_triton": 2e-3, "flash_attn_4": 1e-3, "sdpa": 5e-3})
            ],
            comparison(512, MORE),
        ],
        {"fastest-attention": [{"fastest row": "flash_attn_4 (of 3 rows)"}]},
        {},
    ),
    "A row that another run has is said to have run there": (
        [
            [
                *comparison(1024, {"sdpa_flash": 2e-3}),
                *(
                    record("attention", name, outcome="unsupported", reason="no wheel")
                    for name in ("flex", "flash_attn_2")
                ),
            ],
            comparison(2048, {"flex": 1e-3, "sdpa_flash": 2e-3}),
        ],
        {"not-run": [{"why": "no wheel; in another run flex ran"}]},
        {},
    ),
    "A limit of memory is told with what did not run": (
        [[record("attention", "naive", outcome="oom", reason="no room", memory_limit_bytes=24 * 2**30)]],
        {"not-run": [{"why": "out of memory under the limit of 24 GiB that was asked for"}]},
        {},
    ),
    "Nothing wrong is said": (
        [[record("attention", "naive"), record("attention", "sdpa")]],
        {"wrong": [{"cases": "nothing was wrong: 2 of 2 cases ran, and all of these were right"}]},
        {},
    ),
    "What nobody checked is not called right": (
        [[record("attention", "naive"), record("attention", "sdpa", error_ratio=None)]],
        {"wrong": [{"cases": "nothing was wrong: 2 of 2 cases ran, and 1 were right, 1 were not checked"}]},
        {},
    ),
    "All rows that were sampled together are explained, ours and others', but mine, which has no label": (
        [
            [
                record("data_parallel", name, value)
                for name, value in {"mine": 3e-3, "torch_ddp_tuned": 2e-3, "zero1": 1e-3, "flat": 4e-3}.items()
            ]
        ],
        {},
        {
            "tables/synthetic-gpu-fastest-data-parallel.md": (
                f"Our rows: flat ({STRATEGIES['flat'].label}), zero1 ({STRATEGIES['zero1'].label}), mine.  \n"
                f"Others’ rows: torch_ddp_tuned ({STRATEGIES['torch_ddp_tuned'].label})."
            )
        },
    ),
    "A training step tells the highest MFU of the fastest row's shapes, and explains only ways that lines have": (
        [
            [
                record("model", name, s, mode="step", compile="graphed", mfu=mfu, batch=batch, peer=name == "llama")
                for name, s, mfu, batch in (
                    *(("auto", 1e-3, 0.45, 1), ("auto", 2e-3, 0.4, 2)),
                    *(("llama", 3e-3, 0.5, 1), ("llama", 4e-3, 0.55, 2)),
                )
            ]
        ],
        {"fastest-step": [{"MFU": "45.0 %"}]},
        {"index.html": f"Graphed: compiled, and replayed as one CUDA graph.\n{NOT}fused:"},
    ),
    "Without samples there is a fastest row and no speed: a ratio of two times may be one of two clocks": (
        [
            comparison(1024, {"flash_triton": 1e-3, "sdpa_flash": 2e-3}, samples_s=None)
            + steps({("auto", "fused"): 1e-3, ("llama", "fused"): 2e-3}, samples_s=None)
        ],
        {
            f"fastest-{word}": [{"fastest row": f"{row} (of 2 rows)", "speed": "", "over the next fastest": None}]
            for word, row in (("attention", "flash_triton"), ("step", "auto, fused"))
        },
        {},
    ),
    "A row that is fastest under one pattern need not be so under another, or without one": (
        [
            [
                record("attention", name, 1e-3 if name == FASTEST_OF[kind] else 2e-3, **axes)
                for kind, axes in KINDS.items()
                for name in ("flash_gluon", "flash_triton", "sdpa_flash")
            ]
        ],
        {
            "fastest-attention": [
                {"setting": kind, "fastest row": f"{row} (of 3 rows)"} for kind, row in FASTEST_OF.items()
            ]
        },
        {},
    ),
    # Its baseline is that of the usual mode, `sdpa`; `flex` is the baseline only of patterns.
    "The deterministic mode has answers and tables of its own": (
        [
            [
                record("attention", name, s * (2 if mode else 1), deterministic=mode, comparison=str(mode), **BACKWARD)
                for mode in (None, True)
                for name, s in {"flash_gluon": 1e-3, "sdpa": 2e-3, "flex": 3e-3}.items()
            ]
        ],
        {"fastest-attention": [{"setting": mode, "speed": "2.00 × sdpa"} for mode in ("", "deterministic")]},
        {f"tables/synthetic-gpu-default-bfloat16-causal-bwd{mode}-time.md": "" for mode in ("", "-deterministic")},
    ),
    "Ours alone are no answer": ([comparison(1024, {"flash_triton": 1e-3, "naive": 2e-3})], {"fastest": []}, {}),
    "Rows are said to be right in a dtype only where all of their cases were": (
        [
            [
                *comparison(1024, {"naive": 1e-3, "mine": 2e-3}),
                record("attention", "mine", outcome="wrong", queries=2048, keys=2048),
                record("attention", "mine", dtype="float16"),
                record("attention", "flex", outcome="unsupported", dtype="float32"),
            ]
        ],
        {},
        {
            "index.html": (
                "Attention that was right in bfloat16, in every case that ran: naive.\n"
                f"Attention that was right in float16, in every case that ran: mine.\n{NOT}was right in float32"
            )
        },
    ),
    "A speed of samples that spread is marked": (
        [spread(0.3)],
        {"fastest-attention": [{"speed": "1.50 × sdpa¹"}]},
        {"tables/synthetic-gpu-fastest-attention.md": "Unsteady"},
    ),
    "A speed of samples that spread by little is not marked": (
        [spread(0.1)],
        {"fastest-attention": [{"speed": "1.50 × sdpa"}]},
        {"tables/synthetic-gpu-fastest-attention.md": f"{NOT}Unsteady"},
    ),
    "Rows of another run that took less time in this shape, without turns, are told": (
        [
            comparison(1024, {"flash_gluon": 2e-3, "flex": 3e-3, "sdpa": 4e-3}),
            [
                *LATER,
                *comparison(2048, {"flash_torch": 1e-6, "sdpa_flash": 1e-3}),
            ],
        ],
        {"fastest-attention": [{"fastest row": "flash_gluon (of 3 rows)¹"}]},
        {
            "tables/synthetic-gpu-fastest-attention.md": (
                "¹ In another run, which took no turns with this one, these took less time: flash_cuda."
            )
        },
    ),
}


@pytest.mark.parametrize("law", ANSWERS)
def test_the_page_answers(law: str, tmp_path: Path) -> None:
    runs, tables, texts = ANSWERS[law]
    paths = [save(tmp_path / f"{day}.json", run, date=f"2000-01-0{day}") for day, run in enumerate(runs, start=1)]
    hold_shown(built(tmp_path / "out", *paths), tables, texts)


def test_each_section_has_a_title() -> None:
    grids = [
        grid for sweep in SWEEPS.values() for on_device in sweep.values() for grid in chain(*on_device.grids.values())
    ]
    assert {grid.name for grid in grids} - {"anatomy"} <= WORDS["section"].keys()  # anatomy is a chapter of its own
