"""Plots of the report: a colour for each row, words in place of missing values, legends and labels that can be read.

A row is an implementation, and a chapter is the part of the report about one benchmark. `record` makes the record of a
case, `built` a report of such records: {name of a file: its content}.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmsys.reports import plots
from lmsys.reports.load import read
from lmsys.reports.views import View, view_of
from lmsys.reports.words import Style
from tests.support.records import NOT, TWICE, built, hold_shown, of_everything, record, report, rows_of, save


@pytest.mark.parametrize(("length", "rows"), [(5, 2), (15, 2), (25, 4), (45, 4)])
def test_legends_lie_within_the_drawing(length: int, rows: int) -> None:
    """Long labels stand in one column: two would be cut off. The figure grows by the legend's height."""
    axes = plots.canvas(3.0)
    figure = axes.figure
    height = figure.get_figheight()
    for i in range(4):
        axes.plot([0, 1], [0, i], label=f"{i}" * length)
    plots.add_legend(axes)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert figure.get_figheight() == pytest.approx(height + 0.2 * rows + 0.1)


def test_labels_that_would_run_into_one_another_are_slanted() -> None:
    assert not plots.crowded(["64", "128", "256"])
    assert plots.crowded(["none", "bucketed-25MiB", "bucketed-25MiB-bfloat16"])


@pytest.mark.parametrize(
    ("length", "text"), [(512, "512"), (1024, "1k"), (65536, "64k"), (1000, "1,000"), (128_000, "128,000")]
)
def test_only_powers_of_two_are_abbreviated(length: int, text: str) -> None:
    assert plots.short(length) == text


def test_a_row_has_one_colour_in_all_chapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chapter draws a row in its colour of the table, and peers dashed."""
    seen: set[tuple[str, str, str, bool]] = set()  # (benchmark, row, colour, is dashed)

    def style(self: View, name: str, value: str) -> Style:
        looks = original_style(self, name, value)
        seen.add((self.benchmark, str(value), looks.color, looks.dashed))
        return looks

    original_style = View.style
    monkeypatch.setattr(View, "style", style)
    path = save(tmp_path / "r.json", of_everything())
    # In this file flash_triton has another colour, which the report must take from there.
    path.write_text(path.read_text().replace(rows_of("attention")["flash_triton"]["color"], "#123456"))
    built(tmp_path / "out", path)
    assert {name for name, value, color, _ in seen if (value, color) == ("flash_triton", "#123456")} == {
        "attention",
        "anatomy",
    }
    for kind, benchmarks in (("attention", {"attention", "anatomy"}), ("strategy", {"data_parallel"})):
        table = {name: (row["color"], row["peer"]) for name, row in rows_of(kind).items() if "color" in row}
        looks = [
            (value, (color, dashed))
            for name, value, color, dashed in seen
            if name in benchmarks and value in table and color != "#123456"
        ]
        assert len(looks) >= 3 and all(look == table[value] for value, look in looks)
    trained = {value: (color, dashed) for name, value, color, dashed in seen if name == "training"}
    assert trained["sdpa_flash"] == (rows_of("attention")["sdpa_flash"]["color"], True)
    assert trained["bucketed"] == (rows_of("strategy")["bucketed"]["color"], False)
    parallel = {value: color for name, value, color, _ in seen if name == "data_parallel"}
    assert parallel["bucketed-auto"] == rows_of("strategy")["bucketed"]["color"]


def test_variants_of_a_row_are_its_lighter_shades(tmp_path: Path) -> None:
    records = [record("data_parallel", f"bucketed-{size}MiB") for size in (100, 25)]
    (machine,) = read([save(tmp_path / "r.json", records)])
    view = view_of(machine, "data_parallel").styled("impl", "strategy")
    small, large = (view.style("impl", f"bucketed-{size}MiB").color for size in (25, 100))
    assert small == rows_of("strategy")["bucketed"]["color"]
    assert all(int(large[i : i + 2], 16) >= int(small[i : i + 2], 16) for i in (1, 3, 5)) and large != small
    assert list(view.styles["impl"]) == ["bucketed-25MiB", "bucketed-100MiB"]


def test_the_word_for_a_missing_bar_stands_where_the_bar_would_be(tmp_path: Path) -> None:
    axes = {"section": "tiers", "keys": 64}
    records = [record("attention", "naive", queries=128, **axes)]
    records += [record("attention", "naive", queries=q, outcome="oom", **axes) for q in (64, 256)]
    files = report(tmp_path, records, drawn="bars|heat|peak")
    drawing = files["plots/synthetic-gpu-tiers-bfloat16-causal-fwd-bars.svg"].decode()
    words = [float(x) for x in re.findall(r"translate\(([-\d.]+) [^>]*>OOM<", drawing)]
    ticks = [float(x) for x in re.findall(r'x="([-\d.]+)"[^>]*>(?:64|128×64|256×64)<', drawing)]
    assert len(words) == 2 and len(ticks) == 3
    assert sorted(words) == pytest.approx([ticks[0], ticks[2]], abs=5)
    assert 0 < min(words) < max(words) < 360


TIERS = [record("attention", "naive", section="tiers", queries=size, keys=64) for size in (64, 128)]
UNSUPPORTED = {"impl": "flex", "outcome": "unsupported", "reason": "no", "time_s": None}
DRAWN = {  # {law: (records, a plot of a forward in bfloat16 with a causal mask, lines that it has)}
    # The first of matplotlib's default colours is #1f77b4.
    "a row without a bar has its colour in the legend": (
        [*TIERS, *(case | UNSUPPORTED | {"id": f"{case['id']}-"} for case in TIERS)],
        "tiers-{}-bars",
        f">naive<\n>flex<\n{rows_of('attention')['flex']['color']}\n{NOT}#1f77b4",
    ),
    "a heat map keeps rows without any value": (
        [
            record("attention", impl, queries=size, keys=size, outcome=outcome)
            for impl, outcome in (("naive", "ok"), ("sdpa_flash", "ok"), ("sdpa_cudnn", "unsupported"))
            for size in (512, 1024)
        ],
        "default-{}-heat",
        f">sdpa_cudnn<\n{TWICE}>n/a<",
    ),
    # The larger of two values is twice, or 256 times, the smaller one.
    **{
        f"a range of 1 to {times} is drawn {way}": (
            [
                record("attention", "naive", queries=512 * at, keys=512 * at, peak_bytes=size * 2**20)
                for at, size in values
            ],
            "default-{}-peak",
            f"{start}>0</text>",
        )
        for times, way, values, start in (
            (2, "from zero", ((1, 2), (2, 4)), ""),
            (256, "by powers", ((1, 256), (2, 65536)), NOT),
        )
    },
}


@pytest.mark.parametrize("law", DRAWN)
def test_a_plot_shows_what_became_of_its_cases(law: str, tmp_path: Path) -> None:
    records, plot, lines = DRAWN[law]
    name = f"plots/synthetic-gpu-{plot.format('bfloat16-causal-fwd')}.svg"
    hold_shown(report(tmp_path, records, drawn="bars|heat|peak"), {}, {name: lines})


@pytest.mark.parametrize(
    ("places", "scale", "ticks"), [(range(1, 15), "linear", 5), ((1, 2, 4, 8, 16, 32, 64), "log", 7)]
)
def test_an_axis_of_numbers_is_linear_or_logarithmic_and_has_few_ticks(
    places: Sequence[int], scale: str, ticks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record("collectives", "all_reduce", megabytes=place, bytes=place * 10**6) for place in places]
    (machine,) = read([save(tmp_path / "r.json", records)])
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(
        plots, "drawn", lambda _, axes, *__: seen.append((axes.get_xscale(), len(axes.xaxis.get_majorticklocs())))
    )
    plots.lines(view_of(machine, "collectives").styled("impl"), "time_s", "megabytes")
    assert seen == [(scale, ticks)]
