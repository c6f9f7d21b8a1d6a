"""Writes the seconds that groups of cases take in the default sweep: `python -m dev.durations out/bench.json ...`.

It writes benchmarks/durations_DEVICE.json, DEVICE being cpu or cuda; `benchmarks/sweeps.py` reads the file of the CPU.
A group is the cases of a benchmark that are sampled together. A first run on another machine compares the seconds of
the groups that it has finished with those in the file, and so predicts how long the other groups will take.

Make the results by `python3 -m nox -s bench`, on a machine without other work and with empty caches of compilers. For
several results the geometric mean of each group is written, since runs differ in what they have to compile. The groups
are those of the last result.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lmsys.bench.record import load

FOLDER = Path(__file__).parents[1] / "benchmarks"


def durations_of(machine: dict[str, Any]) -> dict[str, float]:
    """{name of a group: seconds}, from the part "machine" of a result. ValueError if the result does not have them."""
    if machine["sweep"] != "default" or not machine.get("took_s"):
        raise ValueError("it must be of the default sweep, timed to its end: it does not say how long groups took")
    return dict(machine["took_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    took = defaultdict[str, list[float]](list)
    for path in parser.parse_args().results:
        try:
            machine = load(path)["machine"]
            for name, seconds in durations_of(machine).items():
                took[name].append(seconds)
        except ValueError as error:
            parser.error(f"{path}: {error}")
    file = FOLDER / f"durations_{machine['device']}.json"
    middle = {name: float(f"{geometric_mean(took[name]):.3g}") for name in machine["took_s"]}
    file.write_text(json.dumps(middle, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
