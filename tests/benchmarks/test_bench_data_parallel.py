"""The benchmarks of data parallelism and collectives: their cells, their records, a user's own strategy, torchrun."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch._dynamo.utils import counters

from benchmarks import parallel_trial
from benchmarks.axes import parse_parallel_axes
from benchmarks.collectives_trial import cells_of as collective_cells
from benchmarks.parallel_cells import Cell, cells_of
from benchmarks.parallel_profile import merged
from benchmarks.parallel_workbench import Seen, take_pass
from benchmarks.sections import CollectiveSection, ParallelSection
from benchmarks.session import Settings
from benchmarks.sweeps import SWEEPS
from lmsys.attention.compiled import why_no_compiler
from lmsys.parallel import STRATEGIES as TABLE
from lmsys.parallel.adapter import Adapter
from lmsys.parallel.group import WorkerGroup
from lmsys.parallel.none import NoSync
from tests.support import processes

STRATEGIES = '''
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
    outside_bytes = 2**40  # from the beginning


class slightly_off(Container):
    factor = 1.01


class broken(Container):
    def forward(self, *inputs):
        if dist.get_rank() == 1:
            raise TypeError("no such layer")
        return self.module(*inputs)

'''
OTHERS = "attention", "model", "loss", "anatomy", "precision", "tokenizer", "training"


def records(output: Path) -> dict[str, dict[str, Any]]:
    return {one["impl"]: one for one in json.loads(output.read_text())["lmsys"]["records"]}


def test_every_sweep_has_cells_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device in sweep.values():
            ids = [cell.id for part in device.parallels for cell in cells_of(part, {}, "cpu")]
            assert ids and len(set(ids)) == len(ids)
            found = [cell.id for part in device.collectives for cell in collective_cells(part, (), "cpu")]
            assert found and len(set(found)) == len(found)
            assert not any(word in one for one in ids for word in (*OTHERS, "collectives"))
            assert not any(word in one for one in found for word in (*OTHERS, "data_parallel"))


def test_the_command_line_names_rows_and_their_variants() -> None:
    section = ParallelSection("s", ("tiny",), (16,))
    options = {"--strategy": "none,bucketed,naive", "--world-size": "1,2", "--bucket-mb": "1,auto"}
    options |= {"--comm-dtype": "float32,bfloat16", "--sharded-optimizer": "yes,no", "--precision": "fp32"}
    found = [
        cell.id.removeprefix("s-tiny-S16B4-fp32-") for cell in cells_of(section, parse_parallel_axes(options), "cpu")
    ]
    buckets = [f"W2-bucketed-{size}{dtype}" for size in ("1MiB", "auto") for dtype in ("", "-bfloat16")]
    assert set(found) == {"W1-none", "W2-none", "W2-naive", "W2-naive-sharded", *buckets} | {
        f"{one}-sharded" for one in buckets
    }


def test_ways_of_compiling_are_groups_of_their_own() -> None:
    section = ParallelSection("s", ("tiny",), (16,), strategies=("none", "zero1", "fsdp"), world_sizes=(2,))
    axes = parse_parallel_axes({"--compile": "eager,compiled,graphed"})
    assert {cell.group for cell in cells_of(section, axes, "cpu")} == {
        f"s-tiny-S16B4-bf16{how}" for how in ("", "-compiled", "-graphed")
    }
    assert {cell.group for cell in cells_of(section, {}, "cpu")} == {"s-tiny-S16B4-bf16"}


@pytest.mark.skipif(reason := why_no_compiler("cpu"), reason=str(reason))
def test_what_cannot_be_graphed_says_why() -> None:
    section = ParallelSection("s", ("tiny",), (16,), strategies=("none", "zero1", "fsdp"), world_sizes=(2,))
    one, *_ = cells_of(section, {"compiles": ("graphed",)}, "cpu")
    assert one.why_not() == "CUDA graphs are of CUDA devices"
    on_gpu = replace(one, device="cuda")
    found = {name: replace(on_gpu, entry=TABLE[name]).why_not() for name in ("zero1", "fsdp", "torch_fsdp2")}
    if not why_no_compiler("cuda"):
        assert found["zero1"] is None
        assert found["fsdp"] == found["torch_fsdp2"] and "--compile compiled runs it" in found["fsdp"]
    assert replace(one, compile="compiled").why_not() is None


def _graphs(cells: list[Cell]) -> list[int]:
    """On a rank: how many graphs there are after a pass of each cell."""
    found = []
    counters.clear()
    for cell in cells:
        take_pass(cell, 0, 1)
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.skipif(reason := why_no_compiler("cpu"), reason=str(reason))
def test_all_rows_of_a_group_share_compiled_blocks(ranks: WorkerGroup) -> None:
    """One graph, whoever comes first, also within DDP, and in every pass."""
    names = ("torch_ddp_tuned", "bucketed", "zero1", "fsdp")
    section = ParallelSection("s", ("tiny",), (16,), ("fp32",), (2,), (2,), names)
    cells = [replace(cell, bucket_mb=0.01) for cell in cells_of(section, {"compiles": ("compiled",)}, "cpu")]
    cells[-1] = replace(cells[-1], bucket_mb=None)  # fsdp has no buckets
    first, *others = ranks.run(_graphs, [*cells, cells[0]])[0]
    assert first == 1 and others == [1] * len(cells)


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--compile", "jit", "--compile 'jit': must be one of eager, compiled, graphed"),
        ("--bucket-mb", "0", "--bucket-mb '0': must be a positive whole number"),
        ("--world-size", "two", "--world-size 'two': must be a positive whole number"),
        ("--comm-dtype", "bf16", "--comm-dtype 'bf16': must be one of float32, float16, bfloat16"),
        ("--sharded-optimizer", "maybe", "--sharded-optimizer 'maybe': must be one of yes, no"),
    ],
)
def test_a_bad_value_is_refused(option: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_parallel_axes({option: text})


def test_an_unknown_strategy_is_refused() -> None:
    ended = processes.run("data_parallel", "--sweep", "smoke", "--strategy", "buckted", "--benchmark-only")
    assert ended.returncode != 0 and "did you mean bucketed" in ended.stdout + ended.stderr


def test_what_is_no_strategy_is_told_so() -> None:
    with pytest.raises(ValueError, match="Identity is no strategy: it has no finish_gradient_synchronization"):
        Adapter(nn.Identity, nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="NoSync does not take bucket_mb"):
        Adapter(NoSync, nn.Linear(2, 2), None, bucket_mb=1)


def test_gloo_alone_without_cuda_and_two_ranks_at_least() -> None:
    section = CollectiveSection("s", (1,), ("broadcast",), world_sizes=(0, 2, 64))
    assert [cell.id for cell in collective_cells(section, (), "cpu")] == ["s-W2-gloo-broadcast-1MB"]
    assert [cell.world_size for cell in collective_cells(section, (3,), "cpu")] == [3]
    assert next(collective_cells(section, (3,), "cpu")).numel % 3 == 0


def test_intervals_are_united() -> None:
    assert merged([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)]) == [(0.0, 2.0), (3.0, 4.0)]
    assert merged([(0.0, 1.0), (1.5, 2.0)], gap=0.6) == [(0.0, 2.0)]


def test_passes_are_kept_in_turns_and_an_interrupted_group_keeps_what_all_rows_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted in the second pass of two rows, of which the third has failed: both keep the first."""
    section = ParallelSection("s", ("tiny",), (16,), ("fp32",), (2,), strategies=("none", "naive", "flat"))
    cells = [cell for cell in cells_of(section, {}, "cpu") if cell.world_size == 2]
    seen = Seen({"optimizer_bytes": 8}, 0.0, None, [], 0.1, None, None, True)
    asked: list[str] = []

    def looked_at(cell: Any, one: parallel_trial.Found, _: Any) -> None:
        one.seen = [seen, seen]
        if cell.entry.name == "flat":
            raise ValueError("no such thing")

    def timed(cell: Any, *_: Any) -> list[Any]:
        asked.append(cell.entry.name)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return [([rank + number / 10 for number in range(10)], [], "model") for rank in range(2)]

    monkeypatch.setattr(parallel_trial, "_alone", looked_at)
    monkeypatch.setattr(parallel_trial, "_run", timed)
    settings = Settings("cpu", "smoke", 2.0, 10, True, None, "")
    monkeypatch.setattr(type(settings), "run", "now")
    results = parallel_trial.parallel_trial(cells, settings)
    found = {one.record["impl"]: one for one in (next(results), next(results), next(results))}
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert asked == ["none", "naive", "none", "naive"]
    slowest = [1 + number / 10 for number in range(10)]
    assert found["none"].samples == found["naive"].samples == slowest
    assert (found["flat"].samples, found["flat"].record["outcome"]) == (None, "unsupported")
    one = parallel_trial.Found(passes=[[1.0, 2.0], [3.0, 4.0]])
    assert one.samples == [1.0, 3.0, 2.0, 4.0]


def test_a_run_measures_ours_and_a_strategy_of_the_user_s(tmp_path: Path) -> None:
    """One run for all rows: ours with their accounts, the user's as it is, what is wrong or fails as cells."""
    (tmp_path / "own.py").write_text(STRATEGIES)
    own = ",".join(f"{tmp_path}/own.py:{name}" for name in ("Container", "slightly_off", "broken"))
    output = tmp_path / "out.json"
    options = f"--sweep smoke --strategy none,naive,bucketed,zero1,{own} --world-size 1,2 --bucket-mb 1"
    small = "--benchmark-max-time 0.01 --benchmark-only --benchmark-json"
    ended = processes.run("data_parallel", *options.split(), *small.split(), output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = records(output)
    assert {name for name, one in found.items() if one["outcome"] == "ok"} == {
        "none", "naive", "bucketed-1MiB", "zero1", "Container",
    }, [one["reason"] for one in found.values()]  # fmt: skip
    assert found["slightly_off"]["outcome"] == "wrong" and found["slightly_off"]["error_ratio"] > 1
    assert found["broken"]["outcome"] == "error" and "rank 1 failed" in found["broken"]["reason"]
    assert "TypeError: no such layer" in found["broken"]["reason"]
    for name in ("naive", "bucketed-1MiB", "zero1", "Container"):
        one = found[name]
        assert one["error_ratio"] <= 1 and one["rounds"] >= 10 and one["world_size"] == 2
        assert one["tokens_per_s"] == pytest.approx(2 * 2 * 32 / one["time_s"])
        assert one["exposed_s"] == pytest.approx(one["time_s"] - one["unsynchronized_s"])
        assert one["communication_s"] > 0 and 0 <= one["overlap_fraction"] <= 1 and one["scaling_efficiency"] > 0
        assert one["peak_bytes"] >= one["parameters_bytes"] and one["activations_bytes"] > 0
    for name in ("init_bytes", "init_peak_bytes", "before_step_bytes", "peak_bytes"):
        assert found["Container"][name] > 2**40 > found["naive"][name]
    assert found["naive"]["improvement"] == 0 and found["bucketed-1MiB"]["num_buckets"] > 3
    assert found["naive"]["unsynchronized_by"] == "no_sync" and found["zero1"]["unsynchronized_by"] == "none"
    assert found["zero1"]["optimizer_fraction"] == pytest.approx(0.5, abs=0.02)
    assert found["naive"]["optimizer_bytes"] == pytest.approx(found["naive"]["predicted_optimizer_bytes"], rel=0.01)


@pytest.mark.skipif(reason := why_no_compiler("cpu"), reason=str(reason))
def test_compiled_rows_are_checked_and_timed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    options = "--sweep smoke --strategy none,bucketed,zero1 --bucket-mb 1 --compile compiled"
    small = "--benchmark-max-time 0.01 --benchmark-only --benchmark-json"
    ended = processes.run("data_parallel", *options.split(), *small.split(), output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = records(output)
    assert set(found) == {"none", "bucketed-1MiB", "zero1"}
    for one in found.values():
        assert (one["outcome"], one["compile"]) == ("ok", "compiled"), one["reason"]
        assert one["comparison"].startswith("smoke-tiny-S32B2-fp32-compiled ")
    assert found["zero1"]["error_ratio"] <= 1 and found["zero1"]["unsynchronized_by"] == "none"


def test_collectives_are_checked_and_timed(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = "--sweep smoke --benchmark-max-time 0.01 --benchmark-only --benchmark-json"
    ended = processes.run("collectives", *small.split(), output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = records(output)
    assert set(found) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    for one in found.values():
        assert one["outcome"] == "ok" and one["rounds"] >= 10 and one["loop_s"] > 0, one["reason"]
        assert one["algorithm_bytes_per_s"] == pytest.approx(one["bytes"] / one["time_s"])
    assert found["all_reduce"]["bus_bytes_per_s"] == found["all_reduce"]["algorithm_bytes_per_s"]
    assert found["all_gather"]["bus_bytes_per_s"] == found["all_gather"]["algorithm_bytes_per_s"] / 2


def test_two_rendezvous_agents_are_one_group_and_write_one_result(tmp_path: Path) -> None:
    """torchrun with two nodes, both on this machine: each agent starts one rank of the same benchmark."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test", "-m", "pytest"]
    line += "benchmarks -q -k data_parallel --sweep smoke --strategy none,bucketed --benchmark-only".split()
    line += ["--benchmark-max-time", "0.01"]
    environment = processes.ENVIRONMENT | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    agents = []
    for agent in range(2):
        own = [*line, "--benchmark-json", str(tmp_path / "out.json"), "-o", f"cache_dir={tmp_path / f'cache{agent}'}"]
        agents.append(subprocess.Popen(own, cwd=processes.ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [path.name for path in tmp_path.glob("*.json*")] == ["out.json"]
    found = records(tmp_path / "out.json")
    assert {name: one["outcome"] for name, one in found.items()} == {"none": "ok", "bucketed-25MiB": "ok"}
    assert all((one["num_nodes"], one["world_size"]) == (2, 2) for one in found.values())
