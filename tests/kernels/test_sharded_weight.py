"""Sharded output weights: two real processes compute what one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.group import Group
from tests.kernels.truth import HAS_GPU
from tightfit.errors import UserError
from tightfit.kernels.loss.linear_cross_entropy import IGNORE, LossDetails, linear_cross_entropy

PROCESSES, ROWS, HIDDEN, VOCAB = 2, 12, 5, 19
"""An odd vocabulary: ten rows of the weight here, nine there."""
OPTIONS: dict[str, Any] = {"softcap": 1.5, "label_smoothing": 0.1, "z_loss": 0.01, "impl": "torch", "chunk_bytes": 4096}


def whole() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels, the same in every process."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    labels = torch.randint(0, VOCAB, (ROWS,))
    labels[[3, 7]] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def close(found: Any, wanted: Any) -> None:
    assert torch.allclose(found, wanted, atol=1e-12), (found - wanted).abs().max()


def vocabulary_parallel(mesh: Any, plain_hidden: bool, impl: str) -> None:
    """Each process has its rows of the weight; loss, hidden gradient and own rows' gradient are one process's."""
    hidden, weight, bias, labels = whole()
    options = {**OPTIONS, "reduction": "mean"}
    wanted = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    wanted.backward()
    dtype = torch.float64 if impl == "torch" else torch.float32
    shared = [distribute_tensor(x.detach().to(dtype), mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)]
    own = hidden.detach().to(dtype).requires_grad_()
    given = own if plain_hidden else DTensor.from_local(own, mesh, [Replicate()])
    details = LossDetails()
    found = linear_cross_entropy(
        given,
        shared[0],
        labels,
        bias=shared[1],
        details=details,
        **{**options, "impl": impl, "weight_shards": "vocabulary" if plain_hidden else "auto"},
    )
    found.backward()
    tolerance = 1e-12 if impl == "torch" else 1e-5
    pairs: list[tuple[Any, Any]] = [(found, wanted), (own.grad, hidden.grad)]
    pairs += [(a.grad.full_tensor(), b.grad) for a, b in zip(shared, (weight, bias), strict=True)]
    for a, b in pairs:
        assert torch.allclose(a.double(), b, atol=tolerance), (impl, (a - b).abs().max())
    logits = 1.5 * torch.tanh((hidden @ weight.T + bias) / 1.5)
    assert details.correct is not None
    assert torch.equal(details.correct, logits.argmax(-1) == labels)


def losses_of_rows(mesh: Any) -> None:
    """Unreduced losses, whose gradients are computed in backward."""
    hidden, weight, _, labels = whole()
    row_weights = torch.linspace(0, 1, ROWS, dtype=torch.float64)
    (linear_cross_entropy(hidden, weight, labels, reduction="none", **OPTIONS) * row_weights).sum().backward()
    shared = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    own = hidden.detach().requires_grad_()
    replicated = DTensor.from_local(own, mesh, [Replicate()])
    (linear_cross_entropy(replicated, shared, labels, reduction="none", **OPTIONS) * row_weights).sum().backward()
    close(own.grad, hidden.grad)
    close(shared.grad.full_tensor(), weight.grad)


class Model(nn.Module):
    """A layer and a head whose weight is used without calling the head: FSDP2 does not unshard it then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(torch.tanh(self.layer(x)), self.head.weight, labels, divisor=ROWS, **OPTIONS)


def data_parallel(mesh: Any, head_apart: bool) -> None:
    """FSDP2 over two halves of the rows, three steps of SGD, against one process with all rows."""
    hidden, _, _, labels = whole()
    torch.manual_seed(1)
    alone, model = Model(), Model()
    held: Any = model
    model.load_state_dict(alone.state_dict())
    if head_apart:
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    half = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(3):
        (alone(hidden.detach(), labels)).backward()
        (model(hidden.detach()[half], labels[half]) * PROCESSES).backward()  # gradients are averaged over processes
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model.head.weight, DTensor)
        close(held.head.weight.full_tensor(), alone.head.weight)
        close(held.layer.weight.full_tensor(), alone.layer.weight)


def mistakes(mesh: Any) -> None:
    hidden, weight, bias, labels = whole()
    replicated = DTensor.from_local(hidden.detach(), mesh, [Replicate()])
    by_rows = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    cases: list[tuple[str, dict[str, Any]]] = [
        ("the weight is a plain tensor", {"hidden": replicated, "weight": weight}),
        ("split by rows", {"hidden": replicated, "weight": distribute_tensor(weight.detach(), mesh, [Shard(1)])}),
        ("replicated", {"hidden": distribute_tensor(hidden.detach(), mesh, [Shard(0)]), "weight": by_rows}),
        ("to_local", {"hidden": replicated, "weight": by_rows, "weight_shards": "data"}),
        ("shard both", {"hidden": replicated, "weight": by_rows, "bias": bias}),
        ("does not split", {"hidden": replicated, "weight": by_rows, "impl": "eager"}),
    ]
    for message, arguments in cases:
        with pytest.raises(UserError, match=message):
            linear_cross_entropy(labels=labels, **arguments)


def work() -> int:
    """Everything above on this rank, and how many ranks there are."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for plain_hidden, impl in ((False, "torch"), (True, "torch"), *([] if HAS_GPU else [(False, "triton")])):
        vocabulary_parallel(mesh, plain_hidden, impl)
    losses_of_rows(mesh)
    for head_apart in (False, True):
        data_parallel(mesh, head_apart)
    mistakes(mesh)
    return mesh.size()


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    with Group(PROCESSES, tmp_path / "meeting") as pair:
        assert pair.run(work) == [PROCESSES] * PROCESSES
