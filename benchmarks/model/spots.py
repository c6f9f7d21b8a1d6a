"""Checks the results of timed calls of whole models, in a few random parts that the tested row cannot foresee.

Such parts of one call are a *spot*. A *row* is an implementation that the benchmark compares: our model with one
implementation of attention, or a peer, which is somebody else's whole model. `benchmarks/model/rig.py` makes a `Spots`
for each group of cases. Right after a timed call the rig copies a spot (`Spots.outputs`, `Spots.gradients`), which a
random key selects; after the timed window it judges the copy (`Spots.judge`). The mode of the case decides what a spot
holds:

    forward        the logits of some tokens of one sequence
    train_forward  the hidden states of such tokens, and the loss, which is compared with the loss that the reference
                   computes from all hidden states of the row; for a peer the logits of such tokens, and its own loss,
                   which must only be finite
    backward       the gradients of the embeddings of such tokens, which pass through all blocks. If the batch is small
                   enough (MOST_WORK), also the gradients of some rows of the matrices of one block and of the head;
                   their reference must run all sequences, as each adds to them
    optimizer      these gradients, and rows of one matrix with their moments, before and after the update; for some of
                   these rows `rig.py` has replaced the gradient by an extreme one before the update
    step           these gradients, and such rows before and after an update with the gradients of the backward

A new mode, or a new part of a mode, needs a change in `Spots.outputs` or `Spots.gradients`, and in `Spots.judge`.

Half of the tokens are drawn log-uniformly by position: most of them are among the first of the sequence, where
attention's share in the result is largest. If only one sequence holds a token, the gradient of its embedding comes from
that sequence alone, so the reference need not run the others.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.model.cases import ModelTest
from benchmarks.models import LOSS_SCALE, ROUNDING, Batch, matmuls, mean_ratio, ratio_by_group, widened
from lmsys.attention.naive import naive
from lmsys.bench import Kept, plain
from lmsys.extremes.model import group_of
from lmsys.model import TransformerLM, linear
from lmsys.testing import BLOCK_SCORES, SPOT_TIMES
from lmsys.training.prepare import AUTOCAST, autocast

EMBEDDINGS, HEAD = "token_embeddings.weight", "lm_head.weight"


class Reference:
    """Computes outputs and gradients of the model `base` with naive attention and its current weights.

    `Spots.judge` makes two: the result of the exact one is right, and the error of the other, which computes as plain
    PyTorch does in the tested precision, makes the budget.

    exact   True: compute in float32, or in float64 where fp32 is tested
    meant   (name, weight) -> the weight with which our model computes what the tested model computes with `weight`
    narrow  True: round the residual stream to the dtype that matmuls read, unless `exact`
    """

    def __init__(
        self,
        base: TransformerLM,
        precision: str,
        exact: bool,
        meant: Callable[[str, Tensor], Tensor],
        narrow: bool = False,
    ):
        self.base, self.meant, self.exact = base, meant, exact
        self.stream = AUTOCAST[precision] if narrow and not exact else None
        self.device, self.parameters = base.lm_head.weight.device.type, dict(base.named_parameters())
        self.precision = "fp32" if exact else precision
        self.dtype = torch.float64 if exact and precision == "fp32" else torch.float32
        self.leaves: dict[str, Tensor] = {}  # by name: the weights of which `gradients` computes the gradients

    @torch.no_grad()
    def outputs(self, tokens: Tensor, positions: Sequence[int]) -> "Parts":
        """Hidden states (P, M) and logits (P, V) at P positions of a sequence `tokens` (S).

        The model is causal, so tokens after the last position are not run.
        """
        with self._arithmetic():
            hidden = self._hidden(self._embedded(tokens[: max(positions) + 1]))[positions]
            return {STATES: hidden, LOGITS: self._logits(hidden)}

    @torch.no_grad()
    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token, (B · S,), from the hidden states (B, S, M) of the tested row and targets (B, S)."""
        with self._arithmetic():
            logits = (self._logits(states.to(self.dtype) if self.exact else states) for states in hidden)
            return torch.cat(
                [
                    torch.nn.functional.cross_entropy(widened(x), y, reduction="none")
                    for x, y in zip(logits, targets, strict=True)
                ]
            )

    def gradients(self, data: Batch, sequences: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
        """{name: gradient} of the embeddings and of `names`, with the contributions of these sequences alone.

        The loss is the mean over all tokens of the batch.

        sequences  numbers of sequences of the batch
        names      names of parameters of `base`
        """
        scale = LOSS_SCALE if self.precision == "fp16" else 1.0
        self.leaves = {name: self._weight(name).requires_grad_() for name in names}
        total = {name: torch.zeros_like(self._weight(name)) for name in (EMBEDDINGS, *names)}
        for tokens, targets in ((data.tokens[sequence], data.targets[sequence]) for sequence in sequences):
            x = self._embedded(tokens).requires_grad_()
            with self._arithmetic():
                logits = widened(self._logits(self._hidden(x)))
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / data.targets.numel()
                gradients = torch.autograd.grad(loss * scale, (x, *self.leaves.values()))
            total[EMBEDDINGS].index_add_(0, tokens, gradients[0])
            for name, gradient in zip(names, gradients[1:], strict=True):
                total[name] += gradient
        self.leaves = {}
        return {name: x / scale for name, x in total.items()}

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """A context with the matmuls and the autocast that `exact` and the tested precision ask for."""
        with matmuls("fp32") if self.exact else nullcontext(), autocast(self.precision, self.device):
            yield

    def _weight(self, name: str) -> Tensor:
        """The parameter of `base` in the reference's dtype, detached from autograd."""
        return self.parameters[name].detach().to(self.dtype)

    def _used(self, name: str) -> Tensor:
        """The weight that our model computes with: `meant` of the tested model's weight.

        `gradients` differentiates through `meant`, and so gets the gradient of the tested model's own weight.
        """
        return self.meant(name, self.leaves[name] if name in self.leaves else self._weight(name))

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings (S, M) of the tokens of a sequence (S)."""
        return self.parameters[EMBEDDINGS].detach()[tokens].to(self.dtype)

    def _hidden(self, x: Tensor) -> Tensor:
        """The hidden states (S, M) that the head reads, from embeddings x (S, M).

        Each block is checkpointed: the backward runs it again, so that one block's activations are held at once.
        """
        x = x[None].to(self.stream or x.dtype)
        for index in range(len(self.base.layers)):
            x = torch.utils.checkpoint.checkpoint(self._block, index, x, use_reentrant=False, preserve_rng_state=False)
        return torch.func.functional_call(self.base.ln_final, {"weight": self._used("ln_final.weight")}, (x,))[0]

    def _block(self, index: int, x: Tensor) -> Tensor:
        """The output (1, S, M) of block `index` for x (1, S, M)."""
        layer = self.base.layers[index]
        weights = {name: self._used(f"layers.{index}.{name}") for name, _ in layer.named_parameters()}
        # The block's arguments: x, the attention, the rotary embedding, and positions.
        return torch.func.functional_call(layer, weights, (x, attend, self.base.rope, None))

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits (P, V) of hidden states (P, M), by the head."""
        return linear.linear(hidden, self._used(HEAD))


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Naive causal attention, (1, H, S, D), in blocks of query rows with at most BLOCK_SCORES scores or a single row.

    If there are several blocks, the backward computes each again, so that the scores of one block are held at once.

    causal  always True: our model asks for nothing else
    """
    length = q.shape[2]
    rows = max(1, BLOCK_SCORES[q.device.type] // (q.shape[1] * length))
    if rows >= length:
        return naive(q, k, v, causal=True)

    def block(first: int) -> Tensor:
        end = min(first + rows, length)
        return naive(q[:, :, first:end], k[:, :, :end], v[:, :, :end], causal=True, first_query=first)

    return torch.cat(
        [
            torch.utils.checkpoint.checkpoint(block, begin, use_reentrant=False, preserve_rng_state=False)
            for begin in range(0, length, rows)
        ],
        dim=2,
    )


# A spot has at most NUM_TOKENS tokens of its sequence and NUM_ROWS rows of each matrix; `rig.Update` has NUM_ROWS rows.
NUM_TOKENS, NUM_ROWS = 64, 8
# The reference runs all sequences of a batch if (tokens of the batch) x (parameters) is at most this number: it bounds
# the time of a check.
MOST_WORK = {"cuda": 2**39, "cpu": 2**31}
MATRICES = "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ffn.w1", "ffn.w2", "ffn.w3"
# Names of parts; the parts of gradients have the names of their parameters.
LOGITS, STATES, ALL_STATES, LOSS, UPDATE = "logits", "hidden states", "all hidden states", "loss", "update"
OUTPUTS, UPDATES = ("forward", "train_forward"), ("optimizer", "step")  # modes that have outputs, or an update
Parts = dict[str, Tensor]  # {name of a part: its values}; for UPDATE the value is an `Update` of `rig.py`


@dataclass(frozen=True)
class Spot:
    """Positions of some tokens of one sequence, and numbers of some rows of the matrices of one block and of the head.

    sequence   the number of the sequence in the batch
    positions  positions of the tokens in the sequence, sorted
    rows       {name of a parameter: numbers of its rows}
    """

    sequence: int
    positions: list[int]
    rows: dict[str, list[int]]


class Spots:
    """Copies and judges parts of timed calls; the random key of a call selects the parts.

    whole  True: the batch is small enough (MOST_WORK) for the reference to run all of it, so that gradients of matrices
           are judged too
    """

    def __init__(self, base: TransformerLM, data: Batch, precision: str):
        self.base, self.data, self.precision = base, data, precision
        self.parameters = dict(base.named_parameters())
        self.whole = (
            data.tokens.numel() * sum(map(Tensor.numel, base.parameters())) <= MOST_WORK[data.tokens.device.type]
        )

    def spot(self, key: int) -> Spot:
        """The spot that a key chooses."""
        chance, (batch, length) = random.Random(key), self.data.tokens.shape
        anywhere = [chance.randrange(length) for _ in range(NUM_TOKENS // 2)]
        early = [int(length ** chance.random()) - 1 for _ in range(NUM_TOKENS // 2)]
        sequence, layer = chance.randrange(batch), chance.randrange(len(self.base.layers))
        names = [f"layers.{layer}.{name}.weight" for name in MATRICES] + [HEAD]
        heights = {name: len(self.parameters[name]) for name in names}
        rows = {name: chance.sample(range(height), min(NUM_ROWS, height)) for name, height in heights.items()}
        return Spot(sequence, sorted(set(anywhere + early)), rows)

    def outputs(self, made: Parts, key: int | None) -> Parts | None:
        """Copies of the parts of a forward's results that the key chooses; None without a key.

        With and without a key, `check_plain` raises `Failed` if a result is not a plain tensor of the promised form.

        made  all results of the call, by the names of their parts
        """
        for name, x in made.items():
            plain.check_plain(name, x, self._like(name), (self.data.tokens, self.data.targets))
        if key is None:
            return None
        spot, parts = self.spot(key), dict(made)
        if STATES in made:
            parts[ALL_STATES] = made[STATES]  # the loss is judged by all of them
        return {
            name: x.detach().clone() if name in (LOSS, ALL_STATES) else x.detach()[spot.sequence, spot.positions]
            for name, x in parts.items()
        }

    def _like(self, name: str) -> Tensor:
        """A tensor with the right shape, dtype and device of an output: one expanded element, which needs no memory."""
        config, tokens = self.base.config, self.data.tokens
        shapes = {LOSS: (), LOGITS: (*tokens.shape, config.vocab_size), STATES: (*tokens.shape, config.d_model)}
        dtype = torch.float32 if name == LOSS else AUTOCAST.get(self.precision, torch.float32)
        return torch.empty((), dtype=dtype, device=tokens.device).expand(shapes[name])

    def gradients(self, key: int, scale: float) -> Parts:
        """Copies of the parts of the gradients that the key chooses, divided by the loss scale `scale`."""
        spot, gradients = self.spot(key), {}
        for name, rows in {EMBEDDINGS: self._ids(spot), **(spot.rows if self.whole else {})}.items():
            p = self.parameters[name]
            plain.check_plain(f"the gradient of {name}", p.grad, p, (self.data.tokens, self.data.targets))
            gradients[name] = p.grad[rows] / scale
        return gradients

    def judge(self, case: ModelTest, kept: Kept, meant: Callable[[str, Tensor], Tensor]) -> Mapping[str, float]:
        """{name of a part: its error over its budget}; 1 or less is right, and inf means NaN or infinity in the part.

        kept   the copies of a timed call, from `outputs` or `gradients`, and the key that selected them
        meant  as in `Reference`
        """
        parts, spot = dict(kept.result), self.spot(kept.key)
        update = parts.pop(UPDATE, None)
        if broken := [name for name, x in parts.items() if not x.isfinite().all()]:
            return dict.fromkeys(broken, float("inf"))
        references = [
            Reference(self.base, self.precision, exact, meant, narrow=case.residual == "narrow")
            for exact in (True, False)
        ]
        ratios = update.ratios() if update else {}
        if ALL_STATES in parts:
            ratios[LOSS] = mean_ratio(
                parts[LOSS], *(x.losses(parts[ALL_STATES], self.data.targets) for x in references)
            )
        if case.mode in OUTPUTS:
            exact, ordinary = (x.outputs(self.data.tokens[spot.sequence], spot.positions) for x in references)
        else:
            exact, ordinary = (self._right_gradients(x, spot) for x in references)
            parts[EMBEDDINGS] = parts[EMBEDDINGS][self._sequences(spot)[1]]
        for name in parts.keys() - {LOSS, ALL_STATES}:
            ratios[name] = ratio_by_group(
                parts[name],
                exact[name],
                ordinary[name],
                ROUNDING[self.precision],
                self._groups(name, spot),
                lines=spot.rows.get(name),
                times=SPOT_TIMES,
            )
        return ratios

    def _ids(self, spot: Spot) -> Tensor:
        """The ids of the spot's tokens."""
        return self.data.tokens[spot.sequence, spot.positions]

    def _groups(self, name: str, spot: Spot) -> Tensor:
        """The group of each row of the reference's result, for `ratio_by_group`.

        Extreme inputs are written into some embeddings and weights (`lmsys.extremes.model`). A row of the result has
        group 0 if neither its token's embedding nor the row of the weight is one of these.
        """
        if name not in (LOGITS, STATES, EMBEDDINGS):
            return group_of(name, len(self.parameters[name]))
        group = group_of(EMBEDDINGS, self.base.config.vocab_size)[self._ids(spot).cpu()]
        return group[self._sequences(spot)[1]] if name == EMBEDDINGS else group

    def _right_gradients(self, reference: Reference, spot: Spot) -> Parts:
        """Gradients by the reference: of the embeddings of the spot's tokens, and of the spot's matrices if `whole`.

        Matrices have all their rows, as `ratio_by_group` takes the budget of an extreme group from all of its rows.
        """
        sequences, chosen = self._sequences(spot)
        right = reference.gradients(self.data, sequences, list(spot.rows) if self.whole else [])
        return right | {EMBEDDINGS: right[EMBEDDINGS][self._ids(spot)[chosen]]}

    def _sequences(self, spot: Spot) -> tuple[list[int], list[int]]:
        """(numbers of the sequences to run, indices of the spot's tokens whose gradients come from these alone).

        If `whole`, these are all sequences and all tokens. Else the method takes the token of the spot that the fewest
        sequences hold, selects the sequences that hold it, and then the tokens that no other sequence holds.
        """
        tokens, ids = self.data.tokens, self._ids(spot)
        if self.whole:
            return list(range(len(tokens))), list(range(len(ids)))
        occurs = torch.stack([torch.isin(ids, sequence) for sequence in tokens]).cpu()  # (B, tokens of the spot)
        run = occurs[:, occurs.sum(dim=0).argmin()]
        chosen = ~(occurs & ~run[:, None]).any(dim=0)
        return run.nonzero().flatten().tolist(), chosen.nonzero().flatten().tolist()
