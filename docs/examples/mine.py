"""A kernel, a loss, a norm, a strategy and an optimizer to begin with: right, plain and slow. Put yours in their place.

cp docs/examples/mine.py .
lmsys check mine.py:my_attention
lmsys check mine.py:MyAdamW
"""

import torch
import torch.distributed as dist


def my_attention(q, k, v, *, causal=False, scale=None):
    """q (B, H, Q, D), k and v (B, Hkv, K, D); the result is of q's shape and dtype."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # grouped heads
    scores = (q @ k.mT).float() * scale
    if causal:
        scores += torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    return scores.softmax(-1).to(v.dtype) @ v


def my_loss(hidden, weight, targets):
    """hidden (N, M), weight of the head (V, M), targets (N): the mean cross-entropy of the logits."""
    return torch.nn.functional.cross_entropy((hidden @ weight.mT).float(), targets)


def my_norm(x, weight, eps=1e-6):
    """RMSNorm: x (..., M), weight (M,); computed in float32, in x's dtype at the end."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


class MyDDP(torch.nn.Module):
    """Every rank begins with the weights of rank 0; one all-reduce for each gradient, after the backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # not used on this rank: others may have used it
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class MyAdamW(torch.optim.Optimizer):
    """AdamW: Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2, as torch has it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = state["exp_avg_sq"].sqrt() / (1 - beta2 ** state["step"]) ** 0.5
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], root + group["eps"], value=-lr / (1 - beta1 ** state["step"]))
