"""A step as a CUDA graph: the same training as kernel by kernel."""

import pytest
import torch
from torch import Tensor

from lmsys.config import model_config
from lmsys.model import TransformerLM
from lmsys.training.graph import GraphedGradients
from lmsys.training.optimizer import AdamW, clip_grad_norm, set_lr


def test_on_a_cpu_it_says_what_to_do_instead() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="on a CPU call backward"):
        GraphedGradients(lambda x: (x * weight).sum(), [weight])(torch.ones(2))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [tuple(torch.randint(100, (2, 32), device="cuda", generator=generator) for _ in "xy") for _ in range(count)]


def trained(graphed: bool, compiled: bool, attention: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = TransformerLM(model_config("tiny", vocab_size=100, context_length=32, attention=attention), "cuda")
    model = model.compile_blocks() if compiled else model
    optimizer, losses = AdamW(model.parameters()), []

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model.loss(tokens, targets)

    graph = GraphedGradients(loss_of, model.parameters())
    for step, batch in enumerate(batches(6)):
        set_lr(optimizer, 1e-3 / (1 + step))
        if graphed:
            loss = graph(*batch)
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(*batch)
            loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step == 2:
            model.zero_grad(set_to_none=True)  # a replay brings the gradients back
    return losses, model.state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash_triton", "sdpa_flash"])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_trains_as_without(compiled: bool, attention: str) -> None:
    """With other data, another learning rate and clipped gradients in every step; additions may differ in order."""
    (losses, weights), (expected, others) = (trained(graphed, compiled, attention) for graphed in (True, False))
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, weight in weights.items():
        assert (weight - others[name]).norm() <= 1e-3 * others[name].norm(), name


@pytest.mark.gpu
def test_inputs_of_another_shape_are_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    graph = GraphedGradients(lambda x: (x * weight).sum(), [weight])
    assert graph(torch.tensor([1.0, 2.0], device="cuda")).item() == 3
    assert weight.grad.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        graph(torch.ones(3, device="cuda"))
