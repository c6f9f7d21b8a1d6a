"""Axes of benchmarks: values that an option of the command line takes or refuses, and the cases that a grid becomes.

The options are those of benchmarks/axes.py. A new bad value is a case of the first test.
"""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import axes
from benchmarks.bench_attention import shapes
from lmsys.bench import Axis, Grid, positive
from lmsys.bench.fields import filled, given_axes
from lmsys.checkpointing import LEVELS
from lmsys.config import RESIDUALS


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tiers", "128:64,100:64", "--tiers '100:64': must read queries:keys, both powers of two"),
        ("--tiers", "128", "powers of two"),
        ("--length", "0", "--length '0': must be a positive whole number"),
        ("--head-dim", "64.5", "positive whole number"),
        ("--dtype", "bfloat", "must be one of float32, float16, bfloat16; did you mean bfloat16"),
        ("--direction", "forward", "must be one of fwd, bwd, fwdbwd"),
        ("--causal", "maybe", "must be one of yes, no"),
        ("--heads", "12:5", "must be a multiple of key/value heads"),
        ("--epochs", "1", "--epochs '1': must be at least 2"),
        ("--bucket-mb", "few", "must be a positive whole number"),
        ("--checkpoint", "none,,whole", "--checkpoint '': must be fit, a number of blocks"),
        ("--checkpoint", "none,matmul*2", "--checkpoint 'matmul*2': must be fit, a number of blocks, one of none, "),
        ("--residual", "bf16", "--residual 'bf16': must be one of wide, narrow"),
    ],
)
def test_bad_values_are_named(option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        given_axes(axes.NAMED, {option: value})
    assert message in str(caught.value)


def test_every_option_is_declared_once_and_has_help() -> None:
    options = [axis.option for axis in axes.NAMED]
    assert len(set(options)) == len(options) and all(axis.help for axis in axes.NAMED)


def test_named_axes_take_the_place_of_a_grids_own() -> None:
    section = Grid("s", length=((1024, 1024),), head_dim=(64,), tokens=4096, width=256)
    known = axes.named("--length", "--tiers", "--head-dim", "--batch", "--heads")
    assert list(shapes(filled(section, known, {}))) == [(4, 4, 4, 1024, 1024, 64)]
    given = given_axes(known, {"--tiers": "128:64", "--heads": "8:2", "--head-dim": "32,128"})
    assert given == {"length": ((128, 64),), "heads": ((8, 2),), "head_dim": (32, 128)}
    assert list(shapes(filled(section, known, given))) == [(32, 8, 2, 128, 64, dim) for dim in (32, 128)]


@given(st.lists(st.sampled_from(["fit", *LEVELS, "7", "attention*12,matmuls*22", "whole*1"]), min_size=1))
def test_settings_of_checkpointing_are_apart_where_their_commas_are_not_their_own(settings: list[str]) -> None:
    given = given_axes(axes.NAMED, {"--checkpoint": ", ".join(settings)})["checkpoint"]
    runs = [setting for has_number, part in groupby(settings, lambda setting: "*" in setting)
            for setting in ([",".join(part)] if has_number else part)]  # fmt: skip
    assert list(given) == runs
    assert given_axes(axes.NAMED, {"--checkpoint": "0,1"})["checkpoint"] == ("none", "whole")
    assert given_axes(axes.NAMED, {"--residual": "wide,narrow"})["residual"] == RESIDUALS


def test_two_options_of_one_axis_add_up_and_an_axis_is_known_by_its_name() -> None:
    both = given_axes(axes.named("--length", "--tiers"), {"--length": "8", "--tiers": "4:2"})
    assert both == {"length": ((8, 8), (4, 2))}
    assert given_axes([Axis("size", positive)], {"size": "3,5"}) == {"size": (3, 5)}


def test_of_two_axes_of_one_name_the_first_reads_the_values_that_are_given_by_name() -> None:
    assert given_axes(axes.named("--length", "--tiers"), {"length": "1024"}) == {"length": ((1024, 1024),)}
    numbers = [Axis("size", positive, option="--size"), Axis("size", positive, option="--more")]
    assert given_axes(numbers, {"size": "1,2"}) == {"size": (1, 2)}
    assert given_axes(numbers, {"size": "1,2", "--more": "3"})["size"] == (1, 2, 3)
