"""`python -m reports` is `lmsys report` for the committed runs, and takes the same options.

By default it reads reports/results/*.json.gz, and writes the report into reports/site.
"""

import sys
from pathlib import Path

from lmsys.reports.__main__ import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    results = sorted((HERE / "results").glob("*.json.gz"))
    sys.exit(main(results=results, output=HERE / "site", program="python -m reports"))
