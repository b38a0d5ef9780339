"""What docs and docstrings say of each ZeRO stage: what a rank sends, and which weights are whole when."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import covering, sampled
from tests.distributed.training import CPU, TIED, Case, build, micro_batches
from tests.parallel.fake import fake_group
from tests.train.models import TINY
from tightfit.collectives.shards import is_shard
from tightfit.models.decoder import Decoder
from tightfit.parallel.data import micro_batch
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.evaluation import evaluate
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

WORLD = 8
SMALL = 64
"""Messages of fewer elements are counts and norms, not weights or gradients."""


class Traffic(TorchDispatchMode):
    """Counts elements by collective and dtype: what all ranks together hold of each all-gather or reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            place = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}.get(func._opname, 0)
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            for tensor in tensors:
                if tensor.numel() >= SMALL:
                    self.elements[func._opname, tensor.dtype] += tensor.numel()
        return func(*args, **(kwargs or {}))


def sent_in_a_step(case: Case) -> tuple[Counter[tuple[str, torch.dtype]], Decoder]:
    """Of the third step: DDP settles its buckets in the first two."""
    with fake_group(WORLD):
        mesh = make_mesh(case.layout, "cpu")
        decoder, module, optimizer = build(case, mesh)
        traffic = Traffic()
        watches: list[AbstractContextManager[object]] = [nullcontext(), nullcontext(), traffic]
        for watch in watches:
            with watch:
                train_step(module, optimizer, micro_batches(case, 0, 0), CPU, 1e-3, LossScale(), ranks=Ranks.of(mesh))
        return traffic.elements, decoder


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@sampled(3)
@pytest.mark.parametrize(
    ("precision", "micro_batches_each"), covering(list(product(("fp32", "bf16", "pure-bf16"), (1, 2))))
)
def test_traffic_is_what_the_table_says(precision: str, micro_batches_each: int) -> None:
    narrow = torch.float32 if precision == "fp32" else torch.bfloat16
    reduced = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    M = micro_batches_each
    for zero in range(4):
        case = Case(data=WORLD, zero=zero, micro_batch=1, rows=WORLD * M, precision=precision)  # type: ignore[arg-type]
        sent, decoder = sent_in_a_step(case)
        P, layers = parameters(decoder), parameters(decoder.layers)
        gathers = {0: 0, 1: P, 2: P, 3: M * (P + layers)}[zero]
        reductions = {0: 0, 1: P, 2: M * P, 3: M * P}[zero]
        expected = {
            ("allreduce_", narrow): P if zero == 0 else 0,
            ("_allgather_base_", narrow): gathers,
            ("_reduce_scatter_base_", reduced): reductions,
        }
        assert dict(sent) == {kind: count for kind, count in expected.items() if count}, f"zero {zero}"


def whole_parts(decoder: Decoder) -> set[str]:
    """The parts of the model that are gathered now."""
    parts = {"embed": decoder.embed, "norm": decoder.norm, "head": decoder.head, "layers": decoder.layers}
    return {name for name, part in parts.items() if not any(is_shard(p) for p in part.parameters())}


EVERYTHING = {"embed", "norm", "head", "layers"}


@pytest.mark.parametrize(
    ("zero", "tied", "after_forward", "between"),
    [
        (1, False, EVERYTHING, EVERYTHING),
        (2, False, EVERYTHING, EVERYTHING),
        (3, False, {"norm", "head"}, set()),
        (3, True, {"norm", "head", "embed"}, set()),
    ],
)
def test_weights_are_gathered_as_long_as_the_table_says(
    zero: int, tied: bool, after_forward: set[str], between: set[str]
) -> None:
    with fake_group(WORLD):
        case = Case(spec=TIED if tied else TINY, data=WORLD, zero=zero, micro_batch=1, rows=2 * WORLD)
        decoder, module, _ = build(case, make_mesh(case.layout, "cpu"))
        seen = []
        for number, batch in enumerate(micro_batches(case, 0, 0)):
            with micro_batch(module, last=number == 1):
                loss = module(**batch).loss
                seen.append(whole_parts(decoder))
                loss.backward()
                seen.append(whole_parts(decoder))
    assert seen == [after_forward, between, after_forward, set()]


@pytest.mark.parametrize("zero", [2, 3])
def test_evaluation_lets_go_of_what_it_gathered(zero: int) -> None:
    with fake_group(WORLD):
        case = Case(data=WORLD, zero=zero, micro_batch=1)
        mesh = make_mesh(case.layout, "cpu")
        decoder, _, _ = build(case, mesh)
        evaluate(decoder, micro_batches(case, 0, 0), CPU, Ranks.of(mesh))
        assert whole_parts(decoder) == set()


def watch_head(decoder: Decoder, see: Callable[[torch.Tensor], None]) -> None:
    decoder.norm.register_forward_hook(lambda *_: see(decoder.head.weight))


@sampled(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_fused_loss_reads_the_whole_head(zero: int, tied: bool) -> None:
    with fake_group(WORLD):
        case = Case(spec=TIED if tied else TINY, data=WORLD, zero=zero, micro_batch=1, precision="bf16")
        decoder, module, _ = build(case, make_mesh(case.layout, "cpu"))
        seen: list[torch.Tensor] = []
        watch_head(decoder, seen.append)
        module(**micro_batches(case, 0, 0)[0])
    assert [(is_shard(w), tuple(w.shape), w.dtype) for w in seen] == [(False, (96, 32), torch.bfloat16)]
