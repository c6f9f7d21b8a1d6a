"""The optimizer Muon: it orthogonalizes the momentum of each hidden matrix, and steps all else as AdamW does.

The training loop gets the class and the options of its optimizer from `optimizer_of`, also for AdamW; benchmarks and
users make a `Muon` themselves.

A few large singular values often dominate a gradient. A step by an orthogonal matrix moves the weights equally far in
every direction, so that they also learn from directions that are rare in the gradient. The Newton-Schulz iteration
approximates the orthogonal matrix by products of matrices alone, in bfloat16. Two of the three products of an iteration
are symmetric: on CUDA the kernels of muon_triton.py compute one half of them, and copy it into the other.

A param group has the option `use_muon`: True if Muon steps its matrices, False if AdamW steps its parameters.
`matrix_groups` makes both kinds of groups for a model:

    optimizer = wrapper.make_optimizer(Muon, groups=matrix_groups(model), lr=0.02)

Under `ShardedOptimizer`, `Zero1` and `Fsdp` a rank orthogonalizes the whole matrices that it owns, and no others.

A new scale of the update is a name in MATRIX_SCALES (config.py) and a case in `lr_ratio`.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale match_rms_adamw is that
of Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982). Other coefficients: Amsel et al. 2025,
"The Polar Express" (arXiv 2505.16932).

Legend: N matrices, R rows, C columns.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.cost.operations import newton_schulz_flops
from lmsys.kernels import HAS_TRITON
from lmsys.parallel import assembly, structure
from lmsys.training.config import MATRIX_SCALES, TrainConfig
from lmsys.training.optimizer import AdamW, Bundle, undecayed
from lmsys.training.prepare import AUTOCAST
from lmsys.values import finite, flag, grouped, hold, one_of, whole

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan's: steep at 0, so that small singular values grow in few iterations
# Those of the Polar Express for singular values of 0.001 or more, which five steps bring to between 0.84 and 1.13, and
# seven to 1: each polynomial is the best one for the range of values that those before it leave. All but the last are
# applied to x / 1.01, since rounding may take a value above 1.
POLAR_EXPRESS = (
    (8.2057, -22.9065, 16.4647),
    (4.0667, -2.8617, 0.5185),
    (3.9098, -2.8239, 0.5252),
    (3.2854, -2.4152, 0.4853),
    (2.2778, -1.6197, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8750, -1.2500, 0.3750),
)
EPS = 1e-7  # the smallest norm that a matrix is divided by: without it a matrix of zeros would become NaN
BATCH = 2**26  # elements of the matrices that are orthogonalized at once, which bounds the memory that a step takes
ADAMW_RMS = 0.2  # the root mean square of AdamW's updates, about


class Muon(AdamW):
    """Muon for param groups with `use_muon`, AdamW for the others; for matrices equal to torch's Muon but for rounding.

        B = momentum B + (1 - momentum) G,  U = (1 - momentum) G + momentum B  (U = B without nesterov)
        W = W - lr weight_decay W - lr scale newton_schulz(U)

    Matrices of one shape, dtype and device are orthogonalized in one batch. Their state is `momentum_buffer` (like the
    parameter), as in torch; that of other parameters is AdamW's. Each group has options of its own: schedules, a
    group's `lr` and state dicts work as with any optimizer.

    lr, weight_decay  of both algorithms
    momentum          of Muon, as is `nesterov`
    adjust_lr_fn      original: the scale is √max(1, R / C); match_rms_adamw: 0.2 √max(R, C), which suits a learning
                      rate and a weight decay that were chosen for AdamW
    ns_coefficients   a, b and c of the polynomial a X + b (X Xᵀ) X + c (X Xᵀ)² X, applied `ns_steps` times; or several
                      such triples, such as `POLAR_EXPRESS`, one for each step; later steps use the last
    ns_dtype          dtype of the iteration
    batched           True: matrices of one shape together. False: each by itself; only then are its bits the same
                      whichever others are stepped beside it, as libraries choose kernels by the number of matrices
    use_muon          the default for groups that do not set it
    betas, eps        of AdamW
    flats             `Fsdp.make_optimizer` gives it: for each parameter that is this rank's part of several flattened
                      ones, their `FlatShard`

    `torch.amp.GradScaler` unscales the gradients itself, and skips a step by itself.
    ValueError: as of `AdamW`; a momentum outside [0, 1), another `adjust_lr_fn`, a parameter with `use_muon` that is no
    matrix, a state dict with a group whose `use_muon` is missing or differs from that here.
    """

    # Options of other optimizers, by name, that are refused with a hint, as in `AdamW`; this class has `use_muon`.
    other_algorithms = {name: other for name, other in AdamW.other_algorithms.items() if name != "use_muon"}
    _step_supports_amp_scaling = False  # read by GradScaler, which then unscales and skips itself
    takes_whole_matrices = True  # read by `Fsdp.make_optimizer`, which then gives `flats`
    _flats: Mapping[Tensor, Any] = {}  # the `flats` of the constructor

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        ns_coefficients: Sequence[Any] = COEFFICIENTS,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        batched: bool = True,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        flats: Mapping[Tensor, Any] | None = None,
    ) -> None:
        self._flats = flats or {}
        self._begin(  # a method of `AdamW`, which checks the options and calls the constructor of torch's Optimizer
            params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn,
            ns_coefficients=ns_coefficients, ns_steps=ns_steps, ns_dtype=ns_dtype, batched=batched, use_muon=use_muon,
            betas=betas, eps=eps,
        )  # fmt: skip

    @staticmethod
    def cost(p: Tensor, use_muon: bool = True, ns_steps: int = 5, **_: Any) -> float:
        """The number of operations by which ranks weigh a step of `p`, whose group has these options.

        `ShardedOptimizer` divides parameters among ranks by it, and under `Fsdp` this class divides whole matrices.
        """
        return newton_schulz_flops(len(p), p.shape[1], ns_steps) if use_muon and p.dim() == 2 else float(p.numel())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `AdamW`. ValueError also for a parameter with `use_muon` that is no matrix; then no group is added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(x.shape) for p in group["params"] for x in self._whole(p) if x.dim() != 2]
        if group["use_muon"] and shapes:
            self.param_groups.pop()
            raise ValueError(f"Muon steps matrices, not shape {shapes[0]}: that parameter's group needs use_muon=False")

    def _whole(self, p: Tensor) -> list[Any]:
        """The parameters that p is a part of, side by side, under `Fsdp`; elsewhere p itself."""
        return self._flats[p].params if p in self._flats else [p]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `AdamW`: the state's options, such as `ns_coefficients`, take the place of those here.

        ValueError also for a group that has another `use_muon` here than there, or none there.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            here, there = group["use_muon"], saved.get("use_muon")
            hold((here is there, f"the state dict has a param group with use_muon={there}, where this one has {here}"))
        super().load_state_dict(state_dict)

    @staticmethod
    def _validate(**options: Any) -> None:
        """As in `AdamW`, for all options of the constructor but params and flats."""
        AdamW._validate(**options)
        for name in ("nesterov", "batched", "use_muon"):
            flag(name, options[name])
        hold((0 <= finite("momentum", options["momentum"]) < 1, f"momentum={options['momentum']} must be in [0, 1)"))
        one_of("adjust_lr_fn", options["adjust_lr_fn"], MATRIX_SCALES)
        whole("ns_steps", options["ns_steps"], least=1, most=99)
        coefficients, dtype = options["ns_coefficients"], options["ns_dtype"]
        triples = _triples(coefficients)
        hold(
            (
                all(isinstance(triple, Sequence) and len(triple) == 3 for triple in triples),
                f"ns_coefficients={coefficients!r} must be three numbers, or several triples of them",
            ),
            (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point,
                f"ns_dtype={dtype!r} must be a floating-point dtype, such as torch.bfloat16",
            ),
        )
        for value in chain(*triples):
            finite("ns_coefficients", value)

    def _bundles(self, live: list[Tensor], group: dict[str, Any]) -> list[Any]:
        """As in `AdamW`, whose `_plan` calls it: for a group with `use_muon` the bundles are `_Matrices`."""
        if not group["use_muon"]:
            return super()._bundles(live, group)
        for p in live:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        bundles = []
        for params in structure.by_kind(live):
            momentum = [self.state[p]["momentum_buffer"] for p in params]
            if params[0] in self._flats:
                costs = [self.cost(x, **group) for p in params for x in self._whole(p)]
                bundles.append(_Matrices(params, momentum, assembly.Assembly([self._flats[p] for p in params], costs)))
            else:
                for places in in_batches([p.shape for p in params], group["batched"]):  # which bounds a step's memory
                    bundles.append(_Matrices([params[at] for at in places], [momentum[at] for at in places]))
        return bundles


@dataclass
class _Matrices(Bundle):
    """Matrices of one group, dtype and device, with their momentum; or, under `Fsdp`, flat parts of matrices.

    parts  assembles whole matrices from flat parts; None: `params` are whole matrices of one shape
    """

    momentum: list[Tensor]
    parts: assembly.Assembly | None = None

    def step(self, group: dict[str, Any], rounded: Any, *scaling: Tensor | None) -> None:
        """Steps the matrices.

        rounded  not used: the step raises a matrix's version counter, so its rounded copy is made again when it is read
        scaling  grad_scale and found_inf, which are None for `Muon`, and grad_factor
        """
        factor, dtype = scaling[-1], group["ns_dtype"]
        grads = self.grads(None if factor is None else factor.to(self.params[0].device))
        torch._foreach_lerp_(self.momentum, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, self.momentum, group["momentum"]) if group["nesterov"] else self.momentum
        torch._foreach_mul_(self.params, 1 - group["lr"] * group["weight_decay"])
        if self.parts is None:
            params, shapes = self.params, [p.shape for p in self.params]
            steps = orthogonalized(updates, group)
        else:
            params, shapes = self.parts.views([p.detach() for p in self.params]), self.parts.shapes
            steps = self.parts.parts(orthogonalized(self.parts.whole(updates), group), dtype)
        for places in in_batches(shapes):
            rate = group["lr"] * lr_ratio(shapes[places[0]], group["adjust_lr_fn"])
            stepped = [params[place] for place in places]
            torch._foreach_add_(stepped, [steps[place].to(stepped[0].dtype) for place in places], alpha=-rate)


def in_batches(shapes: Sequence[torch.Size], batched: bool = True) -> list[list[int]]:
    """The places (indices) in `shapes`, in lists of one shape each.

    The matrices of a list have at most BATCH elements together, but a list has at least one place. Without `batched`
    each list has one place.
    """
    batches = []
    for shape, places in grouped((shape, place) for place, shape in enumerate(shapes)).items():
        size = max(1, BATCH // max(1, shape.numel())) if batched else 1
        batches += [places[start : start + size] for start in range(0, len(places), size)]
    return batches


def lr_ratio(shape: torch.Size, adjust_lr_fn: str) -> float:
    """The factor of a matrix's learning rate: `adjust_lr_fn` of `Muon`."""
    rows, columns = shape
    return (
        math.sqrt(max(1, rows / max(1, columns)))
        if adjust_lr_fn == "original"
        else ADAMW_RMS * math.sqrt(max(rows, columns))
    )


def orthogonalized(matrices: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """`newton_schulz` of matrices of one dtype and device, with a param group's options, in batches of one shape."""
    steps: list[Any] = [None] * len(matrices)
    for places in in_batches([x.shape for x in matrices], group["batched"]):
        batch = normalized([matrices[place] for place in places], group["ns_dtype"])
        for place, step in zip(places, newton_schulz(batch, group["ns_steps"], group["ns_coefficients"]), strict=True):
            steps[place] = step
    return steps


def normalized(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices (R, C) -> (N, R, C) in `dtype`, each divided by its Frobenius norm: no singular value is above 1.

    The norms are computed in float32 or wider, one matrix at a time.
    """
    wide = torch.promote_types(matrices[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(matrices), 2, dtype=wide))
    return (torch.stack(list(matrices)) / norms.clamp(min=EPS)[:, None, None]).to(dtype)


def newton_schulz(x: Tensor, steps: int = 5, coefficients: Sequence[Any] = COEFFICIENTS) -> Tensor:
    """Approximates U Vᵀ of x = U S Vᵀ: x (N, R, C), with singular values of at most 1 -> (N, R, C).

    Five steps bring all singular values but very small ones to between about 0.7 and 1.2.

    coefficients  `ns_coefficients` of `Muon`
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    triples = _triples(coefficients)
    halved = _halved(x)
    for step in range(steps):
        a, b, c = triples[min(step, len(triples) - 1)]
        if halved is None:
            gram = x @ x.mT  # of the shorter side
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b G + c G²) x
        else:  # the polynomial includes a: with beta=a, torch's baddbmm would copy x before it multiplies
            x = halved.polynomial(x, a, b, c) @ x
    return x.mT if is_tall else x


def _triples(coefficients: Any) -> Sequence[Any]:
    """The triples of `ns_coefficients`: several as they are, and a single one in a list."""
    first = next(iter(coefficients), None) if isinstance(coefficients, Sequence) else None
    return coefficients if isinstance(first, Sequence) else [coefficients]


def _halved(x: Tensor) -> Any:
    """The module whose kernels compute half of a symmetric product, where they take x; None: torch's matmuls do.

    Kernels take the address of x, which tensors of subclasses, such as DTensor, and those within torch.func's
    transforms, such as vmap, do not have.
    """
    has_address = type(x) is Tensor and not torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or x.requires_grad or not (HAS_TRITON and x.is_cuda and has_address):
        return None
    from lmsys.training import muon_triton  # here, as it imports Triton

    return muon_triton if muon_triton.takes(x) else None


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """The matrices that Muon steps: the two-dimensional trained parameters in blocks, without embeddings.

    A block is an entry of a ModuleList. The head, and weights that several blocks or a block and another module share,
    are left to AdamW.
    """
    embeddings = {
        p for child in module.modules() if isinstance(child, nn.Embedding) for p in child.parameters(recurse=False)
    }
    in_blocks = chain(*structure.parameters_by_block(module)[1:])  # the first list: in no block or several
    return {p for p in in_blocks if p.dim() == 2 and p.requires_grad and p not in embeddings}


def matrix_groups(module: nn.Module, more: structure.Groups | None = None) -> structure.Groups:
    """The `groups` of make_optimizer by which Muon steps the hidden matrices of `module`, and AdamW all else.

    more  another function of this kind, such as `lmsys.training.optimizer.undecayed` returns: its options are added
    ValueError where there is no such matrix.
    """
    matrices = hidden_matrices(module)
    hold((matrices, f"{type(module).__name__} has no hidden matrices: Muon steps those in the entries of a ModuleList"))

    def options(name: str, p: nn.Parameter) -> dict[str, Any]:
        return {"use_muon": p in matrices} | (more(name, p) if more is not None else {})

    return options


def optimizer_of(train: TrainConfig, model: nn.Module) -> tuple[type[AdamW], dict[str, Any], dict[str, Any]]:
    """(class, options of all param groups, {"groups": ...} or {}) of the optimizer of a training.

    In a reproducible training each matrix is orthogonalized by itself, so that its bits are the same whichever matrices
    its rank owns beside it. In fp16 the iteration is in float16, too: the GPU may have no bfloat16.
    ValueError as of `undecayed` and `matrix_groups`.
    """
    options: dict[str, Any] = {"betas": train.betas, "eps": train.eps, "weight_decay": train.weight_decay}
    groups = None if train.undecayed is None else undecayed(model, train.undecayed)
    if train.optimizer == "adamw":
        return AdamW, options, {} if groups is None else {"groups": groups}
    options |= {
        "momentum": train.momentum,
        "adjust_lr_fn": train.adjust_lr_fn,
        "ns_dtype": AUTOCAST.get(train.precision, torch.bfloat16),
        "batched": not train.reproducible,
    }
    return Muon, options, {"groups": matrix_groups(model, groups)}
