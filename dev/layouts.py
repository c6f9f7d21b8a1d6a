"""Gives result files the layouts that benchmarks declare today: `python -m dev.layouts reports/results/*.json.gz`.

A layout is the plain data by which the report draws a benchmark (`lmsys.reports.layout`). Files are rewritten in place;
run this from the repository's root. Records and machine facts do not change, so their seals (hashes, which
`lmsys verify` checks) stay valid. The seal of a whole file is computed anew if it covers the layouts, as all do but
those of lmsys 0.1.
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
    """The text of a result file with the layouts of those benchmarks that it has. Text of other files is unchanged."""
    content = json.loads(text)
    ours = content.get("lmsys")
    if ours is None:
        return text
    ours["layouts"] = {name: layouts[name] for name in ours["fields"] if name in layouts}
    if "others" in ours:
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
