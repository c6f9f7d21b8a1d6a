"""`lmsys verify RESULT.json ... [--benchmarks FOLDER] ...`: recomputes what result files say, on any machine.

For every record: its seal; the statistics of its samples; every field that is a function of others; work and rates
from its shapes; whether anything can be that fast there; and of the timed calls that were checked, the inputs, the
oracle and the errors of the rows that it holds. The benchmarks' own code, from each FOLDER (default: benchmarks and
dev), does that, so the same works for your own. What could not be recomputed is told. A time is not proved where its
record holds fewer checked calls than its benchmark keeps, or parts of them. Exit code 1 where something is wrong or not
proved, 2 for bad usage, 130 where it was interrupted (Ctrl-C). A file that takes long says on stderr how far it is.

Whoever has this code can forge a result that agrees with itself. What nobody can see from a file alone: samples that
are all scaled alike, with everything that follows from them; facts of a machine that no rate depends on.
"""

import importlib
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lmsys import commands
from lmsys.bench import fields, results
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.record import file_seal, load, seal, summarize, today
from lmsys.measure.machine import Limits
from lmsys.values import shortly

RTOL = 1e-9  # of what pure Python makes of the same numbers
FOLDERS = Path("benchmarks"), Path("dev")  # of this repository
NOT_RECOMPUTED = "not recomputed: "
NOT_PROVED = "not proved: "
TOLD_S = 5.0  # from one line on how far it is to the next
INTERRUPTED = 128 + signal.SIGINT
Say = Callable[[str], None]


@dataclass
class Recomputed:
    """How much of a file was looked at: its records, and timed calls whose results were judged again."""

    records: int = 0
    calls: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = commands.parser("verify")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument(
        "--benchmarks",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="where they are; may be given several times (default: benchmarks and dev)",
    )
    options = parser.parse_args(arguments)
    try:
        benchmarks = benchmarks_in(*options.benchmarks or FOLDERS)
        wrong = [_tell(path, *verify(path, benchmarks, _say)) for path in options.results]
    except ValueError as error:
        print(f"lmsys verify: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lmsys verify: interrupted; what stands above is all that was verified", file=sys.stderr)
        return INTERRUPTED
    return 1 if any(wrong) else 0


def _tell(path: Path, done: Recomputed, sentences: Sequence[str]) -> int:
    """Prints what was found in a file; the number of things that are wrong with it or not proved."""
    untold = [one for one in sentences if NOT_RECOMPUTED not in one]
    for sentence in untold:
        print(f"{path}: {sentence}")
    for sentence, times in Counter(one.partition(": ")[2] for one in sentences if NOT_RECOMPUTED in one).items():
        print(f"{path}: {times} {'time' if times == 1 else 'times'} {sentence}")
    unproved = sum(NOT_PROVED in one for one in untold)
    wrong = _wrong(len(untold) - unproved) + (f", {unproved} not proved" if unproved else "")
    print(f"{path}: {done.records} records, {done.calls} timed calls judged again, {wrong}", flush=True)
    return len(untold)


def _wrong(count: int) -> str:
    return f"{count} things are wrong" if count > 1 else "1 thing is wrong" if count else "nothing is wrong"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def benchmarks_in(*folders: Path) -> dict[str, Benchmark]:
    """The benchmarks by name that the folders' bench_*.py files hold; none where there is no such folder."""
    paths = [path for folder in folders for path in sorted(folder.glob("bench_*.py"))]
    return {name: benchmark for path in paths for name, benchmark in benchmarks_of(path).items()}


def benchmarks_of(path: Path) -> dict[str, Benchmark]:
    """The benchmarks of a file by name."""
    classes = [getattr(value, "benchmark", None) for value in vars(_module(path)).values()]
    return {cls.name: cls() for cls in classes if isinstance(cls, type) and issubclass(cls, Benchmark)}


def _module(path: Path) -> ModuleType:
    """The module of a file, as pytest would import it: of the package that the folder is, else by its own name."""
    path, in_package = path.resolve(), (path.parent / "__init__.py").is_file()
    root = path.parent.parent if in_package else path.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"{path.parent.name}.{path.stem}" if in_package else path.stem)


def verify(path: Path, benchmarks: Mapping[str, Benchmark], say: Say = lambda _: None) -> tuple[Recomputed, list[str]]:
    """How much was recomputed, and sentences on what is wrong with the file, not proved or not recomputed.

    say  is called every few seconds with a line on how far it is. ValueError where the file is no result.
    """
    content = load(path)
    records = content["records"]
    sentences = list(_of_file(path, content))
    recomputed, began = Recomputed(len(records)), time.monotonic()
    told = began
    for done, record in enumerate(records):
        if (now := time.monotonic()) - told >= TOLD_S:
            told = now
            say(
                f"{path}: {done:,} of {len(records):,} records"
                + results.time_left(
                    {"done": now - began} if done else {}, {"done": done, "to do": len(records) - done}, {}
                )
            )
        faults = _of_any_record(record, benchmarks.get(record["benchmark"]), content["machine"], recomputed)
        sentences += [f"{record['id']}: {fault}" for fault in faults]
    return recomputed, sentences


def _of_file(path: Path, content: fields.Record) -> Iterator[str]:
    if "seal" not in content:
        yield f"the file: {NOT_RECOMPUTED}it has no seal"
    elif content["seal"] != file_seal(content):
        yield "its seal is not that of its machine and its records: something was changed, added or left out"
    ids = Counter((one["benchmark"], one["id"]) for one in content["records"])
    yield from (f"{id}: there are {count} such records" for (_, id), count in ids.items() if count > 1)
    records = {(one["benchmark"], one["id"]): one for one in content["records"]}
    entries = {  # but for those of tests that are no benchmarks of ours
        (info["benchmark"], info.get("id")): one
        for one in results.entries_of(path)
        if "benchmark" in (info := one["extra_info"])
    }
    for key, entry in entries.items():
        if key not in records:
            yield f"{key[1]}: pytest-benchmark has it, and no record"
            continue
        yield from (f"{key[1]}: {one}" for one in _differences(entry["extra_info"], records[key], "pytest-benchmark"))
        if entry["stats"].get("data", records[key].get("samples_s")) != records[key].get("samples_s"):
            yield f"{key[1]}: pytest-benchmark has other samples"
    if not entries or not records:
        return
    sampled = {key: one.get("comparison") for key, one in records.items() if one.get("samples_s")}
    last = content["records"][-1].get("comparison")  # an interrupt leaves all of it without entries, or nothing
    cut_short = last and not any(key in entries for key, comparison in sampled.items() if comparison == last)
    for key, comparison in sampled.items():
        if key not in entries:
            cut = f"{NOT_RECOMPUTED}an interrupt left pytest-benchmark without the case"
            yield f"{key[1]}: {cut if cut_short and comparison == last else 'pytest-benchmark has no such case'}"


def _of_any_record(
    record: fields.Record, benchmark: Benchmark | None, machine: fields.Record, recomputed: Recomputed
) -> Iterator[str]:
    """As `_of_record`, also of one whose values are of other kinds than those that a run writes."""
    try:
        yield from _of_record(record, benchmark, machine, recomputed)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        yield f"it cannot be recomputed: {type(error).__name__}: {error}"


def _of_record(
    record: fields.Record, benchmark: Benchmark | None, machine: fields.Record, recomputed: Recomputed
) -> Iterator[str]:
    if "seal" not in record:
        yield f"{NOT_RECOMPUTED}a record has no seal"
    elif record["seal"] != seal(record):
        yield "its seal is not that of its content"
    if samples := record.get("samples_s"):
        yield from _differences(summarize(samples), record, "its samples")
    elif record.get("time_s") is not None:
        yield "it has a time and no samples"
    if (ratio := record.get("error_ratio")) is not None and record["outcome"] == "ok" and ratio > 1:
        yield f"it is ok, with an error of {ratio:.3g} times what is allowed"
    record = today(record)
    if benchmark is None:
        yield f"{NOT_RECOMPUTED}there is no benchmark {record['benchmark']!r} here"
        return
    yield from _of_benchmark(record, benchmark, machine)
    calls = record.get("proof", {}).get("calls", ())
    if samples and record["outcome"] == "ok":
        proved = len({call["call"] for call in calls})
        if proved < (least := min(benchmark.num_proofs, len(samples))):
            yield f"{NOT_PROVED}it holds {proved} checked calls of {len(samples)}, where a run keeps {least}"
    if calls and type(benchmark).repeat is Benchmark.repeat:
        yield f"{NOT_RECOMPUTED}{benchmark.name}: a record keeps no results of the calls that were checked"
    for call in calls:
        sentences = list(_of_call(record, benchmark, call))
        yield from sentences
        recomputed.calls += type(benchmark).repeat is not Benchmark.repeat and not sentences


def _of_benchmark(record: fields.Record, benchmark: Benchmark, machine: fields.Record) -> Iterator[str]:
    """Its derived fields, its id, its work and rates, and whether anything could be that fast."""
    known = fields.declared(fields.COMMON, benchmark.fields).values()
    derived = {field.name: field.value(record) for field in known if field.of is not None}
    yield from _differences(derived, record, "its other fields")
    case = benchmark.case_of(record)
    if case is None:
        yield f"{NOT_RECOMPUTED}{benchmark.name}: a record does not say all of its case, so not its work and rates"
        return
    if case.id != record["id"]:
        yield f"its axes are those of {case.id}"
    rates = {name: value for name, value in benchmark.metrics(case, record, machine).items() if name in record}
    yield from _differences(rates, record, "its shapes and its time")
    limits, work = machine.get("limits"), benchmark.least_work(case)
    if limits and work and record.get("time_s"):
        least_s = Limits(limits["flops_per_s"], limits["bytes_per_s"]).least_s(*work)
        if record["time_s"] < least_s:
            yield f"it took {record['time_s']:.3g} s, which on that machine takes at least {least_s:.3g}"


def _of_call(record: fields.Record, benchmark: Benchmark, call: fields.Record) -> Iterator[str]:
    where, ratios = f"timed call {call['call']}", call["error_ratios"]
    if not 0 <= call["call"] < record.get("rounds", 0):
        yield f"{where} is none of its {record.get('rounds', 0)} samples"
    if not ratios or not all(ratio <= 1 for ratio in ratios.values()):
        yield f"{where} was wrong: {ratios}"
    elif max(ratios.values()) > (record.get("error_ratio") or 0.0):
        yield f"{where} has an error ratio above the record's {record.get('error_ratio')}"
    try:
        yield from (
            one if one.startswith(NOT_RECOMPUTED) else f"{where}: {one}" for one in benchmark.repeat(record, call)
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        yield f"{where}: its evidence cannot be read: {type(error).__name__}: {error}"


def _differences(right: Mapping[str, Any], found: Mapping[str, Any], source: str) -> Iterator[str]:
    for name, value in right.items():
        if name in found and not _same(value, found[name]):
            yield f"{name} is {shortly(found[name])}; by {source} it is {shortly(value)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int) and not isinstance(one, bool):
        try:
            return math.isclose(one, other, rel_tol=RTOL)
        except OverflowError:  # an int beyond every float
            pass
    return bool(one == other)


if __name__ == "__main__":
    sys.exit(main())
