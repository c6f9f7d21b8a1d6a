"""Traits of strategies: facts that benchmarks and training act on, stated by the table or by a class of a user's file.

`StrategyTraits` in lmsys/traits.py declares them. A row is a strategy in the table STRATEGIES. FACTS has traits of rows
that a benchmark or training acts on; another row needs no entry there.
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry, Traits
from lmsys.traits import StrategyTraits

OPTIONS = {  # {trait: the option of the constructor that it is about}
    "takes_bucket_mb": "bucket_mb",
    "tuned_bucket_mb": "bucket_mb",
    "comm_dtypes": "comm_dtype",
    "compute_dtype": "compute_dtype",
}
OWN_FILE = """
from torch import nn
from lmsys.parallel.overlapped import Bucketed

class Plain(nn.Module):
    zero_stage = 2
    takes_bucket_mb = True
    rivals = ("zero1",)

class Derived(Bucketed):
    why_not_graphed = "it asks for values"
"""
# The rows of lmsys, without those that other installed packages have added.
ROWS = {name: row for name, row in STRATEGIES.items() if row.target.startswith("lmsys.")}
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def test_a_strategy_in_a_users_file_states_its_traits(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)
    rows = STRATEGIES.select([f"{file}:Plain", f"{file}:Derived"])
    plain, derived = (StrategyTraits.of(row) for row in rows)
    assert plain == StrategyTraits(zero_stage=2, takes_bucket_mb=True, rivals=("zero1",))
    assert derived.why_not_graphed == "it asks for values"
    assert derived.takes_bucket_mb is derived.comm_dtypes is True
    assert (derived.zero_stage, derived.synchronizes, derived.color) == (0, True, "")


def test_a_misspelt_trait_of_a_class_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Plain:\n    synchronises = False\n")
    with pytest.raises(ValueError, match="row 'Plain': trait 'synchronises' must .* did you mean synchronizes"):
        STRATEGIES.select([f"{file}:Plain"])


@rows
def test_every_row_has_a_color_and_rivals_of_the_table(row: Entry) -> None:
    traits = StrategyTraits.of(row)
    assert re.fullmatch("|#[0-9a-f]{6}", traits.color) and row.traits.get("color") != ""
    assert all(rival in ROWS and rival != row.name for rival in traits.rivals)


def test_every_trait_is_described() -> None:
    assert all(trait.name in f"{StrategyTraits.__doc__}{Traits.__doc__}" for trait in fields(StrategyTraits))


@rows
def test_a_row_with_a_trait_about_an_option_has_this_option(row: Entry) -> None:
    options = inspect.signature(row.load()).parameters
    assert all(option in options for trait, option in OPTIONS.items() if getattr(StrategyTraits.of(row), trait))


@rows
def test_traits_of_sharding_agree(row: Entry) -> None:
    traits = StrategyTraits.of(row)
    stage = traits.zero_stage
    assert stage is not None and traits.shards_gradients == (stage >= 2)
    assert traits.compute_dtype == bool(traits.why_not_graphed) == (stage == 3)
    assert bool(traits.why_not_fused) == (stage > 0)


FACTS = {
    "none": {"synchronizes": False},  # the row that exposed communication and scaling are measured against
    "naive": {"baseline": 1},  # the row that gains are measured against
    "bucketed": {"takes_bucket_mb": True, "comm_dtypes": True},  # sweeps vary both
    "copy_engine": {"takes_bucket_mb": True, "comm_dtypes": True, "all_reduce_model": False},  # it sends no all-reduce
    "zero1": {"zero_stage": 2},  # a rank keeps the gradients of its shard alone
    "copy_engine_zero1": {"zero_stage": 2, "all_reduce_model": False},
    "fsdp": {"zero_stage": 3},
    "torch_ddp_tuned": {"tuned_bucket_mb": True, "accumulates": False},  # its static graph knows no `no_sync`
    "torch_zero1": {"zero_stage": 1},
    "torch_fsdp2": {"zero_stage": 3, "fused_adamw": True},
    "torch_fsdp2_zero2": {"zero_stage": 3, "fused_adamw": True},  # its parameters are whole from forward to backward
}


@pytest.mark.parametrize("name", FACTS)
def test_rows_have_the_traits_that_others_act_on(name: str) -> None:
    traits = StrategyTraits.of(STRATEGIES[name])
    assert {trait: getattr(traits, trait) for trait in FACTS[name]} == FACTS[name]


def test_the_default_baseline_is_one_row() -> None:
    largest = max(StrategyTraits.of(row).baseline for row in ROWS.values())
    assert largest and [StrategyTraits.of(row).baseline for row in ROWS.values()].count(largest) == 1
