"""Clipping, loss scaling, param groups and optimizer states on strategies that shard parameters, beside one process.

The trainings are functions of tests/support/parts.py: each returns numbers and weights. A new one is added to
TRAININGS. "alone" and "exact" name training on one process with the batches of both ranks, in float32 and in float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmsys.parallel.group import WorkerGroup
from lmsys.testing import error_ratio
from tests.support import parts
from tests.support.parts import on_two

SHARDED = ("zero1", "copy_engine_zero1", "fsdp")
STRATEGIES = ("naive", *SHARDED)


def on_two_ranks(ranks: WorkerGroup, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The function's results on two ranks."""
    return ranks.run(on_two, function, *args)[:2]


def assert_equal(result: Any, exact: Any, plain: Any) -> None:
    """AssertionError unless a result equals that of one process; tensors within the budget of `error_ratio`.

    exact, plain  the result of one process in float64 and in float32
    """
    if isinstance(result, dict):
        assert result.keys() == exact.keys()
        result, exact, plain = (list(state.values()) for state in (result, exact, plain))
    if isinstance(result, list | tuple):
        for three in zip(result, exact, plain, strict=True):
            assert_equal(*three)
    elif isinstance(result, torch.Tensor):
        assert error_ratio(result, exact.double(), plain.float()) <= 1
    else:
        assert result == exact == plain


def assert_as_on_one_process(ranks: WorkerGroup, training: Callable[..., Any], strategy: str, *args: Any) -> None:
    """AssertionError unless the training has equal results on two ranks with the strategy and on one process."""
    exact, plain = (training(one_process, *args) for one_process in ("exact", "alone"))
    for result in on_two_ranks(ranks, training, strategy, *args):
        assert not isinstance(result, str), result
        assert_equal(result, exact, plain)


TRAININGS = (
    parts.scaled,
    parts.in_groups,
    parts.by_a_tensor_of_rates,
    parts.with_batches_run_out,
    parts.by_a_plain_optimizer,
    parts.with_state_replaced,
    parts.with_averages,
    parts.with_hooks_that_change_gradients,
    parts.with_a_step_that_has_no_gradients,
    parts.with_another_strategy,
    parts.with_sums_from_the_start,
    parts.with_states_of_nothing,
    parts.with_a_state_of_its_own,
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", TRAININGS)
def test_two_ranks_train_as_one_process(ranks: WorkerGroup, training: Callable[[str], Any], strategy: str) -> None:
    assert_as_on_one_process(ranks, training, strategy)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"eps": 1e-2, "weight_decay": 0.5}),
        (torch.optim.Adamax, {"eps": 1e-2, "weight_decay": 0.5}),
        (torch.optim.NAdam, {"eps": 1e-2, "weight_decay": 0.5}),
        (torch.optim.RMSprop, {"eps": 1e-2, "weight_decay": 0.5, "centered": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.ASGD, {"weight_decay": 0.5}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
        (torch.optim.Rprop, {}),
        (parts.Counting, {"kept": "group"}),
        (parts.Counting, {"kept": "number"}),
        (parts.Counting, {"kept": "tensor"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("strategy", ["naive", "zero1", "fsdp"])
def test_an_optimizer_goes_on_from_a_state_that_was_kept(
    ranks: WorkerGroup, strategy: str, cls: Any, options: dict[str, Any], before: int
) -> None:
    assert_as_on_one_process(ranks, parts.with_state_kept, strategy, cls, options, before)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", TRAININGS)
def test_two_gpus_train_as_one_process(gpu_ranks: WorkerGroup, training: Callable[[str], Any], strategy: str) -> None:
    assert_as_on_one_process(gpu_ranks, training, strategy)


@pytest.mark.parametrize("strategy", ["naive", "zero1", "copy_engine_zero1"])
@pytest.mark.parametrize(
    "training",
    [
        parts.with_a_late_group,
        parts.with_weights_decayed_by_hand,
        parts.with_gradients_begun_by_hand,
        parts.with_gradients_that_decay,
    ],
)
def test_two_ranks_train_the_modules_own_parameters(
    ranks: WorkerGroup, training: Callable[[str], Any], strategy: str
) -> None:
    """These trainings take the module's own parameters, which fsdp refuses."""
    assert_as_on_one_process(ranks, training, strategy)


@pytest.mark.parametrize("strategy", SHARDED)
def test_torchs_clipping_is_refused_as_it_sees_only_a_part(ranks: WorkerGroup, strategy: str) -> None:
    for errors in on_two_ranks(ranks, parts.refused_norms, strategy):
        assert all("clip_grad_norm(wrapper, max_norm)" in error for error in errors), errors


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_state_that_does_not_fit_is_refused(ranks: WorkerGroup, strategy: str) -> None:
    other_groups, missing_parameters, *more = on_two_ranks(ranks, parts.refused_states, strategy)[1]
    assert "has other parameters, or other groups of them" in other_groups + missing_parameters
    share = more.pop(0)
    assert "is the share of rank 0 of 2, this is rank 1 of 2" in share
    if strategy == "fsdp":
        assert "unit" in more[0] and "several param groups" in more[1] and "before any other" in more[2]
        assert more[3] == "nothing raised"  # a step that was refused leaves nothing behind
        assert "Adafactor looks at whole parameters" in more[4] and "ByNorm looks at whole parameters" in more[5]
        assert "AdamP looks at whole parameters" in more[6] and "Prodigy looks at all gradients" in more[7]


@pytest.mark.parametrize("strategy", ["naive", "zero1", "fsdp"])
def test_a_state_that_cannot_be_divided_is_refused_by_name(ranks: WorkerGroup, strategy: str) -> None:
    for count, pair, key, nested, loaded in on_two_ranks(ranks, parts.refused_keys, strategy):
        for error, name in ((count, "'count'"), (pair, "('a', 1)"), (key, "'steps'")):
            assert error.startswith(f"ValueError: the optimizer's state has the key {name}"), error
        if strategy == "fsdp":
            assert nested == loaded and nested.startswith(
                "ValueError: the optimizer's state has tensors inside 'inner'"
            )
        else:
            assert nested == loaded == "nothing raised"


@pytest.mark.parametrize("strategy", ["naive", "zero1", "fsdp"])
def test_a_state_that_could_not_be_made_leaves_the_optimizer_as_it_was(ranks: WorkerGroup, strategy: str) -> None:
    """Its rate stayed at 0."""
    for found in on_two_ranks(ranks, parts.after_a_failed_state, strategy):
        assert found == ("MemoryError: ", 0.1, 0, False)


def test_parts_in_a_group_of_tree_sums(ranks: WorkerGroup) -> None:
    assert on_two_ranks(ranks, parts.in_tree_sums, None) == [[True, 10**0.5]] * 2


def test_a_state_that_is_known_of_no_single_parameter_is_refused(ranks: WorkerGroup) -> None:
    for never, some in on_two_ranks(ranks, parts.left_out_of_some_steps, None):
        assert never == "nothing raised"
        assert some.startswith("ValueError: a parameter was left out of some steps")
    for error in on_two_ranks(ranks, parts.used_again, None):
        assert error.startswith("RuntimeError: no rank had used a parameter")


@pytest.mark.parametrize("strategy", ["naive", "zero1", "fsdp"])
def test_modules_that_are_not_supported_are_refused_at_construction(ranks: WorkerGroup, strategy: str) -> None:
    expected = [
        "SyncBatchNorm",
        "sparse=False",
        "meta device",
        "names parameters that DDP is to ignore",
        *["nothing raised" if strategy == "naive" else "two parameters share their memory"] * 2,
        "0 has max_norm",
        "was read that fsdp has divided among ranks",
        "nothing raised",
    ]
    for errors in on_two_ranks(ranks, parts.refused_modules, strategy):
        assert all(words in error for words, error in zip(expected, errors, strict=True)), errors


def test_trainings_that_would_be_wrong_are_refused(ranks: WorkerGroup) -> None:
    unfinished, fine = "a backward was not followed by finish_gradient_synchronization()", "nothing raised"
    expected = {
        "bucketed": [unfinished, unfinished, fine, fine, fine],
        "zero1": [unfinished, unfinished, "has added to gradients that are means", fine, fine],
        "fsdp": [fine, "one of parameters() has a hook", fine, "a parameter was written", "modified by an inplace"],
    }
    for strategy, all_words in expected.items():
        for errors in on_two_ranks(ranks, parts.refused_trainings, strategy):
            assert all(words in error for words, error in zip(all_words, errors, strict=True)), errors


CHECKPOINTS = (  # ((number of ranks, strategy) that saves, the same that loads)
    ((4, "fsdp"), (2, "bucketed")),
    ((2, "bucketed"), (4, "fsdp")),
    ((2, "fsdp"), (4, "torch_fsdp2")),
    ((4, "torch_fsdp2"), (2, "fsdp")),
    ((3, "zero1"), (2, "fsdp")),
    ((2, "fsdp"), (2, "zero1")),
    ((2, "zero1"), (2, "torch_fsdp2")),
    ((2, "torch_fsdp2"), (2, "zero1")),
    ((4, "fsdp"), (1, "plain")),
    ((1, "plain"), (3, "fsdp")),
)
BY_NAMES = [parts.decayed] * 3 + [None, parts.decayed] * 2 + [None] * 3


@pytest.mark.parametrize(
    ("before", "after", "by_name"),
    # Checkpoints of torch number param groups, and the plain module has one for each parameter: the last have no names.
    [(*pair, by_name) for pair, by_name in zip(CHECKPOINTS, BY_NAMES, strict=True)],
)
def test_training_goes_on_from_a_distributed_checkpoint(
    ranks: WorkerGroup, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], by_name: Any
) -> None:
    exact, plain = (parts.three_steps(alone, by_name, before[0], after[0]) for alone in ("exact", "alone"))
    saved = ranks.run(parts.save, *before, str(tmp_path), by_name)[0]
    for loaded, after_a_step in ranks.run(parts.load, *after, str(tmp_path), by_name)[: after[0]]:
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], x) for name, x in saved.items())
        assert_equal(after_a_step, exact, plain)
