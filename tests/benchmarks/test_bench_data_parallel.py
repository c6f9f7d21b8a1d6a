"""benchmarks/bench_data_parallel.py: its cases, its records, a user's own strategies, and torchrun.

OWN is a user's file with strategies that are right, wrong or fail; OWN_NAMES lists them. A row is a strategy with its
options, and a pass is a number of timed training steps of a row. Ranks are two processes, or `Answers`, which returns
made-up results.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.bench_data_parallel import PASSES, DataParallel
from benchmarks.data_parallel.cases import Inspection, ParallelCase, Row, Steps, communication, memory, pairs
from benchmarks.data_parallel.check import gate, small_training
from benchmarks.data_parallel.passes import Pass, holds, judge_pass
from benchmarks.data_parallel.rank import Taken, inspect, take_pass
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Failed, Grid, Settings, Sweep
from lmsys.bench.ranks import Ranks, entropy
from lmsys.bench.results import Session
from lmsys.cost.operations import block_matrices, model_parameters
from lmsys.measure.profile import Communication
from lmsys.model import TransformerLM, fused
from lmsys.parallel import STRATEGIES as TABLE
from lmsys.parallel.adapter import Adapter
from lmsys.parallel.baselines import NoSync
from lmsys.parallel.group import WorkerError
from lmsys.parallel.traits import SURROUNDS_BLOCKS
from tests.support import harness, processes

OWN = '''
import torch
import torch.distributed as dist
from torch import nn


class Container(nn.Module):
    """As CS336 asks for it: no process group, no optimizer, no state of its own."""

    def __init__(self, module, bucket_size_mb=25.0):
        super().__init__()
        self.module = module
        for x in module.parameters():
            dist.broadcast(x.data, 0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() * self.factor

    factor = 1.0
    outside_bytes = 2**40  # memory that torch's allocator does not see


class divided(Container):
    """States its traits as class attributes, as the table does for its rows."""

    zero_stage = 2
    takes_bucket_mb = True
    why_not_graphed = "its author has not tried"
    outside_bytes = 0

    def __init__(self, module, bucket_mb=25.0):
        super().__init__(module)
        self.bucket_mb = bucket_mb


class slightly_off(Container):
    factor = 1.01


class summed(Container):
    def __init__(self, module):
        super().__init__(module)
        for x in module.buffers():
            dist.broadcast(x.data, 0)
        self.factor = 1 / dist.get_world_size()


class forgets_unused(Container):
    """Right in a language model, which uses all of its parameters."""

    def finish_gradient_synchronization(self):
        unused = [p for p in self.module.parameters() if p.grad is None]
        for p in unused:
            p.grad = torch.zeros_like(p)
        super().finish_gradient_synchronization()
        for p in unused:
            p.grad = None


class broken(Container):
    def forward(self, *inputs):
        if dist.get_rank() == 1:
            raise TypeError("no such layer")
        return self.module(*inputs)

'''
OWN_NAMES = "Container", "divided", "slightly_off", "summed", "forgets_unused", "broken"
TINY = {"size": ("tiny",), "context": (16,), "precision": ("fp32",), "batch": (2,), "world_size": (2,)}
Records = dict[str, dict[str, Any]]


def cases_of(**values: Any) -> list[ParallelCase]:
    return harness.cases_of(DataParallel(), **(TINY | values))


def test_the_command_line_names_rows_and_their_variants() -> None:
    sweep = Sweep(grids={"data_parallel": (Grid("s", size=("tiny",), context=(16,), batch=(4,)),)})
    options = {"--strategy": "none,bucketed,naive", "--world-size": "1,2", "--bucket-mb": "1,auto"}
    options |= {"--comm-dtype": "float32,bfloat16", "--sharded-optimizer": "yes,no", "--precision": "fp32"}
    ids = Session(Settings(device="cpu"), sweep, texts=options).add(DataParallel)
    case_ids = [case_id.removeprefix("s-tiny-S16B4-fp32-") for case_id in ids]
    buckets = [f"W2-bucketed-{size}{dtype}" for size in ("1MiB", "auto") for dtype in ("", "-bfloat16")]
    assert set(case_ids) == {"W1-none", "W2-none", "W2-naive", "W2-naive-sharded", *buckets} | {
        f"{case_id}-sharded" for case_id in buckets
    }


def test_each_optimizer_makes_a_row() -> None:
    adamw, muon = cases_of(strategy=("naive",), optimizer=("adamw", "muon"))
    assert (adamw.impl, muon.impl, muon.axes["optimizer"]) == ("naive", "naive-muon", "muon")
    assert adamw.group == muon.group and DataParallel().why_not(muon) is None
    assert DataParallel().why_not(replace(muon, entry=TABLE["torch_fsdp2"])) is None
    assert replace(adamw, checkpoint="whole").same_bits(adamw) and replace(muon, checkpoint="whole").same_bits(muon)
    assert not muon.same_bits(adamw) and not muon.same_bits(replace(muon, entry=TABLE["flat"]))
    steps = [Steps(case, case.impl, {"weight": 0.5}) for case in (adamw, muon, replace(adamw, entry=TABLE["flat"]))]
    assert [(first.case.impl, second.case.impl) for first, second in pairs(steps)] == [("naive", "flat")]


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"batch": 8}, {"context": 8}, {"size": "small"}])
def test_only_rows_that_learn_alike_are_compared(change: dict[str, Any]) -> None:
    (case,) = cases_of(strategy=("naive",))
    other = replace(case, **change)
    assert not case.same_bits(other) and not other.same_bits(case)
    versions = [Steps(x, x.impl, {"weight": 0.5}) for x in (case, other)]
    assert len(pairs(versions)) == ("precision" in change)  # precisions are compared by what each may err


def test_muon_keeps_one_moment_less_of_each_matrix() -> None:
    adamw, muon = cases_of(strategy=("naive",), optimizer=("adamw", "muon"))
    hidden = adamw.config.num_layers * block_matrices(adamw.config)
    held = 8 * model_parameters(adamw.config) - 4 * hidden
    seen = replace(ANSWERS[inspect], memory={"optimizer_bytes": held})
    record = memory(Row(muon, [seen]))
    assert record["optimizer_fraction"] == 1 and record["predicted_optimizer_bytes"] == pytest.approx(held)
    assert memory(Row(adamw, [seen]))["predicted_optimizer_bytes"] == 8 * model_parameters(adamw.config)


@pytest.mark.parametrize(("comm_dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_exposed_communication_is_predicted_of_the_bytes_that_are_sent(comm_dtype: str, size: int) -> None:
    """There are 10 buckets, and an all-reduce has a latency of 0.1 ms and a bandwidth of 1 GB/s."""
    case = replace(cases_of(strategy=("bucketed",))[0], comm_dtype=comm_dtype)
    seen = Inspection({}, Communication(1.0, 0.5, []), 1.0, 25.0, 10, True, network=(1e-4, 1e9))
    row = Row(case, [seen], passes=[[1.0]])
    expected_s = 10 * 1e-4 + size * model_parameters(case.config) / (10 * 1e9)
    assert communication(row, [row])["predicted_exposed_s"] == pytest.approx(expected_s)


def test_all_is_the_size_of_a_single_bucket() -> None:
    sized, whole = cases_of(strategy=("bucketed",), world_size=(2,), bucket_mb=(25, "all"))
    assert (sized.impl, whole.impl) == ("bucketed-25MiB", "bucketed-all")
    assert (sized.options, whole.options) == ({"bucket_mb": 25}, {"bucket_mb": None})


def test_rows_that_compile_otherwise_are_measured_apart() -> None:
    cases = cases_of(strategy=("none", "zero1", "fsdp"), compile=("eager", "compiled", "graphed"))
    assert {case.group for case in cases} == {f"s-tiny-S16B2-fp32{how}" for how in ("", "-compiled", "-graphed")}
    assert {case.group for case in cases_of(strategy=("none", "zero1", "fsdp"))} == {"s-tiny-S16B2-fp32"}


@pytest.mark.parametrize(
    ("strategy", "how", "changes", "reason"),
    [
        ("none", "compiled", {"device": "cpu"}, None),
        ("none", "graphed", {"device": "cpu"}, "CUDA graphs need a CUDA device"),
        ("zero1", "graphed", {}, None),
        ("fsdp", "graphed", {}, "--compile compiled runs it"),
        ("torch_fsdp2", "graphed", {}, "--compile compiled runs it"),
        ("naive", "fused", {"device": "cpu"}, "CUDA graphs need a CUDA device"),
        ("naive", "fused", {}, None),
        ("zero1", "fused", {}, SURROUNDS_BLOCKS),
        ("naive", "fused", {"checkpoint": "whole"}, "fused blocks keep all that their backward reads"),
        ("none", "eager", {"device": "cpu", "precision": "tf32"}, "TF32 is an arithmetic of CUDA devices"),
        ("none", "eager", {"precision": "tf32"}, None),
    ],
)
def test_rows_that_cannot_run_in_a_way_say_why(
    strategy: str, how: str, changes: dict[str, Any], reason: str | None
) -> None:
    """Without `changes` a row is for a GPU."""
    (case,) = cases_of(strategy=(strategy,), compile=(how,))
    case = replace(case, **({"device": "cuda"} | changes))
    if how != "fused" and (missing := why_no_compiler(case.device)):
        pytest.skip(missing)
    found = DataParallel().why_not(case)
    assert found is None if reason is None else reason in str(found)


def test_without_triton_blocks_cannot_be_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "HAS_TRITON", False)
    (case,) = cases_of(strategy=("naive",), compile=("fused",))
    reason = DataParallel().why_not(replace(case, device="cuda"))
    assert reason == "fused blocks are kernels in Triton: pip install triton"


def _graphs(cases: list[ParallelCase]) -> list[int]:
    """On a rank: the number of compiled graphs after a pass of each case. They are traced, but no code is generated."""
    numbers = []
    counters.clear()
    traced = partialmethod(TransformerLM.compile_blocks, backend="aot_eager")
    with patch.object(TransformerLM, "compile_blocks", traced):
        for case in cases:
            take_pass(case, Pass(0, 0, 0, 1))
            numbers.append(counters["stats"]["unique_graphs"])
    return numbers


@pytest.mark.long
@pytest.mark.skipif(reason := why_no_compiler("cpu"), reason=str(reason))
def test_all_rows_of_a_group_share_compiled_blocks(two_ranks: Ranks) -> None:
    """The first row compiles one graph, and no later row or pass compiles another."""
    cases = cases_of(strategy=("torch_ddp_tuned", "bucketed", "zero1", "fsdp"), compile=("compiled",))
    cases = [replace(case, asked_bucket_mb=None if case.impl == "fsdp" else 0.01) for case in cases]
    first, *others = two_ranks.run(2, "gloo", _graphs, [*cases, cases[0]])[0]
    assert first == 1 and others == [1] * len(cases)


def test_classes_that_are_no_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="Identity is no strategy: it has no finish_gradient_synchronization"):
        Adapter(nn.Identity, nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="NoSync does not take bucket_mb"):
        Adapter(NoSync, nn.Linear(2, 2), None, bucket_mb=1)


ANSWERS: dict[Any, Any] = {  # of each rank, by what it is asked
    entropy: 1,
    gate: {"weight": 0.5},
    inspect: Inspection({"optimizer_bytes": 8}, Communication(0.0, None, []), 0.1, None, None, True),
    holds: True,
    judge_pass: {"weight": 0.25},
}


class Answers(Ranks):
    """Ranks that return ANSWERS without running anything. The row "flat" is unsupported."""

    def __init__(self) -> None:
        self.passes: list[str] = []  # the rows that trained, in order

    def run(self, world_size: int, backend: str, function: Any, *args: Any) -> list[Any]:
        if function is small_training:
            raise WorkerError(0, "error", "these ranks train nothing")
        if function is inspect and args[0].impl == "flat":
            raise Failed("unsupported", "no such thing")
        if function in ANSWERS:
            return [ANSWERS[function]] * world_size
        assert function is take_pass
        self.passes.append(args[0].impl)
        return [Taken([rank + number / 10 for number in range(10)], [], "model", 0.0) for rank in range(world_size)]


def test_rows_train_in_turns_and_one_that_fails_ends_no_other() -> None:
    ranks, cases = Answers(), cases_of(strategy=("none", "naive", "flat"))
    by_row = harness.records(DataParallel(), cases, ranks=ranks, seconds_per_row=2.0)
    assert ranks.passes == ["none", "naive", "none", "naive"]
    slowest = [1 + number / 10 for number in range(10) for _ in range(2)]
    assert by_row["none"]["samples_s"] == by_row["naive"]["samples_s"] == slowest
    assert by_row["naive"]["exposed_s"] == 0 and by_row["naive"]["unsynchronized_by"] == "none"
    assert "samples_s" not in by_row["flat"] and by_row["flat"]["outcome"] == "unsupported"
    assert Row(cases[0], [], passes=[[1.0, 2.0], [3.0, 4.0]]).samples == [1.0, 3.0, 2.0, 4.0]


class Ended(Answers):
    """Ranks that end when the steps of "naive" are judged. The kept results of other rows' steps are lost with them."""

    def run(self, world_size: int, backend: str, function: Any, *args: Any) -> list[Any]:
        if function is holds:
            return [args[0].impl == "naive"] * world_size
        if function is judge_pass and args[0].impl == "naive":
            raise WorkerError(1, "error", "rank 1 failed in judge_pass: no such judge")
        return super().run(world_size, backend, function, *args)


def test_when_ranks_end_only_the_case_that_they_judged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows, whose results are lost, train and are judged again."""
    monkeypatch.setitem(PASSES, "gloo", 1)
    ranks, cases = Ended(), cases_of(strategy=("naive", "overlapped"))
    naive, overlapped = harness.results(DataParallel(), cases, ranks=ranks, seconds_per_row=2.0)
    assert naive["outcome"] == "error" and "no such judge" in naive["reason"]
    assert ranks.passes == ["naive", "overlapped", "overlapped"]
    assert overlapped["outcome"] == "ok" and overlapped["proof"]["calls"]
    assert overlapped["samples_s"] == [1 + number / 10 for number in range(10)]


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """The records, by row, of one run with some of our strategies and all of the user's."""
    file = tmp_path_factory.mktemp("strategies") / "own.py"
    file.write_text(OWN)
    users_rows = [f"{file}:{name}" for name in OWN_NAMES]
    strategies = ("none", "naive", "bucketed", "zero1", *users_rows)
    cases = cases_of(strategy=strategies, world_size=(1, 2), context=(32,), bucket_mb=(1, 25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PASSES, "gloo", 1)
        cases = [case for case in cases if case.impl != "bucketed-25MiB"]
        return harness.records(DataParallel(), cases, ranks=two_ranks)


@pytest.mark.long
def test_a_run_measures_our_strategies_and_the_users(measured: Records) -> None:
    assert {name for name, record in measured.items() if record["outcome"] == "ok"} == {
        *("none", "naive", "bucketed-1MiB", "zero1", "Container", "divided-1MiB", "divided-25MiB")
    }, [record["reason"] for record in measured.values()]
    assert measured["slightly_off"]["outcome"] == "wrong" and measured["slightly_off"]["error_ratio"] > 1
    assert measured["summed"]["outcome"] == "wrong"
    assert measured["summed"]["reason"].endswith(": gradients are summed over ranks, not averaged")
    assert measured["forgets_unused"]["outcome"] == "wrong"
    assert measured["forgets_unused"]["reason"].startswith(
        "parameters that one rank does not use: the gradients of rare."
    )
    assert measured["broken"]["outcome"] == "error" and "rank 1 failed" in measured["broken"]["reason"]
    assert "TypeError: no such layer" in measured["broken"]["reason"]
    for name in ("naive", "bucketed-1MiB", "zero1", "Container"):
        record = measured[name]
        assert record["error_ratio"] <= 1 and record["rounds"] >= 10 and record["world_size"] == 2
        assert record["tokens_per_s"] == pytest.approx(2 * 2 * 32 / record["time_s"])
        assert record["exposed_s"] == pytest.approx(record["time_s"] - record["unsynchronized_s"])
        assert (
            record["communication_s"] > 0 and 0 <= record["overlap_fraction"] <= 1 and record["scaling_efficiency"] > 0
        )
        assert record["peak_bytes"] >= record["parameters_bytes"] and record["activations_bytes"] > 0
    for name in ("init_bytes", "init_peak_bytes", "before_step_bytes", "peak_bytes"):
        assert measured["Container"][name] > 2**40 > measured["naive"][name]
    assert measured["naive"]["improvement"] == 0 and measured["bucketed-1MiB"]["num_buckets"] > 3
    assert measured["naive"]["unsynchronized_by"] == "no_sync" and measured["zero1"]["unsynchronized_by"] == "none"
    assert measured["zero1"]["optimizer_fraction"] == pytest.approx(0.5, abs=0.02)
    assert measured["zero1"]["held_by"] == {"naive": "bits", "bucketed-1MiB": "bits"} | {
        row: measured[row]["held_by"]["zero1"] for row in ("Container", "divided-1MiB", "divided-25MiB")
    }
    assert measured["naive"]["optimizer_bytes"] == pytest.approx(
        measured["naive"]["predicted_optimizer_bytes"], rel=0.01
    )


@pytest.mark.long
def test_records_have_the_traits_that_a_users_class_states(measured: Records, tmp_path: Path) -> None:
    """Its ZeRO stage predicts its memory, and each bucket size makes a row. No other file needs to be changed."""
    for size in (1, 25):
        record = measured[f"divided-{size}MiB"]
        whole = 4 * record["num_parameters"]
        assert (record["label"], record["asked_bucket_mb"], record["bucket_mb"]) == ("divided", size, size)
        predicted = [record[f"predicted_{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer")]
        assert predicted == [whole, whole / 2, whole]
        assert record["unsynchronized_by"] == "none"  # it has no no_sync()
    assert "predicted_gradients_bytes" not in measured["Container"]  # it states no ZeRO stage
    (tmp_path / "own.py").write_text(OWN)
    (case,) = cases_of(strategy=(f"{tmp_path}/own.py:divided",), compile=("graphed",))
    if not why_no_compiler("cuda"):
        assert DataParallel().why_not(replace(case, device="cuda")) == "its author has not tried"


@pytest.mark.on_request
@pytest.mark.skipif(reason := why_no_compiler("cpu"), reason=str(reason))
def test_compiled_rows_are_checked_and_timed(two_ranks: Ranks) -> None:
    cases = cases_of(strategy=("none", "bucketed", "zero1"), bucket_mb=(1,), compile=("compiled",), context=(32,))
    by_row = harness.records(DataParallel(), cases, ranks=two_ranks)
    assert set(by_row) == {"none", "bucketed-1MiB", "zero1"}
    for record in by_row.values():
        assert (record["outcome"], record["compile"]) == ("ok", "compiled"), record["reason"]
        assert record["comparison"].startswith("s-tiny-S32B2-fp32-compiled ")
    assert by_row["zero1"]["error_ratio"] <= 1 and by_row["zero1"]["unsynchronized_by"] == "none"


@pytest.mark.long
def test_two_rendezvous_agents_are_one_group_and_write_one_result(tmp_path: Path) -> None:
    """torchrun with two nodes, both on this machine: each agent starts one rank of the same benchmark."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    line += [*processes.PYTEST[1:], "benchmarks/bench_data_parallel.py"]
    line += "--sweep smoke --strategy bucketed --benchmark-only".split()
    line += ["--benchmark-max-time", "0.01", "--benchmark-json", str(tmp_path / "out.json")]
    environment = processes.ENVIRONMENT | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    agents = []
    for _ in range(2):
        agents.append(subprocess.Popen(line, cwd=processes.ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    assert [path.name for path in tmp_path.glob("*.json*")] == ["out.json"]
    records = json.loads((tmp_path / "out.json").read_text())["lmsys"]["records"]
    assert {record["impl"]: record["outcome"] for record in records} == {"bucketed-25MiB": "ok"}
    assert all((record["num_nodes"], record["world_size"]) == (2, 2) for record in records)
