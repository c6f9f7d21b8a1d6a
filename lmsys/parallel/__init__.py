"""The table of data-parallel strategies, in reading order. A new one is a file beside this one and a row below."""

from lmsys.registry import Entry, Table

__all__ = ["STRATEGIES"]


def _ours(name: str, target: str, label: str, color: str, supports: str = "") -> Entry:
    supports = supports and f"lmsys.parallel.{supports}"
    return Entry(name, f"lmsys.parallel.{target}", label, supports=supports, traits={"color": color})


def _peer(name: str, attribute: str, label: str, color: str) -> Entry:
    return Entry(name, f"lmsys.parallel.peers:{attribute}", label, peer=True, traits={"color": color})


ON_GPUS = "copy_engine:copy_engine_supports"
STRATEGIES = Table(
    "strategy",
    [
        _ours("none", "none:NoSync", "no synchronization", "#6b7280"),
        _ours("naive", "naive:Naive", "all-reduce per parameter", "#a16207"),
        _ours("flat", "flat:Flat", "one flat all-reduce", "#65a30d"),
        _ours("overlapped", "overlapped:Overlapped", "overlapped, per parameter", "#9333ea"),
        _ours("bucketed", "bucketed:Bucketed", "overlapped, bucketed", "#f59e0b"),
        _ours("copy_engine", "copy_engine:CopyEngine", "bucketed, copy engines", "#dc2626", ON_GPUS),
        _ours("zero1", "zero1:Zero1", "ZeRO-1", "#be185d"),
        _ours("copy_engine_zero1", "copy_engine_zero1:CopyEngineZero1", "ZeRO-1, copy engines", "#7c2d12", ON_GPUS),
        _ours("fsdp", "fsdp:Fsdp", "fully sharded", "#9ca3af"),
        _peer("torch_ddp", "TorchDDP", "torch DDP", "#0891b2"),
        _peer("torch_ddp_tuned", "TorchDDPTuned", "torch DDP, tuned", "#2563eb"),
        _peer("torch_zero1", "TorchZero1", "torch ZeRO-1", "#16a34a"),
        _peer("torch_fsdp2", "TorchFSDP2", "torch FSDP2", "#1e3a8a"),
    ],
    group="lmsys.parallel",
)
