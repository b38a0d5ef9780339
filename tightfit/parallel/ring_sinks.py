"""Ring attention with sinks (gpt-oss): each head has a logit s that takes part in the softmax and has no value.

A ring gives attention O and the logsumexp L of its scores over the keys of all ranks, which is all that sinks need, as
on one rank (kernels/attention/sink_attention.py):

    L' = log(e^L + e^s),   O' = e^(L − L') O,   ds = −Σ_rows e^(s − L') D,   D = Σ dO' · O'

and the ring's backward is called with O' and L' in the place of O and L. A rank's gradient of s covers its own queries;
it is summed over ranks with the gradients of all other weights.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tightfit.parallel.ring import attend_backward_in_ring, attend_in_ring


def ring_sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    first: Tensor | None,
    group: dist.ProcessGroup,
    *,
    scale: float,
) -> Tensor:
    """`ring_attention` with sinks [heads]."""
    out: Tensor = _RingSinkAttention.apply(query, key, value, sinks, first, scale, group.group_name)
    return out


class _RingSinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, first: Tensor | None, *settings: Any
    ) -> Tensor:
        scale, group = settings
        plain, plain_logs = attend_in_ring(query, key, value, first, scale, 0.0, group)
        logs = torch.logaddexp(plain_logs, sinks.to(plain_logs.dtype).view(1, -1, 1))
        out = plain * (plain_logs - logs).exp()[..., None].to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, logs, first)
        ctx.settings = scale, 0.0, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, logs, first = ctx.saved_tensors
        found = attend_backward_in_ring(d_out, query, key, value, out, logs, first, *ctx.settings)
        share = (sinks.to(logs.dtype).view(1, -1, 1) - logs).exp()
        d_sinks = -(share * (d_out.to(logs.dtype) * out.to(logs.dtype)).sum(-1)).sum((0, 2))
        return *found, d_sinks.to(sinks.dtype), None, None, None
