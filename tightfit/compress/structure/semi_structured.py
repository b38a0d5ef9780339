"""2:4 weights as torch's semi-structured tensors, which GPUs from Ampere on multiply as they are.

Half the values and 2 bits each for their places are stored: 9/16 of the bytes in 16 bits. The hardware's rate is up to
twice that of dense products; torch's products with cuSPARSELt in a CUDA graph on an H200 were 1.15 to 1.5 times as fast
from 512 tokens on and slower for 64 (benchmarks/results/sparse_graphs.csv); called one by one they wait for the host.
Only inference: there is no gradient. CUDA only, half precision.
"""

import torch
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from tightfit.errors import UserError

SMALLEST_ROWS, SMALLEST_COLUMNS = 32, 64
"""Torch's sparse kernels take weights in multiples of these (16 bits)."""


def is_two_of_four(weight: Tensor) -> bool:
    """Whether at least two of every four neighbouring inputs are zero."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.detach().reshape(-1, 4) != 0).sum(1).amax() <= 2)


def use_sparse_products(model: nn.Module) -> int:
    """Put every 2:4 weight of linear layers on the GPU into sparse form; the number of weights changed."""
    changed = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear) or not is_two_of_four(module.weight):
            continue
        _check(module.weight)
        if module.weight.shape[0] % SMALLEST_ROWS == 0 and module.weight.shape[1] % SMALLEST_COLUMNS == 0:
            sparse = to_sparse_semi_structured(module.weight.detach())
            module.weight = nn.Parameter(sparse, requires_grad=False)
            changed += 1
    return changed


def _check(weight: Tensor) -> None:
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        raise UserError(
            f"2:4 products need half precision on a GPU, and these weights are {weight.dtype} on {weight.device.type}"
        )
