"""`lmsys.training.gradients`: a step that is replayed as a CUDA graph trains as one that launches kernel by kernel."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.data_parallel.cases import ParallelCase
from benchmarks.data_parallel.check import gate
from benchmarks.data_parallel.rank import compiler_of, execution
from benchmarks.models import Batch, build
from lmsys.bench.ranks import takes_part
from lmsys.config import model_config
from lmsys.model import TransformerLM
from lmsys.parallel import STRATEGIES
from lmsys.parallel.group import WorkerGroup, device
from lmsys.training.gradients import GraphedGradients, backward_of
from lmsys.training.optimizer import AdamW, clip_grad_norm, set_lr
from lmsys.training.prepare import prepare, run_blocks


def test_an_unknown_way_to_run_blocks_is_refused() -> None:
    """Or a benchmark's new way would be timed as eager, under another name."""
    with pytest.raises(ValueError, match="blocks='fusd' must be one of eager, compiled, fused"):
        run_blocks(None, "fusd")


def test_on_a_cpu_it_says_what_to_do_instead() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="on a CPU call backward"):
        GraphedGradients(backward_of(lambda x: (x * weight).sum()), [weight])(torch.ones(2))


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

    graph = GraphedGradients(backward_of(loss_of), model.parameters())
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
    """Each step has other data, another learning rate and clipped gradients. Sums may differ in their order."""
    (losses, weights), (expected, others) = (trained(graphed, compiled, attention) for graphed in (True, False))
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, weight in weights.items():
        assert (weight - others[name]).norm() <= 1e-3 * others[name].norm(), name


@pytest.mark.gpu
def test_inputs_of_another_shape_are_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    graph = GraphedGradients(backward_of(lambda x: (x * weight).sum()), [weight])
    assert graph(torch.tensor([1.0, 2.0], device="cuda")).item() == 3
    assert weight.grad.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        graph(torch.ones(3, device="cuda"))


def on_ranks(case: ParallelCase, graphed: bool) -> tuple[list[float], dict[str, Tensor]] | None:
    """On a rank: (the losses of six steps, the parameters after them). `graphed`: all but the first two steps replay.

    Losses are read at the end, so that the host runs ahead of replays.
    """
    if not takes_part(case.world_size):
        return None
    with compiler_of(case):
        rank, losses = dist.get_rank(), []
        model = build(case.config, str(device()), rank)
        prepared = prepare(model, execution(case), torch.optim.SGD, lr=0.1, momentum=0.9)
        (strategy, optimizer, _), gradients = prepared, prepared.gradients()
        for step in range(6):
            if graphed and step == 2:
                gradients = prepared.gradients(graph=True)
            data = Batch.draw(case.config, case.batch, str(device()), 10 * step + rank)
            losses.append(gradients(data.tokens, data.targets).clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state = {name: x.cpu() for name, x in strategy.full_state_dict().items()}
    return [loss.item() for loss in losses], state


def case_of(strategy: str, world_size: int, bucket_mb: float | None) -> ParallelCase:
    work = ("tiny", 32, 2, "fp32", "graphed", world_size)
    return ParallelCase("s", STRATEGIES[strategy], "cuda", *work, bucket_mb)


SYNCHRONIZED = pytest.mark.parametrize(
    ("strategy", "world_size", "bucket_mb"),
    [
        ("none", 1, None),
        ("naive", 2, None),
        ("flat", 2, None),
        ("overlapped", 2, None),
        ("bucketed", 2, 0.05),
        ("copy_engine", 2, 0.05),
        ("zero1", 2, 0.05),
        ("copy_engine_zero1", 2, 0.05),
        ("torch_ddp", 2, None),
        ("torch_ddp_tuned", 2, 1),
        ("torch_zero1", 2, None),
    ],
)


@pytest.mark.gpu
@SYNCHRONIZED
def test_with_nccl_inside_it_trains_as_without(
    gpu_ranks: WorkerGroup, strategy: str, world_size: int, bucket_mb: float | None
) -> None:
    case = case_of(strategy, world_size, bucket_mb)
    replayed, plain = (gpu_ranks.run(on_ranks, case, graphed)[:world_size] for graphed in (True, False))
    for (losses, weights), (expected, others) in zip(replayed, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, weight in weights.items():
            assert (weight - others[name]).norm() <= 1e-3 * others[name].norm(), name
    assert all(torch.equal(x, replayed[-1][1][name]) for name, x in replayed[0][1].items())  # one model


@pytest.mark.gpu
@SYNCHRONIZED
def test_replays_train_as_one_process_on_the_whole_batch(
    gpu_ranks: WorkerGroup, strategy: str, world_size: int, bucket_mb: float | None
) -> None:
    if strategy == "none":
        pytest.skip("nothing is synchronized: there is no one process to be equal to")
    ratios = gpu_ranks.run(gate, case_of(strategy, world_size, bucket_mb), 0)[0]
    assert max(ratios.values()) <= 1
