"""Gives result files the layouts that benchmarks declare today: `python -m dev.layouts reports/results/*.json.gz`.

All else in a file keeps its bytes, so that seals, which are of the machine and of the records, stay valid.
"""

import argparse
import gzip
import json
import re
from pathlib import Path

from lmsys.files import read_text
from lmsys.verify import benchmarks_in

KEY = '"layouts":'


def with_layouts(text: str) -> str:
    """The text of a result file with its benchmarks' layouts of today; the text of any other JSON file as it is."""
    layouts = {
        name: benchmark.layout
        for name, benchmark in benchmarks_in(Path("benchmarks"), Path("dev")).items()
        if benchmark.layout
    }
    content = json.loads(text)
    if "lmsys" not in content:
        return text
    known = {name: layouts[name] for name in content["lmsys"]["fields"] if name in layouts}
    place = text.index('"fields"', [match.end() for match in re.finditer(r'"lmsys": ?{', text)][-1])
    if "layouts" in content["lmsys"]:
        place = text.rindex(KEY, 0, place)
        _, end = json.JSONDecoder().raw_decode(text, place + len(KEY))
        text = text[:place] + text[text.index(",", end) + 1 :]
    made = f"{text[:place]}{KEY}{json.dumps(known, separators=(',', ':'))},{text[place:]}"
    assert json.loads(made) == content | {"lmsys": content["lmsys"] | {"layouts": known}}
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dev.layouts", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    for path in parser.parse_args().results:
        text = with_layouts(read_text(path)).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
