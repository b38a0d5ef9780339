"""The numbers that 4-bit float and 1-bit codes stand for, and the 8-bit map that NF4's scales are coded with.

NF4: quantiles of a standard normal distribution, scaled to ±1 and with an exact zero (Dettmers et al. 2023, app. E).
e2m1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0). Code 8 is −0.
"""

import torch
from torch import Tensor

from tightfit.models.quantized.scheme import Kind

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
BINARY = (-1.0, 1.0)
TABLES: dict[Kind, tuple[float, ...]] = {"nf4": NF4, "mxfp4": E2M1, "nvfp4": E2M1, "binary": BINARY}
"""What each code of a kind means before it is scaled. Integers and e4m3 need no table."""
NEGATIVE_ZERO: dict[Kind, int] = {"mxfp4": 8, "nvfp4": 8}


def table(kind: Kind, device: torch.device | str = "cpu") -> Tensor:
    """The numbers of the codes of `kind`, float32."""
    return torch.tensor(TABLES[kind], device=device)


def nearest(values: Tensor, kind: Kind) -> Tensor:
    """The code (uint8) whose number is nearest to each of the scaled `values`; −0 is never chosen."""
    numbers = TABLES[kind]
    order = sorted((i for i in range(len(numbers)) if i != NEGATIVE_ZERO.get(kind)), key=numbers.__getitem__)
    ascending = torch.tensor([numbers[i] for i in order], device=values.device)
    codes = torch.tensor(order, dtype=torch.uint8, device=values.device)
    return codes[torch.bucketize(values, (ascending[1:] + ascending[:-1]) / 2)]


def _dynamic_numbers() -> tuple[float, ...]:
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += middles + [-value for value in middles]
    return tuple(sorted(values))


DYNAMIC_NUMBERS = _dynamic_numbers()
"""Kept as Python numbers: a cached tensor would be real under FakeTensorMode, or fake outside it."""


def dynamic_map() -> Tensor:
    """bitsandbytes' signed 8-bit dynamic map: 256 numbers from −1 to 1, ascending, denser near zero."""
    return torch.tensor(DYNAMIC_NUMBERS)
