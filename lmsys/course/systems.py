"""Adapters of a checkout, wrapped so that `lmsys check` can ask them: a function or class for each kind. Also `fsdp`.

A checkout is a student's copy of an assignment of CS336; most wrappers here are for assignment 2, systems. An adapter
is a function of its tests/adapters.py, by which the course's tests call the student's code; its arguments are those of
the handout, the text of the assignment. parts.py names the functions and classes here as targets of checks, and
__main__.py as rows of benchmarks. To wrap another adapter, add a function or class here, and name it in parts.py.
`fsdp` asks questions of its own, not those of `lmsys check`.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.check import laptop, question, strategy
from lmsys.course import basics, checkout
from lmsys.parallel.group import WorkerError, WorkerGroup

CLASSES = {  # by the name that a class has in this module: the adapter that returns the class
    "adamw": "get_adamw_cls",
    "flash_pytorch": "get_flashattention_autograd_function_pytorch",
    "flash_triton": "get_flashattention_autograd_function_triton",
}
MOST_HELD = 0.9  # a rank that holds more than this share of the parameters, or of their state, has not divided them


def __getattr__(name: str) -> Any:
    """The class that an adapter returns, by its name in CLASSES. Python calls this for `systems.flash_triton`."""
    if name not in CLASSES:
        raise AttributeError(name)
    returned = checkout.adapter(CLASSES[name])()
    if name != "adamw" or not isinstance(returned, type):
        return returned
    # The check tells an optimizer's algorithm by its name, and the student's class may have any.
    return type(f"{returned.__name__} (AdamW)", (returned,), {})


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _of_sequences(partial(checkout.adapter("run_rmsnorm"), x.shape[-1], eps, weight), x)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    # w1 is (d_ff, d_model); the adapter gets d_model first.
    return _of_sequences(partial(checkout.adapter("run_swiglu"), *w1.shape[::-1], w1, w2, w3), x)


def _of_sequences(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """call(x) for x (..., S, M): the adapter gets (B, S, M), as in the handout."""
    return call(x) if x.ndim > 2 else call(x[None])[0]


def cross_entropy(inputs: Tensor, targets: Tensor) -> Tensor:
    return checkout.adapter("run_cross_entropy")(inputs, targets)


class Ddp(nn.Module):
    """A data-parallel container of the checkout as a strategy, whose methods `lmsys.parallel.adapter` calls.

    make    the name of the adapter that wraps a model in the container
    after   the name of the adapter to call after a backward
    before  the name of the adapter to call before a forward; "": none
    """

    make, after, before = "get_ddp", "ddp_on_after_backward", ""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module = module
        self.wrapped = checkout.adapter(self.make)(module, **options)

    def make_optimizer(self, optimizer_cls: Any, **options: Any) -> Any:
        self.optimizer = optimizer_cls(self.wrapped.parameters(), **options)
        return self.optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before:
            checkout.adapter(self.before)(self.wrapped, self.optimizer)
        return self.wrapped(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        checkout.adapter(self.after)(self.wrapped, self.optimizer)

    def full_state_dict(self) -> dict[str, Tensor]:
        return getattr(self.wrapped, "module", self.module).state_dict()


class Individual(Ddp):
    make, after = "get_ddp_individual_parameters", "ddp_individual_parameters_on_after_backward"


class Bucketed(Ddp):
    make, after = "get_ddp_bucketed", "ddp_bucketed_on_after_backward"
    before = "ddp_bucketed_on_train_batch_start"

    def __init__(self, module: nn.Module, bucket_size_mb: float = 25.0):
        super().__init__(module, bucket_size_mb=bucket_size_mb)


def sharded_optimizer(params: Any, optimizer_cls: Any, **kwargs: Any) -> Any:
    """The adapter's optimizer, whose step raises RuntimeError where a rank keeps the state of all parameters.

    Without param groups its zero_grad() is replaced: the course's tests do not require that it clears the gradients of
    parameters whose state other ranks keep.
    """
    params = list(params)
    optimizer = checkout.adapter("get_sharded_optimizer")(params, optimizer_cls, **kwargs)
    whole = sum(p.numel() for p in params if isinstance(p, Tensor))  # 0 for param groups, which are dicts
    step = optimizer.step

    def checked_step(*args: Any, **options: Any) -> Any:
        """The optimizer's step, and then the check of how much state this rank keeps."""
        result = step(*args, **options)
        inner = [x for x in (optimizer, *vars(optimizer).values()) if isinstance(x, torch.optim.Optimizer)]
        kept = [item for x in inner for item in getattr(x, "state", {}).items()]  # a wrapper may have none
        states = {id(p): p.numel() for p, state in kept if state and isinstance(p, Tensor)}
        # With one or two parameters, a rank may rightly own nearly all elements.
        if len(params) > 2 and sum(states.values()) > MOST_HELD * whole > 0:
            raise RuntimeError("nothing is sharded: a rank keeps the optimizer's state of all parameters")
        return result

    optimizer.step = checked_step
    if whole:
        optimizer.zero_grad = nn.ParameterList(params).zero_grad
    return optimizer


def prepare() -> None:
    """Prepares the process of a worker or a rank for a checkout's code, which may ask for a GPU and print.

    Without a GPU this process pretends that there is one. What it prints goes to standard error: standard output has
    nothing but the verdicts of `lmsys course`.
    """
    os.dup2(2, 1)  # 1 and 2 are the files of stdout and stderr
    laptop.install()


STEPS, RATE, EXAMPLES, POSITIONS, VOCABULARY, WIDTH = 3, 0.1, 8, 6, 96, 64  # of the trainings that `fsdp` compares
State = dict[str, Tensor]


def toy() -> nn.Module:
    """A small model of the course's own layers: ids (B, S) -> logits (B, S, V)."""
    from cs336_basics.model import Embedding, Linear, RMSNorm  # type: ignore[import-not-found]

    torch.manual_seed(42)
    return nn.Sequential(
        Embedding(VOCABULARY, WIDTH),
        RMSNorm(WIDTH),
        Linear(WIDTH, 2 * WIDTH),
        nn.ReLU(),
        Linear(2 * WIDTH, WIDTH),
        Linear(WIDTH, VOCABULARY),
    )


def train(model: nn.Module, part: slice, rate: float, after: Callable[[Any], object]) -> None:
    """STEPS steps of SGD on the examples in `part`. after: called with the optimizer after each backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        ids, targets = torch.randint(
            VOCABULARY, (2, EXAMPLES, POSITIONS), generator=torch.Generator().manual_seed(step)
        )[:, part]
        nn.functional.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten()).backward()
        after(optimizer)
        optimizer.step()


def train_alone(rate: float) -> State:
    """The parameters after a training in one process, by name."""
    model = toy()
    train(model, slice(None), rate, lambda optimizer: None)
    return {name: p.detach() for name, p in model.named_parameters()}


def train_on_rank(dtype: torch.dtype | None) -> State:
    """The parameters after a training by the checkout's FSDP, by name; `_fault_of_fsdp` runs it on each rank.

    dtype  that of the computation; None: float32
    AssertionError where parameters are not divided, or gradients are wrong in shape or dtype.
    """
    prepare()
    model, first = toy(), dist.get_rank() * EXAMPLES // strategy.WORLD_SIZE
    whole, wrapped = sum(p.nbytes for p in model.parameters()), checkout.adapter("get_fsdp")(model, compute_dtype=dtype)
    storages = {x.data_ptr(): x.nbytes() for x in (p.untyped_storage() for p in wrapped.parameters())}
    share = sum(storages.values()) / whole
    assert share < MOST_HELD, f"nothing is sharded: a rank holds {share:.0%} of the parameters"

    def after(optimizer: Any) -> None:
        """Calls the adapter that follows a backward, and asserts that gradients then fit their parameters."""
        checkout.adapter("fsdp_on_after_backward")(wrapped, optimizer)
        for name, p in wrapped.named_parameters():
            fits = p.grad is not None and (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype)
            assert fits or not p.requires_grad, f"after the backward {name} has no gradient of its shape and dtype"

    train(wrapped, slice(first, first + EXAMPLES // strategy.WORLD_SIZE), RATE, after)
    return {
        name.removeprefix("module."): x.detach().cpu().clone()
        for name, x in checkout.adapter("fsdp_gather_full_params")(wrapped).items()
    }


def fsdp() -> basics.Questions:
    """Questions: three steps of SGD on two ranks from equal weights, in float32 and with float16 for computation.

    Yields pairs (question, True if it goes beyond the handout), as basics.py does. Here all are False.
    """
    for dtype, room in ((None, 1e-4), (torch.float16, 2e-3)):  # room: the tolerance
        yield (
            question.Question(
                "several steps" + ", float16" * (dtype is not None), partial(_fault_of_fsdp, dtype, room)
            ),
            False,
        )


def _fault_of_fsdp(dtype: torch.dtype | None, room: float) -> question.Fault | None:
    """The fault of the weights, compared with training in one process. room: the tolerance."""
    try:
        with WorkerGroup(strategy.WORLD_SIZE, environment=strategy.QUIET, timeout_s=60.0) as ranks:
            states = ranks.run(train_on_rank, dtype)
    except WorkerError as error:
        lines = [line for line in str(error).splitlines() if error.kind in line] or str(error).splitlines()
        return question.Fault(f"  rank {error.rank} raises {lines[-1].strip()}", raises=True)
    # By the factor of the learning rate: what is right (1.0), and what the MISTAKES lead to.
    alone = {rate: train_alone(rate * RATE) for rate in (1.0, strategy.WORLD_SIZE, 1 / strategy.WORLD_SIZE, 0.0)}
    for rank, state in enumerate(states):
        if wrong := _wrong(state, alone[1.0], room):
            text = f"  after {STEPS} steps rank {rank} has other weights than one process: {', '.join(wrong)}"
            # 1.weight is that of RMSNorm, which FSDP need not shard.
            named = (words for rate, words in MISTAKES.items() if not _wrong(state, alone[rate], room))
            return question.Fault(text, OF_REPLICATED if wrong == ["1.weight"] else next(named, None))
    return None


MISTAKES = {  # by the factor of the learning rate that has the same effect: SGD is linear in its gradients
    strategy.WORLD_SIZE: "gradients are summed over ranks, not averaged",
    1 / strategy.WORLD_SIZE: "gradients are divided by the number of ranks twice",
    0.0: "nothing is trained",
}
OF_REPLICATED = "gradients of parameters that are not sharded, such as RMSNorm's, are not averaged over ranks"


def _wrong(state: State, expected: State, room: float) -> list[str]:
    """The names of parameters that are missing, or off by more than `room`."""
    return [
        name
        for name, x in expected.items()
        if name not in state or state[name].shape != x.shape or not bool(((state[name] - x).abs() <= room).all())
    ]
