"""Each data-parallel strategy trains random models on one to four ranks as one process does on the whole batch.

tests/support/ranks.py has the model and the training, which `train` runs on ranks. A new strategy is added to OWN, with
the options that are drawn for it. Functions with `on_first` run on ranks; their tests compare what they return.
"""

import math
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from lmsys.config import ModelConfig, model_config
from lmsys.model import TransformerLM
from lmsys.parallel import STRATEGIES, collectives
from lmsys.parallel.baselines import Naive
from lmsys.parallel.flat_shard import FlatShard
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import WorkerGroup, device
from lmsys.parallel.overlapped import Bucketed
from lmsys.parallel.sharded_optimizer import FlatBuffer, ShardedOptimizer, merge_shares
from lmsys.parallel.structure import blocks_of
from lmsys.parallel.zero1 import Zero1
from tests.support import ranks as on_ranks
from tests.support.parallel_faults import FAULTS, FAULTS_OF_SHARDS, train_with
from tests.support.ranks import GROUPS, Net, Recipe, Training, backward, on_first, on_some, step, train, worst_ratio

flags = st.booleans()
recipes = st.builds(
    Recipe,
    width=st.integers(1, 9),
    layers=st.integers(1, 3),
    tied=flags,
    frozen=flags,
    unused=flags,
    rare=flags,
    mixed=flags,
)
bucket_mbs = st.sampled_from([1e-5, 1e-4, 5e-4, 1.0])
OWN = {  # {our strategies: options that are drawn for them}
    "naive": st.just({}),
    "flat": st.just({}),
    "overlapped": st.just({}),
    "bucketed": st.fixed_dictionaries({"bucket_mb": st.one_of(bucket_mbs, st.sampled_from(["auto", None]))}),
    "copy_engine": st.fixed_dictionaries({"bucket_mb": bucket_mbs}),
    "zero1": st.fixed_dictionaries({"bucket_mb": bucket_mbs}),
    "copy_engine_zero1": st.fixed_dictionaries({"bucket_mb": bucket_mbs}),
    "fsdp": st.just({}),
}


def trainings(name: str) -> st.SearchStrategy[Training]:
    """Trainings by the strategy of this name."""
    return st.builds(
        Training,
        strategy=st.just(name),
        options=OWN[name],
        world_size=st.integers(2, 3) if "copy_engine" in name else st.integers(1, 4),
        optimizer=st.sampled_from([*on_ranks.OPTIMIZERS]),
        sharded=flags if "zero1" not in name and name != "fsdp" else st.just(False),
        steps=st.integers(3, 4),
        microbatches=st.integers(1, 2),
        set_to_none=flags if "zero1" not in name else st.just(True),
        recorded=flags if "zero1" in name else st.just(False),
    )


@pytest.mark.parametrize("name", OWN)
def test_equal_to_one_process_on_the_whole_batch(ranks: WorkerGroup, name: str) -> None:
    @settings(max_examples=8 if name == "zero1" else 5)
    @given(recipe=recipes, training=trainings(name), seed=st.integers(0, 99))
    def holds(recipe: Recipe, training: Training, seed: int) -> None:
        states = ranks.run(train, recipe, training, seed)
        assert worst_ratio(states, recipe, training, seed) <= 1

    holds()


@pytest.mark.parametrize("name", [name for name, row in STRATEGIES.items() if row.peer])
def test_peers_are_that_too(ranks: WorkerGroup, name: str) -> None:
    recipe, training = Recipe(tied=True), Training(name, optimizer="adamw", steps=4)
    assert worst_ratio(ranks.run(train, recipe, training, 0), recipe, training, 0) <= 1


@on_first(2)
def _whole_after_forward(group: Any, name: str) -> tuple[int, int]:
    """(number of parameters of blocks that are whole before a forward, number between it and its backward)"""
    wrapper = STRATEGIES[name].load()(TransformerLM(model_config("tiny")).to(device()), group)

    def whole() -> int:
        return sum(not isinstance(x, DTensor) for block in blocks_of(wrapper.module) for x in block.parameters())

    before = whole()
    loss = wrapper(torch.zeros(1, 8, dtype=torch.int64, device=device())).sum()
    after = whole()
    loss.backward()
    return before, after


@pytest.mark.parametrize(("name", "stays"), [("torch_fsdp2", False), ("torch_fsdp2_zero2", True)])
def test_parameters_of_blocks_stay_whole_until_the_backward_where_they_are_not_resharded(
    ranks: WorkerGroup, name: str, stays: bool
) -> None:
    before, after = ranks.run(_whole_after_forward, name)[0]
    assert before == 0 and (after > 0) == stays


# Strategies in which each rank owns all parameters, or a shard of them: each by collectives, and by copy engines.
OF_ALL, OF_SHARDS = ("bucketed", "copy_engine"), ("zero1", "copy_engine_zero1")


@pytest.mark.parametrize(
    ("fault", "strategy"), [*product(("", *FAULTS), (*OF_ALL, *OF_SHARDS)), *product(FAULTS_OF_SHARDS, OF_SHARDS)]
)
def test_a_seeded_fault_is_caught(ranks: WorkerGroup, fault: str, strategy: str) -> None:
    """Without a fault the same training is right."""
    recipe = Recipe(width=5, tied=True)
    training = Training(strategy, {"bucket_mb": 2e-4}, sharded=strategy in OF_ALL)
    states = ranks.run(train_with, fault, recipe, training, 0)
    assert (worst_ratio(states, recipe, training, 0) > 1) == bool(fault)


@on_first(2)
def _traffic(group: Any, name: str, options: dict[str, Any], recipe: Recipe) -> tuple[int, int]:
    """(number of elements that a step sends as gradients, number of trained elements)"""
    wrapper = STRATEGIES[name].load()(Net(recipe), group, **options)
    sent: list[int] = []

    def counting(real: Any) -> Any:
        return lambda x, g, **options: sent.append(x.numel()) or real(x, g, **options)

    with on_ranks.use((collectives, "all_reduce_mean", counting)):
        backward(wrapper, torch.randn(3, recipe.width))
    return sum(sent), sum(p.numel() for p in wrapper.trainable)


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed"])
def test_every_gradient_travels_once(ranks: WorkerGroup, name: str) -> None:
    sent, trained = ranks.run(_traffic, name, {}, Recipe(width=16, tied=True, frozen=True))[0]
    flags_and_padding = 64 * 30  # elements, at most
    assert trained <= sent <= trained + flags_and_padding


@on_first(2)
def _views(group: Any, bucket_mb: float | None) -> list[Any]:
    """After each of three steps: (number of tensors that gradients are views of, number of buckets)."""
    wrapper = Bucketed(Net(Recipe(width=8)), group, bucket_mb)
    seen = []
    for to_none in (True, True, False):
        backward(wrapper, torch.randn(3, 8))
        bases = {id(p.grad._base) for p in wrapper.trainable if p.grad is not None and p.grad._base is not None}
        seen.append((len(bases), len(wrapper.buckets)))
        wrapper.zero_grad(set_to_none=to_none)
    return seen


@pytest.mark.parametrize("bucket_mb", [1.0, None])
def test_gradients_are_views_of_buckets_also_after_zero_grad(ranks: WorkerGroup, bucket_mb: float | None) -> None:
    seen = ranks.run(_views, bucket_mb)[0]
    assert all(0 < bases <= buckets for bases, buckets in seen) and len(seen) == 3
    assert bucket_mb or seen == 3 * [(1, 1)]  # without a limit there is one bucket


@on_first(2)
def _orders(group: Any) -> tuple[list[Any], list[Any]]:
    """(buckets before the first step, buckets after it) of a model that uses its layers in reverse of their order."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)).sum()

    wrapper = Bucketed(Backwards(), group, 1e-5)
    before = [bucket.indices for bucket in wrapper.buckets]
    for _ in range(2):
        backward(wrapper, torch.ones(2, 4))
    return before, [bucket.indices for bucket in wrapper.buckets]


def test_buckets_are_planned_again_in_the_order_that_gradients_come_in(ranks: WorkerGroup) -> None:
    assert ranks.run(_orders)[0] == ([(1,), (0,)], [(0,), (1,)])


def _outside_of_a_group() -> dict[str, str]:
    """By strategy the error that a rank gets which wraps a module for a new group of rank 0 alone, on rank 1."""
    group = dist.new_group([0])
    rows = [row for row in STRATEGIES.values() if not row.peer and dist.get_rank() == 1]
    return {row.name: on_ranks.error_of(row.load(), nn.Linear(2, 2), group) for row in rows}


def test_a_rank_outside_of_the_group_is_refused(ranks: WorkerGroup) -> None:
    errors = ranks.run(_outside_of_a_group)[1]
    assert {"overlapped", "bucketed", "zero1", "fsdp"} <= errors.keys()
    refused = "ValueError: process_group=-100 must be of type torch.distributed."
    assert all(error.startswith(refused) for error in errors.values())


class _Negated(nn.Module):
    """Autograd leaves the sign of its gradient to be changed when that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.complex(x, self.w).conj() * torch.tensor([1 + 2j])).real.sum()


def _negated_gradients() -> dict[str, list[float]]:
    """By strategy the gradient of `_Negated`: 2 on any number of ranks."""
    gradients, plain = {}, _Negated()
    plain(torch.ones(1)).backward()
    assert plain.w.grad is not None and plain.w.grad.is_neg()
    for name in ("naive", "flat", "overlapped", "bucketed"):
        wrapper = STRATEGIES[name].load()(_Negated())
        backward(wrapper, torch.ones(1))
        gradients[name] = wrapper.module.w.grad.tolist()
    return gradients


def test_gradients_whose_sign_autograd_has_left_are_averaged(ranks: WorkerGroup) -> None:
    for gradients in ranks.run(_negated_gradients):
        assert gradients and all(grad == [2.0] for grad in gradients.values())


@on_some
def _part_of_a_run(group: Any, strategy: str, steps: range, weights: dict[str, Any], shares: list[Any]) -> Any:
    """Trains these steps of a run on a rank, from the weights and the optimizer's state that a part before it has left.

    Returns (the whole weights, this rank's share of the optimizer's state, the optimizer's whole state).
    """
    torch.manual_seed(3)
    wrapper = STRATEGIES[strategy].load()(Net(SAVED), group)
    wrapper.load_state_dict(weights or wrapper.full_state_dict())
    if strategy == "zero1":
        optimizer = wrapper.make_optimizer(torch.optim.AdamW, lr=0.01, eps=1e-2)
    else:
        optimizer = ShardedOptimizer(wrapper.parameters(), torch.optim.AdamW, group, lr=0.01, eps=1e-2)
    if shares:
        optimizer.load_state_dict(merge_shares(shares))
    data = torch.randn(8, 12, 5, generator=torch.Generator().manual_seed(3))
    for number in steps:
        step(wrapper, optimizer, data[number].chunk(dist.get_world_size(group))[dist.get_rank()])
    return on_ranks.copies(wrapper.full_state_dict()), optimizer.state_dict(), optimizer.full_state_dict()


@on_some
def _shown_while_loading(group: Any) -> tuple[list[int], bool]:
    """How many flat shards are whole after each that a load shows; True if the values that came are there then."""
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(3))
    wrapper, shown, unshard = Fsdp(module, group), list[int](), FlatShard.unshard
    state = {name: torch.full_like(x, place) for place, (name, x) in enumerate(wrapper.full_state_dict().items())}

    def counted(flat: FlatShard) -> None:
        unshard(flat)
        shown.append(sum(flat.is_shown for flat in wrapper._flats()))

    with patch.object(FlatShard, "unshard", counted):
        wrapper.load_state_dict(state)
    loaded = wrapper.full_state_dict()
    return shown, all(torch.equal(loaded[name], x) for name, x in state.items())


def test_fsdp_shows_one_block_after_another_while_it_loads(ranks: WorkerGroup) -> None:
    for shown, is_loaded in ranks.run(_shown_while_loading, 2)[:2]:
        assert shown == [1, 1, 1] and is_loaded


SAVED = Recipe(width=5, layers=2, tied=True)


@pytest.mark.parametrize("strategy", ["zero1", "bucketed"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_state_is_saved_and_loaded_across_world_sizes(
    ranks: WorkerGroup, strategy: str, before: int, after: int
) -> None:
    whole, *_ = ranks.run(_part_of_a_run, 1, strategy, range(6), {}, [])[0]
    first = ranks.run(_part_of_a_run, before, strategy, range(3), {}, [])[:before]
    shares = [share for _, share, _ in first]
    state, _, full = ranks.run(_part_of_a_run, after, strategy, range(3, 6), first[0][0], shares)[0]
    torch.testing.assert_close(state, whole)
    plain = torch.optim.AdamW(Net(SAVED).parameters())
    plain.load_state_dict(full)  # an ordinary optimizer loads it
    assert {float(state["step"]) for state in plain.state.values()} == {6.0}


def test_a_state_of_other_shares_or_groups_is_refused() -> None:
    optimizer = ShardedOptimizer(nn.Linear(3, 3).parameters(), torch.optim.AdamW)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="share of rank 1 of 2, this is rank 0 of 1"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "shard": [1, 2]}]})
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


@on_first(2)
def _language_model(
    group: Any, strategy: str, checkpoint_blocks: int | str, compiled: bool, recorded: bool = False
) -> Any:
    """(parameters of a Transformer after two steps on two ranks, those after these steps on one process)

    recorded  the second forward believes that a CUDA graph records it: so it gathers parameters, and the step does not
    """
    rank = dist.get_rank()
    config = ModelConfig(
        16, 32, 4, 2, vocab_size=50, context_length=8, attention="naive", checkpoint_blocks=checkpoint_blocks
    )
    tokens = torch.randint(50, (2, 2, 9), generator=torch.Generator().manual_seed(0)).to(device())
    torch.manual_seed(3)
    alone = _OfModel(TransformerLM(config, device()))
    on_rank = on_ranks.copies(alone)
    if compiled:
        on_rank.model.compile_blocks(backend="aot_eager")
    # Several buckets, so that blocks wait for their own.
    options = {"bucket_mb": 1e-3} if strategy in ("bucketed", "zero1") else {}
    wrapper = STRATEGIES[strategy].load()(on_rank, group, **options)
    assert not options or len(wrapper.buckets) > 3
    own, plain = wrapper.make_optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(2):
        inside = recorded and number == 1
        with (
            on_ranks.recording(inside),
            patch.object(FlatBuffer, "gather", autospec=True, side_effect=FlatBuffer.gather) as gather,
        ):
            loss = wrapper(tokens[rank])
        assert not recorded or gather.call_count == inside * len(wrapper.flat_buffers)
        torch.testing.assert_close(loss, alone(tokens[rank]))
        loss.backward()
        wrapper.finish_gradient_synchronization()
        own.step()
        own.zero_grad()
        if recorded:
            assert wrapper._stale == inside
        ((alone(tokens[0]) + alone(tokens[1])) / 2).backward()
        plain.step()
        plain.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(wrapper(tokens[rank]), alone(tokens[rank]))
    assert all(pending.work is None for pending in getattr(wrapper, "_gathering", ()))  # blocks have waited for theirs
    return on_ranks.on_cpu(wrapper.full_state_dict()), on_ranks.on_cpu(alone.state_dict())


class _OfModel(nn.Module):
    """Returns the loss. It reads weights as attributes of other modules, so hooks of these modules do not run."""

    def __init__(self, model: TransformerLM):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens[:, :-1], tokens[:, 1:])


LEVELS = "whole*1,attention*1,matmuls*1,none*1"
LANGUAGE_MODELS = pytest.mark.parametrize(
    ("strategy", "checkpoint_blocks", "compiled"),
    [
        *(("bucketed", 1, False), ("zero1", 0, False), ("fsdp", 0, False), ("fsdp", 1, False), ("fsdp", 3, False)),
        *(("fsdp", LEVELS, False), ("zero1", LEVELS, False)),
        pytest.param("fsdp", LEVELS, True, marks=pytest.mark.on_request),
        *(("bucketed", 0, True), ("fsdp", 0, True)),
        *(pytest.param(name, 0, True, marks=pytest.mark.on_request) for name in ("overlapped", "zero1")),
    ],
)


@LANGUAGE_MODELS
def test_the_language_model_also_checkpointed_or_compiled(
    ranks: WorkerGroup, strategy: str, checkpoint_blocks: int | str, compiled: bool
) -> None:
    sharded, expected = ranks.run(_language_model, strategy, checkpoint_blocks, compiled)[0]
    torch.testing.assert_close(sharded, expected)


@on_first(2)
def _strangers(group: Any) -> list[str]:
    """The errors of three calls with parameters that were frozen when ZeRO-1 wrapped the module."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].requires_grad_(False)
    wrapper = Zero1(module, group)
    module[1].requires_grad_(True)
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
    more = {"params": list(module[1].parameters())}
    errors = [
        on_ranks.error_of(lambda: wrapper.make_optimizer(torch.optim.SGD, params=module.parameters(), lr=0.1)),
        on_ranks.error_of(lambda: optimizer.add_param_group(more)),
        on_ranks.error_of(backward, wrapper, torch.ones(1, 2)),
    ]
    wrapper.zero_grad()
    module[1].requires_grad_(False)
    step(wrapper, optimizer, torch.ones(1, 2))  # refused calls have left no trace
    return errors


def test_zero1_refuses_parameters_that_it_does_not_train(ranks: WorkerGroup) -> None:
    *errors, of_forward = ranks.run(_strangers)[0]
    untrained = "ValueError: 2 parameters, of 6 numbers, are none that ZeRO-1 trains"
    assert all(error.startswith(untrained) for error in errors)
    trained = "the parameter 1.weight was set to be trained"
    assert of_forward.startswith(f"ValueError: on rank 0 {trained}; on rank 1 {trained}, after the module was wrapped")


@on_first(2)
def _two_wrappers(group: Any, strategy: str, shared: bool, frozen: bool = False, count: int = 2) -> str:
    """The error of a backward that comes from `count` of two wrappers, whose modules hold one layer or are apart."""
    first = nn.Linear(2, 2).requires_grad_(not frozen)
    other = first if shared else nn.Linear(2, 2)
    modules = nn.Sequential(first, nn.Linear(2, 1)), nn.Sequential(other, nn.Linear(2, 1))
    wrappers = [STRATEGIES[strategy].load()(module, group) for module in modules]
    error = on_ranks.error_of(lambda: sum(wrapper(torch.ones(1, 2)).sum() for wrapper in wrappers[:count]).backward())
    for wrapper in wrappers if error == "nothing raised" else ():
        wrapper.finish_gradient_synchronization()
    return error


@pytest.mark.parametrize("strategy", ["overlapped", "bucketed", "naive"])
def test_a_backward_of_two_wrappers_that_send_one_gradient_is_refused(ranks: WorkerGroup, strategy: str) -> None:
    assert ranks.run(_two_wrappers, strategy, False)[0] == "nothing raised"
    assert ranks.run(_two_wrappers, strategy, True, True)[0] == "nothing raised"  # the layer that both hold is frozen
    refused = "RuntimeError: this backward comes from two wrappers that train one parameter"
    expected = "nothing raised" if strategy == "naive" else refused  # naive sends none before the backward has ended
    for count in (1, 2):
        assert ranks.run(_two_wrappers, strategy, True, False, count)[0].startswith(expected)


@on_first(2)
def _one_under_no_sync(group: Any, strategy: str) -> str:
    """The error of a step after a backward of one of two wrappers that hold one layer, under no_sync() of the other."""
    shared = nn.Linear(2, 2)
    wrapper, other = (STRATEGIES[strategy].load()(nn.Sequential(shared, nn.Linear(2, 1)), group) for _ in range(2))
    optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
    with other.no_sync():
        wrapper(torch.ones(1, 2)).sum().backward()
    wrapper.finish_gradient_synchronization()
    return on_ranks.error_of(optimizer.step)


@pytest.mark.parametrize("strategy", ["bucketed", "naive"])
def test_a_backward_under_no_sync_of_another_wrapper_leaves_it_nothing(ranks: WorkerGroup, strategy: str) -> None:
    assert ranks.run(_one_under_no_sync, strategy)[0] == "nothing raised"


def test_a_recorded_forward_fetches_what_the_step_before_it_left(ranks: WorkerGroup) -> None:
    sharded, expected = ranks.run(_language_model, "zero1", 0, False, True)[0]
    torch.testing.assert_close(sharded, expected)


@on_first(2)
def _narrow(group: Any, strategy: str, options: dict[str, Any]) -> Any:
    """(parameters after three steps with these options, parameters without them, dtypes of the gradients)"""
    rank = dist.get_rank()
    recipe, states = Recipe(width=8), []
    for chosen in (options, {}):
        torch.manual_seed(2)
        wrapper = STRATEGIES[strategy].load()(Net(recipe).to(device()), group, **chosen)
        optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
        for x in torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(2)).to(device()):
            with torch.autocast(device().type, torch.bfloat16, enabled="compute_dtype" in chosen):
                loss = wrapper(x[rank])
            loss.backward()
            wrapper.finish_gradient_synchronization()
            dtypes = {p.grad.dtype for p in wrapper.parameters()}
            optimizer.step()
            optimizer.zero_grad()
        states.append(on_ranks.on_cpu(wrapper.full_state_dict()))
    return *states, dtypes


LOW_PRECISION = pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("bucketed", {"comm_dtype": torch.bfloat16, "bucket_mb": 1e-4}),
        ("overlapped", {"comm_dtype": torch.bfloat16}),
        ("fsdp", {"compute_dtype": torch.bfloat16}),
    ],
)


@LOW_PRECISION
def test_low_precision_is_close_and_gradients_stay_wide(
    ranks: WorkerGroup, strategy: str, options: dict[str, Any]
) -> None:
    """In each of three steps with a learning rate of 0.1, gradients have a relative error of 2^-8, by rounding."""
    narrow, wide, dtypes = ranks.run(_narrow, strategy, options)[0]
    assert dtypes == {torch.float32}
    torch.manual_seed(2)
    start = Net(Recipe(width=8)).state_dict()
    for name, x in wide.items():
        moved = (x - start[name]).abs().max()
        difference = (narrow[name] - x).abs().max()
        assert difference <= 8 * torch.finfo(torch.bfloat16).eps * max(moved, 0.1)
    assert any(not torch.equal(narrow[name], x) for name, x in wide.items())


@on_first(2)
def _differ(group: Any, what: str) -> str:
    """The error of wrapping a module that on rank 1 has another "shape", another "order" or "more" layers."""
    usual = [(4, 4), (4, 5)]
    other = {"shape": [(4, 4), (4, 6)], "order": usual[::-1], "more": [*usual, (5, 5)]}[what]
    layers = [nn.Linear(*sizes) for sizes in (other if dist.get_rank() else usual)]
    return on_ranks.error_of(Naive, nn.Sequential(*layers), group)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "rank 0 has the parameter 1.weight (5, 4) float32 where rank 1 has the parameter 1.weight (6, 4)"),
        ("order", "rank 0 has the parameter 0.weight (4, 4) float32 where rank 1 has the parameter 0.weight (5, 4)"),
        ("more", "rank 0 has nothing more where rank 1 has the parameter 2.weight (5, 5)"),
    ],
)
def test_ranks_that_build_different_models_are_told(ranks: WorkerGroup, what: str, message: str) -> None:
    for error in ranks.run(_differ, what)[:2]:
        assert error.startswith("ValueError: ranks hold different modules") and message in error


NO_SIZE, NO_DTYPE = "bucket_mb=.* must be a positive number of MiB", "{}=.* must be a floating-point dtype"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (strategy, {"bucket_mb": x}, NO_SIZE)
        for strategy in (Bucketed, Zero1)
        for x in (0, -1, math.inf, math.nan, True)
    ),
    (Zero1, {"bucket_mb": None}, "bucket_mb=None must be a positive number of MiB"),
    (Bucketed, {"bucket_mb": "large"}, "bucket_mb='large'"),
    *(
        (strategy, {name: dtype}, NO_DTYPE.format(name))
        for strategy, name in ((Bucketed, "comm_dtype"), (Fsdp, "compute_dtype"))
        for dtype in (torch.int32, torch.complex64, torch.bool, "bfloat16")
    ),
]


@pytest.mark.parametrize(("strategy", "options", "message"), REFUSED)
def test_bad_options_are_refused(strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(nn.Linear(2, 2), None, **options)


def test_an_unknown_strategy_offers_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'buckted'; did you mean bucketed"):
        _ = STRATEGIES["buckted"]


def test_alone_no_process_group_is_needed() -> None:
    assert not dist.is_initialized() and not GROUPS
    for name, row in STRATEGIES.items():
        if row.peer:
            continue
        wrapper = row.load()(Net(Recipe()))
        optimizer = wrapper.make_optimizer(torch.optim.SGD, lr=0.1)
        before = [x.clone() for x in wrapper.full_state_dict().values()]
        step(wrapper, optimizer, torch.randn(2, 6))
        assert any(not torch.equal(a, b) for a, b in zip(before, wrapper.full_state_dict().values(), strict=True)), name


def test_a_failed_backward_is_noted_though_no_forward_was() -> None:
    """Under `no_sync()` forwards are not noted; a backward that fails on one rank alone must still tell it apart."""
    wrapper = Naive(nn.Linear(1, 1))
    wrapper._in_backward = True
    wrapper._leave_backward(late=True)
    assert wrapper._flags()[1] != 0


UNEVEN = Recipe(width=8, layers=3, tied=True, rare=True), Recipe(width=5, frozen=True, unused=True, mixed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", [name for name in OWN if "copy_engine" not in name])
def test_the_same_on_nccl(gpu_ranks: WorkerGroup, name: str, sharded: bool) -> None:
    if sharded and name in ("zero1", "fsdp"):
        pytest.skip("it shards its optimizer by itself")
    options = {"bucket_mb": 1e-4} if name in ("bucketed", "zero1") else {}
    for recipe, optimizer in product(UNEVEN, ("momentum", "adamw")):
        training = Training(name, options, optimizer=optimizer, microbatches=2, sharded=sharded)
        assert worst_ratio(gpu_ranks.run(train, recipe, training, 0), recipe, training, 0) <= 1, (recipe, optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, row in STRATEGIES.items() if row.peer])
def test_peers_are_that_too_on_nccl(gpu_ranks: WorkerGroup, name: str) -> None:
    test_peers_are_that_too(gpu_ranks, name)


@pytest.mark.gpu
@LANGUAGE_MODELS
def test_the_language_model_on_nccl(
    gpu_ranks: WorkerGroup, strategy: str, checkpoint_blocks: int | str, compiled: bool
) -> None:
    test_the_language_model_also_checkpointed_or_compiled(gpu_ranks, strategy, checkpoint_blocks, compiled)


@pytest.mark.gpu
@LOW_PRECISION
def test_low_precision_on_nccl(gpu_ranks: WorkerGroup, strategy: str, options: dict[str, Any]) -> None:
    test_low_precision_is_close_and_gradients_stay_wide(gpu_ranks, strategy, options)
