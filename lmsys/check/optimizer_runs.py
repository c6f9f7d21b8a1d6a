"""Runs of optimizers, for `optimizer.py`: the algorithm that an optimizer claims to be, its test cases, and its steps.

`claim_of` tells the algorithm from the constructor and the class's name, `cases_of` lists the cases, `run_of` draws the
inputs of a case, and `trace_of` steps an optimizer through them. A new case is an entry in `cases_of`.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lmsys import draws, values
from lmsys.check.optimizer_formula import DEFAULTS, Run, Settings, Trace
from lmsys.extremes.model import SIZES, extreme
from lmsys.parallel import sharded_optimizer, structure

# Words for other algorithms, for which there is no formula here. An optimizer with such a word in its class's name, or
# in that of a base class, is refused, although the name may contain Adam or SGD as well. A word with a space behind it
# must end the name: "AdamP " does not fit AdamPlain.
OTHERS = (
    *sharded_optimizer.OF_WHOLE,
    *("AdaBelief", "AdaMax", "Adamax", "AdaMod", "Adan", "Cautious", "DAdapt", "Lion", "NAdam", "QHAdam", "RAdam"),
    *("SparseAdam", "ScheduleFree", "SignSGD", "Signum", "Muon", "Prodigy", "RMSprop", "Sophia", "ASGD ", "SGDW "),
)


@dataclass(frozen=True)
class Claim:
    """The algorithm that an optimizer is compared with, and what its constructor takes.

    algorithm  "AdamW", "Adam" or "SGD", as torch.optim has them
    why        how this is known, in words
    settings   the names in DEFAULTS that its constructor takes
    masters    arguments of its constructor that make it keep float32 master weights, {} if it needs none; None if it
               does not claim to keep them
    """

    algorithm: str
    why: str
    settings: frozenset[str]
    masters: Mapping[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        return f"compared with torch.optim.{self.algorithm}, because {self.why}"

    @property
    def plain(self) -> Callable[..., torch.optim.Optimizer]:
        """torch's optimizer of this algorithm. Its rounding error in a dtype is the error that others may have."""
        return getattr(torch.optim, self.algorithm)

    def taken(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The part of the settings that the constructor takes."""
        return {name: x for name, x in settings.items() if name in self.settings}


def claim_of(optimizer: Any) -> Claim:
    """The claim of an optimizer's class, by its constructor and its name.

    If it takes `betas`, the first class with "Adam" in its name decides, of its own class and then the base classes: it
    is an AdamW if that name has AdamW in it, else an Adam. SGD has "SGD" in one of these names. ValueError for any
    other algorithm, since there is no formula for it, and for an object that is not a class.
    """
    values.hold((inspect.isclass(optimizer), f"{optimizer!r} is no class: name the class of the optimizer"))
    parameters, name = _parameters(optimizer), optimizer.__name__
    names = [cls.__name__ for cls in optimizer.__mro__]  # this class's name, then those of its bases
    other = sharded_optimizer.algorithm_of(optimizer, OTHERS)
    nearest = next((x.lower() for x in names if "adam" in x.lower()), "") if "betas" in parameters else ""
    fitting = [
        (algorithm, why)
        for fits, algorithm, why in (
            ("adamw" in nearest, "AdamW", "it takes betas and AdamW is in its name, or in that of its base class"),
            (nearest, "Adam", "it takes betas and AdamW is not in its name: if it is an AdamW, put that into its name"),
            ("sgd" in " ".join(names).lower(), "SGD", "SGD is in its name, or in that of its base class"),
        )
        if fits
    ]
    values.hold(
        (
            not other,
            f"{name} looks like {other.strip()}, for which there is no formula: AdamW, Adam and SGD can be checked",
        ),
        (
            fitting,
            f"no formula is known for {name}, which takes {', '.join(parameters) or 'no settings'}: an AdamW or Adam"
            " takes betas and has Adam in its class's name, an SGD has SGD there. If it is one of these, put its"
            " algorithm into its name (docs/check.md, Optimizers); if not, it cannot be checked",
        ),
    )
    return Claim(
        *fitting[0],  # the algorithm, and why
        settings=frozenset(parameters) & frozenset(DEFAULTS),
        masters=_masters(name, parameters),
    )


def _parameters(optimizer: Any) -> dict[str, inspect.Parameter]:
    """The settings of the constructor by name, without `self` and the parameters to optimize.

    Where it takes **kwargs, the settings of the class that it derives from are added.
    """
    settings: dict[str, inspect.Parameter] = {}
    for cls in [cls for cls in optimizer.__mro__ if "__init__" in vars(cls)]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())
        # The first two are `self` and the parameters to optimize.
        settings = {x.name: x for x in parameters[2:] if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)} | settings
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return settings


def _masters(name: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any] | None:
    """The value of `Claim.masters`, found by the word "master" in the names of arguments and of the class.

    {argument: True} if a constructor's argument has the word in its name, and a bool as its default. {}, so that no
    argument is passed, if that default is not a bool, or if only the class's name has the word. None if no name has it.
    """
    if setting := next((setting for setting in parameters if "master" in setting.lower()), None):
        return {setting: True} if isinstance(parameters[setting].default, bool) else {}
    return {} if "master" in name.lower() else None


SHAPES = (8, 16), (8, 16), (24,)  # of the three parameters of each run
MEMORY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {  # by name: puts a tensor of one of SHAPES so
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}
# The number of steps and the learning rate of the runs with master weights. Here each step of Adam is about lr. That is
# less than half the spacing of bfloat16 between 1 and 2, 2**-7, so bfloat16 weights without a float32 copy would not
# move at all; but all steps together are 0.28.
MASTER_STEPS, MASTER_LR = 96, 0.75 * 2.0**-8


@dataclass(frozen=True)
class Case:
    """A case: what an optimizer is asked to do. `run_of` draws its inputs. Steps and parameters are numbered from 0.

    about       the case in words
    steps       the number of steps
    given       for each param group: settings that replace DEFAULTS
    groups      for each param group: its parameters
    changes     by step: settings that all groups have from then on
    missing     by step: the parameters without a gradient
    reloads     the steps before which the state is saved and loaded
    sizes       by step: the size of its gradients, a name in `lmsys.extremes.model.SIZES`; in a step that is not here
                they are nearly standard normal
    dtype       of parameters and gradients
    masters     True: the optimizer must keep float32 master weights
    in_place    True: a step may change gradients in place, as torch's own does in this case
    memory      how parameters and gradients lie in memory, a name in MEMORY
    """

    about: str
    steps: int
    given: tuple[Mapping[str, Any], ...] = ({},)
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    missing: Mapping[int, frozenset[int]] = field(default_factory=dict)
    reloads: frozenset[int] = frozenset()
    sizes: Mapping[int, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    masters: bool = False
    in_place: bool = False
    memory: str = "contiguous"

    def why_not(self, claim: Claim) -> str | None:
        """None, or why an optimizer with this claim is not asked this case."""
        lacking = sorted(set().union(*self.given, *self.changes.values()) - claim.settings)
        return next(
            values.sentences_of(
                (lacking, f"it takes no {', '.join(lacking)}"),
                (
                    self.masters and claim.masters is None,
                    "it claims no float32 masters: its bfloat16 weights round as torch's do",
                ),
            ),
            None,
        )


def cases_of(claim: Claim) -> list[Case]:
    """The cases for an optimizer with this claim, from the first step to the rarest inputs."""
    sgd = claim.algorithm == "SGD"
    # `half` does not go through `claim.taken`: if the constructor takes no weight_decay, `why_not` leaves the case out.
    momentum, half, decay = {"momentum": 0.9}, {"weight_decay": 0.5}, claim.taken({"weight_decay": 0.5})
    # Settings under which a step depends on earlier ones, so that lost state shows.
    stateful = decay | claim.taken(momentum if sgd else {"betas": (0.8, 0.95)})
    # Each case: what it is about, its steps, the settings of each param group, and the parameters of each group.
    of_sgd = [
        Case("weight decay, without and with momentum", 4, (half, stateful | half), ((0,), (1, 2))),
        Case("momentum", 6, (momentum,)),
        Case("momentum and dampening", 6, (momentum | {"dampening": 0.5},)),
        # With nesterov torch's own foreach SGD adds the momentum to the gradients in place (torch 2.13).
        Case("nesterov", 6, (momentum | {"nesterov": True},), in_place=True),
    ]
    of_adam = [
        Case("weight decay", 4, (half,)),
        Case("a large eps", 4, ({"eps": 0.5},)),
        Case("other betas", 4, ({"betas": (0.5, 0.8)},)),
    ]
    of_all = [
        Case(
            "two param groups, of different settings",
            4,
            (
                stateful | claim.taken({"lr": 0.1, "eps": 0.5}),
                claim.taken({"lr": 0.025, "weight_decay": 0.0, "momentum": 0.5, "nesterov": True}),
            ),
            ((0,), (1, 2)),
            in_place=sgd,  # the second group has nesterov: see above
        ),
        Case("maximize", 4, (decay | {"maximize": True}, decay | {"maximize": False}), ((0,), (1, 2))),
        Case("weights transposed in memory", 4, (decay,), memory="transposed"),
        Case("weights that are every other column of a tensor", 4, (decay,), memory="every other column"),
        Case(
            "parameters without a gradient in some steps",
            6,
            (stateful,),
            missing={0: frozenset({1, 2}), 1: frozenset({2}), 3: frozenset({0})},
        ),
        Case("lr changed between steps", 6, (stateful,), changes={2: {"lr": 0.05}, 4: {"lr": 0.2}}),
        Case(
            "lr and weight decay changed between steps",
            4,
            (stateful,),
            changes={2: {"lr": 0.05, "weight_decay": 0.125}},
        ),
        Case("saved and loaded between steps", 6, (stateful,), changes={1: {"lr": 0.05}}, reloads=frozenset({3, 4})),
        Case("several steps", 6, (stateful,), dtype=torch.bfloat16),
        Case("saved and loaded between steps", 6, (stateful,), reloads=frozenset({3}), dtype=torch.bfloat16),
    ]
    of_extremes = [
        case
        for size, about in zip(
            SIZES,
            (
                "gradients of zero",
                "tiny gradients",
                "huge gradients",
                "rows of zero, tiny, huge and ordinary gradients",
            ),
            strict=True,
        )
        for case in (
            Case(f"{about}, the first step", 1, sizes={0: size}),
            Case(f"{about}, after others", 6, (decay,), sizes={2: size, 3: size}),
        )
    ]
    tiny = Case(
        "float32 masters, many tiny steps", MASTER_STEPS, ({"lr": MASTER_LR},), dtype=torch.bfloat16, masters=True
    )
    return [
        Case("several steps", 6),
        *(of_sgd if sgd else of_adam),
        *of_all,
        *of_extremes,
        tiny,
        replace(
            tiny,
            about="float32 masters, saved and loaded before each of many tiny steps",
            reloads=frozenset(range(1, MASTER_STEPS)),
        ),
    ]


def run_of(case: Case, seed: int) -> Run:
    """The run of a case: its parameters, settings and gradients, with the same bits on any machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(name: str) -> list[torch.Tensor]:
        """A tensor of each of SHAPES, drawn by this name."""
        made = [
            draws.values(draws.key(seed, f"{name} {i}"), 0, shape.numel()).view(shape).to(device)
            for i, shape in enumerate(map(torch.Size, SHAPES))
        ]
        return list(map(MEMORY[case.memory], made))

    # With master weights they begin at about 1.4 to 1.6: Adam's steps then leave them within 1 to 2, see MASTER_STEPS.
    parameters = [1.5 + p / 32 if case.masters else p for p in drawn("parameter")]
    current: list[Settings] = [{**DEFAULTS, **given} for given in case.given]
    settings, gradients = [], []
    for step in range(case.steps):
        current = [{**before, **case.changes.get(step, {})} for before in current]
        settings.append(current)
        # With master weights the gradients are equal in all steps, so that tiny steps add up.
        of_step = [g.to(case.dtype) for g in drawn("gradient" if case.masters else f"gradient of step {step}")]
        if step in case.sizes:
            # held_by_torch: the squares of huge gradients fit into float32, which torch's kernels on a GPU need.
            of_step = [extreme(g, case.sizes[step], held_by_torch=True) for g in of_step]
        gradients.append([None if i in case.missing.get(step, ()) else g for i, g in enumerate(of_step)])
    return Run(
        parameters=[p.to(case.dtype) for p in parameters],
        groups=case.groups,
        settings=settings,
        gradients=gradients,
        reloads=case.reloads,
    )


def trace_of(
    make: Callable[..., torch.optim.Optimizer],
    claim: Claim,
    run: Run,
    begins: Trace | None = None,
    changed: Callable[[int, int], object] = lambda step, i: None,
) -> Trace:
    """The parameters after each step of the optimizer that `make` constructs.

    begins   by step, by parameter: the values that the step starts from; None: the optimizer's own from the step before
    changed  called with (step, parameter) if a step has changed a gradient
    """
    parameters = [torch.nn.Parameter(_copy(p)) for p in run.parameters]
    optimizer = _optimizer_of(make, claim, run, parameters, run.settings[0])
    traced: Trace = []
    for step, gradients in enumerate(run.gradients):
        if step in run.reloads:
            state = copy.deepcopy(optimizer.state_dict())
            parameters = [torch.nn.Parameter(_copy(p.detach())) for p in parameters]
            # The new one is constructed with DEFAULTS: if load_state_dict does not restore a setting, the steps differ.
            optimizer = _optimizer_of(make, claim, run, parameters, [DEFAULTS] * len(run.groups))
            optimizer.load_state_dict(state)
        if step > 0 and run.settings[step] != run.settings[step - 1]:
            structure.set_options(optimizer.param_groups, map(claim.taken, run.settings[step]))
        for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = None if gradient is None else _copy(gradient)
            if begins is not None:
                p.data.copy_(begins[step][i])
        optimizer.step()
        for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient is not None and (p.grad is None or not torch.equal(p.grad, gradient)):
                changed(step, i)
        traced.append([p.detach().clone() for p in parameters])
    return traced


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of x with the same strides, in memory of its own."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_zeros(length).as_strided(x.shape, x.stride()).copy_(x)


def _optimizer_of(
    make: Any, claim: Claim, run: Run, parameters: list[torch.nn.Parameter], settings: Sequence[Settings]
) -> torch.optim.Optimizer:
    """The optimizer of a run. settings: for each param group; those of the first are also the constructor's."""
    groups = [
        {"params": [parameters[i] for i in members], **claim.taken(given)}
        for members, given in zip(run.groups, settings, strict=True)
    ]
    masters = (claim.masters or {}) if parameters[0].dtype == torch.bfloat16 else {}
    return make(groups, **claim.taken(settings[0]), **masters)
