"""`python -m reports [RESULT.json ...] [-o DIR]`: without files it reports results/*.json.gz into reports/site."""

import sys
from pathlib import Path

from lmsys.reports.__main__ import main

HERE = Path(__file__).parent

if __name__ == "__main__":
    results = sorted((HERE / "results").glob("*.json.gz"))
    sys.exit(main(results=results, output=HERE / "site", program="python -m reports"))
