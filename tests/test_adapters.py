"""docs/examples/adapters.py, the file by which CS336's own tests call this library.

ASKED lists the adapters that those tests import: each must exist and take as many arguments. The other tests compare
the adapters with formulas or with PyTorch, and call them by the names of arguments that the course uses.
"""

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lmsys.attention.compiled import why_no_compiler
from lmsys.parallel.group import WorkerGroup
from lmsys.registry import load_target
from lmsys.testing import saved_lse
from tests.support.processes import ROOT

PATH = ROOT / "docs" / "examples" / "adapters.py"
END = "<|endoftext|>"
S, M, H, FF, V = 6, 16, 2, 24, 40  # positions, d_model, heads, d_ff, ids
ASKED = {  # what the tests of both assignments and both years import, and how many arguments they give
    "run_linear": 4, "run_embedding": 4, "run_swiglu": 6, "run_rmsnorm": 4, "run_rope": 5,
    "run_scaled_dot_product_attention": 4, "run_multihead_self_attention": 7,
    "run_multihead_self_attention_with_rope": 10, "run_transformer_block": 7, "run_transformer_lm": 9, "run_silu": 1,
    "run_softmax": 2, "run_cross_entropy": 2, "run_get_batch": 4, "run_gradient_clipping": 2, "get_adamw_cls": 0,
    "run_get_lr_cosine_schedule": 5, "run_save_checkpoint": 4, "run_load_checkpoint": 3, "get_tokenizer": 3,
    "run_train_bpe": 3, "get_flashattention_autograd_function_pytorch": 0,
    "get_flashattention_autograd_function_triton": 0, "get_ddp": 1, "ddp_on_after_backward": 2,
    "get_ddp_individual_parameters": 1, "ddp_individual_parameters_on_after_backward": 2, "get_ddp_bucketed": 2,
    "ddp_bucketed_on_after_backward": 2, "ddp_bucketed_on_train_batch_start": 2, "get_fsdp": 2,
    "fsdp_on_after_backward": 2, "fsdp_gather_full_params": 1, "get_sharded_optimizer": 2,
}  # fmt: skip


def adapter(name: str) -> Any:
    """A function of docs/examples/adapters.py."""
    return load_target(f"{PATH}:{name}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that depend on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of_a_block(seed: int) -> dict[str, Tensor]:
    """The weights of a transformer block, by the names in the course's state dictionary."""
    shapes = {f"attn.{name}_proj.weight": (M, M) for name in ("q", "k", "v", "output")}
    shapes |= {"ln1.weight": (M,), "ln2.weight": (M,)}
    shapes |= {"ffn.w1.weight": (FF, M), "ffn.w2.weight": (M, FF), "ffn.w3.weight": (FF, M)}
    return {name: drawn(*shape, seed=seed + i) / 4 for i, (name, shape) in enumerate(shapes.items())}


def projections(weights: dict[str, Tensor]) -> list[Tensor]:
    """Those of the queries, keys, values and output, in this order."""
    return [weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]


def attended(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The formula of attention, where a query sees a key if `visible` is True."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("name", ASKED)
def test_every_adapter_takes_what_it_is_asked_with(name: str) -> None:
    inspect.signature(adapter(name)).bind(*range(ASKED[name]))


X, W1, W2, W3, GAIN = drawn(2, S, M), drawn(FF, M), drawn(M, FF, seed=1), drawn(FF, M, seed=2), drawn(M, seed=3)
IDS = torch.tensor([[3, 0], [2, 3]])
FORMULAS: dict[str, tuple[dict[str, Any] | tuple[Any, ...], Tensor]] = {  # adapter: (arguments, its result)
    "run_linear": ({"d_in": M, "d_out": FF, "weights": W1, "in_features": X}, X @ W1.mT),
    "run_embedding": ({"vocab_size": FF, "d_model": M, "weights": W1, "token_ids": IDS}, W1[IDS]),
    "run_swiglu": (
        {"d_model": M, "d_ff": FF, "w1_weight": W1, "w2_weight": W2, "w3_weight": W3, "in_features": X},
        (F.silu(X @ W1.mT) * (X @ W3.mT)) @ W2.mT,
    ),
    "run_rmsnorm": (
        {"d_model": M, "eps": 1e-5, "weights": GAIN, "in_features": X},
        X / (X.square().mean(-1, keepdim=True) + 1e-5).sqrt() * GAIN,
    ),
    "run_silu": ((X,), F.silu(X)),
    "run_softmax": ((X + 100, 0), X.softmax(0)),
    "run_cross_entropy": ((1000 * X[0], torch.arange(S)), F.cross_entropy(1000 * X[0], torch.arange(S))),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_modules_and_functions_are_their_formulas(name: str) -> None:
    given, expected = FORMULAS[name]
    result = adapter(name)(**given) if isinstance(given, dict) else adapter(name)(*given)
    torch.testing.assert_close(result, expected)


def test_rope_keeps_lengths_and_knows_distances_alone() -> None:
    """Rotated vectors keep their norm, and scores depend on distances of positions alone."""

    def rope(x: Tensor, positions: Tensor) -> Tensor:
        return adapter("run_rope")(M, theta=100.0, max_seq_len=20, in_query_or_key=x, token_positions=positions)

    q, k, near = drawn(3, S, M), drawn(3, S, M, seed=1), torch.arange(S)
    torch.testing.assert_close(rope(q, near).norm(dim=-1), q.norm(dim=-1))
    scores = [rope(q, places) @ rope(k, places).mT for places in (near, near + 9)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, S, M), (2, H, S, M)])
def test_attention_sees_what_the_mask_shows(shape: tuple[int, ...]) -> None:
    q, k, v = drawn(*shape), drawn(*shape[:-2], S + 2, M, seed=1), drawn(*shape[:-2], S + 2, 2 * M, seed=2)
    mask = drawn(*shape[:-1], S + 2, seed=3) > 0
    mask[..., 0] = True
    o = adapter("run_scaled_dot_product_attention")(Q=q, K=k, V=v, mask=mask)
    torch.testing.assert_close(o, attended(q, k, v, mask))
    o = adapter("run_scaled_dot_product_attention")(Q=q, K=k, V=v)
    torch.testing.assert_close(o, attended(q, k, v, torch.ones_like(mask)))


def test_heads_attend_on_their_own_and_positions_count_by_distance() -> None:
    x, (q, k, v, o) = drawn(2, S, M), projections(weights_of_a_block(0))
    given = {"d_model": M, "num_heads": H, "in_features": x}
    given |= {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v, "o_proj_weight": o}
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    parts = [torch.stack((x @ w.mT).chunk(H, dim=-1), dim=1) for w in (q, k, v)]  # (B, H, S, D)
    expected = torch.cat(attended(*parts, causal).unbind(1), dim=-1) @ o.mT
    torch.testing.assert_close(adapter("run_multihead_self_attention")(**given), expected)
    rotated = adapter("run_multihead_self_attention_with_rope")
    far = [
        rotated(**given, max_seq_len=20, theta=100.0, token_positions=torch.arange(S)[None] + shift) for shift in (0, 9)
    ]
    torch.testing.assert_close(*far, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotated(**given, max_seq_len=20, theta=100.0), far[0])


def test_a_model_is_its_blocks_and_a_block_its_layers() -> None:
    blocks = [weights_of_a_block(seed) for seed in (0, 100)]
    others = {"token_embeddings.weight": drawn(V, M, seed=1), "lm_head.weight": drawn(V, M, seed=2)}
    others["ln_final.weight"] = drawn(M, seed=3)
    weights = others | {f"layers.{i}.{name}": x for i, block in enumerate(blocks) for name, x in block.items()}
    ids = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))
    norm, attend = adapter("run_rmsnorm"), adapter("run_multihead_self_attention_with_rope")
    x = weights["token_embeddings.weight"][ids]
    for block in blocks:
        run_block = adapter("run_transformer_block")
        outputs = run_block(
            d_model=M, num_heads=H, d_ff=FF, max_seq_len=8, theta=100.0, weights=block, in_features=x
        )  # fmt: skip
        x = x + attend(M, H, 8, 100.0, *projections(block), norm(M, 1e-5, block["ln1.weight"], x))
        ffn = [block[f"ffn.w{i}.weight"] for i in (1, 2, 3)]
        x = x + adapter("run_swiglu")(M, FF, *ffn, norm(M, 1e-5, block["ln2.weight"], x))
        torch.testing.assert_close(outputs, x)
    logits = norm(M, 1e-5, weights["ln_final.weight"], x) @ weights["lm_head.weight"].mT
    sizes = {"vocab_size": V, "context_length": 8, "d_model": M, "num_layers": 2, "num_heads": H, "d_ff": FF}
    run_lm = adapter("run_transformer_lm")
    outputs = run_lm(**sizes, rope_theta=100.0, weights=weights, in_indices=ids)
    torch.testing.assert_close(outputs, logits, rtol=1e-4, atol=1e-4)
    prefix = run_lm(**sizes, rope_theta=100.0, weights=weights, in_indices=ids[:, :3])
    torch.testing.assert_close(prefix, outputs[:, :3], rtol=1e-4, atol=1e-4)


def test_training_is_that_of_torch() -> None:
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    optimizers = [adapter("get_adamw_cls")()(ours.parameters(), **settings)]
    optimizers.append(torch.optim.AdamW(theirs.parameters(), **settings))
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            model(drawn(8, 5, seed=step)).square().sum().backward()
        adapter("run_gradient_clipping")(ours.parameters(), 0.5)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    schedule = adapter("run_get_lr_cosine_schedule")
    rates = [schedule(it, 1.0, 0.1, warmup_iters=4, cosine_cycle_iters=12) for it in (0, 2, 4, 8, 12, 99)]
    assert rates == pytest.approx([0, 0.5, 1, 0.55, 0.1, 0.1])


def test_data_and_checkpoints_come_back() -> None:
    inputs, targets = adapter("run_get_batch")(dataset=np.arange(50), batch_size=4, context_length=7, device="cpu")
    assert torch.equal(inputs + 1, targets) and inputs.shape == (4, 7)
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = adapter("get_adamw_cls")()(model.parameters(), lr=0.1)
    file = io.BytesIO()
    adapter("run_save_checkpoint")(model, optimizer, iteration=7, out=file)
    file.seek(0)
    restored = adapter("get_adamw_cls")()(other.parameters(), lr=1.0)
    assert adapter("run_load_checkpoint")(src=file, model=other, optimizer=restored) == 7
    assert torch.equal(model.weight, other.weight) and restored.param_groups[0]["lr"] == 0.1


def test_a_trained_tokenizer_gives_the_text_back() -> None:
    vocab, merges = adapter("run_train_bpe")(input_path=str(Path(__file__)), vocab_size=300, special_tokens=[END])
    assert len(vocab) == 300 and len(merges) == 300 - 256 - 1 and END.encode() in vocab.values()
    text = f"def test_{END}café\n"
    for specials in ([END], None):
        tokenizer = adapter("get_tokenizer")(vocab, merges, specials)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert list(tokenizer.encode_iterable([text, text])) == tokenizer.encode(text + text)


@pytest.mark.parametrize("backend", ["pytorch", "triton"])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_functions_are_attention_and_keep_the_log_sum_exp(backend: str, causal: bool, device: str) -> None:
    if backend == "triton" and (device != "cuda" or why_no_compiler("cuda")):
        pytest.skip("runs on a GPU only, like the course's tests: tests/attention tests the row in the interpreter")
    q, k, v, do = (drawn(2, 40, 64, seed=i).to(device).requires_grad_(i < 3) for i in range(4))
    o = adapter(f"get_flashattention_autograd_function_{backend}")().apply(q, k, v, causal)
    visible = torch.ones(40, 40, dtype=torch.bool, device=device)
    visible = visible.tril() if causal else visible
    expected = attended(q, k, v, visible)
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)  # the course's own tolerance, for TF32
    lse = (q @ k.mT / 8).masked_fill(~visible, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(saved_lse(o, q), lse, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(output, (q, k, v), do) for output in (o, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


def _layers() -> nn.Module:
    """The module that all ranks train; the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def _batches(world_size: int) -> list[list[Tensor]]:
    """A batch for each rank, in each of three steps."""
    return [[drawn(4, 6, seed=10 * step + rank) for rank in range(world_size)] for step in range(3)]


def _trained(kind: str) -> dict[str, Tensor]:
    """Wrap a module on a rank, train it for three steps, and return its weights.

    Before it is wrapped, its weights differ from rank to rank: wrapping must make them those of rank 0.
    """
    prefix = kind if kind in ("ddp_individual_parameters", "ddp_bucketed", "fsdp") else "ddp"
    module = _layers()
    for p in module.parameters():
        p.data += dist.get_rank()
    given = {"bucket_size_mb": 0.0002} if kind == "ddp_bucketed" else {}
    wrapped = adapter(f"get_{prefix}")(module, **given)
    make = adapter("get_sharded_optimizer") if kind == "sharded" else lambda params, cls, **rest: cls(params, **rest)
    optimizer = make(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    for batches in _batches(dist.get_world_size()):
        if kind == "ddp_bucketed":
            adapter("ddp_bucketed_on_train_batch_start")(ddp_model=wrapped, optimizer=optimizer)
        optimizer.zero_grad()
        wrapped(batches[dist.get_rank()]).square().mean().backward()
        adapter(f"{prefix}_on_after_backward")(wrapped, optimizer)
        optimizer.step()
    weights = adapter("fsdp_gather_full_params")(wrapped) if kind == "fsdp" else module.state_dict()
    return copy.deepcopy({name: x.detach() for name, x in weights.items()})


@pytest.mark.parametrize("kind", ["ddp", "ddp_individual_parameters", "ddp_bucketed", "fsdp", "sharded"])
def test_ranks_train_as_one_process_on_all_batches(ranks: WorkerGroup, kind: str) -> None:
    weights_of_ranks = ranks.run(_trained, kind)
    alone = _layers()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for batches in _batches(len(weights_of_ranks)):
        optimizer.zero_grad()
        alone(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    for weights in weights_of_ranks:
        assert weights.keys() == alone.state_dict().keys()
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
