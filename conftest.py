"""Options, the device, and what must be settled before any kernel is imported."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # triton reads it on import: without a GPU its kernels are interpreted


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup(
        "lmsys", "what the benchmarks run (comma lists; an axis not named takes its sweep's values)"
    )
    group.addoption("--sweep", default="default", help="smoke, default or full: see benchmarks/sweeps.py")
    group.addoption(
        "--attention", metavar="ROWS", help="exactly these rows: names, path.py:function; of models also auto, llama"
    )
    group.addoption("--length", metavar="S", help="sequence lengths, queries and keys alike: 1024,4096")
    group.addoption("--tiers", metavar="Q:K", help="queries and keys apart, powers of two: 128:64,256:128")
    group.addoption("--head-dim", metavar="D", help="head dimensions: 64,128")
    group.addoption("--batch", metavar="B", help="batch sizes: 1,8")
    group.addoption("--heads", metavar="H", help="query heads, or query:key heads: 16,32:8")
    group.addoption("--dtype", help="float32, float16, bfloat16")
    group.addoption("--causal", help="yes, no")
    group.addoption("--direction", help="fwd, bwd, fwdbwd")
    group.addoption("--size", help="of the language model: tiny, small, medium, large, xl, 2.7b, 10b")
    group.addoption("--context", metavar="S", help="sequence lengths of the language model: 512,1024")
    group.addoption("--precision", help="fp32, tf32, bf16 (autocast), fp16 (autocast and loss scaling)")
    group.addoption("--mode", help="forward (inference), train_forward, backward, optimizer, step")
    group.addoption("--compile", help="eager, compiled (block by block), graphed (and replayed as a CUDA graph)")
    group.addoption(
        "--traces", metavar="DIR", type=Path, help="keep what the anatomy reads: traces, and on CUDA memory snapshots"
    )
    group.addoption("--strategy", metavar="ROWS", help="exactly these strategies: names, path.py:Class")
    group.addoption("--world-size", metavar="N", help="ranks: 1,2,4; a GPU each, or processes on a CPU")
    group.addoption(
        "--bucket-mb", metavar="MIB", help="of bucketed and copy_engine, MiB: 1,25,auto; of a training also torch DDP's"
    )
    group.addoption("--comm-dtype", help="what bucketed and copy_engine send: float32, bfloat16, float16")
    group.addoption("--sharded-optimizer", help="optimizer state divided among ranks: yes, no")
    group.addoption("--epochs", metavar="N", help="of a training; the first is not timed, the others are the samples")
    group.addoption("--train-tokens", metavar="N", help="of a training: tokens of an epoch")
    group.addoption("--val-tokens", metavar="N", help="of a training: held-out tokens of the loss at its end")
    group.addoption("--memory-limit", metavar="SIZE", help="cap the GPU's allocator, such as 24GiB")
    group.addoption(
        "--resume", metavar="OUT.json", help="take what this result holds as done; alone, go on in that file"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "on_request" not in (config.option.markexpr or ""):
        on_request = pytest.mark.skip(reason="takes minutes: python -m pytest -m on_request runs it")
        for item in items:
            if item.get_closest_marker("on_request"):
                item.add_marker(on_request)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
