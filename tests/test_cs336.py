"""docs/cs336.md, the page of CS336's problems: what it promises is so.

Its commands select tests, its code runs, its settings are read, and a report of made-up results makes the tables and
plots that it promises. A problem of the handouts that has no row fails. test_docs.py has the laws of every page.
"""

import re
import shlex
from fnmatch import fnmatch

import pytest

from lmsys.training.config import RunConfig
from tests.support.collected import collect, strays
from tests.support.pages import PAGES, blocks, commands, module_of, without
from tests.support.records import built, of_everything, record, save

ROWS = [line for line in PAGES["docs/cs336.md"].splitlines() if line.startswith("| ") and "`" in line]
LINES = [module_of(words) for words in commands("docs/cs336.md")]
COMMANDS = sorted(  # commands of pytest with arguments; without, it is the course's own whole suite
    {shlex.join(without(words, "--benchmark-json")) for module, words in LINES if module == "pytest" and words}
)
FILES = re.compile(r"`((?:tables|plots)/[^`]*)`")
PROBLEMS = {  # of both handouts, in their order
    "benchmarking_script", "nsys_profile", "mixed_precision_accumulation", "benchmarking_mixed_precision",
    "memory_profiling", "gradient_checkpointing", "pytorch_attention", "torch_compile", "flash_forward",
    "flash_backward", "flash_benchmarking", "distributed_communication_single_node", "naive_ddp",
    "naive_ddp_benchmarking", "minimal_ddp_flat_benchmarking", "ddp_overlap_individual_parameters",
    "ddp_overlap_individual_parameters_benchmarking", "ddp_overlap_bucketed", "ddp_bucketed_benchmarking",
    "communication_accounting", "optimizer_state_sharding", "optimizer_state_sharding_accounting", "fsdp",
    "fsdp_accounting", "alternate_ring_all_reduce", "data_parallel_calcs", "fsdp_calcs", "tp_calcs", "fsdp_tp_calcs",
    "leaderboard",
}  # fmt: skip


ON_GPUS_ONLY = "benchmarks/bench_steps.py"  # has models of 8 billion parameters, and on a CPU no cases


def test_every_problem_has_a_row() -> None:
    assert len(PROBLEMS) == 30
    documented = {match[1] for row in ROWS if (match := re.match(r"\| `(\w+)`", row))}
    assert documented >= PROBLEMS


@pytest.fixture(scope="module")
def collected() -> dict[str, list[str]]:
    """The ids of the tests that each command selects, by command."""
    arguments = [shlex.split(command) for command in COMMANDS]
    answers = collect(arguments)
    assert not [answer["said"] for answer in answers if answer["code"] not in (0, 5)]  # 5: no test is left
    return {command: answer["ids"] for command, answer in zip(COMMANDS, answers, strict=True)}


@pytest.mark.long
def test_every_command_runs_something(collected: dict[str, list[str]]) -> None:
    nothing = [command for command, ids in collected.items() if not ids]
    assert len(collected) > 15 and all(command.startswith(ON_GPUS_ONLY) for command in nothing)
    assert not [test_id for command, ids in collected.items() for test_id in strays(shlex.split(command), ids)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a report, without their suffixes and the machine's name.

    Its results are made up: some cases of each section of a benchmark that the page's commands run.
    """
    folder = tmp_path_factory.mktemp("cs336")
    attention = {
        "flash": [("bfloat16", "fwd"), ("float32", "bwd"), ("bfloat16", "fwdbwd")],
        "leaderboard": [("bfloat16", "fwdbwd")],
        "eager_compiled": [("float32", "fwd"), ("float32", "bwd")],
    }
    records = [
        record("attention", impl, section=name, dtype=dtype, direction=direction, causal=name != "eager_compiled")
        for name, slices in attention.items()
        for dtype, direction in slices
        for impl in ("naive", "naive_compiled")
    ]
    ways = [{"precision": "fp32", "compile": "eager"}, {"precision": "fp32", "compile": "compiled"}, {}]
    modes = ("forward", "train_forward", "backward", "optimizer", "step")
    records += [record("model", "auto", section="sizes", mode=mode, **way) for mode in modes for way in ways]
    records.append(record("model", "auto", section="warmup", warmup_steps=0))
    records += [other for other in of_everything() if other["benchmark"] in ("anatomy", "precision")]
    for name in ("sizes", "buckets", "sharded"):
        shared = {"section": name, "size": "xl"}
        records += [record("data_parallel", "none", batch=batch, world_size=1, **shared) for batch in (2, 4)]
        records += [
            record("data_parallel", "bucketed-25MiB", batch=batch, exposed_s=1e-3, **shared) for batch in (2, 4)
        ]
    large = {"size": "8b", "context": 32768, "num_parameters": 10**10, "losses": [12.0, 11.0]}
    records += [record("steps", f"{name}-Ca", checkpoint="attention", **large) for name in ("fsdp", "torch_fsdp2")]
    sent = [(megabytes, megabytes * 10**6) for megabytes in (1, 10)]
    records += [record("collectives", "all_reduce", section="sizes", megabytes=mb, bytes=size) for mb, size in sent]
    made = built(folder / "out", save(folder / "r.json", records))
    return [name.replace("synthetic-gpu-", "").rpartition(".")[0] for name in made]


@pytest.mark.long
def test_the_report_makes_the_files_of_each_row(files: list[str], collected: dict[str, list[str]]) -> None:
    checked = 0
    for row in ROWS:
        for pattern in FILES.findall(row):
            assert any(fnmatch(name, pattern) for name in files), f"no report has {pattern}"
            checked += 1
            for command in re.findall(r"`python -m pytest ([^`]*)`", row):
                ids = [test_id[test_id.index("[") + 1 :] for test_id in collected[command] if "[" in test_id]
                sections = {case_id.partition("-")[0] for case_id in ids}
                if not ids and command.startswith(ON_GPUS_ONLY):
                    continue
                assert any(section in pattern for section in sections), f"{pattern} is not of {sorted(sections)}"
    assert checked > 40


@pytest.mark.parametrize("code", blocks("docs/cs336.md", "python"), ids=["memory", "paper"])
def test_its_code_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = code.replace('"2.7b", 2048, 4', '"tiny", 32, 2').replace("(1, 2, 4, 8)", "(1,)")
    exec(compile(small, "docs/cs336.md", "exec"), {})
    assert capsys.readouterr().out


def test_its_settings_are_read() -> None:
    (settings,) = blocks("docs/cs336.md", "json")
    config = RunConfig.from_json(settings)
    assert config.train.accumulation(world_size=2) == 1 and config.train.strategy == "fsdp"
