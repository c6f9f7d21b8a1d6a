"""`STRATEGIES`, the table of data-parallel strategies: training and benchmarks look a strategy's class up here by name.

A strategy wraps a module and averages its gradients over ranks; `wrapper.py` states the contract. The rows are in the
order in which to read their files. A new strategy is a file in this folder and a row below.
"""

from lmsys.registry import Entry, Table
from lmsys.traits import StrategyTraits

__all__ = ["STRATEGIES", "StrategyTraits"]


# Both make a row: its name, where its class is, its label and its color in plots. `supports`: as in `Entry`.
def _ours(name: str, target: str, label: str, color: str = "", supports: str = "") -> Entry:
    return Entry(name, f"lmsys.parallel.{target}", label, supports=supports, traits={"color": color})


def _peer(name: str, attribute: str, label: str, color: str) -> Entry:
    return Entry(name, f"lmsys.parallel.peers:{attribute}", label, peer=True, traits={"color": color})


# `supports` of rows that need GPUs.
ON_GPUS = "lmsys.parallel.copy_engine:copy_engine_supports"
STRATEGIES = Table(
    "strategy",
    [
        _ours("none", "baselines:NoSync", "no synchronization", "#99bbff"),
        _ours("naive", "baselines:Naive", "all-reduce per parameter", "#cc6611"),
        _ours("flat", "baselines:Flat", "one flat all-reduce", "#445511"),
        _ours("overlapped", "overlapped:Overlapped", "overlapped, per parameter", "#7700ee"),
        _ours("bucketed", "overlapped:Bucketed", "overlapped, bucketed", "#ddaa00"),
        _ours("copy_engine", "copy_engine:CopyEngine", "bucketed, copy engines", "#ff88aa", ON_GPUS),
        _ours("zero1", "zero1:Zero1", "ZeRO-1", "#111188"),
        _ours("copy_engine_zero1", "zero1:CopyEngineZero1", "ZeRO-1, copy engines", "#552222", ON_GPUS),
        _ours("fsdp", "fsdp:Fsdp", "fully sharded", "#994477"),
        _peer("torch_ddp", "TorchDDP", "torch DDP", "#442255"),
        _peer("torch_ddp_tuned", "TorchDDPTuned", "torch DDP, tuned", "#9977ff"),
        _peer("torch_zero1", "TorchZero1", "torch ZeRO-1, unmaintained", "#aaaa55"),
        _peer("torch_fsdp2", "TorchFSDP2", "torch FSDP2", "#4455aa"),
        _peer("torch_fsdp2_zero2", "TorchFSDP2Zero2", "torch FSDP2, not resharded", "#008855"),
    ],
    group="lmsys.parallel",
    traits=StrategyTraits,
)
