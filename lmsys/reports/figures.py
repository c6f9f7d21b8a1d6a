"""Functions that the templates of the page call: FILTERS by name, and `Figures` for what one page shows.

`page.html` hands a `Figures` to the templates, which draw blocks, tables, plots and runs. The functions return plain
texts; the templates escape them. A new function is used in a template once FILTERS has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from lmsys.bench.fields import Record
from lmsys.reports import cells, load, tables, words
from lmsys.reports.items import Block, Plot, Table

BRIEF = 80  # characters: a caption that was shown before is repeated if it has at most so many, else only linked


@dataclass(frozen=True)
class Figures:
    """The figures of a page so far. `single_file`: plots stand in the page, and it links to no other file."""

    single_file: bool
    _shown: set[str] = field(default_factory=set, init=False)  # anchors
    # By the first line of a caption, the anchor of the first figure that has it.
    _explained: dict[str, str] = field(default_factory=dict, init=False)

    def is_new(self, anchor: str) -> bool:
        """True at the first call with this anchor: a page may show a figure twice, but an id only once."""
        is_new = anchor not in self._shown
        self._shown.add(anchor)
        return is_new

    def caption(self, caption: str, anchor: str) -> tuple[str, str, str]:
        """(the first line of a caption, the anchor to link to in place of a long line shown before or "", the rest)."""
        about, _, rest = caption.partition("\n")
        first = self._explained.setdefault(about, anchor)
        return about, first if first != anchor and len(about) > BRIEF else "", rest

    def parts(self, block: Block) -> list[list[Table | Plot]]:
        """[the first table and plot of a block, all others]: without sentences that stand further up in the block."""
        known = set[str]()
        first = tables_of(block.lead)[:1] + plots_of(block.lead)[:1]
        more = [item for item in block.items if item not in first]
        return [[_without_repeats(item, block.title, known) for item in items] for items in (first, more)]


def tables_of(items: Iterable[Table | Plot | None]) -> list[Any]:
    """The tables among the items."""
    return [item for item in items if isinstance(item, Table)]


def plots_of(items: Iterable[Table | Plot | None]) -> list[Any]:
    """The plots among the items."""
    return [item for item in items if isinstance(item, Plot)]


def brief(item: Table | Plot) -> str:
    """The figure's title up to the first " · ": the rest repeats the heading above."""
    return item.title.partition(" · ")[0]


def names(items: Iterable[Table | Plot]) -> str:
    """The subjects of these figures, each once, joined by commas."""
    return ", ".join(dict.fromkeys([words.inside_a_sentence(brief(item).partition(",")[0]) for item in items]))


def _without_repeats(item: Table | Plot, heading: str, known: set[str]) -> Table | Plot:
    """The figure without sentences that its block's heading or a figure above it has; adds its own to `known`."""
    about, *rest = item.caption.splitlines() or [""]
    lines = [line for line in rest if line not in known]
    if isinstance(item, Table):
        notes = [note for note in item.notes if note not in known or not note.startswith(tables.LEFT_OUT)]
        item = replace(item, notes=notes)
        known.update(notes)
    elif about in known:
        about = ""
    known.update(lines, [about])
    short = [words.sentence(line.removeprefix(heading).removeprefix("; ").removeprefix(".")) for line in lines]
    return replace(item, caption="\n".join([about, " ".join(filter(None, short))]))


def marks(table: Table) -> list[str]:
    """The footnotes of a table: the notes that begin with a number, as a superscript."""
    return [note for note in table.notes if note[0].isdigit()]


def lines(table: Table) -> Iterator[tuple[Sequence[str], str, list[tuple[str, str, str, str]]]]:
    """For each line of a table: the texts of its keys, the details that all its cells share, and its other cells.

    A cell is (head of its column, text, kind, details of its own). The kind, a CSS class, is "best", "wrong" or "".
    """
    for row, texts in enumerate(table.rows):
        details = [table.details.get((row, column), "") for column in range(len(texts))]
        several = [text.split(cells.DETAILS) for text in details if text]
        common = [fact for fact in several[0] if all(fact in facts for facts in several)] if len(several) > 1 else []
        shown = []
        for column in range(table.keys, len(texts)):
            text, known = texts[column], details[column].split(cells.DETAILS)
            kind = "wrong" if words.OUTCOMES["wrong"] in text else "best" * ((row, column) in table.best)
            own = cells.DETAILS.join(fact for fact in known if fact not in common)
            shown.append((table.columns[column], text, kind, own))
        yield texts[: table.keys], cells.DETAILS.join(common), shown


# Facts of a run, by their names in result files, that are shown as they are.
FACTS = "date commit command sweep seed driver cuda torch triton python platform".split()

SETTINGS = {  # settings of a machine, as a run notes them: label and unit
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
    "persistence": ("persistence mode", ""),
    "power_limit_w": ("power limit", "W"),
    "power_sensor": ("sensor of power", ""),
    "max_sm_mhz": ("highest SM clock", "MHz"),
    "max_memory_mhz": ("highest memory clock", "MHz"),
    "governor": ("CPU frequency governor", ""),
}


def runs_of(machine: load.Machine) -> tuple[str, str]:
    """A sentence on the number, dates, commits and cases of the runs; and their command, "" where they have several."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {''.join(commits)}"
    command, *others = {str(run.get("command") or "") for run in machine.runs}
    return f"{count}, {words.span(days)}, {several}: {len(machine.records):,} cases. ", "" if others else command


def facts_of(runs: Sequence[Record]) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
    """The facts that all these runs have in common, by name; and for each other fact its text in each run."""
    facts = list(map(_of_run, runs))
    common, differing = dict[str, str](), dict[str, list[str]]()
    for name in dict.fromkeys(chain.from_iterable(facts)):
        texts = [run.get(name, "–") for run in facts]
        if len(set(texts)) > 1:
            differing[name] = texts
        else:
            common[name] = texts[0]
    return common, differing


def _of_run(run: Record) -> dict[str, str]:
    """The known facts of a run, as texts, by name."""
    ceilings, sustained, settings = (run.get(name) or {} for name in ("ceilings", "sustained", "settings"))
    short, memory, copy = load.matmul_rates(run), run.get("memory_bytes"), ceilings.get("copy_bytes_per_s")
    commit = run.get("commit")
    facts = {name: run.get(name) for name in FACTS} | {
        "commit": commit and commit + " with local changes" * bool(run.get("dirty")),
        "memory": memory and f"{memory / 2**30:.1f} GiB",
        **{f"matmul {dtype}": f"{words.number(rate / 1e12)} TFLOP/s" for dtype, rate in sorted(short.items())},
        "copy": copy and f"{words.number(copy / 1e9)} GB/s",
    }
    state, reasons = cells.state_of(sustained), sustained.get("clock_reasons")
    for dtype, rate in (sustained.get("matmul_flops_per_s") or {}).items():
        share = short.get(dtype) and f"{rate / short[dtype]:.0%} of the short one"
        parts = [f"{words.number(rate / 1e12)} TFLOP/s", share] + state + [reasons and f"clock held by {reasons}"]
        facts[f"matmul {dtype}, sustained"] = ", ".join(filter(None, parts))
    facts |= {
        label: f"{words.exact(settings[name])} {unit}".strip()
        for name, (label, unit) in SETTINGS.items()
        if settings.get(name) not in (None, "")
    }
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}


FILTERS = {  # of Jinja: `value | name` in a template
    "brief": brief,
    "facts": facts_of,
    "file_name": load.file_name,
    "lines": lines,
    "marks": marks,
    "names": names,
    "plots": plots_of,
    "runs": runs_of,
    "sentence": words.sentence,
    "tables": tables_of,
}
