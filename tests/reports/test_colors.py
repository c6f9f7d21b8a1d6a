"""Rows, the implementations of a table, have colours that everybody can tell apart, also without red, green or blue.

A failed test names the two rows whose colours are too near.
"""

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest

from lmsys.attention import ATTENTION
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry, Traits
from lmsys.reports.plots import DARK, INK, LIFT
from lmsys.reports.words import PALETTE, lighter, styles_of

# {kind of vision: matrix from linear RGB to linear RGB as it is seen}.
# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency", 2009, table 1, severity 1.0.
SEEN = {
    "all colours": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1.0, 1.08883]  # D65
LEAST = 18.0  # least distance in CIELAB (1976); a distance of 2.3 can just be seen
LEAST_CONTRAST = 3.0  # WCAG 2.1, 1.4.11
LEAST_ON_DARK = LEAST / 2  # on dark paper colours are lighter, and so nearer to each other
DARKEST, LIGHTEST = 5.0, 80.0  # lightness on white paper


def lab(color: str, kind: str) -> np.ndarray:
    """CIELAB coordinates of an sRGB colour as somebody sees it."""
    srgb = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(SEEN[kind] @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def stated(rows: Mapping[str, Entry]) -> dict[str, str]:
    """{row: colour} of the rows that state one; the report chooses the others."""
    return {name: color for name, row in rows.items() if (color := str(Traits.of(row).color))}


def test_the_distance_is_that_of_the_standard() -> None:
    """Red has the coordinates of the sRGB tables. Two colours that rows once had are too near without green."""
    assert lab("#ff0000", "all colours") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert np.linalg.norm(lab("#dc2626", "no green") - lab("#a16207", "no green")) < LEAST  # colours of earlier rows


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("table", ["attention", "strategies", "palette"])
def test_colors_of_rows_differ(table: str, kind: str) -> None:
    rows = {"attention": ATTENTION, "strategies": STRATEGIES}.get(table, {})
    colors = stated(rows) or {color: color for color in PALETTE}
    seen = {name: lab(color, kind) for name, color in colors.items()}
    for (row, a), (other, b) in combinations(seen.items(), 2):
        assert np.linalg.norm(a - b) >= LEAST, f"{row} and {other}: {colors[row]}, {colors[other]}"
    assert all(DARKEST <= color_in_lab[0] <= LIGHTEST for color_in_lab in seen.values())


@pytest.mark.parametrize("kind", SEEN)
def test_colors_of_rows_differ_on_dark_paper_too(kind: str) -> None:
    for rows in (ATTENTION, STRATEGIES):
        seen = {name: lab(on_dark(color), kind) for name, color in stated(rows).items()}
        assert all(np.linalg.norm(seen[row] - seen[other]) >= LEAST_ON_DARK for row, other in combinations(seen, 2))
        assert all(color_in_lab[0] >= lab(DARK["#ffffff"], kind)[0] + LEAST for color_in_lab in seen.values())
    assert lab(DARK[INK], kind)[0] > 80


def on_dark(color: str) -> str:
    """The colour that replaces this one on dark paper."""
    return DARK.get(color) or lighter(color, LIFT)


def test_rows_stand_out_from_dark_paper() -> None:
    """The contrast is at least what WCAG 2.1 demands of graphics."""
    paper = luminance(DARK["#ffffff"])
    for color in {*stated(ATTENTION).values(), *stated(STRATEGIES).values(), *PALETTE}:
        assert (luminance(on_dark(color)) + 0.05) / (paper + 0.05) >= LEAST_CONTRAST, color


def luminance(color: str) -> float:
    """Relative luminance (Y of XYZ), from CIELAB's lightness."""
    return ((lab(color, "all colours")[0] + 16) / 116) ** 3  # no colour here is so dark that it is linear


@pytest.mark.parametrize("table", [ATTENTION, STRATEGIES], ids=["attention", "strategies"])
def test_a_row_without_a_colour_gets_one_that_no_other_has(table: Mapping[str, Entry]) -> None:
    """As a kernel of a user's file, which states none."""
    rows = {name: {"color": Traits.of(row).color} for name, row in table.items()} | {"mine": {}}
    styles = styles_of([{"impl": name} for name in rows], "impl", "impl", "impl", rows)
    assert styles["mine"].color not in {styles[name].color for name in rows.keys() - {"mine"}}
