"""Tables of whole trainings: attention rows by strategies, and every figure of every run."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import GIB
from lmsys.reports.tables import Footnotes, Table, number
from lmsys.reports.training.cases import BASE, PEAK, RATE, SINGLE, SPEED, TIME, Slice

KEYS = ["attention", "strategy", "row", "num_ranks", "outcome"]


def rates(part: Slice) -> Table:
    return _pivot(part, RATE.stem, RATE.head, f"{RATE.title}.", ["tokens_per_s", "time_s"], _plain(RATE.field))


def times(part: Slice) -> Table:
    def shown(case: Any, notes: Footnotes) -> str:
        spread = f" ± {number(case.std_s)}" if case.std_s == case.std_s else ""
        return tables.cell(case, case.mean_s, notes) + spread

    text = f"{TIME.title}: mean ± standard deviation over the epochs behind the first."
    return _pivot(part, TIME.stem, TIME.head, text, ["mean_s", "std_s", "rounds"], shown)


def peaks(part: Slice) -> Table:
    return _pivot(part, PEAK.stem, PEAK.head, f"{PEAK.title}.", [PEAK.field], _plain(PEAK.field, PEAK.scale))


def losses(part: Slice) -> Table:
    """The loss on held-out text at the end, and how far the curve went from the reference's at most."""

    def shown(case: Any, notes: Footnotes) -> str:
        ended = tables.cell(case, case.valid_loss, notes) if case.outcome != "ok" else f"{case.valid_loss:.4f}"
        return ended + (f" ({case.curve_difference:.1e})" if case.curve_difference == case.curve_difference else "")

    first = part.frame.iloc[0]
    text = (
        f"Loss after the last epoch on {first.val_tokens:,} held-out tokens, nats; in brackets how far the loss of a "
        "step was at most from that of naive attention in one process, over the first 100 steps"
    )
    budget = part.frame["curve_budget"].max()
    text += f" (right: {budget:g} or less)." if budget == budget else "."
    return _pivot(part, "loss", "Loss", text, ["valid_loss", "loss", "curve_difference", "norm_difference"], shown)


def speedups(part: Slice) -> Table | None:
    if part.frame["speedup"].isna().all():
        return None
    title = f"Speed, × of {BASE}"
    return _pivot(part, SPEED.stem, title, f"{SPEED.title}.", ["speedup", "time_s"], _plain("speedup"))


def _plain(field: str, scale: float = 1.0) -> Callable[[Any, Footnotes], str]:
    return lambda case, notes: tables.cell(case, getattr(case, field) * scale, notes)


def _pivot(
    part: Slice, stem: str, title: str, text: str, fields: list[str], shown: Callable[[Any, Footnotes], str]
) -> Table:
    """Rows: attention rows; columns: strategies."""
    frame, notes = part.frame, Footnotes()
    cases = tables.by_key(frame, ["attention", "row"])
    rows = []
    for attention, label in tables.distinct(frame, ["attention", "attention_label"]):
        found = [cases.get((attention, row)) for row in part.strategies]
        rows.append([label, *(tables.NOT_RUN if case is None else shown(case, notes) for case in found)])
    return Table(
        name=f"{part.stem}-{stem}",
        title=f"{title} · {part.heading}",
        caption=part.caption(text, clocked=stem in (RATE.stem, TIME.stem, SPEED.stem)),
        columns=["attention", *part.strategies],
        rows=rows,
        frame=frame[[*KEYS, *fields]],
        notes=[*notes.notes(), *tables.legend(rows)],
    )


COLUMNS = {  # column: field, factor
    "tokens/s": ("tokens_per_s", 1.0),
    f"speed, × of {BASE}": ("speedup", 1.0),
    "scaling, %": ("efficiency", 100.0),
    "first step, s": ("first_step_s", 1.0),
    "peak, GiB": ("peak_bytes", 1 / GIB),
    "last loss": ("loss", 1.0),
    "held-out loss": ("valid_loss", 1.0),
    "norm, % off": ("norm_difference", 100.0),
}


def runs(part: Slice) -> Table:
    """Rows: every cell; columns: all its figures."""
    notes, rows = Footnotes(), []
    for case in part.frame.itertuples(index=False):
        time = tables.cell(case, case.mean_s, notes)
        values = [getattr(case, field) * factor for field, factor in COLUMNS.values()]
        ranks = "" if pd.isna(case.world_size) else f"{case.world_size:.0f}"
        rows.append(
            [
                case.attention_label,
                f"{case.row}: {case.label}",
                ranks,
                time,
                *("" if pd.isna(v) else number(v) for v in values),
            ]
        )
    return Table(
        name=f"{part.stem}-runs",
        title=f"Every run · {part.heading}",
        caption=part.caption(
            f"Mean time of an epoch and what else a run has shown. Scaling: tokens/s of a rank over those of {SINGLE}. "
            "First step: it compiles and tunes, in a run of its own. Norm: of the first gradient, and the reference's.",
            clocked=True,
        ),
        columns=["attention", "strategy", "ranks", "epoch, s", *COLUMNS],
        rows=rows,
        frame=part.frame[[*KEYS, "world_size", "time_s", "mean_s", "std_s", *(field for field, _ in COLUMNS.values())]],
        notes=notes.notes(),
        keys=2,
    )
