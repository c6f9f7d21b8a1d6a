"""Mixed precision: what rounding does to a long sum, and which dtype autocast gives each tensor."""

from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports.tables import Block, Chapter, Table, listing, pivot
from lmsys.reports.views import View

DTYPES = {name: name for name in ("float32", "float16", "bfloat16")}  # in reading order


def chapters(view: View) -> list[Chapter]:
    view = replace(view.read_as(impl=DTYPES), styles={}, stem=f"{view.stem}-precision").ordered("impl")
    return [Chapter("Mixed precision", [Block("", [_sums(view), _tensors(view)])])]


def _sums(view: View) -> Table | None:
    """Rows: the dtypes of a running sum and of its addends; columns: what came out, and the error."""
    view = view.only(lambda case: case["sums"])
    if not view.cases:
        return None
    addend, times = view.cases[0]["addend"], view.cases[0]["times"]
    own = view.unfolded("sums", Field("accumulator", label="sum"), Field("addend"), Field("result"), Field("error"))
    keys = ("accumulator", "addend", "result", "error")
    own = replace(own, cases=[one.cases[0] for one in own.groups(*keys).values()]).with_fields(
        Field("sum", label="result", of=lambda case: f"{case['result']:.5f}"),
        Field("off", label="error", of=lambda case: f"{case['error']:+.1e}"),
    )
    about = (
        f"The running sum and the addend, by dtype; the sum is {addend * times:g} without rounding. What the addend "
        "lost when it was rounded no accumulator brings back; a sum that is itself rounded after each step loses far "
        "more"
    )
    return listing(own, keys[:2], ("sum", "off"), "accumulation", f"{addend:g} added {times:,} times", about, data=keys)


def _tensors(view: View) -> Table | None:
    """Rows: tensors of a training step; columns: the dtype that autocast gives them, for each dtype asked of it."""
    own = view.unfolded("tensors", Field("name", label="tensor"), Field("dtype", label="Dtypes under autocast"))
    about = "Tensors of one training step of a model of one block, and the dtype that each has under autocast"
    return pivot(
        own.labelled(impl="autocast to"), "dtype", ["name"], word="autocast", about=about, data=("name", "dtype")
    )
