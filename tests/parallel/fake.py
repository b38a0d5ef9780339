"""A fake process group: this process is one rank of many, the others always agree, and nothing is sent.

Torch's fake collectives leave some results as the memory was, others in other versions. Here every result is defined,
so that a step stays finite: gathered pieces are all this rank's own, of a reduction over ranks this rank's piece comes
back as if the others had added nothing, and what is received is zero.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.memory.simulation import fake_world


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    with fake_world(world, rank), Answers():
        yield


class Answers(TorchDispatchMode):
    """Writes what a collective is said to have brought, once the fake one has returned."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func._opname in IN_PLACE:
            IN_PLACE[func._opname](args[0], args[1])
        elif func.namespace == "_c10d_functional" and func._opname in NEW:
            NEW[func._opname](result, args[0])
        return result


def gather(gathered: Tensor, own: Tensor) -> None:
    for piece in gathered.split(len(own)):
        piece.copy_(own)


def scatter(piece: Tensor, reduced: Tensor) -> None:
    """The first piece, which has the shape of every rank's."""
    piece.copy_(reduced.narrow(0, 0, len(piece)))


def receive(tensors: list[Tensor], _: object) -> None:
    torch._foreach_zero_(tensors)


IN_PLACE: dict[str, Callable[..., None]] = {
    "_allgather_base_": gather,
    "_reduce_scatter_base_": scatter,
    "recv_": receive,
}
NEW = {"all_gather_into_tensor": gather, "reduce_scatter_tensor": scatter}
"""Of DTensor: these return their result, and along the first dimension."""
