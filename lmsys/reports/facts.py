"""The facts of a machine and its runs, as the page shows them."""

from collections.abc import Sequence

from lmsys.bench.fields import Record
from lmsys.reports.cells import STATE
from lmsys.reports.load import Machine, matmul_rates
from lmsys.reports.tags import Html, joined, tag
from lmsys.reports.words import exact, number, span

FACTS = "date commit command sweep seed driver cuda torch triton python platform".split()

SETTINGS = {  # of a machine: label and unit
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
    "persistence": ("persistence mode", ""),
    "power_limit_w": ("power limit", "W"),
    "power_sensor": ("sensor of power", ""),
    "max_sm_mhz": ("highest SM clock", "MHz"),
    "max_memory_mhz": ("highest memory clock", "MHz"),
    "governor": ("CPU frequency governor", ""),
}


def runs_of(machine: Machine) -> Html:
    """The runs in a line: how many, when, of which commits, and the command where it is one."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {[*commits][0]}"
    said = f"{count}, {span(days)}, {several}: {len(machine.records):,} cases. "
    commands = {str(run.get("command") or "") for run in machine.runs}
    command = commands.pop() if len(commands) == 1 else ""
    return tag("p", said, *([tag("code", command)] if command else []))


def facts_of(runs: Sequence[Record]) -> Html:
    """The runs behind a machine's figures: what all have in common, then a line for each with what they have not."""
    told = [_of_run(run) for run in runs]
    names = dict.fromkeys(name for facts in told for name in facts)
    rows = {name: [facts.get(name, "–") for facts in told] for name in names}
    common = [
        tag("tr", tag("th", name), tag("td", values[0])) for name, values in rows.items() if len(set(values)) == 1
    ]
    own = {name: values for name, values in rows.items() if len(set(values)) > 1}
    head = tag("thead", tag("tr", *(tag("th", name) for name in own)))
    lines = [tag("tr", *(tag("td", value) for value in line)) for line in zip(*own.values(), strict=True)]
    found = [common, [head, tag("tbody", *lines)]] if own else [common]
    return joined(tag("div", tag("table", *rows, class_="facts"), class_="scroll") for rows in found)


def _of_run(run: Record) -> dict[str, str]:
    copy, memory = (run.get("ceilings") or {}).get("copy_bytes_per_s"), run.get("memory_bytes")
    facts = {name: str(run[name]) for name in FACTS if run.get(name) not in (None, "")}
    facts |= {"commit": f"{facts['commit']} with local changes"} if run.get("dirty") and "commit" in facts else {}
    facts |= {"memory": f"{memory / 2**30:.1f} GiB"} if memory else {}
    facts |= {f"matmul {dtype}": f"{number(rate / 1e12)} TFLOP/s" for dtype, rate in sorted(matmul_rates(run).items())}
    facts |= {"copy": f"{number(copy / 1e9)} GB/s"} if copy else {}
    return facts | _sustained(run) | _settings(run.get("settings") or {})


def _sustained(run: Record) -> dict[str, str]:
    """The matmul that the machine keeps up, beside the one that it reaches for a moment."""
    found, short = run.get("sustained") or {}, matmul_rates(run)
    facts = {}
    for dtype, rate in (found.get("matmul_flops_per_s") or {}).items():
        told = [f"{number(rate / 1e12)} TFLOP/s"]
        told += [f"{rate / short[dtype]:.0%} of the short one"] if short.get(dtype) else []
        told += [f"{label} {exact(round(found[name]))} {unit}" for name, label, unit in STATE if found.get(name)]
        facts[f"matmul {dtype}, sustained"] = ", ".join(told)
    return facts


def _settings(found: Record) -> dict[str, str]:
    known = {name: words for name, words in SETTINGS.items() if found.get(name) is not None}
    return {label: f"{_told(found[name])} {unit}".strip() for name, (label, unit) in known.items()}


def _told(value: object) -> str:
    return exact(value) if isinstance(value, int | float) else str(value)
