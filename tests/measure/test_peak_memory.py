"""Memory of a call (lmsys/measure/memory.py): phases, breakdown, timeline, snapshot, and the peak of a command.

The calls under test allocate tensors of known sizes: `zeros` makes one of 4 * SIZE bytes.
"""

import gc
import itertools
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmsys.measure import memory
from lmsys.measure.compare import release_memory
from tests.support.processes import Stopwatch

SIZE = 2**20  # of float32: 4 MiB


@pytest.fixture(autouse=True)
def no_cached_blocks() -> None:
    """Frees cached blocks: a GPU's allocator may serve a request with a larger cached block, and counts it whole."""
    release_memory()


def zeros(device: str) -> Tensor:
    return torch.zeros(SIZE, device=device)


def test_a_phase_has_its_peak_and_what_is_live_after_it(device: str) -> None:
    kept: list[Tensor] = []

    def grow() -> None:
        kept.extend([zeros(device), zeros(device)])
        zeros(device).neg_()

    phases = memory.phases({"grow": grow, "shrink": kept.pop, "same": lambda: zeros(device)}, device)
    assert phases == {
        "grow": {"peak_bytes": 12 * SIZE, "live_bytes": 8 * SIZE},
        "shrink": {"peak_bytes": 8 * SIZE, "live_bytes": 4 * SIZE},
        "same": {"peak_bytes": 8 * SIZE, "live_bytes": 4 * SIZE},
    }


def test_a_breakdown_counts_each_storage_once(device: str) -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)).to(device)
    module[2].weight = module[1].weight
    module.register_buffer("table", torch.zeros(10, device=device))
    module.register_buffer("row", module.table[:5])
    optimizer = torch.optim.Adam(module.parameters())
    parameters = 4 * (8 * 4 + 4 + 4 * 8)
    before = {"parameters_bytes": parameters, "gradients_bytes": 0, "optimizer_bytes": 0, "buffers_bytes": 40}
    assert memory.breakdown(module, optimizer) == memory.breakdown(module) == before
    module[2](module[0](torch.ones(2, 8, device=device))).sum().backward()
    optimizer.step()
    after = before | {
        "gradients_bytes": parameters,
        "optimizer_bytes": 2 * parameters + 2 * 4 + 4,  # Adam's two moments, and a counter for each of 3 parameters
    }
    assert memory.breakdown(module, optimizer) == after
    flat = torch.zeros(parameters // 4, device=device)
    for x, grad in zip(module.parameters(), flat.split([x.numel() for x in module.parameters()]), strict=True):
        x.grad = grad.view_as(x)
    assert memory.breakdown(module)["gradients_bytes"] == parameters


def test_a_breakdown_needs_no_memory() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).to("meta")
    assert memory.breakdown(module)["parameters_bytes"] == 4 * (8 * 4 + 4 + 4 * 2 + 2)


def test_the_timeline_follows_each_event(device: str) -> None:
    def call() -> Tensor:
        x = zeros(device)
        y = x.add(1)
        del x
        return y.mul(2)

    before = zeros(device)  # is live, and not counted
    timeline = memory.timeline({"one": call, "two": lambda: zeros(device)}, device)
    (times, live), (later_times, last) = (zip(*points, strict=True) for points in timeline.values())
    levels = [size // SIZE for size in live]  # rounded down, as operators also allocate scalars
    assert [level for level, _ in itertools.groupby(levels)][:4] == [4, 8, 4, 8]
    assert times[0] == 0 and [*times, *later_times] == sorted([*times, *later_times])
    assert max(live) == memory.peak_bytes(call, device) and max(levels) == 8 and list(last) == [4 * SIZE, 0]
    del before
    assert memory.timeline({"none": lambda: None}, device) == {"none": []}


def test_saved_bytes_count_each_storage_once(device: str) -> None:
    x = torch.randn(64, 64, device=device, requires_grad=True)
    w = torch.randn(64, 64, device=device, requires_grad=True)
    assert memory.saved_bytes(lambda: x @ w) == 2 * 64 * 64 * 4
    assert memory.saved_bytes(lambda: x * x) == 64 * 64 * 4
    assert memory.saved_bytes(lambda: (x @ x.mT).exp()) == 2 * 64 * 64 * 4  # x, and the result of exp


def test_lines_survive_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations keep their source lines, even if the collector runs while these are read."""
    read = memory._marked_source
    monkeypatch.setattr(memory, "_marked_source", lambda event: (gc.collect(), read(event))[1])
    events = memory.allocator_events(lambda: zeros("cpu"), "cpu", lines=True)
    assert [event.function for event in events if event.bytes == 4 * SIZE] == ["zeros"]


def test_devices_without_allocator_events_are_refused() -> None:
    with pytest.raises(ValueError, match="device='meta' must be one of cpu, cuda"):
        memory.timeline({"none": lambda: None}, "meta")


CPP = {"filename": "??", "line": 0, "name": "at::native::empty_cuda(c10::ArrayRef<long>)"}
NODE = CPP | {"name": "torch::autograd::generated::MmBackward0::apply(std::vector<Tensor>&&)"}
TORCH = {"filename": memory.TORCH + "nn/functional.py", "line": 7, "name": "softmax"}
LINE = {"filename": str(Path(__file__)), "line": 12, "name": "call"}


@pytest.mark.parametrize(
    ("frames", "source"),
    [
        ([CPP, TORCH, LINE], ("tests/measure/test_peak_memory.py:12", "call")),
        ([CPP, LINE, NODE], ("tests/measure/test_peak_memory.py:12", "call MmBackward0")),
        ([CPP, NODE], ("(backward)", "MmBackward0")),
        ([CPP], ("", "")),
        ([], ("", "")),
    ],
)
def test_frames_of_a_snapshot_are_read(frames: list[dict[str, Any]], source: tuple[str, str]) -> None:
    """Frames are as torch records them: the innermost first, and those of C++ among those of Python."""
    assert memory._source(frames) == source


@pytest.mark.gpu
def test_a_snapshot_holds_the_call(tmp_path: Path) -> None:
    memory.write_snapshot(path := tmp_path / "new" / "snapshot.pickle", lambda: zeros("cuda"))
    snapshot = pickle.loads(path.read_bytes())
    assert {"segments", "device_traces"} <= snapshot.keys()
    trace = snapshot["device_traces"][torch.cuda.current_device()]
    (allocated,) = [entry for entry in trace if entry["action"] == "alloc"]
    assert allocated["size"] == 4 * SIZE and any(frame["filename"] == __file__ for frame in allocated["frames"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has")
def test_the_limit_is_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a GPU of its own, and they may be of several sizes."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    gpus = [SimpleNamespace(total_memory=size) for size in (2**33, 2**35)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    memory.cap_gpu_memory(2**34)
    with pytest.raises(ValueError, match="--memory-limit 64GiB is more than the 32GiB of this GPU"):
        memory.cap_gpu_memory(2**36)
    assert fractions == [0.5]


def test_the_memory_of_a_command_is_that_of_its_processes_together() -> None:
    alone = "import time; x = bytearray(50_000_000); time.sleep(0.3)"
    watch = Stopwatch()
    small = memory.peak_resident_bytes([sys.executable, "-c", alone])
    assert 50_000_000 < small < 80_000_000 and watch.keeps(10)
    both = f"import subprocess, sys; x = bytearray(50_000_000); subprocess.run([sys.executable, '-c', {alone!r}])"
    assert memory.peak_resident_bytes([sys.executable, "-c", both]) > 1.8 * small
    # More errors than a pipe holds.
    many = "import sys; sys.stderr.write('x' * 2**20 + '\\n'); sys.exit('no such thing')"
    with pytest.raises(RuntimeError, match="ended with 1: .*no such thing"):
        memory.peak_resident_bytes([sys.executable, "-c", many])
