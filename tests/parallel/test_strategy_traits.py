"""The facts about strategies that others act on: in the table, and in a file of a user's own."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry, Traits
from lmsys.traits import StrategyTraits

OPTIONS = {  # trait: the option of the constructor that it speaks of
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
ROWS = {name: row for name, row in STRATEGIES.items() if row.target.startswith("lmsys.")}  # not those of other packages
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def test_a_strategy_in_a_file_of_its_own_has_traits_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)
    rows = STRATEGIES.select([f"{file}:Plain", f"{file}:Derived"])
    plain, derived = (StrategyTraits.of(row) for row in rows)
    assert plain == StrategyTraits(zero_stage=2, takes_bucket_mb=True, rivals=("zero1",))
    assert derived.why_not_graphed == "it asks for values"
    assert derived.takes_bucket_mb is derived.all_reduces is derived.comm_dtypes is True
    assert (derived.zero_stage, derived.synchronizes, derived.color) == (0, True, "")


def test_a_misspelt_trait_of_a_class_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Plain:\n    synchronises = False\n")
    with pytest.raises(ValueError, match="row 'Plain': trait 'synchronises' must .* did you mean synchronizes"):
        STRATEGIES.select([f"{file}:Plain"])


@rows
def test_every_row_has_a_color_and_rivals_of_the_table(row: Entry) -> None:
    traits = StrategyTraits.of(row)
    assert re.fullmatch("#[0-9a-f]{6}", traits.color)
    assert all(rival in ROWS and rival != row.name for rival in traits.rivals)


def test_every_trait_is_described() -> None:
    assert all(trait.name in f"{StrategyTraits.__doc__}{Traits.__doc__}" for trait in fields(StrategyTraits))


@rows
def test_a_trait_that_speaks_of_an_option_has_it(row: Entry) -> None:
    options = inspect.signature(row.load()).parameters
    assert all(option in options for trait, option in OPTIONS.items() if getattr(StrategyTraits.of(row), trait))


@rows
def test_traits_of_sharding_agree(row: Entry) -> None:
    traits = StrategyTraits.of(row)
    stage = traits.zero_stage
    assert stage is not None and traits.shards_gradients == (stage >= 2)
    assert traits.compute_dtype == bool(traits.why_not_graphed) == (stage == 3)
    assert traits.local_step == (not traits.why_not_fused) == (stage == 0)
    assert traits.all_reduces == (stage == 0 and traits.synchronizes)


def test_facts_that_single_rows_have() -> None:
    def where(trait: str) -> list[str]:
        usual = getattr(StrategyTraits(zero_stage=0), trait)
        return [name for name, row in ROWS.items() if getattr(StrategyTraits.of(row), trait) != usual]

    assert where("synchronizes") == ["none"] and where("baseline") == ["naive"]
    assert where("takes_bucket_mb") == where("comm_dtypes") == ["bucketed", "copy_engine"]
    assert where("tuned_bucket_mb") == where("accumulates") == ["torch_ddp_tuned"]
    assert where("all_reduce_model") == where("kernels") == ["copy_engine", "copy_engine_zero1"]
    of_torch = ["torch_fsdp2", "torch_fsdp2_zero2"]
    assert where("fused_adamw") == where("why_not_saved") == of_torch
    assert where("zero_stage") == ["zero1", "copy_engine_zero1", "fsdp", "torch_zero1", *of_torch]


def test_rows_have_colors_of_their_own() -> None:
    colors = [StrategyTraits.of(row).color for row in ROWS.values()]
    assert len(set(colors)) == len(colors)
