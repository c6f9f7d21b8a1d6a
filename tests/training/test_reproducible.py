"""`train.reproducible`: trained weights have one sha256 for every number of ranks and every strategy.

A batch is divided into `train.leaves` equal parts, the leaves. Their gradients are added as a binary tree, in an order
that does not depend on the number of ranks. `reproduced` trains on a rank, and returns the sha256 of the weights.
"""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.parallel import STRATEGIES as TABLE
from lmsys.parallel.group import WorkerGroup
from lmsys.training import reproducible
from lmsys.training.config import TrainConfig
from lmsys.training.optimizer_triton import whole_squares
from lmsys.training.reproducible import Tree, exact_norm
from lmsys.traits import StrategyTraits
from tests.support.training_runs import MUON, config, on, reproduced, trainer
from tests.support.variants import few_by_default

STRATEGIES = ("naive", "flat", "overlapped", "bucketed", "zero1", "fsdp")
SHARDED = "flat+sharded", "overlapped+sharded", "bucketed+sharded"
MANY = "naive", "zero1", "fsdp"
STEPS = 4
# {setting: numbers of ranks that it can have}; other settings run on 1, 2 and 4.
WORLD_SIZES = {"train.leaves=2": (1, 2), "train.leaves=8": (1, 4)}
# {setting: strategies that it can have}; other settings run with every strategy.
ONLY = {"train.bucket_mb=0.001": ("bucketed", "zero1")}
SETTINGS = ("train.reproducible=true", f"train.steps={STEPS}", "train.clip_norm=0.5")


@pytest.fixture(scope="module", params=[(), MUON], ids=["adamw", "muon"])
def settings(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Settings of a training, by each optimizer."""
    return SETTINGS + request.param


@pytest.fixture(scope="module")
def expected(ranks: WorkerGroup, settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights that one rank trains."""
    run = config(tmp_path_factory.mktemp("run"), *settings, "train.strategy=naive")
    return ranks.run(reproduced, run, 1, STEPS)[0]


# Of each strategy the first number of ranks always runs.
ON_RANKS = [(name, size) for name in STRATEGIES + SHARDED for size in ((4, 2, 1) if name in MANY else (2, 4, 1))]


@pytest.mark.parametrize(("strategy", "world_size"), few_by_default(ON_RANKS, one_in=3))
def test_weights_have_one_sha256(
    ranks: WorkerGroup, settings: tuple[str, ...], expected: str, tmp_path: Path, strategy: str, world_size: int
) -> None:
    digests = ranks.run(reproduced, config(tmp_path, *settings, *on(strategy)), world_size, STEPS)
    assert digests[:world_size] == [expected] * world_size


CHANGES = [  # of settings, each for one case of the next test
    ("train.precision=bf16",),
    ("train.precision=fp16",),
    ("model.d_model=12", "model.d_ff=21", "model.vocab_size=307", "model.num_layers=3"),
    ("train.leaves=8",),
    ("train.leaves=2", "train.clip_norm=0"),
    ("train.bucket_mb=0.001",),
    ("model.checkpoint_blocks=1", "model.attention=flash_torch"),
    ("data.packing=documents",),
]


@pytest.mark.parametrize("more", few_by_default([(more,) for more in CHANGES], one_in=4))
def test_other_settings_have_one_sha256_too(ranks: WorkerGroup, tmp_path: Path, more: tuple[str, ...]) -> None:
    digests = set()
    for strategy, world_size in product(("bucketed", "zero1", "fsdp"), (1, 2, 4)):
        if world_size not in WORLD_SIZES.get(more[0], (1, 2, 4)) or strategy not in ONLY.get(more[0], STRATEGIES):
            continue
        run = config(tmp_path, *SETTINGS, *more, f"train.strategy={strategy}")
        digests |= set(ranks.run(reproduced, run, world_size, STEPS)[:world_size])
    assert len(digests) == 1


@pytest.mark.parametrize(("strategy", "world_size"), [("naive", 1), ("fsdp", 2)])
def test_checkpointing_changes_no_bit(
    ranks: WorkerGroup, settings: tuple[str, ...], expected: str, tmp_path: Path, strategy: str, world_size: int
) -> None:
    levels = "model.checkpoint_blocks=attention*1,matmuls*1"
    run = config(tmp_path, *settings, f"train.strategy={strategy}", levels)
    assert ranks.run(reproduced, run, world_size, STEPS)[:world_size] == [expected] * world_size


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("bucketed+sharded", 4), ("bucketed+sharded", 2)),
        (("zero1", 2), ("naive", 1)),
        (("none", 1), ("zero1", 4)),
        (("fsdp", 4), ("bucketed+sharded", 2)),
        (("zero1", 2), ("fsdp", 1)),
    ],
)
def test_a_run_that_is_resumed_on_other_ranks_has_the_same_sha256(
    ranks: WorkerGroup,
    settings: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    before: tuple[str, int],
    after: tuple[str, int],
) -> None:
    """It ends after two steps, and is resumed with another strategy on another number of ranks."""
    for (strategy, world_size), steps in ((before, 2), (after, STEPS)):
        run = config(tmp_path, *settings, *on(strategy))
        digests = set(ranks.run(reproduced, run, world_size, steps, str(tmp_path))[:world_size])
        assert len(digests) == 1
    assert digests == {expected}


def test_another_order_of_additions_has_another_sha256(
    ranks: WorkerGroup, settings: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """Here gradients are added one after another: so the other tests can fail."""
    run = config(tmp_path, *settings, "train.strategy=naive")
    assert ranks.run(reproduced, run, 1, STEPS, "", True)[0] != expected


ON_GPUS = (
    *("model.d_model=128", "model.num_heads=2", "model.d_ff=256", "model.context_length=64", "model.attention=auto"),
    *("train.precision=bf16", "train.device=cuda"),
)


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[WorkerGroup]:
    with WorkerGroup(1, "nccl", timeout_s=120) as ranks:
        yield ranks


EXECUTIONS = pytest.mark.parametrize("execution", ["", "compile", "compile,graph", "fused,graph"])


def takes(strategy: str, execution: str) -> bool:
    """True if the strategy can be executed so: compiled, as a CUDA graph, with fused blocks."""
    row = TABLE[strategy]
    traits = StrategyTraits.of(row)
    reasons = {"graph": traits.why_not_graphed, "fused": traits.why_not_fused}
    return not any(reasons.get(name) for name in execution.split(","))


def executed(execution: str) -> list[str]:
    """The settings of an execution."""
    return [f"train.{name}=true" for name in execution.split(",") if name]


@pytest.mark.gpu
@EXECUTIONS
def test_one_sha256_on_a_gpu(one_gpu: WorkerGroup, tmp_path: Path, execution: str) -> None:
    digests = set()
    for strategy in ("naive", "naive", "none", "bucketed", "zero1", "fsdp"):
        if not takes(strategy, execution):
            continue
        settings = *ON_GPUS, f"train.strategy={strategy}", *executed(execution)
        digests |= set(one_gpu.run(reproduced, config(tmp_path, *SETTINGS, *settings), 1, STEPS))
    assert len(digests) == 1


@pytest.mark.gpu
@EXECUTIONS
def test_one_sha256_on_one_gpu_and_two(gpu_ranks: WorkerGroup, tmp_path: Path, execution: str) -> None:
    digests = set()
    for strategy, world_size in (("none", 1), *product(STRATEGIES, (1, 2))):
        if not takes(strategy, execution):
            continue
        settings = *ON_GPUS, f"train.strategy={strategy}", *executed(execution)
        digests |= set(
            gpu_ranks.run(reproduced, config(tmp_path, *SETTINGS, *settings), world_size, STEPS)[:world_size]
        )
    assert len(digests) == 1


@given(st.integers(0, 99), st.integers(1, 400), st.integers(1, 9), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_the_norm_does_not_depend_on_an_order(seed: int, count: int, parts: int, size: float) -> None:
    """The norm has equal bits for any order and any division of the gradient, and is exact to 1e-12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator).pow(5) * size
    mixed = x[torch.randperm(count, generator=generator)]
    norm = exact_norm([x], count)
    assert exact_norm(list(mixed.chunk(parts)), count) == norm
    assert math.isclose(norm, x.double().norm().item(), rel_tol=1e-12)


@given(st.integers(0, 99), st.integers(1, 9000), st.integers(1, 4), st.sampled_from([1e-30, 1.0, 1e30]))
def test_one_launch_sums_the_same_whole_numbers(seed: int, count: int, parts: int, size: float) -> None:
    """The kernel sums scaled squares as whole numbers, and of the remainders the first 44 bits, in two sums."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size
    scales = torch.tensor([2.0**40 / size**2, 2.0**44], dtype=torch.float64)
    sums = whole_squares(x.chunk(parts), scales)
    high, low = x.double().square().mul(scales[0]).tolist(), scales[1].item()
    assert sums[0].item() == sum(math.trunc(square) for square in high)
    assert abs(sums[1].item() - sum(math.trunc(math.modf(square)[0] * low) for square in high)) <= count


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(value: float) -> None:
    assert not math.isfinite(exact_norm([torch.tensor([1.0, value]), torch.ones(3)], 5))
    assert exact_norm([], 5) == exact_norm([torch.zeros(2)], 5) == 0


def test_a_rank_without_gradients_joins_on_the_device_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the host."""
    seen = list[str]()
    monkeypatch.setattr(reproducible, "size_and_rank", lambda group: (2, 0))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, *_, **__: seen.append(x.device.type))
    with pytest.raises(RuntimeError):  # a meta tensor has no value
        exact_norm([], 5, divided=True, device=torch.device("meta"))
    assert seen == ["meta"]


@given(st.integers(0, 4), st.integers(0, 99))
def test_leaves_are_added_in_pairs(levels: int, seed: int) -> None:
    leaves = torch.randn(2**levels, 5, generator=torch.Generator().manual_seed(seed))
    tree = Tree()
    for x in leaves:
        tree.add([x, None])
    expected = leaves
    while len(expected) > 1:
        expected = expected[::2] + expected[1::2]
    assert torch.equal(tree.total[0], expected[0]) and tree.total[1] is None


def test_numbers_of_ranks_that_cannot_share_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match="train.leaves=8 runs on 1, 4, 8 ranks, not 2"):
        TrainConfig(reproducible=True, leaves=8).accumulation(2)


@pytest.mark.parametrize("strategy", ["torch_ddp", "copy_engine"])
def test_strategies_that_add_in_another_order_are_refused(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ValueError, match=f"strategy '{strategy}' with train.reproducible: "):
        trainer(config(tmp_path, *SETTINGS, f"train.strategy={strategy}"))
