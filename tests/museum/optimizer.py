"""Optimizers in the museum of published faults: each fault is a few lines on top of a right optimizer in plain loops.

`lmsys check` must refuse each fault, and must not accuse the right optimizers, which HONEST lists. A new fault is a
class with the decorator `exhibit(kind, where it was published, what users saw, a part of the mistake's name)`.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lmsys.registry import Entry
from tests.museum.exhibit import exhibit


class PlainAdamW(Optimizer):
    """A right AdamW. If `coupled` is True, weight decay is added to the gradient instead, which makes it an Adam.

    A fault overrides a method below `step`:
    - `state_of`: the dict in which a parameter's state is kept;
    - `count`: the number of this step, from that of the last one;
    - `without_gradient`: called for a parameter whose grad is None;
    - `decay`: applies decoupled weight decay;
    - `update_parameter`: updates a parameter p with gradient g;
    - `update`: the change of a parameter, divided by lr, from moments m and v and their bias corrections c1 and c2.
    """

    coupled = False

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    self.without_gradient(p, group)
                else:
                    state = self.state_of(p)
                    state["step"] = self.count(state.get("step", 0))
                    self.update_parameter(p, p.grad, state, group)

    def state_of(self, p: Tensor) -> dict[str, Any]:
        return self.state[p]

    def count(self, step: int) -> int:
        return step + 1

    def without_gradient(self, p: Tensor, group: dict[str, Any]) -> None: ...

    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        if not self.coupled:
            p.mul_(1 - group["lr"] * group["weight_decay"])

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.decay(p, group)
        g = g.add(p, alpha=group["weight_decay"]) if self.coupled else g
        beta1, beta2 = group["betas"]
        m, v = (state.setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq"))
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        c1, c2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        p.sub_(group["lr"] * self.update(m, v, c1, c2, group["eps"]))

    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m / c1) / (v.sqrt() / math.sqrt(c2) + eps)  # v / c2 would overflow where v does not


class PlainAdam(PlainAdamW):
    """A right Adam."""

    coupled = True


class HandoutAdamW(Optimizer):
    """A right AdamW in the form of CS336's handout (assignment 1) and of transformers, as a student would write it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay=0.01):
        if lr < 0:
            raise ValueError(f"{lr=} must not be negative")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state.get("t", 1)
                grad = p.grad.data
                m = beta1 * state.get("m", torch.zeros_like(p.data)) + (1 - beta1) * grad
                v = beta2 * state.get("v", torch.zeros_like(p.data)) + (1 - beta2) * grad**2
                alpha_t = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= alpha_t * m / (torch.sqrt(v) + eps)
                p.data -= lr * weight_decay * p.data
                state["t"], state["m"], state["v"] = t + 1, m, v
        return loss


class FixedEpsAdamW(HandoutAdamW):
    """A right AdamW whose eps cannot be set."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), weight_decay: float = 0.01):
        super().__init__(params, lr, betas, 1e-8, weight_decay)


class EfficientAdamW(PlainAdamW):
    """A right AdamW in Kingma and Ba's efficient order of computation, arXiv 1412.6980, end of section 2."""

    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return m * (math.sqrt(c2) / c1) / (v.sqrt() + eps)


class EfficientAdam(EfficientAdamW):
    """A right Adam in the order of computation of `EfficientAdamW`."""

    coupled = True


class LateDecayAdamW(PlainAdamW):
    """A right AdamW: decay after the step, as in the handout, and eps after bias correction, as in torch."""

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update_parameter(p, g, state, {**group, "weight_decay": 0.0})
        self.decay(p, group)


class TextbookAdam(PlainAdam):
    """A right Adam as in arXiv 1412.6980, Algorithm 1. It squares the gradient before it scales it."""

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        g = g + group["weight_decay"] * p
        state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
        m_hat, v_hat = state["m"] / (1 - beta1 ** state["step"]), state["v"] / (1 - beta2 ** state["step"])
        p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))


@exhibit(
    "optimizer",
    "allenai/OLMo-core#317",
    "the effective learning rate was 2.2 times the given one, and stayed so",
    "steps are not counted",
)
class NeverCountsAdamW(PlainAdamW):
    def count(self, step: int) -> int:
        return 1


@exhibit(
    "optimizer",
    "NVIDIA/Megatron-LM#5976",
    "the first real step was smaller: a step that only made the state had been counted",
    "steps are counted from 2",
)
class CountsItsInitialisationAdam(PlainAdam):
    def count(self, step: int) -> int:
        return max(step, 1) + 1


@exhibit(
    "optimizer",
    "flashlight/flashlight#143",
    "every parameter had the bias correction of another step",
    "once for each parameter",
)
class CountsParametersAdam(PlainAdam):
    total = 0

    def count(self, step: int) -> int:
        self.total += 1
        return self.total


@exhibit(
    "optimizer",
    "InfiniTensor/InfiniTrain#235",
    "the first update of a parameter whose gradient comes late was a quarter too small",
    "one step counter serves all",
)
class CountsTogetherAdam(PlainAdam):
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step(closure)

    def count(self, step: int) -> int:
        return self.calls


@exhibit(
    "optimizer",
    "karpathy/convnetjs#70",
    "it trained far worse than Adadelta: moments were multiplied by their bias correction",
    "multiplied by 1 - beta ** t",
)
class MultipliesAdam(PlainAdam):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m * c1) / ((v * c2).sqrt() + eps)


@exhibit(
    "optimizer",
    "ml-explore/mlx#1640",
    "there was no bias correction, so the first steps were too large",
    "bias correction is forgotten",
)
class NoCorrectionAdam(PlainAdam):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return m / (v.sqrt() + eps)


@exhibit(
    "optimizer",
    "FluxML/Flux.jl#448",
    "eps acted as its root, 1e-4 for 1e-8, where gradients are small",
    "eps is added inside of the root",
)
class EpsInRootAdam(PlainAdam):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m / c1) / (v / c2 + eps).sqrt()


@exhibit(
    "optimizer",
    "kozistr/pytorch_optimizer#480",
    "weights became NaN where a second moment was zero",
    "eps is added after the division",
)
class EpsAfterDivisionAdam(PlainAdam):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m / c1) * ((v / c2).rsqrt() + eps)


@exhibit(
    "optimizer",
    "google-deepmind/optax#1754",
    "a step with a gradient of zero made the weights NaN: eps rounds to zero in float16",
    "eps is forgotten",
)
class HalfEpsAdam(PlainAdam):
    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return (m / c1) / (v.sqrt() / math.sqrt(c2) + torch.tensor(eps).half())


@exhibit(
    "optimizer",
    "FluxML/Optimisers.jl#182",
    "a model ported from PyTorch misbehaved: weight decay did not follow the learning rate",
    "weight decay is not scaled by lr",
)
class UnscaledDecayAdamW(PlainAdamW):
    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        p.mul_(1 - group["weight_decay"])


@exhibit(
    "optimizer",
    "keras-team/keras#19051",
    "AdamW was Adam with L2 regularisation since it inherited from Adam",
    "weight decay is coupled",
)
class InheritingAdamW(PlainAdamW):
    coupled = True


@exhibit(
    "optimizer",
    "e-sensing/torchopt#14",
    "decay took the same from every weight, whatever its size and sign",
    "is subtracted, not lr",
)
class ConstantDecayAdamW(PlainAdamW):
    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * group["weight_decay"])


@exhibit(
    "optimizer",
    "KellerJordan/Muon#54",
    "parameters that took no part in a step shrank all the same",
    "applied to parameters whose grad is None",
)
class DecaysUnusedAdamW(PlainAdamW):
    def without_gradient(self, p: Tensor, group: dict[str, Any]) -> None:
        self.decay(p, group)


@exhibit(
    "optimizer",
    "chainer/chainer#1913",
    "a parameter whose gradient is None was updated as if it were zero",
    "are stepped, as if the gradient were zero",
)
class StepsUnusedAdam(PlainAdam):
    def without_gradient(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state_of(p)
        state["step"] = self.count(state.get("step", 0))
        self.update_parameter(p, torch.zeros_like(p), state, group)


@exhibit(
    "optimizer",
    "LiyuanLucasLiu/RAdam#24",
    "all param groups were stepped with the learning rate of the first: a cache had its step size",
    "lr of the first param group",
)
class CachedRateAdam(PlainAdam):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        cache = vars(self).setdefault("cache", {})
        rate = cache.setdefault(state["step"], group["lr"])
        super().update_parameter(p, g, state, {**group, "lr": rate})


@exhibit(
    "optimizer",
    "HomebrewML/HeavyBall#11",
    "parameters of one shape wrote to one state: its key was an address, which was 0 for all",
    "share one state",
)
class StateByShapeAdamW(PlainAdamW):
    def state_of(self, p: Tensor) -> dict[str, Any]:
        return vars(self).setdefault("by_shape", defaultdict(dict))[tuple(p.shape)]


@exhibit(
    "optimizer",
    "raskr/rust-autograd#16",
    "training diverged whatever the settings: new moments were made, and never stored",
    "moments are not kept",
)
class ForgetfulAdam(PlainAdam):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update_parameter(p, g, {"step": state["step"]}, group)


@exhibit(
    "optimizer",
    "meta-pytorch/torchrec#2663",
    "a schedule of settings other than lr did nothing: the wrapped optimizer kept its own",
    "settings other than lr are read once, in the constructor",
)
class InnerGroupsAdamW(PlainAdamW):
    def step(self, closure: Any = None) -> None:
        inner = vars(self).setdefault("inner", [dict(group) for group in self.param_groups])
        outer, self.param_groups = self.param_groups, inner
        for group, shown in zip(inner, outer, strict=True):
            group["lr"] = shown["lr"]
        super().step(closure)
        self.param_groups = outer


@exhibit(
    "optimizer",
    "KempnerInstitute/KempnerForge#115",
    "moments began from zero after each resume: those of the checkpoint were dropped without a word",
    "lost by load_state_dict",
)
class DropsStateAdamW(PlainAdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


@exhibit(
    "optimizer",
    "tenstorrent/tt-metal#53212",
    "after a resume bias correction was wrong for good: powers of the betas were made before these were restored",
    "uses the constructor's betas",
)
class StalePowersAdamW(PlainAdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made_with = [group["betas"] for group in self.param_groups]
        super().load_state_dict(state_dict)

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.powers = group["betas"] if not hasattr(self, "made_with") else self.made_with[0]
        self.now = state["step"]
        super().update_parameter(p, g, state, group)

    def update(self, m: Tensor, v: Tensor, c1: float, c2: float, eps: float) -> Tensor:
        return super().update(m, v, *(1 - beta**self.now for beta in self.powers), eps)


class Masters(PlainAdamW):
    """A right AdamW that keeps float32 master weights as state; they stay float32 when they are loaded.

    `MastersAdamW`, which is an entry of HONEST, and the faults derive from it.

    master_weights  False: it keeps none, and is a plain AdamW
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, master_weights: bool = False, **more: Any
    ):
        super().__init__(params, lr, weight_decay=weight_decay, **more)
        self.keeps = master_weights

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not self.keeps:
            return super().update_parameter(p, g, state, group)
        if "master" not in state:
            state["master"] = p.float()
        super().update_parameter(state["master"], g.to(state["master"].dtype), state, group)
        p.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = (p for group in self.param_groups for p in group["params"])
        for i, p in enumerate(params):  # torch has cast the state to the weights' dtype
            loaded = {name: x for name, x in state_dict["state"].get(i, {}).items() if isinstance(x, Tensor)}
            self.state[p].update({name: x.clone() for name, x in loaded.items()})


class MastersAdamW(Masters):
    """A right AdamW with master weights."""


class EfficientMastersAdamW(EfficientAdamW, Masters):
    """A right AdamW with master weights, in Kingma and Ba's order of computation."""


@exhibit(
    "optimizer",
    "pytorch/pytorch#43706",
    "float32 state became that of the weights' dtype when it was loaded",
    "load_state_dict loses the float32 masters",
)
class CastMastersAdamW(Masters):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        PlainAdamW.load_state_dict(self, state_dict)


@exhibit(
    "optimizer",
    "NVIDIA/apex#1731",
    "the setting for float32 masters did nothing for bfloat16 weights",
    "no float32 masters",
)
class IgnoredMastersAdamW(Masters):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        PlainAdamW.update_parameter(self, p, g, state, group)


@exhibit(
    "optimizer",
    "TensorAuto/OpenTau#185",
    "each resume made the float32 masters anew of the bfloat16 weights",
    "load_state_dict loses the float32 masters",
)
class RebuiltMastersAdamW(Masters):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.pop("master", None)


class Sgd(Optimizer):
    """A right SGD. A fault overrides `update_parameter` or `buffer`, the next momentum buffer from b and gradient g."""

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float = 0
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_parameter(p, p.grad, self.state[p], group)

    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g.add(p, alpha=group["weight_decay"])
        if group["momentum"]:
            g = state["b"] = self.buffer(g, state.get("b"), group)
        p.sub_(group["lr"] * g)

    def buffer(self, g: Tensor, b: Tensor | None, group: dict[str, Any]) -> Tensor:
        return g if b is None else group["momentum"] * b + (1 - group["dampening"]) * g


@exhibit(
    "optimizer",
    "pytorch/pytorch#12218",
    "gradients had weight decay in them after the step",
    "changes the gradient",
)
class ChangesGradientSgd(Sgd):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update_parameter(p, g.add_(p, alpha=group["weight_decay"]), state, {**group, "weight_decay": 0.0})


@exhibit(
    "optimizer",
    "ml-explore/mlx#440",
    "weight decay did nothing without momentum",
    "ignored where momentum is 0",
)
class DecayNeedsMomentumSgd(Sgd):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update_parameter(p, g, state, group if group["momentum"] else {**group, "weight_decay": 0.0})


@exhibit(
    "optimizer",
    "ml-explore/mlx#473",
    "the first gradient was damped, which torch's is not",
    "dampening is applied to the first gradient",
)
class DampsFirstSgd(Sgd):
    def buffer(self, g: Tensor, b: Tensor | None, group: dict[str, Any]) -> Tensor:
        return super().buffer(g, torch.zeros_like(g) if b is None else b, group)


@exhibit(
    "optimizer",
    "kozistr/pytorch_optimizer#517",
    "weight_decay was taken, validated and stored, and never applied",
    "weight_decay is ignored",
)
class IgnoresDecaySgd(Sgd):
    def update_parameter(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update_parameter(p, g, state, {**group, "weight_decay": 0.0})


# Right: torch's optimizers, each in one of its implementations. The fused ones are not among them: on a CPU they step
# memory beside weights that are not contiguous (torch 2.13).
def with_settings(name: str, base: type[Optimizer], **settings: Any) -> type[Optimizer]:
    """A class of this name, derived from an optimizer of torch whose constructor always gets these settings."""

    def __init__(self: Any, params: Any, **others: Any) -> None:
        base.__init__(self, params, **settings, **others)

    return type(name, (base,), {"__init__": __init__, "__module__": __name__})


ForeachAdamW = with_settings("ForeachAdamW", torch.optim.AdamW, foreach=True)
LoopAdamW = with_settings("LoopAdamW", torch.optim.AdamW, foreach=False)
ForeachAdam = with_settings("ForeachAdam", torch.optim.Adam, foreach=True)
ForeachSGD = with_settings("ForeachSGD", SGD, foreach=True)


HONEST = [
    Entry("lmsys AdamW", "lmsys.training.optimizer:AdamW"),
    *(Entry(f"torch {name}", f"torch.optim:{name}", peer=True) for name in ("AdamW", "Adam", "SGD")),
    *(
        Entry(function.__name__, f"{__name__}:{function.__name__}", peer=True)
        for function in (LoopAdamW, ForeachAdamW, ForeachAdam, ForeachSGD)
    ),
    *(
        Entry(function.__name__, f"{__name__}:{function.__name__}")
        for function in (PlainAdamW, PlainAdam, MastersAdamW, Sgd)
    ),
    *(
        Entry(function.__name__, f"{__name__}:{function.__name__}")
        for function in (HandoutAdamW, FixedEpsAdamW, EfficientAdamW, EfficientAdam, EfficientMastersAdamW)
    ),
    *(Entry(function.__name__, f"{__name__}:{function.__name__}") for function in (LateDecayAdamW, TextbookAdam)),
]
