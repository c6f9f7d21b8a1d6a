"""`lmsys verify RESULT.json ... [--benchmarks FOLDER] ...`: recomputes what result files say, on any machine.

The command checks the seal (a hash) of the file and of every record; the statistics of samples; every field that is a
function of others; work and rates from shapes; and whether the file's machine can be so fast. A record holds parts of
the results of some timed calls: for these calls the command draws the inputs again, and compares the parts with the
*oracle*, a reference of higher precision. The benchmarks' own code, from each FOLDER (default: benchmarks and dev),
makes this comparison, so the command verifies benchmarks of your own, too.

A time is *not proved* if its benchmark is not known here, or if its record has no seal, holds fewer checked calls than
its benchmark keeps, holds one call twice, or lacks parts of a call. *Not recomputed* is no fault: a sentence says what
was left out, such as a head that is too large or a row that is not known here. Exit code 1: something is wrong or not
proved; 2: bad usage; 130: interrupted (Ctrl-C). Progress in a long file is printed to stderr.

Whoever has this code can forge a result that agrees with itself: see NO_FILE_PROVES. `lmsys verify` runs `main`, and
`lmsys.leaderboard` calls `verify`. A new check of every record belongs in `_of_record`; one that only a benchmark can
make belongs in that benchmark's `repeat`.
"""

import importlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lmsys import commands
from lmsys.bench import Benchmark, fields, results
from lmsys.bench.record import load_file, older_file_seal, others_seal, seal, summarize, today
from lmsys.measure.machine import Limits
from lmsys.values import sentences_of, shortly

_ROOT = Path() if any(Path("benchmarks").glob("bench_*.py")) else commands.FOLDER
FOLDERS = _ROOT / "benchmarks", _ROOT / "dev"  # in the current folder if it has benchmarks, else in lmsys's checkout
NOT_RECOMPUTED = "not recomputed: "  # begins a sentence on what cannot be recomputed, which is no fault
NO_SEAL = f"{NOT_RECOMPUTED}the file has no seal, so nothing shows a changed machine or a record left out"
NOT_PROVED = "not proved: "  # begins a fault for want of proof; "timed call N: " may stand before it
NO_FILE_PROVES = (
    "No file proves how long a call took, nor facts of the machine and of the run that no rate depends on, such as its"
    " name, clocks and temperatures: a seal shows only that they were not changed without sealing them again."
)
TOLD_S = 5.0  # seconds between two lines of progress


@dataclass
class Recomputed:
    """How much of a file was recomputed.

    records   the number of records in the file
    calls     the number of timed calls whose results were compared again, without any fault or omission
    elements  the number of elements that were compared, also those of calls with faults
    left_out  sentences on what was not recomputed, such as NO_SEAL, each with how often it came up
    """

    records: int = 0
    calls: int = 0
    elements: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code."""
    parser = commands.parser("verify")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument(
        "--benchmarks",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="where they are; may be given several times (default: benchmarks and dev, here or in lmsys's checkout)",
    )
    options = parser.parse_args(arguments)
    try:
        benchmarks = benchmarks_in(*options.benchmarks or FOLDERS)
        wrong = [
            _tell(path, *verify(path, benchmarks, partial(print, file=sys.stderr, flush=True)))
            for path in options.results
        ]
        print(NO_FILE_PROVES)
    except ValueError as error:
        return commands.refused(parser.prog, error)
    return 1 if any(wrong) else 0


def _tell(path: Path, recomputed: Recomputed, faults: Sequence[str]) -> int:
    """Prints a file's faults and how much was recomputed. Returns the number of things wrong with it or not proved."""
    for sentence in faults:
        print(f"{path}: {sentence}")
    for sentence, times in recomputed.left_out.items():
        print(f"{path}: {times} {'time' if times == 1 else 'times'} {sentence}")
    unproved = sum(NOT_PROVED in sentence for sentence in faults)
    count = len(faults) - unproved
    wrong = {0: "nothing is wrong", 1: "1 thing is wrong"}.get(count, f"{count} things are wrong")
    print(
        f"{path}: {recomputed.records} records, {recomputed.calls} timed calls judged again by"
        f" {recomputed.elements:,} elements, {wrong}" + (f", {unproved} not proved" if unproved else ""),
        flush=True,
    )
    return len(faults)


def benchmarks_in(*folders: Path) -> dict[str, Benchmark]:
    """The benchmarks by name that the folders' bench_*.py files hold; none where there is no such folder."""
    paths = [path for folder in folders for path in sorted(folder.glob("bench_*.py"))]
    return {name: benchmark for path in paths for name, benchmark in benchmarks_of(path).items()}


def benchmarks_of(path: Path) -> dict[str, Benchmark]:
    """The benchmarks of a file by name."""
    classes = [getattr(value, "benchmark", None) for value in vars(_module(path)).values()]
    return {cls.name: cls() for cls in classes if isinstance(cls, type) and issubclass(cls, Benchmark)}


def _module(path: Path) -> ModuleType:
    """The module of a file, imported as pytest would: as part of its folder if that is a package, else by itself."""
    path, in_package = path.resolve(), (path.parent / "__init__.py").is_file()
    root = path.parent.parent if in_package else path.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"{path.parent.name}.{path.stem}" if in_package else path.stem)


def verify(
    path: Path, benchmarks: Mapping[str, Benchmark], say: Callable[[str], None] = lambda _: None
) -> tuple[Recomputed, list[str]]:
    """(how much was recomputed, sentences on what is wrong with the file or not proved).

    ValueError where the file is no result. `say` is called every TOLD_S seconds with a line of progress.
    """
    file = load_file(path)
    content, faults = file["lmsys"], list(_of_entries(file))
    records = content["records"]
    recomputed, began = Recomputed(len(records)), time.monotonic()
    last_line = began
    for number, record in enumerate(records):
        if (now := time.monotonic()) - last_line >= TOLD_S:
            last_line, to_do = now, len(records) - number
            # By the seconds taken and the numbers of records; {}: there are no times of an earlier run.
            left = results.time_left({"done": now - began} if number else {}, {"done": number, "to do": to_do}, {})
            say(f"{path}: {number:,} of {len(records):,} records{left}")
        faults += [
            (record["id"], fault)
            for fault in _of_any_record(record, benchmarks.get(record["benchmark"]), content["machine"], recomputed)
        ]
    faults += [("the file", fault) for fault in _of_seal(file)]
    # The test is on the fault alone, before an id is put in front: a file could choose an id that passes the test.
    recomputed.left_out.update(fault for _, fault in faults if fault.startswith(NOT_RECOMPUTED))
    return recomputed, [f"{where}: {fault}" for where, fault in faults if not fault.startswith(NOT_RECOMPUTED)]


def _of_seal(file: fields.Record) -> list[str]:
    """[the first sentence that is true of the file's seal], or [] where the seal shows that nothing was changed."""
    content = file["lmsys"]
    sealed, has_others = content.get("seal"), content.get("others") == others_seal(file)
    sentences = sentences_of(
        ("seal" not in content, NO_SEAL),
        (
            sealed == older_file_seal(content),
            f"{NOT_RECOMPUTED}the file's seal is one of lmsys 0.1, which does not cover fields, layouts, rows and"
            " pytest-benchmark's part",
        ),
        (
            sealed != seal(content),
            "its seal is not that of its content: something was changed, added or left out",
        ),
        (
            not has_others and file.get("benchmarks"),
            "pytest-benchmark's part is not the one that was sealed",
        ),
        (not has_others, f"{NOT_RECOMPUTED}the file is kept without pytest-benchmark's entries"),
    )
    return list(sentences)[:1]


def _of_entries(file: fields.Record) -> Iterator[tuple[str, str]]:
    """Yields (id, fault): two records with one id, or an entry of pytest-benchmark that fits no record."""
    ids = Counter((record["benchmark"], record["id"]) for record in file["lmsys"]["records"])
    yield from ((id, f"there are {count} such records") for (_, id), count in ids.items() if count > 1)
    records = {(record["benchmark"], record["id"]): record for record in file["lmsys"]["records"]}
    for entry in file.get("benchmarks", []):
        info = entry["extra_info"]
        if "benchmark" not in info:
            continue  # of a test that is no benchmark of ours
        if (record := records.get((info["benchmark"], info.get("id")))) is None:
            yield str(info.get("id")), "pytest-benchmark has it, and no record"
        else:
            yield from ((record["id"], fault) for fault in _differences(info, record, "pytest-benchmark"))
            if entry["stats"].get("data", record.get("samples_s")) != record.get("samples_s"):
                yield record["id"], "pytest-benchmark has other samples"


def _of_any_record(
    record: fields.Record, benchmark: Benchmark | None, machine: fields.Record, recomputed: Recomputed
) -> Iterator[str]:
    """Yields what `_of_record` yields. An exception, which a forged or damaged record may cause, becomes a fault."""
    try:
        yield from _of_record(record, benchmark, machine, recomputed)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        yield f"it cannot be recomputed: {type(error).__name__}: {error}"


def _of_record(
    record: fields.Record, benchmark: Benchmark | None, machine: fields.Record, recomputed: Recomputed
) -> Iterator[str]:
    """Yields what is wrong with a record, not proved or not recomputed; counts its calls into `recomputed`."""
    samples, ratio = record.get("samples_s"), record.get("error_ratio") or 0.0
    yield from sentences_of(
        ("seal" not in record, f"{NOT_PROVED}it has no seal, so nothing shows what was changed in it"),
        ("seal" in record and record["seal"] != seal(record), "its seal is not that of its content"),
        (not samples and record.get("time_s") is not None, "it has a time and no samples"),
        (record["outcome"] == "ok" and ratio > 1, f"it is ok, with an error of {ratio:.3g} times what is allowed"),
    )
    yield from _differences(summarize(samples) if samples else {}, record, "its samples")
    record = today(record)  # a row of an earlier commit gets the name that benchmarks know
    if benchmark is None:
        # How many checked calls prove a time is known to its benchmark alone.
        lacks = NOT_PROVED if samples else NOT_RECOMPUTED
        yield f"{lacks}there is no benchmark {record['benchmark']!r} here: name its folder by --benchmarks"
        return
    yield from _of_benchmark(record, benchmark, machine)
    calls = record.get("proof", {}).get("calls", ())
    if samples and record["outcome"] == "ok":
        proved = min(len({int(call[name]) for call in calls}) for name in ("call", "draw"))
        if proved < (least := min(benchmark.num_proofs, len(samples))):
            yield f"{NOT_PROVED}it holds {proved} checked calls of {len(samples)}, where a run keeps {least}"
    # A benchmark that does not override `repeat` has no results of timed calls in its records.
    if samples and type(benchmark).repeat is Benchmark.repeat:
        yield f"{NOT_RECOMPUTED}{benchmark.name}: a record keeps no results of timed calls"
    for call in calls:
        sentences = list(_of_call(record, benchmark, call, recomputed))
        yield from sentences
        recomputed.calls += type(benchmark).repeat is not Benchmark.repeat and not sentences


def _of_benchmark(record: fields.Record, benchmark: Benchmark, machine: fields.Record) -> Iterator[str]:
    """Yields faults in the record's derived fields, id, work and rates, and a time too short for that machine."""
    declared = fields.declared(fields.COMMON, benchmark.fields).values()
    # Fields with `of` are functions of other fields.
    derived = {known.name: known.value(record) for known in declared if known.of is not None}
    yield from _differences(derived, record, "its other fields")
    if (case := benchmark.case_of(record)) is None:
        yield f"{NOT_RECOMPUTED}{benchmark.name}: a record does not say all of its case, so not its work and rates"
        return
    unknown = f"{NOT_RECOMPUTED}{benchmark.name}: a record's row is not known here, so not its label, nor whose it is"
    yield from sentences_of(
        (benchmark.tables and not case.entry.target, unknown),  # `case_of` makes an entry without target of such a row
        (case.id != record["id"], f"its axes are those of {case.id}"),
    )
    rates = {name: value for name, value in benchmark.metrics(case, record, machine).items() if name in record}
    yield from _differences(rates, record, "its shapes and its time")
    limits, work = machine.get("limits"), benchmark.least_work(case)
    if limits and work and record.get("time_s"):
        least_s = Limits(limits["flops_per_s"], limits["bytes_per_s"]).least_s(*work)
        if record["time_s"] < least_s:
            yield f"it took {record['time_s']:.3g} s, which on that machine takes at least {least_s:.3g}"


def _of_call(record: fields.Record, benchmark: Benchmark, call: fields.Record, recomputed: Recomputed) -> Iterator[str]:
    """Yields what is wrong with a timed call, or was not recomputed; adds its compared elements to `recomputed`."""
    where, ratios = f"timed call {call['call']}", call["error_ratios"]
    rounds, of_record = record.get("rounds", 0), record.get("error_ratio")
    is_right = ratios and all(ratio <= 1 for ratio in ratios.values())
    yield from sentences_of(
        (call["call"] not in range(rounds), f"{where} is none of its {rounds} samples"),
        (not is_right, f"{where} was wrong: {ratios}"),
        (
            is_right and max(ratios.values()) > (of_record or 0.0),
            f"{where} has an error ratio above the record's {of_record}",
        ),
    )
    try:
        for answer in benchmark.repeat(record, call):
            if isinstance(answer, int):
                recomputed.elements += answer  # a number of elements; a sentence is a fault or says what was left out
            else:
                yield answer if answer.startswith(NOT_RECOMPUTED) else f"{where}: {answer}"
    except (KeyError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        yield f"{where}: its evidence cannot be read: {type(error).__name__}: {error}"


def _differences(right: Mapping[str, Any], recorded: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yields a sentence for each field of `right` that `recorded` has with another value.

    source  what `right` was computed from, as the sentence names it
    """
    for name, value in right.items():
        if name in recorded and not _same(value, recorded[name]):
            yield f"{name} is {shortly(recorded[name])}; by {source} it is {shortly(value)}"


def _same(first: Any, second: Any) -> bool:
    """True if two values of a field are equal, numbers up to rounding."""
    if isinstance(first, float | int) and isinstance(second, float | int) and not isinstance(first, bool):
        try:
            # Python computes the same from the same numbers, or nearly.
            return math.isclose(first, second, rel_tol=1e-9)
        except OverflowError:  # an int beyond every float
            pass
    return bool(first == second)


if __name__ == "__main__":
    sys.exit(main())
