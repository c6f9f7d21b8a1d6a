"""AdamW, a cosine schedule with warm-up, and clipping by the global norm. On CUDA the host waits in none of them.

The training loop, benchmarks and loops of your own call them. The training loop gets its optimizer from `optimizer_of`
in muon.py, and `Trainer.schedule` in loop.py calls `cosine_schedule`. The kernel of AdamW is in optimizer_triton.py.

`AdamW` divides the parameters of a param group into *bundles*, lists that are stepped at once. Another optimizer may
derive from `AdamW`, as `Muon` in muon.py does: it overrides `_validate`, which checks options, and `_bundles`, which
makes the bundles, here of its own subclass of `Bundle`. `lmsys train` knows it once `optimizer_of` returns it.

Schedule and clipping are those of CS336, assignment 1 (section 4, "Training a Transformer LM").
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lmsys.kernels import HAS_TRITON as HAS_TRITON  # benchmarks read it here
from lmsys.parallel import collectives, structure, wrapper
from lmsys.values import finite, hold, instance, several, shortly, whole


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay: Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2; equal to torch's AdamW.

        m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²
        p = p - lr weight_decay p - lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + eps)

    Parameters of one group, device and dtype are stepped at once. On CUDA they are stepped by our kernel, that of
    optimizer_triton.py, if triton is installed, they are float32, and they, their gradients and their state are
    contiguous; otherwise by torch's fused kernel. On other devices torch's foreach function steps them. The three
    differ in rounding alone.

    The state is that of torch's AdamW, so each loads the other's state dict: `step` (float32 scalar, on CUDA beside its
    parameter, else on the CPU), `exp_avg` and `exp_avg_sq` (like the parameter). The lists of tensors that kernels take
    are kept from step to step, until other parameters have gradients or a tensor of the state is replaced.

    grad_factor  a scalar tensor that `scale_gradients` sets: the next step, and no other, multiplies gradients by it as
                 it reads them; `.grad` itself does not change
    rounded      `lmsys.model.linear.RoundedWeights`: copies of parameters in a narrower dtype. Our kernel writes them
                 as it steps the parameters, but not in a step that `GradScaler` may skip. torch's kernels never do.
                 Copies that were not written are made again in the next forward

    `torch.amp.GradScaler` leaves unscaling, and skipping a step, to the kernel when all parameters are on CUDA.
    ValueError: a negative, NaN or infinite lr, eps or weight_decay, a beta outside [0, 1), a gradient that is sparse
    or not floating-point, the state dict of another algorithm.

    `lmsys.training.muon.Muon` derives from it.
    """

    grad_factor: Tensor | None = None
    rounded: Any = None
    # A state dict with one of these values in a param group is that of another algorithm, and is refused.
    other_algorithms = {"amsgrad": True, "maximize": True, "decoupled_weight_decay": False, "use_muon": True}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._begin(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _begin(self, params: Iterable[Any], **defaults: Any) -> None:
        """The work of the constructor, for this class and `Muon`, whose options differ."""
        # What `_plan` keeps: {index of a param group: (its parameters that have gradients, and the tensors of their
        # state; the `Bundle` objects that hold these parameters)}.
        self._plans: dict[int, tuple[list[Tensor], list[Any]]] = {}
        self._validate(**defaults)
        super().__init__(instance("params", params, Iterable), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; torch's constructor calls it for each of its groups, too. ValueError for wrong options."""
        self._validate(**{**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state, and the options of its param groups in place of those here, as any optimizer of torch does.

        ValueError for the state of another algorithm.
        """
        hold(
            *(
                (
                    group.get(name) is not other,
                    f"the state dict is not {type(self).__name__}'s: its param group has {name}={other}",
                )
                for name, other in self.other_algorithms.items()
                for group in state_dict["param_groups"]
            ),
            *(
                (
                    self.defaults.keys() <= group.keys(),
                    f"the state dict is not {type(self).__name__}'s: its param group lacks"
                    f" {', '.join(name for name in self.defaults if name not in group)}",
                )
                for group in state_dict["param_groups"]
            ),
        )
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch when an optimizer is unpickled, or has loaded a state dict: the kept lists are then old."""
        super().__setstate__(state)
        self._plans = {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads it: True where `step` acts on the `grad_scale` and `found_inf` that it sets."""
        return all(p.is_cuda for group in self.param_groups for p in group["params"])

    @staticmethod
    def _validate(*, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        """ValueError for options of a param group that are wrong."""
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            finite(name, value, least=0)
        hold(
            (
                isinstance(betas, Sequence)
                and len(betas) == 2
                and all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in betas),
                f"{betas=} must be two numbers in [0, 1)",
            )
        )

    @torch._disable_dynamo  # the graph of compiled code breaks here: torch.compile cannot trace the call of `adamw`
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what `closure` returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        # GradScaler sets the first two during its `step`, if `_step_supports_amp_scaling` is True.
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), self.grad_factor
        self.grad_factor = None
        plans = list(map(self._plan, range(len(self.param_groups))))  # raises errors before any parameter is changed
        # Under some strategies gradients have the class `lmsys.parallel.part.Part`, which would intercept each call.
        with torch._C.DisableTorchFunctionSubclass():
            for group, bundles in zip(self.param_groups, plans, strict=True):
                for bundle in bundles:
                    bundle.step(group, self.rounded, *scaling)
        return loss

    def _plan(self, index: int) -> list[Any]:
        """The bundles (`Bundle`) of param group `index`.

        They are kept while the same parameters have gradients and their state consists of the same tensors. ValueError
        for wrong options, and for gradients that the algorithm does not take.
        """
        group = self.param_groups[index]
        self._validate(**group)
        live = [p for p in group["params"] if p.grad is not None]
        (before, bundles), now = self._plans.get(index, ([], [])), self._with_state(live)
        if len(before) != len(now) or not all(map(is_, before, now)):
            hold(
                *(
                    (
                        p.grad.layout == torch.strided and p.is_floating_point(),
                        f"{type(self).__name__} takes dense floating-point gradients, and one is {p.grad.layout} of"
                        f" {p.dtype}, shape {tuple(p.shape)}",
                    )
                    for p in live
                )
            )
            bundles = self._bundles(live, group)
            self._plans[index] = self._with_state(live), bundles
        return bundles

    def _bundles(self, live: list[Tensor], group: dict[str, Any]) -> list[Any]:
        """The bundles of the parameters `live` of a group, which have gradients. Makes the state of new parameters."""
        for p in live:
            state = self.state[p]
            home = p.device if p.is_cuda else "cpu"
            if not state:
                # The counter is made on its device: otherwise the host would wait until the number is copied there.
                step = torch.zeros((), dtype=torch.float32, device=home)
                state.update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=home)
        return [
            _Bundle(params, *([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step")))
            for params in structure.by_kind(live)
        ]

    def _with_state(self, live: list[Tensor]) -> list[Any]:
        """The parameters and the tensors of their state."""
        # As it runs in every step, no line of Python runs for each parameter.
        states = filter(None, map(self.state.get, live))
        return list(chain(live, chain.from_iterable(map(dict.values, states))))


@dataclass
class Bundle:
    """Parameters of one group, device and dtype that have gradients, which are stepped at once.

    A subclass must have `step`, with the arguments of `_Bundle.step`: `AdamW.step` calls it.
    """

    params: list[Tensor]

    def grads(self, factor: Tensor | None = None) -> list[Any]:
        """The gradients, or copies of them times a factor."""
        grads = [p.grad for p in self.params]
        return grads if factor is None else list(torch._foreach_mul(grads, factor.to(grads[0])))


@dataclass
class _Bundle(Bundle):
    """A bundle of AdamW: parameters with their state, in the lists that a multi-tensor kernel takes."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    kernel: Any = None  # the FusedAdamW of optimizer_triton.py, from the first step on

    def step(self, group: dict[str, Any], rounded: Any, *scaling: Tensor | None) -> None:
        """Steps the parameters with a param group's options.

        rounded  as in `AdamW`
        scaling  grad_scale, found_inf and grad_factor, each a scalar tensor or None
        """
        device, on_cuda = self.params[0].device, self.params[0].is_cuda
        moved = [None if x is None else x.to(device, non_blocking=on_cuda) for x in scaling]
        lists = self.params, self.grads(), self.exp_avgs, self.exp_avg_sqs
        has_kernel = HAS_TRITON and on_cuda and self.params[0].dtype == torch.float32
        if has_kernel and all(map(Tensor.is_contiguous, chain(*lists))):
            _triton_step(self, group, rounded, *moved)
        else:
            # Not torch's fused kernel for CPUs: it rounds the last elements of a tensor in another way, so that weights
            # would depend on how strategies divide them, and takes any memory for contiguous without a check.
            _torch_step(self, group, on_cuda, *moved)


def _triton_step(
    bundle: _Bundle, group: dict[str, Any], rounded: Any, grad_scale: Tensor | None, found_inf: Tensor | None,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Steps a bundle by our kernel. rounded, factor: `rounded` and `grad_factor` of `AdamW`."""
    from lmsys.training.optimizer_triton import FusedAdamW  # here, as it imports Triton

    bundle.kernel = bundle.kernel or FusedAdamW(bundle.params)
    lists = bundle.params, bundle.grads(), bundle.exp_avgs, bundle.exp_avg_sqs, bundle.steps
    follows = rounded is not None and found_inf is None  # with found_inf the host does not know if the step is skipped
    copies = [rounded.of(p) if follows else None for p in bundle.params]
    bundle.kernel.step(lists, copies, group, grad_scale, found_inf, factor)
    if follows:
        rounded.follow(bundle.params)


def _torch_step(
    bundle: _Bundle, group: dict[str, Any], fused: bool, grad_scale: Tensor | None, found_inf: Tensor | None,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Steps a bundle by torch: by its fused kernel, or by its function of many tensors (foreach).

    factor  `grad_factor` of `AdamW`
    """
    # The fused kernel takes only gradients that lie in memory as their parameters do.
    grads = [
        x if not fused or x.stride() == p.stride() else torch.empty_like(p).copy_(x)
        for p, x in zip(bundle.params, bundle.grads(factor), strict=True)
    ]
    adamw(  # the empty list is for amsgrad
        bundle.params, grads, bundle.exp_avgs, bundle.exp_avg_sqs, [], bundle.steps, foreach=not fused,
        fused=fused, grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]), lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=False,
    )  # fmt: skip
    torch.autograd.graph.increment_version(bundle.params)  # torch's fused kernel does not do it


def cosine_schedule(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of `step`, which is counted from 0 (Loshchilov & Hutter, arXiv 1608.03983, without restarts).

    It rises linearly from 0 to max_lr at warmup_steps, falls by half a cosine to min_lr at total_steps, and stays so.

    ValueError unless steps are whole numbers and rates finite, 0 <= step, 0 <= min_lr <= max_lr and
    0 <= warmup_steps < total_steps.
    """
    whole("step", step, least=0)
    whole("warmup_steps", warmup_steps, least=0, most=whole("total_steps", total_steps, least=1) - 1)
    finite("min_lr", min_lr, least=0, most=finite("max_lr", max_lr, least=0))
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    progress = min(1, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_lr + (max_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def undecayed(module: nn.Module, parts: str) -> structure.Groups:
    """A function for the argument `groups` of `Wrapper.make_optimizer`, which gives some parameters no weight decay.

    parts  parts of the names of these parameters, divided by |, such as "ln|embeddings"; a name must contain one of
           them. ValueError for a part that no name contains, and for an empty one, which all names would contain
    """
    names = "\n".join(dict(instance("module", module, nn.Module).named_parameters()))
    hold(
        *(
            (text and text in names, f"undecayed={parts!r}: {text!r} is empty, or in no parameter's name")
            for text in instance("parts", parts, str).split("|")
        )
    )

    def options(name: str, _: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": 0.0} if any(text in name for text in parts.split("|")) else {}

    return options


def set_lr(optimizer: torch.optim.Optimizer, lr: float, matrix_lr: float | None = None) -> None:
    """Sets the learning rate of every param group: `set_lr(optimizer, cosine_schedule(step, ...))` before each step.

    matrix_lr  the rate of groups that `Muon` steps; None: lr
    """
    for group in instance("optimizer", optimizer, torch.optim.Optimizer).param_groups:
        of_matrices = matrix_lr is not None and group.get("use_muon", False)
        group["lr"] = matrix_lr if of_matrices else lr


@torch.no_grad()
def clip_grad_norm(
    parameters: wrapper.Wrapper | Tensor | Iterable[Tensor], max_norm: float, eps: float = 1e-6
) -> Tensor:
    """Scales all gradients in place by min(1, max_norm / (norm + eps)); returns norm, a scalar tensor.

    Under a strategy that leaves each rank a part of the gradients, give the wrapper itself: then norm is that of the
    whole gradient, equal on all ranks. All ranks call it. Such strategies have a `zero_stage` of 2 or more: `Fsdp`, and
    `Zero1` too, which divides gradients although ZeRO's stage 1 divides only the optimizer's state.

    norm is the L2 norm of all gradients as one vector, before clipping, on the first gradient's device and in at least
    float32, so that the norm of float16 gradients cannot overflow; 0 when there are none. The host does not wait for
    it: with a norm of NaN every gradient becomes NaN, with an infinite one the finite gradients become 0 and the
    infinite ones NaN. Look at the returned norm before you step. `max_norm=math.inf` only measures, whatever the norm.

    ValueError: a negative or NaN max_norm or eps; a set of parameters, whose order is another in each process, so that
    ranks would round the norm in different ways, and their weights would drift apart.
    """
    group, divided = None, False
    if isinstance(parameters, wrapper.Wrapper):
        group, divided = parameters.group, parameters.zero_stage >= 2 and parameters.world_size > 1
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, Tensor) else several("parameters", parameters)
    norm = whole_norm(parameters, group, divided)
    _multiply(parameters, clip_factor(norm, max_norm, eps))
    return norm


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients as one vector, as in `clip_grad_norm`; 0 when there are none."""
    if not (bundles := structure.by_kind(p.grad for p in several("parameters", parameters) if p.grad is not None)):
        return torch.zeros(())
    norms = [
        torch.stack(torch._foreach_norm(grads, 2, dtype=torch.promote_types(grads[0].dtype, torch.float32)))
        for grads in bundles
    ]
    return torch.linalg.vector_norm(torch.cat([x.to(norms[0].device) for x in norms]))


def whole_norm(parameters: Sequence[Tensor], group: collectives.Group, divided: bool) -> Tensor:
    """The L2 norm of all gradients as one vector, a scalar tensor, equal on all ranks.

    divided  True: this rank has only parts of the gradients, and all ranks of `group` call it
    """
    if not divided:
        return grad_norm(parameters)
    # Gradients may have the class `lmsys.parallel.part.Part`, which refuses functions of norms.
    with torch._C.DisableTorchFunctionSubclass():
        square = grad_norm(parameters).to(parameters[0].device, torch.float64).square()
    torch.distributed.all_reduce(square, group=collectives.unwrapped(group))
    return square.sqrt().to(torch.promote_types(parameters[0].dtype.to_real(), torch.float32))


def clip_factor(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    """min(1, max_norm / (norm + eps)), a scalar tensor as norm is; 1 for an infinite max_norm, whatever the norm.

    ValueError: a negative or NaN max_norm or eps.
    """
    hold(
        *(
            (
                not isinstance(value, bool) and isinstance(value, Real) and float(value) >= 0,
                f"{name}={shortly(value)} must be a number of at least 0",
            )
            for name, value in dict[str, Any](max_norm=max_norm, eps=eps).items()
        )
    )
    return torch.ones_like(norm) if max_norm == math.inf else (max_norm / (norm + eps)).clamp(max=1)


def scale_gradients(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    """Multiplies gradients by `factor` for the next step.

    `AdamW` does so as it reads them, which saves a pass over all gradients. Those of another optimizer are multiplied
    in place.
    """
    if isinstance(optimizer, AdamW):
        optimizer.grad_factor = factor
    else:
        _multiply((p for group in optimizer.param_groups for p in group["params"]), factor)


@torch.no_grad()
def _multiply(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies the parameters' gradients in place."""
    for grads in structure.by_kind(p.grad for p in parameters if p.grad is not None):
        torch._foreach_mul_(grads, factor.to(grads[0]))
