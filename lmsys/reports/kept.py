"""Chapters of models tell by these two fields what blocks keep for their backward, and the residual stream."""

from lmsys.bench.fields import Field
from lmsys.reports.views import View

LEVELS = ("none", "matmuls", "attention", "whole")  # of `lmsys.checkpointing`, in its order
KEPT = {"checkpoint": "none", "residual": "wide"}  # the defaults, which also stand for what older files do not say


def with_kept(view: View) -> View:
    """The view with both fields, the defaults first; captions do not tell a field that has the default throughout."""
    view = view.with_fields(
        Field("checkpoint", role="axis", of=lambda case: case.get("checkpoint") or KEPT["checkpoint"]),
        Field("residual", role="axis", of=lambda case: case.get("residual") or KEPT["residual"]),
    )
    for name, plain in KEPT.items():
        first = [value for value in (plain, *LEVELS) if value in view.values(name)]
        view = view.read_as(**{name: {value: value for value in (*first, *view.values(name))}})
        view = view.quiet(name) if view.values(name) == [plain] else view
    return view
