"""Axes of benchmarks: values that an option of the command line takes or refuses, and the cases that a grid becomes.

An axis is a parameter that a benchmark varies, such as "length", with an option such as --length. A grid has values of
axes, and becomes cases, one for each combination. The options are those of benchmarks/axes.py. A new bad value is one
more case of the first test.
"""

from itertools import chain, groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import axes
from benchmarks.bench_attention import shapes
from benchmarks.bench_collectives import Collectives
from benchmarks.bench_data_parallel import DataParallel
from benchmarks.bench_loss import Loss
from benchmarks.bench_training import Training
from benchmarks.sweeps import SWEEPS
from lmsys.bench import Axis, Benchmark, Grid, Settings, positive
from lmsys.bench.fields import filled, given_axes
from lmsys.bench.results import Session
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
        (
            "--size",
            "medum",
            "must be one of tiny, small, medium, large, xl, 2.7b, 10b, 1b, 3b, 8b; did you mean medium",
        ),
        ("--context", "0", "--context '0': must be a positive whole number"),
        ("--precision", "bf61", "must be one of fp32, tf32, bf16, fp16"),
        ("--mode", "fwd", "must be one of forward, train_forward, backward, optimizer, step"),
        ("--compile", "jit", "--compile 'jit': must be one of eager, compiled, graphed"),
        ("--world-size", "two", "--world-size 'two': must be a positive whole number"),
        ("--comm-dtype", "bf16", "--comm-dtype 'bf16': must be one of float32, float16, bfloat16"),
        ("--sharded-optimizer", "maybe", "--sharded-optimizer 'maybe': must be one of yes, no"),
        ("--optimizer", "sgd", "--optimizer 'sgd': must be one of adamw, muon"),
        ("--epochs", "1", "--epochs '1': must be at least 2"),
        ("--epochs", "2,3", "--epochs '2,3': must be a positive whole number"),
        ("--train-tokens", "0", "--train-tokens '0': must be a positive whole number"),
        ("--val-tokens", "many", "--val-tokens 'many': must be a positive whole number"),
        ("--bucket-mb", "0", "--bucket-mb '0': must be a positive whole number"),
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


@pytest.mark.parametrize("kind", [Collectives, DataParallel, Loss, Training])
def test_every_sweep_has_cases_that_the_name_of_no_other_benchmark_selects(kind: type[Benchmark]) -> None:
    """`-k NAME` selects each case whose id contains NAME.

    The sweeps of other benchmarks are asked in the test files of these benchmarks.
    """
    names = "attention model loss anatomy precision tokenizer training data_parallel collectives".split()
    for sweep in chain.from_iterable(map(dict.values, SWEEPS.values())):
        ids = Session(Settings(device="cpu"), sweep).add(kind)
        assert ids and len(set(ids)) == len(ids)
        assert not any(name in case_id for case_id in ids for name in names if name != kind.name)


def test_values_from_the_command_line_replace_those_of_a_grid() -> None:
    section = Grid("s", length=((1024, 1024),), head_dim=(64,), tokens=4096, width=256)
    known = axes.named("--length", "--tiers", "--head-dim", "--batch", "--heads")
    # batch, heads, key/value heads, queries, keys, head_dim: 4096 tokens / 1024, and width 256 / 64
    assert list(shapes(filled(section, known, {}))) == [(4, 4, 4, 1024, 1024, 64)]
    given = given_axes(known, {"--tiers": "128:64", "--heads": "8:2", "--head-dim": "32,128"})
    assert given == {"length": ((128, 64),), "heads": ((8, 2),), "head_dim": (32, 128)}
    assert list(shapes(filled(section, known, given))) == [(4096 // 128, 8, 2, 128, 64, dim) for dim in (32, 128)]


@given(st.lists(st.sampled_from(["fit", *LEVELS, "7", "attention*12,matmuls*22", "whole*1"]), min_size=1))
def test_commas_separate_settings_of_checkpointing_but_not_the_parts_of_one(settings: list[str]) -> None:
    """Neighbouring parts with a number, such as "attention*12", are read as one setting."""
    given = given_axes(axes.NAMED, {"--checkpoint": ", ".join(settings)})["checkpoint"]
    expected = [setting for has_number, parts in groupby(settings, lambda setting: "*" in setting)
                for setting in ([",".join(parts)] if has_number else parts)]  # fmt: skip
    assert list(given) == expected


LENGTHS = axes.named("--length", "--tiers")
NUMBERS = [Axis("size", positive, option="--size"), Axis("size", positive, option="--more")]


@pytest.mark.parametrize(
    ("known", "texts", "values"),
    [
        # Numbers of blocks that share one kept input: 0 is the level "none", and 1 is "whole", each block by itself.
        (axes.NAMED, {"--checkpoint": "0,1"}, {"checkpoint": ("none", "whole")}),
        (axes.NAMED, {"--residual": "wide,narrow"}, {"residual": RESIDUALS}),
        # Two options of one axis are joined.
        (LENGTHS, {"--length": "8", "--tiers": "4:2"}, {"length": ((8, 8), (4, 2))}),
        (NUMBERS, {"size": "1,2", "--more": "3"}, {"size": (1, 2, 3)}),
        ([Axis("size", positive)], {"size": "3,5"}, {"size": (3, 5)}),
        # Values given by name are read by the first axis of that name.
        (LENGTHS, {"length": "1024"}, {"length": ((1024, 1024),)}),
        (NUMBERS, {"size": "1,2"}, {"size": (1, 2)}),
    ],
)
def test_values_are_read_by_the_options_and_names_of_axes(
    known: list[Axis], texts: dict[str, str], values: dict[str, Any]
) -> None:
    assert given_axes(known, texts) == values
