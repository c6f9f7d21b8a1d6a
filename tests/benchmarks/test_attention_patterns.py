"""benchmarks/attention/patterns.py: masks, documents and lengths of cases, and the work that they leave.

Lengths are drawn by fixed seeds, so they are equal on all machines. Visible pairs of queries and keys are counted, and
the slow definition `spelled` is the oracle. A new option of a case is added to `asked`.
"""

from time import sleep
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import axes
from benchmarks.attention import patterns
from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.attention import ATTENTION, AttentionCase, Pattern
from lmsys.cost.operations import attention_flops
from lmsys.registry import Entry
from lmsys.traits import AttentionTraits
from tests.support.patterns import spelled

SIZES = st.integers(1, 40)


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    """Draws (queries, keys, options) of a case."""
    documents = draw(st.sampled_from([None, "mixed", "equal4"]))
    queries = draw(SIZES)
    options = {"causal": draw(st.booleans()), "documents": documents, "key_lengths": draw(st.booleans())}
    if options["causal"]:
        options |= {"window": draw(st.none() | SIZES), "offset": draw(st.integers(0, 40))}
    return queries, queries if documents else draw(SIZES), options


@given(asked())
def test_visible_pairs_and_keys_are_counted_exactly(asked: tuple[int, int, dict[str, Any]]) -> None:
    queries, keys, options = asked
    case = AttentionCase(2, 1, 1, queries, keys, 8, "float32")
    seen = spelled(patterns.make(2, queries, keys, "cpu", **options), case)[:, 0]
    pairs, keys_seen = patterns.visible(2, queries, keys, **options)
    assert pairs == seen.sum().item() / 2 and keys_seen == seen.any(1).sum().item() / 2


@given(st.sampled_from(["mixed", "equal16", "equal1"]), st.integers(1, 20_000))
def test_documents_fill_their_sequence_and_are_the_same_each_time(name: str, tokens: int) -> None:
    lengths = patterns.lengths_of(name, tokens)
    assert sum(lengths) == tokens and min(lengths) >= 1 and lengths == patterns.lengths_of(name, tokens)
    assert name == "mixed" or max(lengths) - min(lengths) <= 1


def test_mixed_documents_are_many_short_and_a_few_long() -> None:
    """Drawn by a stated seed, so that a committed result can be made again."""
    lengths = sorted(patterns.lengths_of("mixed", 16384))
    assert lengths[len(lengths) // 2] < 16384 / 32 and lengths[-1] > 16384 / 8


def case(**changes: Any) -> AttentionTest:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 64, "keys": 64, "head_dim": 32}
    asked = {"dtype": "float32", "causal": True, "direction": "fwd"}
    return AttentionTest("window", ATTENTION["naive"], "cpu", **sizes | asked | changes)


def test_ids_name_the_options_that_are_given_and_no_others() -> None:
    assert case().group == "window-B2H4kv2Q64K64D32-float32-causal"
    assert case(window=16, offset=3, documents="mixed", key_lengths=True, softcap=30.0).group == (
        "window-B2H4kv2Q64K64D32-float32-causal-window16-offset3-documents_mixed-key_lengths-softcap30"
    )
    assert case(deterministic=True).group == "window-B2H4kv2Q64K64D32-float32-causal-deterministic"


def test_work_is_that_of_visible_pairs() -> None:
    windowed = case(window=16)
    pairs = sum(min(i + 1, 16) for i in range(64))
    metrics = Attention().metrics(windowed, {}, {})
    assert metrics["flops"] == 4 * 2 * 4 * 32 * pairs and metrics["visible_share"] == pairs / 64**2
    plain = Attention().metrics(case(), {}, {})
    assert plain["flops"] == attention_flops(2, 4, 64, 64, 32, causal=True, direction="fwd")
    assert "visible_share" not in plain
    decode = case(queries=1, offset=63, key_lengths=True)
    lengths = decode.pattern.key_lengths
    assert lengths is not None and Attention().metrics(decode, {}, {})["bytes"] == (
        2 * 2 * 4 * 1 * 32 * 4 + 2 * 2 * lengths.sum().item() * 32 * 4
    )
    unseen = case(queries=16)  # a causal forward of 16 queries reads the first 16 of 64 keys
    assert Attention().metrics(unseen, {}, {})["bytes"] == 2 * (2 * 4 * 16 * 32 + 2 * 2 * 16 * 32) * 4


def test_what_hides_nothing_is_asked_as_nothing() -> None:
    """Rows without options can then decode a query at the end of its keys."""
    assert case(queries=1, offset=63).asked == case(queries=1, causal=False).asked
    assert case(window=64).asked == case().asked


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (axes.or_none(axes.positive), {"none": None, "16": 16}, ["0", "-1", "all"]),
        (axes.asked, {"yes": True, "no": None}, ["1", "maybe"]),
        (axes.or_none(axes.softcap), {"none": None, "30": 30.0}, ["0", "nan", "much"]),
        (axes.offset, {"end": axes.END, "0": 0, "7": 7}, ["-1", "last"]),
        (
            axes.or_none(axes.documents),
            {"none": None, "mixed": "mixed", "equal16": "equal16"},
            ["equal", "equal0", "16"],
        ),
    ],
)
def test_values_of_axes_are_read_or_refused(parse: Any, good: dict[str, Any], bad: list[str]) -> None:
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(ValueError, match="must be"):
            parse(text)


def test_a_row_without_a_parameter_for_an_option_is_unsupported() -> None:
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None) -> Any:
        return q

    from lmsys.attention.contract import keywords_of, why_not_given

    assert why_not_given(plain, {"window": 3}) == "it has no parameter `window`"
    assert keywords_of(plain, Pattern(True)) == {"causal": True}
    with pytest.raises(ValueError, match="has no parameter `window`"):
        keywords_of(plain, Pattern(True, 3))


def slow(*_: Any) -> None:
    """Makes a mask for 20 ms."""
    sleep(0.02)


def test_what_is_made_before_calls_is_timed_where_there_is_something() -> None:
    def made(name: str, **options: Any) -> dict[str, float | None]:
        pattern = patterns.make(1, 64, 64, "cpu", causal=True, **options)
        entry = (
            Entry("slow", "operator:add", traits=AttentionTraits(mask=f"{__name__}:slow"))
            if name == "slow"
            else ATTENTION[name]
        )
        return patterns.made_before_calls(entry, pattern, 64, 64, "cpu")

    both = made("slow", window=8, documents="mixed")
    assert 0.02 <= both["mask_s"] < 2 and 0 < both["documents_s"] < 2
    assert made("slow", window=8).keys() == {"mask_s"}
    assert made("slow") == made("naive", window=8) == {}
    assert made("naive", documents="mixed").keys() == {"documents_s"}
    declared = {field.name for field in Attention.fields}
    assert both.keys() <= declared
