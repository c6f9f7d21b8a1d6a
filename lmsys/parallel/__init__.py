"""The table of data-parallel strategies. A new one is a file beside this one and a row below."""

from lmsys.registry import Entry, Table

__all__ = ["STRATEGIES"]


def _ours(name: str, target: str, label: str, supports: str = "") -> Entry:
    return Entry(name, f"lmsys.parallel.{target}", label, supports=supports and f"lmsys.parallel.{supports}")


def _peer(name: str, attribute: str, label: str) -> Entry:
    return Entry(name, f"lmsys.parallel.peers:{attribute}", label, peer=True)


ON_GPUS = "copy_engine:copy_engine_supports"
STRATEGIES = Table(
    "strategy",
    [
        _ours("none", "none:NoSync", "no synchronization"),
        _ours("naive", "naive:Naive", "all-reduce per parameter"),
        _ours("flat", "flat:Flat", "one flat all-reduce"),
        _ours("overlapped", "overlapped:Overlapped", "overlapped, per parameter"),
        _ours("bucketed", "bucketed:Bucketed", "overlapped, bucketed"),
        _ours("copy_engine", "copy_engine:CopyEngine", "bucketed, copy engines", ON_GPUS),
        _ours("zero1", "zero1:Zero1", "ZeRO-1"),
        _ours("copy_engine_zero1", "copy_engine_zero1:CopyEngineZero1", "ZeRO-1, copy engines", ON_GPUS),
        _ours("fsdp", "fsdp:Fsdp", "fully sharded"),
        _peer("torch_ddp", "TorchDDP", "torch DDP"),
        _peer("torch_ddp_tuned", "TorchDDPTuned", "torch DDP, tuned"),
        _peer("torch_zero1", "TorchZero1", "torch ZeRO-1"),
        _peer("torch_fsdp2", "TorchFSDP2", "torch FSDP2"),
    ],
    group="lmsys.parallel",
)
