"""`STRATEGIES`, the table of data-parallel strategies: training and benchmarks look a strategy's class up here by name.

A strategy is a class that wraps a module and averages its gradients over ranks; `wrapper.py` states the contract, and
`StrategyTraits` lists the facts that a strategy may state about itself. To learn how strategies work, read their files
in the order of the rows. A new strategy is a file in this folder and a row below; CONTRIBUTING.md says what else it
needs. Other packages add rows by the entry point group `lmsys.parallel`.
"""

from lmsys.registry import Entry, Table
from lmsys.traits import StrategyTraits

__all__ = ["STRATEGIES", "StrategyTraits"]


def _row(name: str, target: str, label: str, color: str = "", supports: str = "") -> Entry:
    """A row of the table. Rows of the file peers.py are marked as peers, that is, implementations by others.

    name      the name by which settings and options ask for the strategy
    target    "file:Class" of the strategy; the file is in this folder
    label     its name in tables and plots
    color     its color in plots, unlike that of any other row; "": the report chooses one
    supports  "module:function", a function that says why the strategy cannot run a case; "": it can run every case
    """
    return Entry(
        name, f"lmsys.parallel.{target}", label, peer=target.startswith("peers:"), supports=supports,
        traits={"color": color} if color else {},
    )  # fmt: skip


# `supports` of rows that need GPUs.
ON_GPUS = "lmsys.parallel.copy_engine:copy_engine_supports"
STRATEGIES = Table(
    "strategy",
    [
        _row("none", "baselines:NoSync", "no synchronization", "#99bbff"),
        _row("naive", "baselines:Naive", "all-reduce per parameter", "#cc6611"),
        _row("flat", "baselines:Flat", "one flat all-reduce", "#445511"),
        _row("overlapped", "overlapped:Overlapped", "overlapped, per parameter", "#7700ee"),
        _row("bucketed", "overlapped:Bucketed", "overlapped, bucketed", "#ddaa00"),
        _row("copy_engine", "copy_engine:CopyEngine", "bucketed, copy engines", "#ff88aa", ON_GPUS),
        _row("zero1", "zero1:Zero1", "ZeRO-1", "#111188"),
        _row("copy_engine_zero1", "zero1:CopyEngineZero1", "ZeRO-1, copy engines", "#552222", ON_GPUS),
        _row("fsdp", "fsdp:Fsdp", "fully sharded", "#994477"),
        _row("torch_ddp", "peers:TorchDDP", "torch DDP", "#442255"),
        _row("torch_ddp_tuned", "peers:TorchDDPTuned", "torch DDP, tuned", "#9977ff"),
        _row("torch_zero1", "peers:TorchZero1", "torch ZeRO-1, unmaintained", "#aaaa55"),
        _row("torch_fsdp2", "peers:TorchFSDP2", "torch FSDP2", "#4455aa"),
        _row("torch_fsdp2_zero2", "peers:TorchFSDP2Zero2", "torch FSDP2, not resharded", "#008855"),
    ],
    group="lmsys.parallel",
    traits=StrategyTraits,
)
