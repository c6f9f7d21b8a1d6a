"""The harness: a pytest plugin that verifies rows, times them side by side and writes a result file. Imports no torch.

A *row* is an implementation under test. Files of benchmarks import the names below from here; a name that they should
all be able to import is added to the imports and to `__all__`. To write a benchmark, begin with benchmark.py. plugin.py
connects the harness to pytest, results.py does the work of a run, and runner.py and trial.py measure.
"""

from lmsys.bench.benchmark import Benchmark, OnRanks, Settings, bench
from lmsys.bench.case import Candidate, Case, Measurement
from lmsys.bench.fields import Axis, Field, Grid, Record, Sweep, one_of, positive, yes_no
from lmsys.measure.step import Failed, Failure, Kept, Step
from lmsys.registry import Entry, Table, Traits

__all__ = [
    "Axis",
    "Benchmark",
    "Candidate",
    "Case",
    "Entry",
    "Failed",
    "Failure",
    "Field",
    "Grid",
    "Kept",
    "Measurement",
    "OnRanks",
    "Record",
    "Settings",
    "Step",
    "Sweep",
    "Table",
    "Traits",
    "bench",
    "one_of",
    "positive",
    "yes_no",
]
