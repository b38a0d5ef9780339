"""Which backend of attention is fastest here: measured once per class of shapes, and remembered.

A class is what speed depends on: card, torch, dtype, heads, head size, the length to the next power of two, whether
there is a window, a cap, documents, and whether gradients are wanted. Each candidate runs on random tensors of the
shapes at hand, with its backward pass where one will come; the fastest median wins, the first of equals. What was
found is kept for the process and in a file for the next one, so that a choice, once made on a machine, stays.
Measuring takes milliseconds, but FlexAttention, a candidate where there is a window, a cap or documents, is compiled
first: some ten seconds, once per machine. It happens in a thread of its own with random numbers of its own: what is set
for the caller's thread (hooks of activation checkpointing, autocast, gradient mode) neither sees nor touches it.
"""

import contextlib
import json
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tightfit.durable import durable_file
from tightfit.kernels.operators import on_device_of

CACHE = Path("~/.cache/tightfit/attention.json")
WARM_UPS, ROUNDS = 3, 7
TIE = 1.01
"""A later candidate must be this much faster: differences below are noise, and noise must not choose."""
Candidate = Callable[[Tensor, Tensor, Tensor], Tensor]
Name = TypeVar("Name", bound=str)

_known: dict["Asked", str] = {}
_measured: dict["Asked", dict[str, float]] = {}


@dataclass(frozen=True)
class Asked:
    """A class of shapes, on a kind of card."""

    device: str
    torch: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: bool
    softcap: bool
    documents: bool
    gradients: bool

    @staticmethod
    def about(query: Tensor, key: Tensor, window: bool, softcap: bool, documents: bool) -> "Asked":
        """The class of these tensors."""
        gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        return Asked(
            torch.cuda.get_device_name(query.device), torch.__version__, str(query.dtype), query.shape[1], key.shape[1],
            query.shape[3], 1 << (query.shape[2] - 1).bit_length(), window, softcap, documents, gradients,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The key under which a choice is kept in a file."""
        return json.dumps(asdict(self), sort_keys=True)


def chosen(asked: Asked, candidates: Mapping[Name, Candidate], like: tuple[Tensor, Tensor], *, otherwise: Name) -> Name:
    """The fastest of `candidates` for tensors like query and key; `otherwise` where none could run."""
    if asked not in _known:
        kept = _read().get(asked.text)
        if kept is None or kept not in candidates:
            with ThreadPoolExecutor(1) as apart:
                times = apart.submit(measure, candidates, like, gradients=asked.gradients).result()
            _measured[asked] = times
            kept = fastest(times) or otherwise
            _keep(asked, kept)
        _known[asked] = kept
    found: Any = _known[asked]
    return found


def measurements() -> dict[str, dict[str, float]]:
    """Milliseconds of every candidate measured in this process, by class."""
    return {asked.text: times for asked, times in _measured.items()}


def fastest(times: Mapping[str, float]) -> str | None:
    """The candidate of least time; an earlier one unless a later one is clearly faster."""
    best = None
    for name, milliseconds in times.items():
        if best is None or milliseconds * TIE < times[best]:
            best = name
    return best


def measure(candidates: Mapping[Any, Candidate], like: tuple[Tensor, Tensor], *, gradients: bool) -> dict[str, float]:
    """Median milliseconds of each candidate that runs at all, on random tensors like query and key."""
    query, key = like
    times: dict[str, float] = {}
    generator = torch.Generator(query.device).manual_seed(0)
    with torch.enable_grad() if gradients else torch.no_grad(), on_device_of(query):
        tensors = [_random_like(x, generator).requires_grad_(gradients) for x in (query, key, key)]
        given = _random_like(query, generator) if gradients else None
        for name, candidate in candidates.items():
            # Unsupported shapes and cards raise RuntimeError, failed compilations all kinds of errors.
            with contextlib.suppress(Exception):
                times[name] = _median_ms(candidate, tensors, given)
    return times


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers in the layout of x: [B, heads, T, D] is mostly a view of [B, T, heads, D]."""
    return torch.empty_like(x, requires_grad=False).normal_(generator=generator)


def _median_ms(candidate: Candidate, tensors: list[Tensor], given: Tensor | None) -> float:
    times = []
    for _ in range(WARM_UPS + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = candidate(*tensors)
        if given is not None:
            torch.autograd.grad(out, tensors, given)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UPS:])


def _read() -> dict[str, str]:
    """What was chosen before; a file that is missing or damaged is no reason to fail."""
    try:
        read = json.loads(CACHE.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _keep(asked: Asked, name: str) -> None:
    with contextlib.suppress(OSError), durable_file(CACHE.expanduser()) as file:
        file.write_text(json.dumps({**_read(), asked.text: name}, indent=1) + "\n", encoding="utf-8")
