"""Gives result files the layouts that benchmarks declare today: `python -m dev.layouts reports/results/*.json.gz`.

A layout is plain data, by which the report draws tables and plots of a benchmark (`lmsys.reports.layout`). Maintainers
run this from the root of the repository after they have changed a layout; files are rewritten in place. Records and
facts about machines do not change, so their seals (hashes that `lmsys verify` checks) stay valid. The seal of a whole
file covers the layouts, except in files of lmsys 0.1; where it does, it is computed again.
"""

import argparse
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmsys.bench.record import seal
from lmsys.files import read_text, replacing
from lmsys.verify import benchmarks_in


def with_layouts(text: str, layouts: Mapping[str, Any]) -> str:
    """The text of a result file, with the given layouts in place of its own. Text of any other JSON is unchanged.

    layouts  {name of a benchmark: layout}; the file gets those of the benchmarks that it has
    """
    content = json.loads(text)
    ours = content.get("lmsys")
    if ours is None:
        return text
    ours["layouts"] = {name: layouts[name] for name in ours["fields"] if name in layouts}
    if "others" in ours:  # files of lmsys 0.1 lack this key
        ours["seal"] = seal(ours)
    return json.dumps(content, separators=(",", ":"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dev.layouts", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    known = benchmarks_in(Path("benchmarks"), Path("dev"))
    declared = {name: benchmark.layout for name, benchmark in known.items() if benchmark.layout}
    for path in parser.parse_args().results:
        text = with_layouts(read_text(path), declared).encode()
        with replacing(path) as file:
            file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
