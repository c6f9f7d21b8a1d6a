"""Trials: small trainings, a millisecond a step, that test data-parallel strategies and sharded optimizers.

`lmsys check` runs all TRIALS of strategies and all OPTIMIZER_TRIALS of sharded optimizers; new ones go there. The
benchmark of data parallelism runs TRIALS too: the `extreme` ones with a strategy that passed an earlier test, else all.
The `parts` of a `Trial` say what its module (`Probe`) has: tied weights, a layer used twice, frozen layers, layers that
one rank or no rank uses, or gradients from 1e-20 to 1e+10 in one bucket. All values come from `lmsys.draws` and are
scaled by powers of two, so that any machine makes the same bits. `lmsys/check/trained.py` runs a trial: it calls
`probe`, `batch`, `made_optimizer` and `change_options`.

To add a part, describe it in `Trial`, and let `Probe.forward` use it. `Probe.__init__` makes a linear layer for each
part that is in LAYERS; make other parameters there. A second use of a weight goes into TWINS. `probe` draws all
weights, and its `units` sets their size. If only some ranks or micro-batches use the part, add it to `Trial.switches`
and to the arguments of `forward`. If some strategies cannot train it, `why_not` of trained.py must say so.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lmsys import draws

VOCABULARY, WIDTH, SEQUENCE = 11, 6, 3  # ids, features, and tokens of a sequence
EXAMPLES, FEW = 4, 1  # sequences in a batch, and in a smaller batch of the last rank
EXPONENTS = (-66, -33, 0, 33)  # sizes of gradients: 2**-66 = 1.4e-20, 2**33 = 8.6e+9
# By part: the name of its layer in a `Probe`.
LAYERS = {"twice": "shared"} | {part: part for part in ("frozen", "transposed", "once", "rare", "idle")}
# By part in which a weight is used twice: {a twin's name: the weight's name}. A *twin* is a second parameter with the
# values of the weight. It takes the weight's place in the second use, so that each use has a gradient of its own. Only
# `Probe(trial, apart=True)` has twins; otherwise the weight itself is used twice.
TWINS = {
    "tied": {"head.weight": "embed.weight"},
    "twice": {"again.weight": "shared.weight", "again.bias": "shared.bias"},
}


@dataclass(frozen=True)
class Trial:
    """A training on `world_size` ranks.

    about          the trial in words
    parts          what the module has: `buffers` that differ between ranks at first; `tied` weights;
                   a layer used `twice`; a `frozen` layer; a layer whose weight lies `transposed` in memory; a layer
                   that only the first micro-batch uses (`once`), only rank 0 (`rare`: of two ranks, one does not use
                   it), or no rank (`idle`); gradients of many `sizes`; a first parameter in bfloat16 (`narrow`)
    micro_batches  backwards for each step, all but the last under no_sync()
    uneven         the last rank has FEW examples in a batch, the others EXAMPLES
    small_buckets  the strategy is built with buckets that hold less than the module
    extreme        the trial goes beyond a plain module and equal batches. A strategy may refuse it by an exception. The
                   benchmark of data parallelism first tests plain training in its own way. A strategy that passes this
                   test runs only the extreme trials; one that fails runs all, to find its mistake
    sharded        the trial tests a sharded optimizer, which gets gradients that are averaged over ranks already
    optimizer      a name in OPTIMIZERS
    groups         the optimizer has two param groups: biases are in the second, with other options
    schedule       learning rate and momentum change after each step
    single         the optimizer has a single parameter, so that some ranks own none
    seed           the key of all values that the trial draws: weights, buffers and tokens
    """

    about: str
    parts: tuple[str, ...] = ()
    steps: int = 2
    micro_batches: int = 1
    uneven: bool = False
    small_buckets: bool = False
    extreme: bool = False
    sharded: bool = False
    optimizer: str = "SGD"
    groups: bool = False
    schedule: bool = False
    single: bool = False
    world_size: int = 2
    seed: int = 0

    @property
    def twins(self) -> dict[str, str]:
        """{a twin's name: the name of its weight}, of all parts of this trial; TWINS says what a twin is."""
        return {twin: name for part, twins in TWINS.items() if part in self.parts for twin, name in twins.items()}

    def switches(self, rank: int, micro_batch: int) -> dict[str, bool]:
        """The keyword arguments of `Probe.forward` on a rank: True for layers that it uses."""
        switches = {"rare": rank == 0, "once": micro_batch == 0}
        return {name: value for name, value in switches.items() if name in self.parts}

    def examples(self, rank: int) -> int:
        """The number of sequences in a batch of the rank."""
        return FEW if self.uneven and rank == self.world_size - 1 else EXAMPLES


TRIALS = (  # of strategies
    Trial("one step", steps=1),
    Trial("several steps", steps=3),
    Trial("small buckets", small_buckets=True),
    Trial("tied weights", ("tied",)),
    Trial("a layer used twice", ("twice",)),
    Trial("frozen parameters", ("frozen",)),
    Trial("buffers, which are rank 0's", ("buffers",)),
    Trial("accumulated micro-batches", micro_batches=3),
    Trial("a smaller batch on one rank", uneven=True, extreme=True),
    Trial("gradients from 1e-20 to 1e+10 in one bucket", ("sizes",), extreme=True),
    Trial("accumulated micro-batches of tied weights", ("tied", "twice"), micro_batches=2, extreme=True),
    Trial("parameters of two dtypes, the first in bfloat16", ("narrow",), extreme=True),
    Trial("a weight transposed in memory", ("transposed",), extreme=True),
    Trial("parameters that only the first micro-batch uses", ("once",), micro_batches=2, extreme=True),
    Trial("parameters that no rank uses", ("idle",), extreme=True),
    Trial("parameters that one rank does not use", ("rare",), extreme=True),
)


def trials(world_size: int, seed: int, sharded: bool = False) -> list[Trial]:
    """All trials of a strategy, or with `sharded` of a sharded optimizer, from the simplest to the rarest."""
    return [
        replace(trial, sharded=sharded, world_size=world_size, seed=seed)
        for trial in (OPTIMIZER_TRIALS if sharded else TRIALS)
    ]


class Probe(nn.Module):
    """The module of a trial: tokens (B, S) -> the loss, a mean over all tokens.

    apart  True: the second use of a tied or repeated layer is a layer of its own, with the twins of TWINS as weights.
           `probe` gives both layers equal weights
    """

    shared: nn.Module

    def __init__(self, trial: Trial, apart: bool = False):
        super().__init__()
        self.parts = trial.parts
        if "narrow" in trial.parts:
            self.narrow = nn.Parameter(torch.empty(WIDTH, dtype=torch.bfloat16))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        more = {LAYERS[part]: nn.Linear(WIDTH, WIDTH) for part in trial.parts if part in LAYERS}
        if "twice" in trial.parts and apart:
            more["again"] = nn.Linear(WIDTH, WIDTH)
        if "frozen" in more:
            more["frozen"].requires_grad_(False)
        if "transposed" in more:
            more["transposed"].weight = nn.Parameter(torch.empty(WIDTH, WIDTH).t())
        for name, layer in more.items():
            self.add_module(name, layer)
        if "sizes" in trial.parts:
            self.sizes = nn.ParameterList(nn.Parameter(torch.empty(WIDTH)) for _ in EXPONENTS)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if "tied" in trial.parts and not apart:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(WIDTH))

    def forward(self, tokens: Tensor, rare: bool = False, once: bool = False) -> Tensor:
        x = self.embed(tokens) * self.scale  # (B, S, width)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if "twice" in self.parts:
            x = x + torch.tanh(getattr(self, "again", self.shared)(torch.tanh(self.shared(x))))
        # No forward uses the layer "idle".
        for name, asked in {"frozen": True, "transposed": True, "once": once, "rare": rare}.items():
            if asked and name in self.parts:
                x = x + getattr(self, name)(x)
        loss = (self.head(x) - tokens.unsqueeze(-1) / VOCABULARY).square().mean()
        if "narrow" in self.parts:
            # The gradient is a small whole number, so that bfloat16 holds it and the weights exactly.
            loss = loss + self.narrow.sum() * (tokens[0, 0] + 1)
        if "sizes" in self.parts:
            by_sequence = tokens.to(x.dtype).mean(dim=1, keepdim=True) - VOCABULARY // 2  # (B, 1)
            for exponent, p in zip(EXPONENTS, self.sizes, strict=True):
                loss = loss + (by_sequence * p).mean() * 2.0**exponent
        return loss


def probe(trial: Trial, rank: int, apart: bool = False) -> Probe:
    """The trial's module with the weights of this rank, which differ from those of all other ranks.

    Buffers are equal on all ranks unless "buffers" is among the trial's parts, so that each trial tests a single thing.
    """
    module = Probe(trial, apart)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    sizes = {name: state[name].numel() for name in sorted(state) if name not in trial.twins}
    drawn = draws.values(draws.key(trial.seed, f"weights of rank {rank}"), first=0, count=sum(sizes.values()))
    values = dict(zip(sizes, drawn.split(list(sizes.values())), strict=True))
    # By name: the factor of the drawn values, whose standard deviation is 1. All other tensors have the factor 0.5.
    units = {"scale": 1.0, "narrow": 0.0} | {
        f"sizes.{number}": 2.0**exponent for number, exponent in enumerate(EXPONENTS)
    }
    with torch.no_grad():
        for name, x in state.items():
            x.copy_(values[trial.twins.get(name, name)].view(x.shape) * units.get(name, 0.5))
        if "buffers" not in trial.parts:
            module.scale.fill_(1.0)
    return module


def batch(trial: Trial, step: int, micro_batch: int, rank: int) -> Tensor:
    """The tokens (B, SEQUENCE) of a rank for one forward and backward."""
    key, count = draws.key(trial.seed, f"step {step}, micro-batch {micro_batch}, rank {rank}"), trial.examples(rank)
    # Numbers 0 to count · SEQUENCE - 1 of the key's stream, each below VOCABULARY.
    return draws.whole_numbers(key, 0, count * SEQUENCE, VOCABULARY).view(count, SEQUENCE)


OPTIMIZERS: dict[str, dict[str, Any]] = {  # by name: the options that it is built with
    "SGD": {"lr": 0.25, "momentum": 0.5},
    "AdamW": {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1},
}
SECOND: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}  # options of the second param group
SLOWER = 0.5  # the factor by which a schedule multiplies options after each step
OPTIMIZER_TRIALS = (  # of sharded optimizers
    Trial("SGD with momentum, one step", steps=1),
    Trial("SGD with momentum", steps=3),
    Trial("AdamW", steps=3, optimizer="AdamW"),
    Trial("AdamW, tied weights", ("tied",), optimizer="AdamW"),
    Trial("AdamW, groups of parameters", optimizer="AdamW", groups=True),
    Trial("SGD with a schedule of learning rate and momentum", schedule=True),
    Trial("frozen parameters", ("frozen",), optimizer="AdamW", extreme=True),
    Trial("gradients from 1e-20 to 1e+10", ("sizes",), extreme=True),
    Trial("parameters without a gradient", ("idle",), optimizer="AdamW", extreme=True),
    Trial("fewer parameters than ranks", single=True, extreme=True),
)


def made_optimizer(trial: Trial, module: nn.Module, make: Callable[..., Any]) -> Any:
    """The trial's optimizer for the module: make(parameters or param groups, torch's class, **options)."""
    named: dict[str, Any] = dict(module.named_parameters())
    params = [named["head.weight"]] if trial.single else list(named.values())
    if trial.groups:
        biases, others = ([p for name, p in named.items() if name.endswith("bias") is x] for x in (True, False))
        params = [{"params": others}, {"params": biases, **SECOND}]
    return make(params, getattr(torch.optim, trial.optimizer), **OPTIMIZERS[trial.optimizer])


def change_options(optimizer: Any) -> None:
    """Multiplies learning rate and momentum by SLOWER, after each step of a trial with `schedule`. For SGD only."""
    for group in optimizer.param_groups:
        group.update(lr=SLOWER * group["lr"], momentum=SLOWER * group["momentum"])
