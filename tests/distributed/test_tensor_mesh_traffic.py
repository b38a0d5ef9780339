"""What ranks of 2D, 2.5D and 3D meshes send and keep, counted on real processes, is what the papers' formulas say."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import sampled, thorough
from tests.distributed.group import Group
from tests.distributed.test_tensor_mesh import CUBE, DEEP, NINE, SPECS, SQUARE, THREES
from tests.distributed.training import GEMMA, GPT2
from tightfit.jobs.layout import Layout
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.plan.seconds.tensor_mesh import MeshMessages, Message
from tightfit.prove.check_target import CheckTarget
from tightfit.prove.equivalence import build_trained

Make = Callable[[int], Group]
Counted = dict[str, int]
CPU = torch.device("cpu")
LENGTH = 32
NAMES = {
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}
"""Collectives as torch dispatches them."""
GPT = replace(GPT2, heads=4, kv_heads=4, head_dim=8, mlp_size=128)
"""A layer of the papers: h = 32, 4h inside its MLP, 12 h² weights."""
CASES = {
    "2d-gpt": (GPT, SQUARE),
    "2d-nine-gemma": (replace(GEMMA, **THREES, kv_heads=3, vocab_size=96), NINE),
    "2.5d-gpt": (GPT, DEEP),
    "3d-gpt": (GPT, CUBE),
    "3d-joint": (SPECS["joint"], CUBE),
    "3d-one-key": (SPECS["one-key"], CUBE),
}


class Collectives(TorchDispatchMode):
    """Counts elements of every collective, gathered: what a rank holds after an all-gather, before a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            found = args[1 if func._opname == "_reduce_scatter_base_" else 0]
            while isinstance(found, list) and isinstance(found[0], list):
                found = found[0]
            count = sum(t.numel() for t in found) if isinstance(found, list) else found.numel()
            self.elements[NAMES[func._opname]] += count
        return func(*args, **(kwargs or {}))


@cache
def made_mesh(layout: Layout) -> DeviceMesh:
    """One for all tests of a process: every mesh makes process groups."""
    return make_mesh(layout, "cpu")


def counted(spec: ModelSpec, layout: Layout) -> tuple[Counted, Counted]:
    """Elements by collective of a forward pass, and of its backward."""
    target = CheckTarget(spec, layout, length=LENGTH)
    trained = build_trained(target, made_mesh(layout), CPU)
    forward, backward = Collectives(), Collectives()
    batch = target.micro_batches(0)[0]
    with forward:
        loss = trained.decoder(**batch).loss
    with backward:
        loss.backward()
    return dict(forward.elements), dict(backward.elements)


def told(messages: list[Message]) -> Counter[str]:
    found: Counter[str] = Counter()
    for message in messages:
        assert message.elements == int(message.elements)
        found[message.kind] += int(message.elements)
    return found


@sampled(4)
@pytest.mark.parametrize("name", [thorough(name) if layout is NINE else name for name, (_, layout) in CASES.items()])
def test_what_is_sent_is_the_formula(group: Make, name: str) -> None:
    """Of every collective, forward and backward, on every rank."""
    spec, layout = CASES[name]
    messages = MeshMessages(spec, layout, layout.micro_batch * LENGTH)
    for found in group(layout.ranks).run(counted, spec, layout):
        for backward, sent in enumerate(found):
            expected = told(messages.layer(backward=bool(backward)) * spec.layers)
            expected += told(messages.ends(backward=bool(backward)))
            if not backward:
                expected["all_reduce"] += 2  # the loss, over columns and depth; what it combines is in an operator
            assert sent == dict(expected), "backward" if backward else "forward"


def test_layers_send_what_the_papers_say() -> None:
    """Xu and You 2021, table 1, without the log₂ q of a tree and the recomputed forward; Wang et al. 2022: rows / d;
    Bian et al. 2021: of X, W and Y each (q − 1)/q³ sent, which is 1/q² gathered less a rank's own 1/q³."""
    n, h = 4 * LENGTH, GPT.hidden_size
    for layout, depth in ((SQUARE, 1), (DEEP, 2)):
        forward, backward = (told(MeshMessages(GPT, layout, n).layer(backward=b)) for b in (False, True))
        q = layout.tensor_axes[1]
        assert forward["broadcast"] == (7 * n * h // depth + 12 * h * h) // q
        assert (backward["broadcast"], backward["reduce"]) == (forward["broadcast"], forward["broadcast"])
    cubic = MeshMessages(GPT, CUBE, n)
    statistics = 2 * 2 * 2 * n // 4  # two norms of two numbers a row, of two ranks
    forward, backward = (told(cubic.layer(backward=b)) for b in (False, True))
    assert forward["all_gather"] - statistics == (7 * n * h + 12 * h * h) // 4
    assert forward["reduce_scatter"] == (3 + 1 + 4 + 1) * n * h // 4
    assert backward["all_gather"] == (7 * n * h + 12 * h * h + 9 * n * h) // 4
    assert backward["reduce_scatter"] == (7 * n * h + 12 * h * h) // 4


def kept(spec: ModelSpec, layout: Layout) -> int:
    """Numbers that autograd keeps of activations, but for numbers per row."""
    target = CheckTarget(spec, layout, length=LENGTH)
    trained = build_trained(target, made_mesh(layout) if layout.ranks > 1 else None, CPU)
    weights = {p.untyped_storage().data_ptr() for p in trained.decoder.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.shape[-1:] != (1,) and storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trained.decoder(**target.micro_batches(0)[0]).loss
    assert loss is not None
    return sum(found.values())


def kept_by_a_layer(spec: ModelSpec, layout: Layout) -> int:
    """The third of three: ends and shared tables left out."""
    three, two = (kept(replace(spec, layers=layers), layout) for layers in (3, 2))
    return three - two


@sampled(3)
@pytest.mark.parametrize("layout", [SQUARE, DEEP, CUBE], ids=["2d", "2.5d", "3d"])
def test_a_rank_keeps_its_share_of_activations(group: Make, layout: Layout) -> None:
    """1/q² of a layer's activations, 1/(d q²), 1/q³: one in as many as there are ranks.

    Both norms' inputs and outputs; queries, keys, values and attention's output, that once more as o takes it, and a
    number per head; gate, its activation, up and their product. On a CPU also the mask of packed rows, whole.
    """
    spec = replace(SPECS["llama"], kv_heads=4)
    numbers = 4 * spec.hidden_size + 3 * spec.query_size + 2 * spec.kv_size + spec.heads + 4 * spec.mlp_size
    mask = layout.micro_batch // layout.row_parts * LENGTH * LENGTH
    expected = layout.micro_batch * LENGTH * numbers // layout.ranks + mask
    assert set(group(layout.ranks).run(kept_by_a_layer, spec, layout)) == {expected}
