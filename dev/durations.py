"""Writes the seconds that groups of cases took in a run of the default sweep: `python -m dev.durations out/bench.json`.

A first run on another machine learns from their ratios to its own how long the rest will take. Make the result by
`python3 -m nox -s bench` on a machine without other work, where compilers have kept nothing from earlier runs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from lmsys.bench.record import load

FOLDER = Path(__file__).parents[1] / "benchmarks"


def durations_of(machine: dict[str, Any]) -> dict[str, float]:
    """Seconds of each group, to three digits, of a result's facts. ValueError where they do not say them."""
    if machine["sweep"] != "default" or not machine.get("took_s"):
        raise ValueError("it must be of the default sweep, timed to its end: it does not say how long groups took")
    return {name: float(f"{seconds:.3g}") for name, seconds in machine["took_s"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    result = parser.parse_args().result
    try:
        machine = load(result)["machine"]
        text = json.dumps(durations_of(machine), indent=1)
    except ValueError as error:
        parser.error(f"{result}: {error}")
    path = FOLDER / f"durations_{machine['device']}.json"
    path.write_text(text + "\n")
    print(path)


if __name__ == "__main__":
    main()
