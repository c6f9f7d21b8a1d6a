"""Ways to train a module: with a strategy on ranks (`play`), and plainly on one process (`play_alone`).

`tests/parallel/test_graphs.py` draws a `Graph` (tests/support/graphs.py) and some WAYS, and compares what `play` sees
with what `play_alone` sees; `tests/parallel/test_modules.py` does so with OPERATIONS, by which users treat a module.
Ranks import this file. A new way of training is a method of `Player` between `step` and `others_are_odd`; a way that
not every strategy supports is a method between that and `unshard`. A new operation is a method after it.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmsys.parallel import STRATEGIES
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.group import device
from lmsys.parallel.zero1 import Zero1
from lmsys.training.optimizer import clip_grad_norm
from tests.support.graphs import EXAMPLES, WIDTH, Block, Boom, Graph, Net, taken
from tests.support.ranks import Trained, answer_of, error_of, on_first, stand_in

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "dampened": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2}),
    "grouped": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.3}),
}
MAX_NORM = 0.3  # gradients are clipped to it


def groups_of(name: str, p: nn.Parameter) -> dict[str, Any]:
    """The options of a parameter for "grouped": no decay for biases, another learning rate outside of blocks."""
    return ({} if p.dim() > 1 else {"weight_decay": 0.0}) | ({} if "block" in name else {"lr": 0.1})


@dataclass
class Player(Trained):
    """A model, wrapped by a strategy or plain, that is trained in some ways.

    ranks  the ranks whose batches it trains on: its own, or for a plain model all
    wrap   wraps another module in the same way
    drawn  how many batches were drawn
    saved  the state dict that `save` has written
    """

    model: nn.Module
    ranks: Sequence[int]
    dtype: torch.dtype
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    seen: list[dict[str, Tensor]] = field(default_factory=list)
    drawn: int = 0
    saved: bytes = b""

    def __post_init__(self) -> None:
        self.new_optimizer()

    def play(self, ways: Sequence[str]) -> list[dict[str, Tensor]]:
        for way in ways:
            getattr(self, way)()
        self.state()
        return self.seen

    def batch(self) -> list[Tensor]:
        """A batch for each of `ranks`; all players draw the same."""
        self.drawn += 1
        every = torch.randn(2, EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(self.drawn))
        self.net.turn = self.drawn
        return [every[rank].to(device(), self.dtype) for rank in self.ranks]

    def outputs(self, batch: Sequence[Tensor], model: Any = None) -> list[Tensor]:
        """The output of each of `ranks`. `model`: it is called in place of the player's."""
        call = self.model if model is None else model
        return [taken(call(x, rank)) for rank, x in zip(self.ranks, batch, strict=True)]

    def mean(self, of_each: Sequence[Tensor]) -> Tensor:
        """The loss, from the output of each of `ranks`: how far they are from 1, in mean square."""
        if not all(y.requires_grad for y in of_each):  # torch would raise on one rank alone, while others wait for it
            raise RuntimeError("nothing that is trained has made the loss of a rank")
        return torch.stack([(y - 1).square().mean() for y in of_each]).mean()

    def loss(self) -> Tensor:
        return self.mean(self.outputs(self.batch()))

    def update(self) -> None:
        """End a step after its last backward: gradients are synchronized, and the optimizer steps."""
        self.finish()
        self.apply()

    def learn(self, loss: Tensor) -> None:
        """The backward of a loss, and the end of its step."""
        loss.backward()
        self.update()

    def gradients(self) -> None:
        """A forward, a backward, and the synchronization of gradients, without a step of the optimizer."""
        self.loss().backward()
        self.finish()

    # Ways of training.

    def step(self) -> None:
        self.gradients()
        self.apply()

    def accumulate(self) -> None:
        with self.no_sync():
            self.loss().backward()
        self.step()

    def two_forwards(self) -> None:
        self.learn(self.loss() + self.loss())

    def two_backwards(self, order: int = 1) -> None:
        losses = [self.loss(), self.loss()]
        for loss in losses[::order]:
            loss.backward()
        self.update()

    def two_backwards_in_reverse(self) -> None:
        self.two_backwards(order=-1)

    def sync_then_not(self) -> None:
        first, second = self.loss(), self.loss()
        first.backward()
        with self.no_sync():
            second.backward()
        self.update()

    def retain(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        self.learn(loss)

    def chunks(self) -> None:
        outputs = self.outputs(self.batch())
        parts = [self.mean([y.chunk(2)[part] for y in outputs]) for part in range(2)]
        parts[0].backward(retain_graph=True)
        self.learn(parts[1])

    def evaluate_between(self, without_gradients: Any = torch.no_grad) -> None:
        loss = self.loss()
        with without_gradients():
            self._evaluated_for_all()
        self.learn(loss)

    def infer_between(self) -> None:
        self.evaluate_between(torch.inference_mode)

    def _evaluated_for_all(self) -> None:
        for y in self.outputs(self.batch()):
            assert not y.requires_grad

    def look(self) -> None:
        """A forward without a backward, whose graph is kept."""
        self.kept = self.loss()

    def late_look(self) -> None:
        """A forward whose graph is kept, between the gradients and their step."""
        self.gradients()
        self.kept = self.loss()
        self.apply()

    def finish_twice(self) -> None:
        self.gradients()
        self.update()

    def two_finishes(self) -> None:
        self.gradients()
        self.gradients()
        self.apply()

    def accumulate_behind_a_finish(self) -> None:
        self.gradients()
        self.accumulate()

    def zero_in_place(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.step()

    def drop(self) -> None:
        self.gradients()
        self.optimizer.zero_grad()

    def penalty(self) -> None:
        batch = [x.requires_grad_() for x in self.batch()]
        outputs = self.outputs(batch)
        grads = torch.autograd.grad(sum(y.sum() for y in outputs), batch, create_graph=True)
        self.learn(self.mean(outputs) + torch.stack([g.square().mean() for g in grads]).mean())

    def ask_for_inputs_gradients(self) -> None:
        """Computes gradients of inputs alone, between a backward and its step."""
        self.gradients()
        batch = [x.requires_grad_() for x in self.batch()]
        torch.autograd.grad(sum(y.sum() for y in self.outputs(batch)), batch)
        self.apply()

    def two_optimizers(self) -> None:
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        other.step()
        self.step()

    def _backward_that_fails(self, loss: Tensor, armed: bool = True) -> None:
        """A backward. Calls of `Boom` in it raise an exception on ranks where `armed` is true."""
        with suppress(ArithmeticError), patch.object(Boom, "armed", armed):
            loss.backward()

    def fail(self) -> None:
        """An exception in a backward, on all ranks; the gradients are dropped."""
        loss, has_boom = self.loss(), any(c.op == "boom" for p in self.net.graph.programs for c in p)
        self._backward_that_fails(loss if has_boom else Boom.apply(loss))
        self.finish()
        self.optimizer.zero_grad()

    def fail_in_forward(self) -> None:
        with suppress(RuntimeError):
            self.model(torch.ones(1, WIDTH + 1, dtype=self.dtype, device=device()))

    def checkpoint_all(self, reentrant: bool = False) -> None:
        batch = [x.requires_grad_() for x in self.batch()]
        outputs = [
            taken(checkpoint(self.model, x, rank, self.net.turn, use_reentrant=reentrant))
            for rank, x in zip(self.ranks, batch, strict=True)
        ]
        self.learn(self.mean(outputs))

    def checkpoint_all_reentrant(self) -> None:
        self.checkpoint_all(reentrant=True)

    def clip(self) -> None:
        self.gradients()
        self._clip()
        self.apply()

    def _clip(self) -> None:
        """Clips by the norm of all gradients, and appends the norm to `seen`."""
        norm = clip_grad_norm(self.model.parameters() if self.is_plain else self.model, MAX_NORM)
        self.see(norm=norm.to(self.dtype))  # the norm's dtype is that of the first parameter

    def scale(self) -> None:
        """Two steps under GradScaler. In the first one rank 1 has an inf."""
        scaler = torch.amp.GradScaler(device().type, init_scale=64.0)
        for factor in (torch.inf, 1.0):
            batch = zip(self.ranks, self.batch(), strict=True)
            outputs = [taken(self.model(x, rank)) * (factor if rank == 1 else 1.0) for rank, x in batch]
            scaler.scale(self.mean(outputs)).backward()
            self.finish()
            scaler.unscale_(self.optimizer)
            if factor == 1:
                self._clip()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
        self.see(scale=torch.tensor(scaler.get_scale()))

    def others_are_odd(self) -> None:
        """Marks a place in this class, and is never called: the ways below are those that some strategies refuse."""

    def fail_to_ask_for_inputs_gradients(self) -> None:
        """As `ask_for_inputs_gradients`, but an exception ends it: if on some ranks alone, the next step is refused."""
        self.gradients()
        batch = [x.requires_grad_() for x in self.batch()]
        asked = sum(y.sum() for y in self.outputs([Boom.apply(x) for x in batch]))
        with suppress(ArithmeticError), patch.object(Boom, "armed", True):
            torch.autograd.grad(asked, batch)
        self.apply()

    def closure(self) -> None:
        """A step whose closure makes the gradients."""

        def gradients() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.finish()
            return loss.detach()

        self.optimizer.step(gradients)
        self.optimizer.zero_grad()

    def fail_in_closure(self) -> None:
        """An exception in a closure of a step, for which gradients have been made; they are dropped."""

        def gradients() -> float:
            raise ArithmeticError

        self.gradients()
        with suppress(ArithmeticError):
            self.optimizer.step(gradients)
        self.optimizer.zero_grad()

    def zero_the_module(self) -> None:
        """A step after which the module's own zero_grad() drops the gradients."""
        self.gradients()
        self.optimizer.step()
        self.net.zero_grad()

    def leave_out_a_gradient(self) -> None:
        """A step in which one parameter's gradient, which is dropped, has no part."""
        self.gradients()
        next(self.net.block(0).parameters()).grad = None
        self.apply()

    def ask_for_optimizer_state(self) -> None:
        """Asks for the optimizer's whole state, which must leave the optimizer as it is."""
        if not self.is_plain:
            self.model.full_optimizer_state_dict(self.optimizer)

    def resume(self) -> None:
        """Goes on with another model and optimizer, which load the whole state of these."""
        other = self._other()
        other.model.load_state_dict(self.whole())
        if self.is_plain:
            other.optimizer.load_state_dict(self.optimizer.state_dict())
        else:
            state = self.model.full_optimizer_state_dict(self.optimizer)
            other.model.load_optimizer_state_dict(other.optimizer, state)
        self.model, self.optimizer = other.model, other.optimizer

    def forget_finish(self) -> None:
        self.loss().backward()
        self.apply()

    def fail_and_forget_finish(self) -> None:
        self._backward_that_fails(self.loss())
        self.optimizer.zero_grad()
        self.step()

    def forward_before_finish(self) -> None:
        self.loss().backward()
        with torch.no_grad():
            self._evaluated_for_all()
        self.update()

    def create_graph(self) -> None:
        self.loss().backward(create_graph=True)
        self.update()

    def call_the_module(self) -> None:
        self.learn(self.mean(self.outputs(self.batch(), self.net)))

    def functional_call(self) -> None:
        copies = {name: 1.0 * p for name, p in self.net.named_parameters()}
        outputs = self.outputs(self.batch(), lambda *inputs: torch.func.functional_call(self.net, copies, inputs))
        self.learn(self.mean(outputs))

    def compile_the_wrapper(self) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(self.model, backend="eager")
        self.learn(self.mean(self.outputs(self.batch(), compiled)))

    def compile_blocks(self) -> None:
        torch._dynamo.reset()
        for block in self.net.modules():
            if isinstance(block, Block):
                block.compile(backend="eager")
        self.step()
        self.step()

    def fail_on_one_rank(self) -> None:
        """An exception in a backward of rank 0 alone."""
        self._backward_that_fails(self.loss(), armed=0 in self.ranks)
        self.update()

    def freeze(self) -> None:
        next(self.net.block(0).parameters()).requires_grad_(False)
        self.step()

    def unfreeze(self) -> None:
        for p in self.net.parameters():
            p.requires_grad_(True)
        self.step()

    def freeze_parts(self) -> None:
        """Freezes the first of the wrapper's parameters, which may be parts of the module's."""
        for p in [*self.model.parameters()][:1]:
            p.requires_grad_(False)
        self.step()

    def replace(self) -> None:
        self.net.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=self.dtype, device=device()))
        self.step()

    def train_all(self) -> None:
        self.model.train()
        self.step()

    def read_parameters(self) -> None:
        self.see(**dict(self.net.named_parameters()))

    def _other(self) -> "Player":
        torch.manual_seed(7)
        net = Net(replace(self.net.graph, prepared="")).to(device())
        model = self.wrap(net.double() if self.dtype == torch.float64 else net)
        return Player(model, self.ranks, self.dtype, self.wrap, self.seen, self.drawn)

    def gan(self) -> None:
        """Two wrapped models, a generator and a critic of its outputs, that are trained in turn."""
        critic = self._other()
        for _ in range(2):
            made = self.outputs(self.batch())
            critic.learn(critic.mean(critic.outputs([y.detach() for y in made])))
            made = self.outputs(self.batch())
            self.mean([-y for y in critic.outputs(made)]).backward()
            critic.finish()
            critic.optimizer.zero_grad()
            self.update()
        critic.state()

    def teach(self) -> None:
        """A student that learns the outputs of a teacher, which is not trained."""
        teacher = self._other()
        batch = self.batch()
        with torch.no_grad():
            goals = teacher.outputs(batch)
        self.learn(self.mean([y - goal for y, goal in zip(self.outputs(batch), goals, strict=True)]))

    def unshard(self) -> None:
        """With fsdp, makes parameters and their gradients whole; otherwise they are. Operations come after it."""
        if isinstance(self.model, Fsdp):
            self.model.unshard()

    def new_optimizer(self) -> None:
        cls, options = OPTIMIZERS[self.net.graph.optimizer]
        groups = groups_of if self.net.graph.optimizer == "grouped" else None
        self.optimizer = self.optimizer_by(cls, groups, **options)

    def step_after_unshard(self) -> None:
        """A step after `unshard`: parameters that were whole before the step are sharded again after it."""
        self.unshard()
        self.gradients()
        self.unshard()
        self.apply()
        if isinstance(self.model, Fsdp):
            assert "was read that fsdp has divided" in error_of(lambda: self.net.first.weight.sum())
        self.state()

    def see_gradients(self) -> None:
        """Appends to `seen` the gradients that this rank has at the module's parameters, with fsdp after `unshard`."""
        self.gradients()
        if isinstance(self.model, Fsdp):
            parts = {name: p.grad for name, p in self.net.named_parameters() if p.requires_grad}
            assert all(x is not None and x.dim() == 1 for x in parts.values())
        if isinstance(self.model, Zero1):
            own = [p for p, owner in self.model.owners.items() if owner == self.model.rank]
            assert {id(p) for p in own} == {id(p) for p in self.net.parameters() if p.grad is not None}
        self.unshard()
        self.see(**{f"gradient of {n}": p.grad for n, p in self.net.named_parameters() if p.grad is not None})
        self.apply()

    def evaluate(self) -> None:
        """Appends the result of the model in evaluation to `seen`."""
        self.model.eval()
        with torch.no_grad():
            self.see(evaluated=taken(self.model(torch.ones(EXAMPLES, WIDTH, dtype=self.dtype, device=device()))))
        self.model.train()

    def read(self) -> None:
        """Appends to `seen` the module's parameters, by named_parameters() and by state_dict()."""
        self.unshard()
        self.read_parameters()
        self.see(**self.net.state_dict())

    def state(self) -> None:
        self.see(**self.whole())

    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.whole(), file)
        self.saved = file.getvalue()

    def load(self) -> None:
        """Loads the state dict of the last `save`; if there was none, the present one."""
        if not self.saved:
            self.save()
        result = self.model.load_state_dict(torch.load(io.BytesIO(self.saved)))
        assert not result.missing_keys and not result.unexpected_keys

    def zero(self) -> None:
        """Computes gradients, and drops them."""
        self.gradients()
        self.model.zero_grad()

    def stay(self) -> None:
        """Calls that must return the model itself, and leave its parameters as they are."""
        assert self.model.to(self.dtype) is self.model and self.model.train() is self.model
        assert "Linear" in repr(self.model)
        assert len(list(self.net.parameters())) == len(list(Net(self.net.graph).parameters()))


# The ways that every strategy supports: the methods from `step` to `others_are_odd`.
WAYS = [name for name in vars(Player) if not name.startswith("_")]
WAYS = WAYS[WAYS.index("step") : WAYS.index("others_are_odd")]
OPERATIONS = (
    "step late_look finish_twice accumulate look zero new_optimizer step_after_unshard see_gradients evaluate read "
    "state save load stay"
).split()


def prepare(net: Net) -> Net:
    """Compiles the blocks, or sets the module to evaluation, as `graph.prepared` says."""
    if net.graph.prepared == "compiled":
        torch._dynamo.reset()
        for block in net.modules():
            if isinstance(block, Block):
                block.compile(backend="aot_eager")
    return net.train(net.graph.prepared != "eval")


# How the error begins that a strategy may raise on a rank for a block that is called twice.
TWICE = "RuntimeError: a second gradient of one parameter in a backward, whose first is on its way: checkpoint what"


def ops_of(graph: Graph) -> set[str]:
    return {call.op for program in graph.programs for call in program}


class RaisedApart(Exception):
    """Raised instead of returning the error TWICE, if ranks call different blocks, and on GPUs an error of no refusal.

    The other rank may then wait for this one for ever; an exception that leaves `play` ends both.
    """


@on_first(2)
def play(group: Any, strategy: str, graph: Graph, ways: Sequence[str]) -> list[dict[str, Tensor]] | str:
    """Trains on one of two ranks, in these ways: what the player has seen, or the error as a text.

    RaisedApart: an error that perhaps only this rank has.
    """
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)

    def go() -> list[dict[str, Tensor]]:
        if rank == 0:
            torch.manual_seed(0)
        with torch.device("meta") if graph.prepared == "meta" else nullcontext():
            net = Net(graph)
        strategy_class = STRATEGIES[strategy].load()

        def wrap(module: nn.Module) -> nn.Module:
            return strategy_class(module, group)

        net = net if graph.prepared == "meta" else net.to(device())
        return Player(wrap(prepare(net)), [rank], torch.float32, wrap).play(ways)

    # cuDNN's LSTM rounds to TF32, and its backward has no derivative.
    with stand_in(), torch.backends.cudnn.flags(enabled=False):
        answer = answer_of(go)
    if isinstance(answer, str):
        refused = answer.startswith(("ValueError: ", "RuntimeError: "))
        if (answer.startswith(TWICE) and {"own", "apart"} & ops_of(graph)) or (device().type == "cuda" and not refused):
            raise RaisedApart(answer)
    return answer


def play_alone(
    graph: Graph, ways: Sequence[str], dtype: torch.dtype, nudge: float = 0.0, ranks: Sequence[int] = (0, 1)
) -> list[dict[str, Tensor]]:
    """Trains a plain module on the batches of these ranks, in these ways: what the player has seen.

    nudge  the weights begin this share of themselves, or less, away from where they would, up or down at random
    """
    torch.manual_seed(0)
    net = Net(graph)
    net = net.double() if dtype == torch.float64 else net
    with torch.no_grad():
        for p in net.parameters():
            p *= 1 + nudge * (2 * torch.rand(p.shape, dtype=torch.float64) - 1)
    return Player(net, ranks, dtype).play(ways)
