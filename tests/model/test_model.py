"""`lmsys.model.transformer`: laws that hold for any weights, and choices that must not change results.

Such choices are the attention row, compilation, and the chunks of the loss. `assert_right` compares with `expected`,
the plain model in float64, with the error of float32 as budget. Tables at the end have bad values with their messages.
"""

import math
import threading
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import ATTENTION, AttentionCase
from lmsys.attention.compiled import why_no_compiler
from lmsys.config import SIZES, ModelConfig, model_config
from lmsys.model import TransformerLM
from lmsys.model.loss import linear_cross_entropy
from lmsys.model.transformer import Attention, Linear, _guards
from lmsys.testing import error_ratio
from tests.support.variants import by_default_all_but

VOCABULARY = 31
ROWS = [
    name
    for name in ATTENTION
    if ATTENTION[name].why_not(AttentionCase(2, 4, 2, 12, 12, 8, "float32", grad=True)) is None
]
seeds = st.integers(0, 2**16)


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformerLM:
    base = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(seed)
    return TransformerLM(ModelConfig(**base | {"context_length": 16, "attention": "naive"} | changes)).to(dtype)


def ids(seed: int, batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def outcome(model: TransformerLM, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """{"logits": ..., "loss": ..., name of a parameter: its gradient}."""
    model.zero_grad()
    loss = model.loss(tokens, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": model(tokens), "loss": loss, **gradients}


@cache
def expected(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outcome of the plain model on `ids(seed)`, in float64 and in float32."""
    tokens, targets = ids(seed), ids(seed + 1)
    return outcome(tiny(seed, torch.float64), tokens, targets), outcome(tiny(seed), tokens, targets)


def assert_right(model: TransformerLM, seed: int) -> None:
    reference, plain = expected(seed)
    results = outcome(model, ids(seed), ids(seed + 1))
    ratios = {name: error_ratio(results[name], reference[name].detach(), plain[name]) for name in reference}
    assert max(ratios.values()) <= 1, ratios


@settings(max_examples=10)
@given(seed=seeds, changed=st.integers(1, 11))
def test_later_tokens_change_nothing_earlier(seed: int, changed: int) -> None:
    model, tokens = tiny(seed), ids(seed)
    other = tokens.clone()
    other[:, changed:] = ids(seed + 1)[:, changed:]
    assert torch.equal(model(tokens)[:, :changed], model(other)[:, :changed])


@settings(max_examples=10)
@given(seed=seeds, shift=st.integers(0, 4))
def test_only_relative_positions_matter(seed: int, shift: int) -> None:
    model, tokens = tiny(seed, torch.float64), ids(seed)
    positions = torch.arange(12)
    torch.testing.assert_close(
        model(tokens, positions + shift), model(tokens), rtol=0, atol=1e-5
    )  # the table of angles is float32
    assert torch.equal(model(tokens, positions), model(tokens))
    assert torch.equal(model(tokens, positions.expand(2, -1)), model(tokens))


@pytest.mark.parametrize("row", by_default_all_but(ROWS, "naive_compiled"))
@settings(max_examples=1)
@given(seed=seeds)
def test_the_attention_row_does_not_matter(row: str, seed: int) -> None:
    assert_right(tiny(seed, attention=row), seed)


needs_compiler = pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))


@needs_compiler
@pytest.mark.parametrize(
    ("row", "backend", "together", "num_layers", "checkpointed"),
    [
        ("sdpa_flash", "aot_eager", 2, 3, 3),
        pytest.param("naive", "inductor", 1, 2, 0, marks=pytest.mark.long),
        pytest.param("flash_triton", "inductor", 1, 2, 0, marks=pytest.mark.long),
        pytest.param("flash_torch", "inductor", 2, 3, "whole*1,attention*1,matmuls*1", marks=pytest.mark.on_request),
    ],
)
def test_compiled_blocks_equal_eager_ones_without_graph_breaks(
    row: str, backend: str, together: int, num_layers: int, checkpointed: int | str
) -> None:
    """With "aot_eager" torch only traces the blocks; with "inductor" it generates code that asserts the shapes of its
    inputs. Several blocks may be compiled together, and the last graph may have fewer."""
    if row not in ROWS:
        pytest.skip(f"{row} does not run here: see lmsys")
    shape = {"attention": row, "num_layers": num_layers, "checkpoint_blocks": checkpointed}
    how = {"options": {"size_asserts": True}} if backend == "inductor" else {"backend": backend}
    eager, compiled = tiny(3, **shape), tiny(3, **shape).compile_blocks(together, **how)
    expected, found = (outcome(model, ids(3), ids(4)) for model in (eager, compiled))
    torch.testing.assert_close(found, expected)


SCALE, activation = 1.0, F.relu


def bent(x: Tensor) -> Tensor:
    return activation(x.sin())


class Bent(Linear):
    """A user's layer, which reads globals of its own file."""

    def forward(self, x: Tensor) -> Tensor:
        return SCALE * bent(super().forward(x))


@needs_compiler
def test_compiled_blocks_follow_what_a_program_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards on torch's and this package's own functions and modules are left out, and no others."""
    torch.compiler.reset()
    dropped: list[Any] = []

    def guards(entries: Any) -> list[bool]:
        kept = _guards(entries)
        dropped.extend(entry.value for entry, keep in zip(entries, kept, strict=True) if not keep)
        return kept

    eager, compiled = tiny(num_layers=2), tiny(num_layers=2)
    for model in (eager, compiled):
        for layer in model.layers:
            layer.ffn.w2 = Bent(*reversed(layer.ffn.w2.weight.shape))
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_blocks(backend="eager", options={"guard_filter_fn": guards})
    for name, value in (
        ("SCALE", 1.0),
        ("SCALE", 2.0),
        ("activation", F.gelu),
        ("bent", lambda x: x.cos()),
        ("bent", lambda x: x.exp()),
    ):
        monkeypatch.setitem(globals(), name, value)
        assert torch.equal(compiled(ids(0)), eager(ids(0)))
    assert torch in dropped and F in dropped and bent not in dropped


@needs_compiler
def test_blocks_share_the_options_of_the_compiler_which_stay_as_they_are() -> None:
    """torch.compile takes entries out of a dict; a backend must be one object for all blocks, or each is compiled."""

    class Backend:
        def __init__(self) -> None:
            self.calls, self.lock = 0, threading.Lock()  # a lock cannot be copied

        def __call__(self, graph: Any, inputs: Any) -> Any:
            self.calls += 1
            return graph

    torch.compiler.reset()
    backend, options = Backend(), {"guard_filter_fn": _guards}
    model = tiny(num_layers=12).compile_blocks(backend=backend, options=options)
    model(ids(0))
    assert backend.calls == 1 and options == {"guard_filter_fn": _guards}


@needs_compiler
@pytest.mark.parametrize("together", by_default_all_but([1, 2], 2))
def test_a_deep_model_compiles_once(together: int) -> None:
    """There is one graph for each shape of inputs, for any number of blocks. The loss is that of the eager model."""
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model, eager = tiny(num_layers=6).compile_blocks(together, backend=backend), tiny(num_layers=6)
    for length, count in ((12, 1), (12, 1), (8, 2)):
        loss, expected = (each.loss(ids(0, length=length), ids(1, length=length)) for each in (model, eager))
        loss.backward()
        assert len(graphs) == count and torch.equal(loss, expected)
    with pytest.raises(ValueError, match="together=0 must be at least 1"):
        model.compile_blocks(0)


@settings(max_examples=10)
@given(seed=seeds)
def test_grouped_heads_equal_repeated_key_and_value_projections(seed: int) -> None:
    grouped, whole = tiny(seed, torch.float64), tiny(seed, torch.float64, num_kv_heads=4)
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    torch.testing.assert_close(grouped(ids(seed)), whole(ids(seed)))


def test_a_loss_scale_saves_small_gradients_from_float16() -> None:
    """Divided by 4,096 tokens, most gradients are too small for float16. Scaled by 2**16 before, none is lost."""
    torch.manual_seed(0)
    leaves = [torch.randn(n, 8).half().requires_grad_() for n in (4096, 500)]
    targets = torch.randint(500, (4096,))
    gradients = torch.autograd.grad(2**16 * linear_cross_entropy(*leaves, targets, chunk=512), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    reference = torch.autograd.grad(2**16 * F.cross_entropy(wide[0] @ wide[1].mT, targets), wide)
    for x, ref in zip(gradients, reference, strict=True):
        assert torch.count_nonzero(x) > 0.95 * x.numel() and error_ratio(x, ref, ref.half()) <= 1


@pytest.mark.parametrize("residual", ["wide", "narrow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_a_model_in_float64_alone(dtype: torch.dtype, residual: str) -> None:
    """As torch's layers do: autocast casts no float64."""
    model = tiny(1, torch.float64, residual=residual)
    plain = outcome(model, ids(1), ids(2))
    with torch.autocast("cpu", dtype):
        cast = outcome(model, ids(1), ids(2))
    assert all(x.dtype == torch.float64 and torch.equal(x, cast[name]) for name, x in plain.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_in_chunks_under_autocast(dtype: torch.dtype) -> None:
    """Gradients of chunks are added in float32, so that many chunks are as exact as one."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 256, device="cuda"), 0.1 * torch.randn(1000, 256, device="cuda")
    targets = torch.randint(1000, (700,), device="cuda")

    def results(wide: torch.dtype, autocast: bool, loss: Any) -> list[Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cuda", dtype, enabled=autocast):
            value = loss(*leaves)
        return [value, *torch.autograd.grad(value, leaves)]

    def whole(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), targets)

    reference = results(torch.float64, False, whole)
    plain = [x.to(dtype) for x in results(torch.float32, True, whole)]  # autocast rounds to this dtype on the way
    for chunk in (None, 64, 100):
        tested = results(torch.float32, True, lambda h, w, chunk=chunk: linear_cross_entropy(h, w, targets, chunk))
        assert all(x.dtype == torch.float32 for x in tested)
        for x, ref, low in zip(tested, reference, plain, strict=True):
            assert error_ratio(x, ref.detach(), low) <= 1


def test_a_batch_can_be_learnt_by_heart() -> None:
    model, tokens = tiny(), ids(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = model.loss(tokens, tokens.roll(-1, 1)).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
    assert first > 2 and loss.item() < 0.05


def test_parameters_carry_the_names_of_cs336_and_round_trip() -> None:
    model = tiny()
    names = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"} | {
        f"layers.{i}.{part}.weight"
        for i in range(2)
        for part in (
            "ln1",
            "ln2",
            *(f"attn.{x}_proj" for x in ("q", "k", "v", "output")),
            *(f"ffn.w{n}" for n in (1, 2, 3)),
        )
    }
    assert set(model.state_dict()) == names
    for prefix in ("module._orig_mod.", "_orig_mod.module."):  # compiled then wrapped, and wrapped then compiled
        other = tiny(1)
        other.load_state_dict({f"{prefix}{name}": value for name, value in model.state_dict().items()})
        assert torch.equal(other(ids(0)), model(ids(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("ln_final.weight"), 'Missing key.*"ln_final.weight"'),
        (lambda state: state.update(extra=torch.zeros(1)), 'Unexpected key.*"extra"'),
        (lambda state: state.update({"lm_head.weight": torch.zeros(3, 32)}), "size mismatch for lm_head.weight"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_named(change: Any, message: str) -> None:
    state = dict(tiny().state_dict())
    change(state)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        tiny().load_state_dict(state)


def gradient_error(residual: str, compiled: bool, device: str) -> float:
    """The relative error, in the L2 norm, of all gradients of six blocks under bfloat16 autocast."""
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 6, "num_heads": 2, "num_kv_heads": None, "vocab_size": 97}
    model, exact = (
        tiny(0, dtype, residual=residual, attention="sdpa_math", **sizes).to(device)
        for dtype in (torch.float32, torch.float64)
    )
    tokens, targets = (ids(seed, batch=4, length=16).to(device) for seed in (0, 1))
    exact.loss(tokens, targets).backward()
    if compiled:
        model.compile_blocks()
    with torch.autocast(device, torch.bfloat16):
        loss = model.loss(tokens, targets)
    loss.backward()
    gradients, right = (torch.cat([p.grad.flatten() for p in trained.parameters()]) for trained in (model, exact))
    return ((gradients - right).norm() / right.norm()).item()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_narrow_residual_adds_less_than_half_to_the_error(compiled: bool, device: str) -> None:
    """Every block of a narrow model rounds the stream once more, to the 8 bits of bfloat16's mantissa."""
    wide, narrow = (gradient_error(residual, compiled, device) for residual in ("wide", "narrow"))
    assert wide < narrow < 1.5 * wide


def test_the_residual_is_narrow_where_matmuls_are() -> None:
    """With residual="narrow" the stream has the dtype of the matmuls; with "wide", the default, it is float32."""
    model, dtypes = tiny(residual="narrow", num_layers=1), list[torch.dtype]()
    model.layers[0].register_forward_hook(lambda _, args, output: dtypes.extend((args[0].dtype, output.dtype)))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(ids(0))
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_weights_are_drawn_as_cs336_draws_them() -> None:
    model = tiny(d_model=128, d_ff=256, vocab_size=512)
    weight, std = model.layers[0].ffn.w1.weight, (2 / (128 + 256)) ** 0.5
    assert weight.std().item() == pytest.approx(0.987 * std, rel=0.03)  # of a normal truncated at three deviations
    assert weight.abs().max() <= 3 * std and model.token_embeddings.weight.abs().max() <= 3
    assert torch.equal(model.ln_final.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.zeros(2, 17, dtype=torch.int64)], "17 tokens are more than context_length=16"),
        ([torch.full((1, 3), VOCABULARY)], "token ids from 0 to 30; got 31"),
        ([torch.full((1, 3), -1)], "token ids from 0 to 30; got -1"),
        ([torch.zeros(3, dtype=torch.int64)], r"tokens must be token ids of shape \(B, S\); got shape \(3,\)"),
        ([torch.zeros(1, 3)], "token ids in int64 or int32; got torch.float32"),
        ([torch.zeros(1, 3, dtype=torch.bool)], "token ids in int64 or int32; got torch.bool"),
        ([[[1, 2]]], r"tokens must be a tensor of token ids; got \[\[1, 2\]\]"),
        ([ids(0)[:, :3], torch.arange(4)], r"of shape \(3\) or \(2, 3\); got shape \(4,\)"),
        ([ids(0)[:, :3], torch.arange(3.0)], "positions in the context in int64 or int32; got torch.float32"),
        ([ids(0)[:, :3], torch.arange(3) - 1], "positions in the context from 0 to 15; got -1"),
        ([ids(0)[:, :3], torch.arange(14, 17)], "from 0 to 15; got 16"),
        ([ids(0)[:, :3], 7], "positions must be a tensor of positions in the context; got 7"),
    ],
)
def test_bad_tokens_and_positions_are_named(inputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny()(*inputs)


@pytest.mark.parametrize(
    ("width", "targets", "message"),
    [
        (16, torch.zeros(2, 4, dtype=torch.int64), r"class indices of shape \(2, 3\); got shape \(2, 4\)"),
        (16, torch.zeros(2, 3), "class indices in int64 or int32; got torch.float32"),
        (16, torch.full((2, 3), 31), "class indices from 0 to 30, or -100; got 31"),
        (16, None, "targets must be a tensor of class indices; got None"),
        (17, None, r"must fit together; got shapes \(2, 3, 16\), \(31, 17\)"),
    ],
)
def test_bad_targets_and_weights_are_named(width: int, targets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.zeros(2, 3, 16), torch.zeros(31, width), targets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": None}, "d_model=32 must divide into num_heads=3"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_layers": 1.5}, "num_layers: must be a whole number; got 1.5"),
        ({"rope_theta": math.nan}, "rope_theta: must be a finite number; got NaN"),
        ({"norm_eps": math.inf}, "norm_eps: must be a finite number; got Infinity"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be more than 0"),
        ({"residual": "bfloat16"}, "residual='bfloat16' must be one of wide, narrow"),
        ({"checkpoint_blocks": 3}, "checkpoint_blocks=3 must lie in 0 to 2"),
        (
            {"checkpoint_blocks": "blocks"},
            "checkpoint_blocks='blocks' must be a number of blocks, fit, one of none",
        ),
        ({"checkpoint_blocks": "whole*1"}, r"checkpoint_blocks='whole\*1' must .* numbers that add up to 2 layers"),
        ({"checkpoint_blocks": "whole*3,none*0"}, "checkpoint_blocks='whole.*' must be a number of blocks"),
        ({"checkpoint_blocks": "fit"}, "checkpoint_blocks='fit' is no level yet: lmsys.cost.memory.fit"),
        ({"attention": "flash_trition"}, "did you mean flash_triton"),
        ({"attention": "sdpa_cudnn"}, "'sdpa_cudnn' cannot run .*cuDNN attention runs on CUDA only"),
    ],
)
def test_bad_configs_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)(ids(0))


def test_named_sizes() -> None:
    for size, values in SIZES.items():
        assert asdict(model_config(size, attention="naive")).items() >= {**values, "attention": "naive"}.items()
    with pytest.raises(ValueError, match="unknown size='smal': must be one of tiny, .*; did you mean small"):
        model_config("smal")


def test_the_loss_is_that_of_its_logits() -> None:
    model, tokens, targets = tiny(), ids(0), ids(1)
    torch.testing.assert_close(
        model.loss(tokens, targets), F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
    )


@given(seed=seeds, shift=st.integers(0, 4))
def test_attention_of_plain_sizes_is_that_of_a_model(seed: int, shift: int) -> None:
    """`Attention` alone equals that of a model with its positions. Without positions, the order of keys is free."""
    model = tiny(seed, torch.float64)
    layer, x = Attention(32, 4, 2, dtype=torch.float64), model.token_embeddings(ids(seed))
    layer.load_state_dict(model.layers[0].attn.state_dict())
    positions = torch.arange(12) + shift
    expected = model.layers[0].attn(x, model._attend(x), model.rope, positions)
    torch.testing.assert_close(layer(x, rope=model.rope, positions=positions), expected)
    order = torch.cat([torch.randperm(11, generator=torch.Generator().manual_seed(seed)), torch.tensor([11])])
    torch.testing.assert_close(layer(x[:, order])[:, -1], layer(x)[:, -1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5), "num_heads=5 must divide d_model=32, and kv_heads=5 the heads"),
        ((32, 4, 3), "num_heads=4 must divide d_model=32, and kv_heads=3 the heads"),
        ((32, 0), "num_heads=0 must be at least 1"),
        ((32, 4, 0), "kv_heads=0 must be at least 1"),
    ],
)
def test_attention_of_sizes_that_do_not_divide_is_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(*sizes)
