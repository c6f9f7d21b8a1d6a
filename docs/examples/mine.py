"""A kernel and a strategy to begin with: right, plain and slow. Put yours in their place.

cp docs/examples/mine.py .
python -m lmsys.check mine.py:my_attention
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
