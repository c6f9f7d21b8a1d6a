"""`RoundedWeights`: copies of a model's weights in autocast's dtype, which its forwards read (`model.rounded`).

A model that keeps such copies must have the same bits as one that casts its weights in each forward. If a weight
changes, its copy must be made again before it is read. A new way to change weights is a function in CHANGES, which
takes the model and returns it, or another model with the changed weights.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lmsys.config import model_config
from lmsys.model import TransformerLM
from lmsys.model.linear import READ
from lmsys.training.gradients import GraphedGradients
from lmsys.training.optimizer import AdamW, _torch_step

CONFIG = replace(
    model_config("tiny", context_length=8), vocab_size=96, d_model=32, d_ff=64, attention="naive", num_kv_heads=2
)


def made(seed: int = 0, device: str = "cpu") -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(CONFIG, device).fuse_blocks()


@pytest.fixture
def model() -> TransformerLM:
    """A model whose copies are made."""
    ready = made()
    gradients(ready)
    return ready


def gradients(model: TransformerLM) -> list[Tensor]:
    """[loss, logits, the gradient of each parameter] in bfloat16 autocast. The forward makes outdated copies again."""
    tokens = torch.arange(18, device=model.lm_head.weight.device).view(2, 9) % CONFIG.vocab_size
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        logits = model(tokens[:, :-1])
    return [loss, logits, *torch.autograd.grad(loss, [*model.parameters()])]


def casting(model: TransformerLM) -> TransformerLM:
    """A model of the same weights that keeps no copies."""
    other = TransformerLM(CONFIG, model.lm_head.weight.device).fuse_blocks()
    other.load_state_dict(model.state_dict())
    other.rounded = None
    return other


def add(model: TransformerLM) -> TransformerLM:
    with torch.no_grad():
        model.layers[1].ffn.w2.weight[3] += 1
    return model


def step(model: TransformerLM) -> TransformerLM:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    optimizer = AdamW(model.parameters(), lr=0.1)
    optimizer.rounded = model.rounded
    optimizer.step()
    return model


def fused_step(model: TransformerLM) -> TransformerLM:
    """With one of torch's fused optimizers, matmuls went on to read the weights from before its first step."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    return model


def step_by_torchs_kernel(model: TransformerLM) -> TransformerLM:
    """Our AdamW so steps what its own kernel does not take on a GPU."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model.loss(tokens, tokens).backward()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for bundle in optimizer._plan(0):
        _torch_step(bundle, optimizer.param_groups[0], fused=True, grad_scale=None, found_inf=None)
    return model


def load(model: TransformerLM) -> TransformerLM:
    model.load_state_dict(made(1).state_dict())
    return model


def assign(model: TransformerLM) -> TransformerLM:
    model.load_state_dict(made(2).state_dict(), assign=True)
    return model


def replaced(model: TransformerLM) -> TransformerLM:
    model.layers[0].attn.k_proj.weight = nn.Parameter(torch.randn_like(model.layers[0].attn.k_proj.weight))
    return model


def with_other_data(model: TransformerLM) -> TransformerLM:
    model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)
    return model


def to_float64_and_back(model: TransformerLM) -> TransformerLM:
    model = model.double()
    with torch.no_grad():
        model.lm_head.weight[0] *= 2
    return model.float()


def pickled(model: TransformerLM) -> TransformerLM:
    return pickle.loads(pickle.dumps(model))


CHANGES: list[Callable[[TransformerLM], TransformerLM]] = [
    add, step, fused_step, step_by_torchs_kernel, load, assign, replaced, with_other_data, to_float64_and_back,
    copy.deepcopy, pickled,
]  # fmt: skip


@given(change=st.sampled_from(CHANGES), more=st.lists(st.sampled_from(CHANGES), max_size=2))
def test_copies_are_never_older_than_their_weights(change: Any, more: list[Any]) -> None:
    model = made()
    for changed in (change, *more):
        gradients(model)
        model = changed(model)
    assert all(map(torch.equal, gradients(model), gradients(casting(model))))


def test_a_compiled_step_of_a_fused_optimizer_counts_as_a_change(model: TransformerLM) -> None:
    """A compiler took the count out of the step."""
    model.loss(*2 * [torch.zeros(1, 8, dtype=torch.int64)]).backward()
    step = torch.compile(torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step, backend="aot_eager")
    for _ in range(2):  # the first call compiles
        step()
        assert all(map(torch.equal, gradients(model), gradients(casting(model))))


def pairs_of(model: TransformerLM) -> list[tuple[Tensor, Tensor]]:
    """(weight, its copy) of each weight that has one."""
    return [(p, copy) for p in model.parameters() if (copy := model.rounded.of(p)) is not None]


def test_copies_have_the_dtype_of_autocast(model: TransformerLM) -> None:
    with torch.autocast("cpu", torch.float16), model.rounded.shown():
        assert all(torch.equal(copy, p.half()) for p, copy in pairs_of(model))


def test_only_the_copy_of_a_changed_weight_is_made_again(model: TransformerLM) -> None:
    before = [copy._version for _, copy in pairs_of(model)]
    add(model)
    gradients(model)
    again = [copy._version != version for (_, copy), version in zip(pairs_of(model), before, strict=True)]
    assert len(again) == 1 + 7 * CONFIG.num_layers  # the head, and seven matrices of each block
    assert sum(again) == 1


def test_a_copy_that_an_optimizer_has_written_is_not_made_again(model: TransformerLM) -> None:
    """An optimizer that steps weights writes their copies itself, and says so by `follow`. Here the copy is older."""
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    model.rounded.follow([model.lm_head.weight])
    written = model.rounded.of(model.lm_head.weight)
    before = written.clone()
    gradients(model)
    assert torch.equal(written, before)


def test_a_backward_after_a_step_is_refused() -> None:
    """The backward would read copies of newer weights than its forward did."""
    model, tokens = made(), torch.zeros(1, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, tokens)
    add(model)
    gradients(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_show_their_copies_within_a_forward_alone(model: TransformerLM) -> None:
    assert not any(hasattr(p, "rounded") for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16), model.rounded.shown():
        assert hasattr(model.lm_head.weight, "rounded")
    with model.rounded.shown():  # without autocast nothing is rounded
        assert not hasattr(model.lm_head.weight, "rounded")


def test_a_weight_of_two_layers_has_the_bits_of_one_that_is_cast() -> None:
    model = made()
    model.layers[0].ffn.w1.weight = model.layers[1].ffn.w1.weight
    gradients(model)
    add(model)
    # The loss and the logits: `casting` unties the weights, so that it has one gradient more.
    assert all(map(torch.equal, gradients(model)[:2], gradients(casting(model))[:2]))


def test_a_forward_notes_the_copies_that_it_reads(model: TransformerLM) -> None:
    """READ has them since it was last cleared: replays of a CUDA graph refresh those that its capture has read."""
    gradients(made(1))
    READ.clear()
    gradients(model)
    assert set(READ) == {model.rounded}


def test_copies_of_query_key_and_value_weights_lie_side_by_side(model: TransformerLM) -> None:
    attn = model.layers[0].attn
    q, k, v = (model.rounded.of(layer.weight) for layer in (attn.q_proj, attn.k_proj, attn.v_proj))
    assert [q.data_ptr() + q.nbytes, k.data_ptr() + k.nbytes] == [k.data_ptr(), v.data_ptr()]


@pytest.mark.gpu
@pytest.mark.parametrize("change", [add, load, step])
def test_a_replayed_step_reads_weights_as_they_are(change: Callable[[TransformerLM], Any]) -> None:
    """AdamW (`step`) writes the copies itself. Other changes between two replays must be seen, too."""
    model = made(device="cuda")
    tokens = torch.arange(18, device="cuda").view(2, 9) % CONFIG.vocab_size

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model.loss(tokens[:, :-1], tokens[:, 1:])

    graph, optimizer = GraphedGradients(loss, model.parameters()), AdamW(model.parameters(), lr=1e-2)
    optimizer.rounded = model.rounded
    for _ in range(2):
        graph()
        optimizer.step()
        assert all(torch.equal(copy, p.bfloat16()) for p, copy in pairs_of(model))
    if change is step:
        optimizer.step()
    else:
        change(model)
    assert torch.equal(graph(), loss())
