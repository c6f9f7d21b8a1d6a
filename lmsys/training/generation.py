"""Generates tokens with a model, one after another. A cache of keys and values lets each step read only one token.

The pipeline's step `generate`, and users, call `generate`; `Sampling` says how a token is drawn. `generate` hands its
`Cache` to `TransformerLM.hidden`. A new option of `Sampling` acts in `probabilities`; for `lmsys train` it is also a
field of `GenerateConfig` (config.py), which pipeline.py passes on.

Sources: Holtzman et al. 2020 (top-p, arXiv 1904.09751); Fan et al. 2018 (top-k, 1805.04833).
Legend: B prompts, S sequence length, H query heads, Hkv key/value heads, D head dimension, V ids.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys import strict_json, values
from lmsys.attention import attention
from lmsys.config import ModelConfig
from lmsys.model import TransformerLM, functions


@dataclass(frozen=True)
class Sampling(strict_json.Checked):
    """How the next token is drawn from the logits.

    temperature   what the logits are divided by; 0: the most likely token is taken
    top_k         a token is one of the k most likely; None: of all
    top_p         a token is one of the fewest most likely ones whose probabilities add up to top_p or more; 1: of all
    """

    temperature: values.Amount = 1.0
    top_k: values.Count | None = None
    top_p: values.Share = 1.0

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, V) -> (probabilities (B, V) in float64, the most likely first; the ids (B, V) of these).

        Among equally likely ids the lower comes first.
        """
        ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
        ordered = (ordered - ordered[:, :1]) / (self.temperature or 1.0)  # the largest is 0, so that none overflows
        if (top_k := self.top_k if self.temperature else 1) is not None:
            ordered[:, top_k:] = -torch.inf
        kept = torch.softmax(ordered, dim=-1)
        if self.top_p < 1:
            kept = kept.masked_fill(kept.cumsum(dim=-1) - kept >= self.top_p, 0.0)
        return kept / kept.sum(dim=-1, keepdim=True), ids

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draws an id for each row: logits (B, V) and random numbers of [0, 1) (B) -> ids (B)."""
        probabilities, ids = self.probabilities(logits)
        place = torch.searchsorted(probabilities.cumsum(dim=-1), uniform[:, None].to(probabilities), right=True)
        # A draw may be above the sum, which rounding leaves a little below 1: then the last possible id is taken.
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        return ids.gather(1, torch.minimum(place, last))[:, 0]


class Cache:
    """Keys and values of every layer, (B, Hkv, S, D) each, and the last position of each row.

    A row is a prompt with the tokens that follow it. The prompts are read first, together, with padding behind the
    shorter ones. No token attends to later places, so padding changes nothing, and later tokens are written over it.
    After that one token of each row is read at a time. `generate` gives the cache to `TransformerLM.hidden`, which
    calls `attend`. Before each token `generate` calls `at`; before the prompts it does not.

    capacity  tokens of a row that there is memory for
    """

    def __init__(self, num_layers: int, capacity: int):
        self._capacity = capacity
        self._kept: list[Any] = [None] * num_layers  # pairs (keys, values)
        self._positions: Tensor | None = None

    def attend(self, of_model: Callable[[], Any]) -> list[Any]:
        """The attention function of each layer, which also writes its keys and values into the cache.

        For the prompts it is the model's own attention function, for a later token one that reads the cache.

        of_model  returns the model's own attention function
        """
        read = partial(self._read_prompts, of_model()) if self._positions is None else self._read_token
        return [partial(read, index) for index in range(len(self._kept))]

    def at(self, positions: Tensor) -> Tensor:
        """Sets the positions of the tokens that are read next: (B) -> (B, 1), as the model takes them."""
        self._positions, self._lengths = positions, positions + 1
        return positions[:, None]

    def _read_prompts(self, row: Any, index: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        padding = 0, 0, 0, self._capacity - k.shape[2]  # zeros behind, along S: memory for tokens to come
        self._kept[index] = torch.nn.functional.pad(k, padding), torch.nn.functional.pad(v, padding)
        return row(q, k, v, causal=causal)

    def _read_token(self, index: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        assert causal and q.shape[2] == 1
        keys, values = self._kept[index]
        rows = torch.arange(len(q), device=q.device)
        keys[rows, :, self._positions], values[rows, :, self._positions] = k[:, :, 0], v[:, :, 0]
        return attention(q, keys, values, key_lengths=self._lengths)


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    stop: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """The new ids of each prompt, at most `max_new_tokens`.

    stop        the id that ends a row; it is not in the result. None: no id does
    seed        row i draws with seed + i, so it does not depend on the other rows
    use_cache   False: every step reads all tokens again, with the attention that the model's config names
    vocab_size  only ids below it are drawn, as a tokenizer may have fewer than the model; None: all
    The prompts are read with the attention that the model's config names, later tokens with the fastest implementation
    of the table `lmsys.attention.ATTENTION` that reads caches of different lengths. Compiled blocks run uncompiled, and
    so does all compiled code of other threads meanwhile, as torch has one switch for the process. If two threads call
    this function at once, compiled code may stay switched off after both.
    ValueError: no prompt, an empty one, ids outside the vocabulary, more tokens than the model's context.
    """
    sampling = Sampling() if sampling is None else values.instance("sampling", sampling, Sampling)
    _check(model, prompts, max_new_tokens, stop)
    known = model.config.vocab_size
    vocab_size = values.whole("vocab_size", known if vocab_size is None else vocab_size, least=1, most=known)
    device = model.token_embeddings.weight.device
    generators = [torch.Generator().manual_seed(values.whole("seed", seed) + row) for row in range(len(prompts))]
    lengths = torch.tensor(list(map(len, prompts)), device=device)
    capacity = int(lengths.max()) + max_new_tokens
    tokens = torch.tensor(  # (B, S)
        [[*prompt, *[0] * (capacity - len(prompt))] for prompt in prompts], dtype=torch.int64, device=device
    )
    cache = Cache(len(model.layers), capacity) if values.flag("use_cache", use_cache) else None
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    made: list[list[int]] = [[] for _ in prompts]
    with torch.compiler.set_stance("force_eager"):  # inside, compiled blocks run uncompiled
        for new in range(max_new_tokens):
            logits = _next_logits(model, tokens, lengths + new, cache, first=new == 0)[:, :vocab_size]
            values.hold((logits.isfinite().all(), f"the model's logits are not finite, of new token {new}"))
            uniform = [torch.rand((), dtype=torch.float64, generator=x, device="cpu") for x in generators]
            drawn = sampling.draw(logits, torch.stack(uniform).to(device))
            if stop is not None:
                ended |= drawn == stop
            for row, token in enumerate(drawn.tolist()):
                if not ended[row]:
                    made[row].append(token)
            if ended.all():
                break
            tokens.scatter_(1, (lengths + new)[:, None], drawn[:, None])
    return made


def _next_logits(model: TransformerLM, tokens: Tensor, lengths: Tensor, cache: Cache | None, first: bool) -> Tensor:
    """Logits (B, V) of the next token of each row, whose first `lengths` (B) of `tokens` (B, S) are known.

    first  True: the prompts are read. False: each row's last known token is read, or without a cache all known tokens
    """
    last = lengths - 1
    if cache is not None and not first:
        return model.lm_head(model.hidden(tokens.gather(1, last[:, None]), cache.at(last), cache)[:, 0])
    hidden = model.hidden(tokens[:, : int(lengths.max())], cache=cache)
    return model.lm_head(hidden[torch.arange(len(tokens), device=tokens.device), last])


def _check(model: TransformerLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: int | None) -> None:
    """ValueError for arguments of `generate` that are wrong."""
    # A model is known by its config, not its class: torch.compile and other wrappers pass on attributes of the model.
    config = values.instance("model.config", getattr(model, "config", None), ModelConfig)
    values.whole("max_new_tokens", max_new_tokens, least=0)
    lengths = list(map(len, values.several("prompts", prompts, Collection)))
    longest, most = max(lengths, default=0) + max_new_tokens, config.context_length
    values.hold(
        (
            lengths and all(lengths),
            "generation needs at least one prompt, and a token in each; start with the end-of-text token",
        ),
        (
            longest <= most,
            f"the longest prompt and {max_new_tokens=} are {longest} tokens, more than context_length={most}",
        ),
    )
    for prompt in prompts:
        ids = [values.whole("a prompt's id", number) for number in prompt]
        functions.check_range("prompts", "token ids", min(ids), max(ids), config.vocab_size)
    if stop is not None:
        functions.check_range("stop", "token ids", values.whole("stop", stop), stop, config.vocab_size)
