"""The axes of attention cases in words: which vary, which are held, and how each is written."""

import pandas as pd

from lmsys.reports.metrics import span

SHAPE = ["batch", "heads", "kv_heads", "queries", "keys", "head_dim"]
CASE = [*SHAPE, "causal"]


def columns(frame: pd.DataFrame) -> dict[str, str]:
    """The axes that vary freely among these cases, with their column heads, in sort order; the length when none does.

    Batch or heads that only balance another axis (B·S or H·D is one number, which `held` states) are left out.
    """
    heads = frame[["heads", "kv_heads"]].drop_duplicates()
    lengths = frame[["queries", "keys"]].drop_duplicates()
    found = {"mask": "mask"} if frame["causal"].nunique() > 1 else {}
    if frame["head_dim"].nunique() > 1:
        found["D"] = "D"
    if len(heads) > 1 and not (_balanced(frame, "heads", "head_dim") and _balanced(frame, "kv_heads", "head_dim")):
        found["H"] = "H" if (heads["heads"] == heads["kv_heads"]).all() else "H:Hkv"
    if len(lengths) > 1:
        found["S"] = "S" if (lengths["queries"] == lengths["keys"]).all() else "Q×K"
    if frame["batch"].nunique() > 1 and not _balanced(frame, "batch", "queries"):
        found["B"] = "B"
    return found or {"S": "S"}


def _balanced(frame: pd.DataFrame, count: str, size: str) -> bool:
    """Whether `count` varies with `size` so that their product does not."""
    return len(set(frame[count])) > 1 and len(set(frame[count] * frame[size])) == 1


def axis(name: str, shape: tuple[int, ...]) -> str:
    """One axis of a shape (in the order of CASE, or of SHAPE) as its column shows it."""
    batch, heads, kv_heads, queries, keys, head_dim, *mask = shape
    if name == "mask":
        return "causal" if mask[0] else "not causal"
    if name == "H":
        return f"{heads}" if heads == kv_heads else f"{heads}:{kv_heads}"
    if name == "S":
        return f"{queries:,}" if queries == keys else f"{queries:,}×{keys:,}"
    return f"{batch if name == 'B' else head_dim:,}"


def held(frame: pd.DataFrame) -> str:
    """The axes that are constant among these cases, and the range of the others."""
    grouped = "" if (frame["heads"] == frame["kv_heads"]).all() else f" (key/value {span(frame['kv_heads'])})"
    square = (frame["queries"] == frame["keys"]).all()
    length = f"S {span(frame['queries'])}" if square else f"Q {span(frame['queries'])}, K {span(frame['keys'])}"
    length += f" (B·S = {tokens(frame)})" if tokens(frame) else ""
    dim = f"D {span(frame['head_dim'])}"
    if _balanced(frame, "heads", "head_dim"):
        dim += f" (H·D = {span(frame['heads'] * frame['head_dim'])})"
    return f"batch {span(frame['batch'])}, heads {span(frame['heads'])}{grouped}, {length}, {dim}"


def tokens(frame: pd.DataFrame) -> str:
    """The B·S of these cases when they hold it by varying both, else ""."""
    return span(frame["batch"] * frame["queries"]) if _balanced(frame, "batch", "queries") else ""
