"""`lmsys.training.generation`: the key-value cache changes nothing, and each way of sampling draws as it should."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import attention
from lmsys.config import ModelConfig
from lmsys.model import TransformerLM
from lmsys.testing import error_ratio
from lmsys.training import generation
from lmsys.training.generation import Cache, Sampling, generate
from tests.support.attention_rows import Row

GREEDY = Sampling(temperature=0)
SAMPLINGS = [GREEDY, Sampling(0.8), Sampling(1.2, 5), Sampling(1.0, None, 0.7)]


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> TransformerLM:
    torch.manual_seed(seed)
    shape = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "context_length": 32}
    return TransformerLM(ModelConfig(**{**shape, "attention": "naive", **changes}), dtype=dtype)


prompt_lists = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=15)
@given(prompt_lists, st.integers(0, 3), st.sampled_from([None, 1, 2]), st.sampled_from(["naive", "flash_torch"]))
def test_logits_with_the_cache_equal_those_without(
    prompts: list[list[int]], seed: int, num_kv_heads: int | None, attention: str
) -> None:
    """Prompts of different lengths are a batch. Each step's logits equal those of the model on each prompt alone."""
    model = make_model(seed, num_kv_heads=num_kv_heads, attention=attention)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()) + 5, dtype=torch.int64)
    later = torch.randint(50, (len(prompts), 5))
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens[row, len(prompt) : len(prompt) + 5] = later[row]
    cache = Cache(2, tokens.shape[1])
    with torch.no_grad():
        hidden = model.hidden(tokens[:, : int(lengths.max())], cache=cache)
        cached = [model.lm_head(hidden[torch.arange(len(prompts)), lengths - 1])]
        for new in range(5):
            at = lengths + new
            cached.append(model.lm_head(model.hidden(tokens.gather(1, at[:, None]), cache.at(at), cache))[:, 0])
        for row, prompt in enumerate(prompts):
            alone = model(tokens[row : row + 1, : len(prompt) + 5])[0, len(prompt) - 1 :]
            torch.testing.assert_close(torch.stack([step[row] for step in cached]), alone)


@settings(max_examples=8)
@given(prompt_lists, st.integers(0, 5), st.sampled_from(SAMPLINGS))
def test_neither_the_cache_nor_other_prompts_change_what_is_drawn(
    prompts: list[list[int]], seed: int, sampling: Sampling
) -> None:
    model = make_model()
    together = generate(model, prompts, 8, sampling, seed=seed)
    assert together == generate(model, prompts, 8, sampling, seed=seed, use_cache=False)
    for row, prompt in enumerate(prompts):
        assert generate(model, [prompt], 8, sampling, seed=seed + row) == [together[row]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_decoding_kernel_draws_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the kernel of `flash_triton` for few queries. Query heads share key heads, and the cache is not full."""
    row = Row("flash_triton", device)
    if reason := row.why_not(row.case(dtype="float32", key_lengths=True)):
        pytest.skip(reason)
    monkeypatch.setattr(generation, "attention", partial(attention, impl="flash_triton"))
    model = make_model(3, torch.float32, num_kv_heads=2, d_model=64).to(device)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
    assert generate(model, prompts, 6, seed=2) == generate(model, prompts, 6, seed=2, use_cache=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_with_the_cache_are_as_exact_as_those_without(dtype: torch.dtype) -> None:
    for seed in range(5):
        model, exact = make_model(seed, dtype), make_model(seed)
        exact.load_state_dict(model.state_dict())
        tokens, cache = torch.randint(50, (3, 12)), Cache(2, 12)
        with torch.no_grad():
            model.hidden(tokens[:, :11], cache=cache)
            last = torch.full((3,), 11)
            cached = model.lm_head(model.hidden(tokens[:, 11:], cache.at(last), cache))[:, 0]
            assert error_ratio(cached, exact(tokens)[:, 11], model(tokens)[:, 11]) <= 1


def test_greedy_takes_the_most_likely() -> None:
    model = make_model()
    (made,) = generate(model, [[1, 2, 3]], 6, GREEDY)
    tokens = [1, 2, 3]
    for token in made:
        assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)


def test_the_stop_token_ends_a_row_and_no_other() -> None:
    model, prompts = make_model(), [[1], [2, 3], [4]]
    free = generate(model, prompts, 20, seed=1)
    stop = free[0][4]
    stopped = generate(model, prompts, 20, seed=1, stop=stop)
    for row, every in zip(stopped, free, strict=True):
        assert row == (every[: every.index(stop)] if stop in every else every)
    assert generate(model, prompts, 0) == [[], [], []]


@settings(max_examples=8)
@given(st.integers(1, 50))
def test_only_ids_below_the_vocabulary_of_a_tokenizer_are_drawn(vocab_size: int) -> None:
    """The tokenizer of a short text may have fewer tokens than the model, which has not learned to avoid the others."""
    made = generate(make_model(), [[0], [0, 0]], 20, vocab_size=vocab_size)
    assert max(map(max, made)) < vocab_size and (vocab_size < 40 or max(map(max, made)) >= 20)


def test_another_seed_draws_others_and_torchs_random_numbers_are_left_alone() -> None:
    model = make_model()
    before = torch.get_rng_state()
    assert generate(model, [[1]], 20, seed=3) != generate(model, [[1]], 20, seed=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_model_generates_the_same() -> None:
    model = make_model()
    expected = generate(model, [[1, 2]], 5)
    assert generate(model.compile_blocks(backend="aot_eager"), [[1, 2]], 5) == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_under_a_default_device(use_cache: bool) -> None:
    """As under torch.set_default_device("cuda"), where a generator of the CPU was asked for a number on the GPU."""
    model = make_model()
    expected = generate(model, [[1, 2], [3]], 5, use_cache=use_cache)
    with torch.device("meta"):
        assert generate(model, [[1, 2], [3]], 5, use_cache=use_cache) == expected


logits = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12)


def drawn_ids(sampling: Sampling, row: list[float]) -> dict[int, float]:
    """{id: probability} of every id that can be drawn."""
    probabilities, ids = sampling.probabilities(torch.tensor([row]))
    return {int(i): float(p) for i, p in zip(ids[0], probabilities[0], strict=True) if p > 0}


@given(logits, st.floats(0.1, 5))
def test_temperature_divides_the_logits(row: list[float], temperature: float) -> None:
    expected = torch.softmax(torch.tensor(row).double() / temperature, -1)
    probabilities = drawn_ids(Sampling(temperature), row)
    for number, probability in enumerate(expected.tolist()):
        assert math.isclose(probabilities.get(number, 0.0), probability, rel_tol=1e-9, abs_tol=1e-300)


@given(logits, st.integers(1, 15), st.floats(0.01, 1), st.floats(0.2, 3))
def test_top_k_and_top_p_keep_the_fewest_likeliest(row: list[float], k: int, p: float, temperature: float) -> None:
    plain = torch.softmax(torch.tensor(row).double() / temperature, -1)
    order = sorted(range(len(row)), key=lambda number: (-row[number], number))
    by_k = drawn_ids(Sampling(temperature, top_k=k), row)
    likely = [number for number in order[:k] if plain[number] > 0]
    assert list(by_k) == likely
    assert math.isclose(sum(by_k.values()), 1, rel_tol=1e-9)
    by_p = drawn_ids(Sampling(temperature, top_p=p), row)
    kept = list(by_p)
    assert kept == order[: len(kept)]
    total = float(plain[kept].sum())
    assume(abs(total - p) > 1e-9)  # at the border rounding decides
    assert p == 1 or total >= p or len(kept) == int((plain > 0).sum())
    assert float(plain[kept[:-1]].sum()) < p
    for number in kept:
        assert math.isclose(by_p[number], float(plain[number]) / total, rel_tol=1e-6)


def test_ids_are_drawn_as_often_as_they_should() -> None:
    row = [0.0, 1.0, 2.0, -1.0]
    sampling, count = Sampling(0.7), 40_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sampling.draw(torch.tensor([row]).expand(count, -1), uniform)
    shares = torch.bincount(drawn, minlength=4).double() / count
    torch.testing.assert_close(shares, torch.softmax(torch.tensor(row).double() / 0.7, -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_least_and_the_largest_random_number_draw_possible_ids(uniform: float) -> None:
    for top_k, top_p in product((None, 1, 2), (1.0, 0.5)):
        sampling = Sampling(1.0, top_k, top_p)
        row: Tensor = torch.tensor([[0.0, -1000.0, 1.0, 0.5]])
        assert int(sampling.draw(row, torch.tensor([uniform], dtype=torch.float64))) in drawn_ids(
            sampling, row[0].tolist()
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": math.inf}, "temperature: must be a finite number; got Infinity"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be more than 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be more than 0 and at most 1"),
    ],
)
def test_impossible_samplings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1], []]}, "a token in each"),
        ({"prompts": [[1] * 30], "max_new_tokens": 3}, "are 33 tokens, more than context_length=32"),
        ({"prompts": [[50]]}, "prompts must be token ids from 0 to 49; got 50"),
        ({"prompts": ["ab"]}, "a prompt's id='a' must be a whole number"),
        ({"prompts": [[1.5]]}, "a prompt's id=1.5 must be a whole number"),
        ({"stop": 77}, "stop must be token ids from 0 to 49; got 77"),
        ({"stop": "x"}, "stop='x' must be a whole number"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"vocab_size": 0}, "vocab_size=0 must be"),
        ({"vocab_size": 51}, "vocab_size=51 must be"),
        ({"seed": None}, "seed=None must be a whole number"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(make_model(), **{"prompts": [[1]], "max_new_tokens": 1, **wrong})


def test_logits_that_are_not_finite_are_refused() -> None:
    model = make_model()
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(model, [[1]], 1)
