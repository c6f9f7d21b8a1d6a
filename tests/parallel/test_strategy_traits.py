"""The facts about strategies that others act on: in the table, and in a file of a user's own."""

import inspect
import re
from pathlib import Path

import pytest

from lmsys.parallel import STRATEGIES
from lmsys.parallel.traits import Traits
from lmsys.registry import Entry

DEFAULTS = {name: value for name, value in vars(Traits).items() if not name.startswith("_")}
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
    plain, derived = STRATEGIES.select([f"{file}:Plain", f"{file}:Derived"])
    assert plain.trait("zero_stage") == 2 and plain.trait("takes_bucket_mb") is True
    assert plain.trait("rivals") == ("zero1",)
    assert plain.trait("all_reduces", False) is False and plain.trait("color") is None
    assert derived.trait("why_not_graphed") == "it asks for values"
    assert derived.trait("takes_bucket_mb") is derived.trait("all_reduces") is derived.trait("comm_dtypes") is True
    assert (derived.trait("zero_stage", 7), derived.trait("synchronizes")) == (0, True)


@rows
def test_every_row_has_every_trait(row: Entry) -> None:
    for name, default in DEFAULTS.items():
        assert type(row.trait(name)) is type(default), name
        assert name in Traits.__doc__
    assert re.fullmatch("#[0-9a-f]{6}", row.trait("color"))
    assert all(rival in ROWS and rival != row.name for rival in row.trait("rivals"))


@rows
def test_a_trait_that_speaks_of_an_option_has_it(row: Entry) -> None:
    options = inspect.signature(row.load()).parameters
    assert all(option in options for trait, option in OPTIONS.items() if row.trait(trait))


@rows
def test_traits_of_sharding_agree(row: Entry) -> None:
    stage = row.trait("zero_stage")
    assert row.trait("shards_gradients") == (stage >= 2)
    assert row.trait("compute_dtype") == bool(row.trait("why_not_graphed")) == (stage == 3)
    assert row.trait("local_step") == (not row.trait("why_not_fused")) == (stage == 0)
    assert row.trait("all_reduces") == (stage == 0 and row.trait("synchronizes"))


def test_facts_that_single_rows_have() -> None:
    def where(trait: str) -> list[str]:
        return [name for name, row in ROWS.items() if row.trait(trait) != DEFAULTS[trait]]

    assert where("synchronizes") == ["none"] and where("baseline") == ["naive"]
    assert where("takes_bucket_mb") == where("comm_dtypes") == ["bucketed", "copy_engine"]
    assert where("tuned_bucket_mb") == where("accumulates") == ["torch_ddp_tuned"]
    assert where("all_reduce_model") == where("kernels") == ["copy_engine", "copy_engine_zero1"]
    of_torch = ["torch_fsdp2", "torch_fsdp2_zero2"]
    assert where("fused_adamw") == where("why_not_saved") == of_torch
    assert where("zero_stage") == ["zero1", "copy_engine_zero1", "fsdp", "torch_zero1", *of_torch]


def test_rows_have_colors_of_their_own() -> None:
    colors = [row.trait("color") for row in ROWS.values()]
    assert len(set(colors)) == len(colors)
