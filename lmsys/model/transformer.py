"""A Transformer language model, from token ids to logits and loss: pre-norm, RMSNorm, RoPE, SwiGLU, no biases.

Read the classes from bottom to top: TransformerLM -> Block -> Attention, FeedForward -> RMSNorm, Linear, Embedding. The
config is `lmsys.config.ModelConfig`. Training, benchmarks and generation call `loss`, `hidden` and `forward`. Parameter
names are those of the course CS336, so that checkpoints of its models load: do not rename attributes of modules.
Parameters are float32; matmuls run in lower precision under autocast. An *attention row* is an entry of the table
`lmsys.attention.ATTENTION`, that is, one implementation of attention; its function is called as f(q, k, v,
causal=True). A change of a block's formula is also made in fused.py and selective.py, which run blocks in other ways.

Sources: Vaswani et al. 2017 (arXiv 1706.03762); Zhang & Sennrich 2019 (RMSNorm, 1910.07467); Shazeer 2020 (SwiGLU,
2002.05202).

Legend: B batch, S sequence length, M d_model, F d_ff, H query heads, Hkv key/value heads, D head dimension, V ids.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lmsys import checkpointing, values
from lmsys.attention import ATTENTION, Documents, Pattern, attention, contract, row_of
from lmsys.config import ModelConfig
from lmsys.measure.profile import part
from lmsys.model import functions, fused, linear, rotary, selective
from lmsys.model.loss import cross_entropy, linear_cross_entropy

# The value of `compile_blocks(together=...)` where no block must stay a module. Larger graphs gain little, and compile
# longer.
BLOCKS_PER_GRAPH = 4


class Linear(nn.Linear):
    """y = x Wᵀ, W (out, in) drawn from a normal of variance 2 / (in + out), cut off at three standard deviations."""

    reads_rounded = True  # under autocast the layer reads the weight's copy `rounded`, if there is one: see linear.py

    def __init__(self, in_features: int, out_features: int, **factory: Any):
        super().__init__(*values.counts(in_features=in_features, out_features=out_features), bias=False, **factory)

    def reset_parameters(self) -> None:
        """Called by the constructor of nn.Linear."""
        std = (2 / (self.in_features + self.out_features)) ** 0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        return linear.linear(x, self.weight)


class SideBySide(nn.Module):
    """Several linear layers of one input in one matmul: x (..., M) -> (..., the features of all layers).

    It is a module so that hooks see the call. Layers that are not `plain` are called, one after another.
    """

    def forward(self, x: Tensor, *layers: Linear) -> Tensor:
        return (
            linear.linear(x, *(layer.weight for layer in layers))
            if plain(*layers)
            else torch.cat([layer(x) for layer in layers], dim=-1)
        )


def plain(*layers: nn.Module, kinds: tuple[type[nn.Module], ...] = (Linear,)) -> bool:
    """True where calling each layer would only multiply by its weight, so that the weight can be read instead.

    A call would do more if another module is in the layer's place, such as LoRA's, or if the layer has a hook, a
    parametrization, as for pruning, or a forward of its own. In compiled blocks hooks are looked up once, when torch
    compiles the code that all blocks share.

    kinds  the classes that the modules may have. For another class than `Linear`, True says that a call of the module
           runs the forward of this class and nothing else
    """
    return all(
        type(x) in kinds
        and not (x._forward_pre_hooks or x._forward_hooks or x._backward_pre_hooks or x._backward_hooks)
        and "forward" not in vars(x)
        for x in layers
    )


class Embedding(nn.Embedding):
    """A row of W (V, M) for each token id; W standard normal, cut off at 3. Takes nn.Embedding's other options, too."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *options: Any, device: Any = None, **more: Any):
        super().__init__(
            *values.counts(num_embeddings=num_embeddings, embedding_dim=embedding_dim), *options, device=device, **more
        )

    def reset_parameters(self) -> None:
        """Called by the constructor of nn.Embedding. The row of `padding_idx`, if one is given, is zeros, as there."""
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)
        self._fill_padding_idx_with_zero()


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight over the last dimension, in float32 at least.

    The result already has the dtype that the next matmuls read. So these matmuls share one cast and keep one tensor for
    their backward, where autocast would make three.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            normalized_shape
            if isinstance(normalized_shape, list | tuple)
            else values.whole("normalized_shape", normalized_shape, least=1),
            eps if eps is None else values.finite("eps", eps, least=0),
            elementwise_affine,
            device,
            dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        with part("norms"):
            weight = None if self.weight is None else functions.widened(self.weight)  # without elementwise_affine
            return nn.functional.rms_norm(functions.widened(x), self.normalized_shape, weight, self.eps).to(
                linear.matmul_dtype(x)
            )


class Attention(nn.Module):
    """Causal self-attention of H query heads over Hkv key/value heads: x (B, S, M) -> (B, S, M).

    By default there are as many key/value heads as query heads. ValueError unless num_heads divides d_model, and
    kv_heads divides num_heads.
    """

    def __init__(self, d_model: int, num_heads: int, kv_heads: int | None = None, **factory: Any):
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        values.counts(d_model=d_model, num_heads=num_heads, kv_heads=kv_heads)
        values.hold(
            (
                not d_model % num_heads and not num_heads % kv_heads,
                f"{num_heads=} must divide {d_model=}, and {kv_heads=} the heads",
            )
        )
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, d_model // num_heads
        self.q_proj = Linear(d_model, num_heads * self.head_dim, **factory)
        self.k_proj = Linear(d_model, kv_heads * self.head_dim, **factory)
        self.v_proj = Linear(d_model, kv_heads * self.head_dim, **factory)
        self.qkv = SideBySide()
        self.output_proj = Linear(num_heads * self.head_dim, d_model, **factory)

    def forward(
        self,
        x: Tensor,
        attend: Any = attention,
        rope: rotary.RotaryEmbedding | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attention of x (B, S, M).

        attend     the function of an attention row
        rope       rotates queries and keys by `positions` (S) or (B, S), by default 0 ... S - 1; None: no rotation
        """
        return self.mix(self.project(x), attend, rope, positions)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side: (B, S, (H + 2 Hkv) D)."""
        with part("projections"):
            return self.qkv(x, self.q_proj, self.k_proj, self.v_proj)

    def mix(
        self,
        projected: Tensor,
        attend: Any,
        rope: rotary.RotaryEmbedding | None,
        positions: Tensor | None,
        in_place: bool = False,
    ) -> Tensor:
        """The result (B, S, M) of attention, from what `project` gives.

        attend                     the function of an attention row: f(q, k, v, causal=True)
        rope, positions, in_place  as in `forward`, and as in `RotaryEmbedding.forward`
        """
        with part("rotation"):  # q (B, S, H, D), k and v (B, S, Hkv, D)
            q, k, v = (
                projected.unflatten(-1, (-1, self.head_dim)).split(
                    (self.num_heads, self.kv_heads, self.kv_heads), dim=-2
                )
                if rope is None
                else rope(projected, self.num_heads, positions, in_place)
            )
        with part("attention"):
            o = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)  # (B, H, S, D)
        with part("projections"):
            return self.output_proj(o.transpose(1, 2).flatten(-2))


def attention_case(
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: str,
    device: torch.device,
    *,
    grad: bool,
    documents: bool = False,
) -> contract.AttentionCase:
    """Describes a model's attention on `batch` sequences of `length` tokens: by this case a row says if it can run.

    dtype      the name of a dtype, such as "bfloat16"
    grad       True: gradients are needed
    documents  True: several documents are packed into a sequence
    """
    return contract.AttentionCase(
        batch=batch,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        queries=length,
        keys=length,
        head_dim=config.head_dim,
        dtype=dtype,
        causal=True,
        grad=grad,
        device=device.type,
        capability=contract.capability_of(device.index) if device.type == "cuda" else None,
        documents=documents,
    )


class FeedForward(nn.Module):
    """SwiGLU: W2 (silu(W1 x) · W3 x), x (..., M) -> (..., M)."""

    def __init__(self, d_model: int, d_ff: int, **factory: Any):
        super().__init__()
        values.counts(d_model=d_model, d_ff=d_ff)
        self.w1 = Linear(d_model, d_ff, **factory)
        self.w2 = Linear(d_ff, d_model, **factory)
        self.w3 = Linear(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(*self.up(x))

    def up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W1 x and W3 x, each (..., F)."""
        with part("feed-forward"):
            return self.w1(x), self.w3(x)

    def down(self, gate: Tensor, value: Tensor) -> Tensor:
        """W2 (silu(gate) · value), from what `up` gives: (..., M)."""
        with part("feed-forward"):
            return self.w2(functions.silu(gate) * value)


class Block(nn.Module):
    """x + attn(ln1(x)), then y + ffn(ln2(y)): x (B, S, M) -> (B, S, M)."""

    def __init__(self, config: ModelConfig, **factory: Any):
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.attn = Attention(config.d_model, config.num_heads, config.kv_heads, **factory)
        self.ln2 = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.ffn = FeedForward(config.d_model, config.d_ff, **factory)

    def forward(
        self,
        x: Tensor,
        attend: Any = attention,
        rope: rotary.RotaryEmbedding | None = None,
        positions: Tensor | None = None,
        level: str = "none",
    ) -> Tensor:
        """The block of x (B, S, M); attend, rope and positions as in `Attention`.

        level  what is kept for the backward, "none", "matmuls" or "attention": see `lmsys.checkpointing`. At the last
               two, a block with parts that are not `plain` keeps its input alone: the second run skips matmuls, which
               is right for plain parts only
        """
        if level != "none":
            if not self.has_plain_parts():
                return selective.run_again(self.forward, x, attend, rope, positions, preserve_rng_state=True)
            return selective.run_selectively(self, level, x, attend, rope, positions)
        x = x + self.attn(self.ln1(x), attend, rope, positions)
        return x + self.ffn(self.ln2(x))

    def has_plain_parts(self) -> bool:
        """True where all parts are `plain`.

        Other parts may draw random numbers, such as LoRA's dropout, and must be called as modules, which
        `lmsys.model.selective` does not do with attention and feed-forward. The block itself may have a hook. At the
        levels "matmuls" and "attention" the hook is not run again; at "whole" it is, and may not draw random numbers.
        """
        return plain(self.ln1, self.attn, self.ln2, self.ffn, kinds=(RMSNorm, Attention, FeedForward)) and plain(
            *(self.attn.qkv, self.attn.q_proj, self.attn.k_proj, self.attn.v_proj, self.attn.output_proj),
            *(self.ffn.w1, self.ffn.w2, self.ffn.w3),
            kinds=(Linear, SideBySide),
        )


def _run(layers: list[Block], x: Tensor, attend: list[Any], *rest: Any) -> Tensor:
    """Runs several blocks one after another. `compile_blocks` compiles this function if `together` is 2 or more.

    attend  for each block the function of its attention row
    rest    rope, positions and level, as in `Block.forward`
    """
    for layer, attend_here in zip(layers, attend, strict=True):
        x = layer(x, attend_here, *rest)
    return x


# Names that torch.compile gives to what it finds in modules of torch and of this package, and to Python's builtins.
PACKAGES = f"contextlib|torch|{__name__.partition('.')[0]}"
LASTING = re.compile(rf"G\['__(builtins_dict___\d+|import_({PACKAGES})(_dot_\w+)?)'\]")


def _guards(guards: Sequence[Any]) -> list[bool]:
    """For each guard of a compiled block, True if each call is to check it: torch's `guard_filter_fn`.

    A guard is a condition under which compiled code is valid, such as that a name still means the same function. False
    for guards on modules, classes and functions that LASTING matches: these do not change while a program runs. They
    are half of the guards of a block, and take a fifth of the time of all. Names in modules of users are checked, also
    those that mean functions of torch.
    """
    kinds = ModuleType | type | FunctionType | BuiltinFunctionType
    return [not (isinstance(guard.value, kinds) and LASTING.match(guard.name)) for guard in guards]


class TransformerLM(nn.Module):
    """Token ids (B, S) -> logits (B, S, V); `loss` gives the mean cross-entropy without holding all logits."""

    def __init__(self, config: ModelConfig, device: Any = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = values.instance("config", config, ModelConfig)
        factory = {
            "device": values.instance("device", device, torch.device | str | int | None),
            "dtype": values.instance("dtype", dtype, torch.dtype),
        }
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, **factory)
        self.layers = nn.ModuleList(Block(config, **factory) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.lm_head = Linear(config.d_model, config.vocab_size, **factory)
        self.rope = rotary.RotaryEmbedding(config.head_dim, config.context_length, config.rope_theta, device)
        if config.attention != "auto":
            _ = ATTENTION[config.attention]  # an unknown name fails here
        # _together: how many blocks `_run` runs at once; `compile_blocks` sets both. _fused: True after `fuse_blocks`.
        self._together, self._run, self._fused = 1, _run, False
        self.rounded: linear.RoundedWeights | None = None  # copies of weights, which `fuse_blocks` makes

    def compile_blocks(self, together: int = 1, **options: Any) -> "TransformerLM":
        """Compiles `together` blocks as one graph. Blocks share their code, so it is compiled once.

        With together=1 each block is compiled in place, and is still a module that hooks and wrappers may surround.
        With more the host enters fewer graphs, and a block's last addition is fused with the next block's norm; then no
        hook may stand between the blocks of a graph. `options` are torch.compile's. Unless they say otherwise,
        compiled code does not check sizes again that its guards have checked, nor in each call that functions and
        modules of torch and of this package are still the same (`_guards`). Returns the model. ValueError for less than
        one block.
        """
        values.whole("together", together, least=1)
        if "backend" not in options and "mode" not in options:
            options["options"] = {"size_asserts": False, "guard_filter_fn": _guards} | options.get("options", {})
        options = {"fullgraph": True, "dynamic": False} | options
        if together == 1:
            for layer in self.layers:
                # torch.compile takes entries out of a dict that it is given as `options`.
                layer.compile(**{name: dict(x) if isinstance(x, dict) else x for name, x in options.items()})
        else:
            self._together, self._run = together, torch.compile(_run, **options)
        return self

    def fuse_blocks(self) -> "TransformerLM":
        """Runs blocks by the kernels of fused.py, with no compiler, best in a CUDA graph. Returns the model.

        Under autocast matmuls read kept copies of their weights, `rounded` (see linear.py). `AdamW` writes them as it
        steps, if its attribute `rounded` is set to that of the model.

        Hooks and wrappers of blocks are not called then, nor hooks of their norms, attention and feed-forward; blocks
        keep all that their backward reads. ValueError with activation checkpointing, if a norm, attention or
        feed-forward has a forward of its own, which would not be called, and if a module in the place of a linear layer
        has no weight.
        """
        fused.check_levels(self.config)
        groups = [[self.lm_head]]
        for layer in self.layers:
            values.hold(
                *(
                    (
                        getattr(part.forward, "__func__", None)
                        in (RMSNorm.forward, Attention.forward, FeedForward.forward),
                        f"fused blocks do not call the forward of its own that a {type(part).__name__} of this model"
                        " has: run its blocks as they are, or compiled",
                    )
                    for part in (layer.ln1, layer.attn, layer.ln2, layer.ffn, self.ln_final)
                )
            )
            groups += [
                [layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj],
                [layer.attn.output_proj],
                [layer.ffn.w1, layer.ffn.w3],
                [layer.ffn.w2],
            ]
        values.hold(
            *(
                (
                    isinstance(getattr(layer, "weight", None), Tensor),
                    f"fused blocks read the weight of each layer, and a {type(layer).__name__} of this model has none:"
                    " run its blocks as they are, or compiled",
                )
                for group in groups
                for layer in group
            )
        )
        self._fused = True
        self.rounded = linear.RoundedWeights(groups)
        return self

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: Any = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The hidden states that the head reads: tokens (B, S) and positions (S) or (B, S) -> (B, S, M).

        documents  packed into the sequences: a token attends to its own document alone, and positions begin anew in
                   each document, unless they are given
        cache      gives each layer the function that it attends with, which may have keys and values of earlier tokens:
                   see `lmsys.training.generation.Cache`
        ValueError for a sequence longer than the context, documents that do not fill the sequences or come with a
        cache, and on a CPU for ids outside the vocabulary and positions outside the context; on CUDA such an id stops
        the process with a device-side assertion.
        """
        values.hold((documents is None or cache is None, "a cache knows no documents: give one of the two"))
        self._check(tokens, positions, documents)
        x = self.token_embeddings(tokens)
        if self.config.residual == "narrow":  # blocks then keep this dtype, as they add outputs of matmuls
            x = x.to(linear.matmul_dtype(x))
        positions = documents.positions if documents is not None and positions is None else positions
        attend = (
            [self._attend(x, documents)] * len(self.layers) if cache is None else cache.attend(lambda: self._attend(x))
        )
        if self._fused:
            with self._rounded_shown():
                return fused.run(list(self.layers), self.ln_final, x, attend, self.rope, positions)
        all_blocks = checkpointing.Group(first=0, stop=len(self.layers), level="none")
        for group in self.config.groups if torch.is_grad_enabled() else [all_blocks]:
            x = (
                # level="none": when blocks run again, their backward follows at once: they keep all that it reads.
                selective.run_again(
                    self._blocks,
                    x,
                    group._replace(level="none"),
                    attend,
                    positions,
                    preserve_rng_state=not all(
                        block.has_plain_parts() for block in list(self.layers)[group.first : group.stop]
                    ),
                )
                if group.level == "whole"
                else self._blocks(x, group, attend, positions)
            )
        return self.ln_final(x)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        with self._rounded_shown():
            return self.lm_head(self.hidden(tokens, positions))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Documents | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy of the targets (B, S) that are not `lmsys.config.IGNORED`: a scalar in float32.

        tokens, documents, positions  as in `hidden`
        """
        return self.loss_of(self.hidden(tokens, positions, documents=documents), targets)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss from the states (B, S, M) that `hidden` gives. With a head that is not `plain` all logits are held.

        ValueError for targets that are not class indices (B, S).
        """
        with part("head and loss"), self._rounded_shown():
            loss: Tensor = (
                linear_cross_entropy(hidden, self.lm_head.weight, targets)
                if plain(self.lm_head)
                else cross_entropy(self.lm_head(hidden), targets)
            )
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, also for the dict of a wrapped or compiled model (prefixes `module.`, `_orig_mod.`).

        ValueError for a dict that does not fit.
        """
        renamed = {key.replace("_orig_mod.", "").removeprefix("module."): value for key, value in state_dict.items()}
        try:
            loaded = super().load_state_dict(renamed, strict=strict, assign=assign)
        except RuntimeError as error:
            raise ValueError(f"the state dict does not fit {self.config}: {error}") from error
        if self.rope.cos.is_meta:  # `assign` brings weights to a device, but not the tables of `rope`
            self.rope.to_empty(device=self.lm_head.weight.device)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """The state without compiled code, for copies and `torch.save`, as of torch's own modules."""
        return super().__getstate__() | {"_run": _run}

    def _blocks(self, x: Tensor, group: checkpointing.Group, attend: list[Any], positions: Tensor | None) -> Tensor:
        """Runs the blocks of a group."""
        layers = list(self.layers)
        for start in range(group.first, group.stop, self._together):
            blocks = slice(start, min(start + self._together, group.stop))
            x = self._run(layers[blocks], x, attend[blocks], self.rope, positions, group.level)
        return x

    def _rounded_shown(self) -> AbstractContextManager[None]:
        """The context in which matmuls read copies of weights, if the model has any."""
        return nullcontext() if self.rounded is None or torch.compiler.is_compiling() else self.rounded.shown()

    def _check(self, tokens: Tensor, positions: Tensor | None, documents: Documents | None) -> None:
        """ValueError as in `hidden`."""
        functions.check_ids("tokens", tokens, "token ids", [("B", "S")], self.config.vocab_size)
        batch, length = tokens.shape
        if length > self.config.context_length:
            raise ValueError(f"{length} tokens are more than context_length={self.config.context_length}")
        if documents is not None and (
            not isinstance(documents, Documents)
            or documents.num_tokens != length
            or documents.batch not in (1, batch)
            or documents.device != tokens.device
        ):
            raise ValueError(
                f"documents must fill {batch} sequences of {length} tokens on {tokens.device}; got {documents}"
            )
        if positions is not None:
            functions.check_ids(
                "positions", positions, "positions in the context", [(length,), (batch, length)],
                self.config.context_length,
            )  # fmt: skip

    def _attend(self, x: Tensor, documents: Documents | None = None) -> Any:
        """The attention row's function for states x (B, S, M). It is looked up here, outside of compiled blocks."""
        case = attention_case(
            self.config, x.shape[0], x.shape[1], contract.DTYPE_NAMES[linear.matmul_dtype(x)], x.device,
            grad=torch.is_grad_enabled(), documents=documents is not None,
        )  # fmt: skip
        row, _ = row_of(self.config.attention, case)
        if documents is None:
            return row
        options = contract.keywords_of(row, Pattern(causal=True, documents=documents))
        return lambda q, k, v, causal: row(q, k, v, **options)


class Loss(nn.Module):
    """A module whose forward is the model's loss: the data-parallel strategies of `lmsys.parallel` wrap this module."""

    def __init__(self, model: TransformerLM):
        super().__init__()
        self.model = values.instance("model", model, nn.Module)

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents | None = None) -> Tensor:
        return self.model.loss(tokens, targets, documents)
