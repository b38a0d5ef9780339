"""Every split that a number of ranks allows, alone and in combination, as targets of the equivalence check.

The splits are the AXES below; a combination of k of them has two ranks on each but the first, which has the remaining
factor. Each axis is checked alone in all its variants (ZeRO stages, schedules, with and without sequence parallelism,
the meshes that tensor ranks can fill); a combination takes one variant of each: ZeRO-3, or ZeRO-1 beside a pipeline.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.models.presets import preset
from tightfit.prove.check_target import CheckTarget, miniature

AXES = ("data", "pipeline", "ring", "heads", "tensor", "expert")
"""`ring` and `heads` are the two kinds of context parallelism."""
FEW_ROWS = {"micro_batch": 2}
DENSE, ROUTED = "qwen3-8b", "qwen3-30b-a3b"
"""Presets of which miniatures are made: with grouped heads and norms of queries and keys; the same with experts."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {"": {}, "ZeRO-1": {"zero": 1}, "ZeRO-2": {"zero": 2}, "ZeRO-3": {"zero": 3}},
    "pipeline": {
        "1f1b": {},
        "gpipe": {"schedule": "gpipe"},
        "interleaved": {"schedule": "interleaved", "stages_per_rank": 2},
        "zero-bubble": {"schedule": "zero-bubble"},
        "zb-v": {"schedule": "zb-v", "stages_per_rank": 2},
        "2bw": {"schedule": "2bw"},
    },
    "ring": {"": {"zero": 3}},
    "heads": {"": {"zero": 3}},
    "tensor": {"": {}, "whole sequence": {"sequence_parallel": False}},
    "expert": {"": {}, "ZeRO-3": {"zero": 3}},
}
BESIDE_MESHES: dict[str, dict[str, Any]] = {
    "": {},
    "data": {"zero": 3},
    "pipeline": {},
    "ring": {"zero": 3},
    "heads": {"zero": 3},
}
"""Axes that are checked with two ranks beside a mesh of tensor ranks, with their layout fields."""


@dataclass(frozen=True)
class Split:
    """A layout to check, with its name in the findings."""

    name: str
    layout: Layout

    @property
    def target(self) -> CheckTarget:
        """A miniature of a routed model where experts are split, else of a dense one."""
        model = preset(ROUTED if self.layout.expert > 1 else DENSE)
        return miniature(CheckTarget(model, self.layout, passes=2, length=64))

    @property
    def is_trainable(self) -> bool:
        """Whether the layout can split the miniature; an odd number of tensor ranks cannot share its tokens."""
        target = self.target
        run = Run(layout=target.layout, levers=target.levers, spec=target.spec, sequence_length=target.length)
        return refused_by_trainer(run) is None


def splits_that_fit(ranks: int) -> list[Split]:
    """Single axes in all variants, hybrid sharding, tensor meshes, then combinations of two, three, … axes."""
    found = [*_alone(ranks), *_hybrid(ranks), *_meshes(ranks)]
    for size in range(2, len(AXES) + 1):
        found += [split for axes in combinations(AXES, size) if (split := mixture(ranks, axes))]
    return [split for split in found if split.is_trainable]


def mixture(ranks: int, axes: tuple[str, ...]) -> Split | None:
    """The split over `axes`: two ranks on each but the first, which has the remaining factor; None if under two."""
    rest = 2 ** (len(axes) - 1)
    if ranks % rest or ranks // rest < 2:
        return None
    degrees = dict.fromkeys(axes, 2) | {axes[0]: ranks // rest}
    shared = bool(set(axes) & {"data", "ring", "heads", "expert"})
    zero = (1 if "pipeline" in axes else 3) if shared else 0
    return Split(
        " × ".join(f"{axis} {degree}" for axis, degree in degrees.items()),
        Layout.of_axes(degrees, **FEW_ROWS, zero=zero),
    )


def _alone(ranks: int) -> Iterator[Split]:
    for axis, variants in VARIANTS.items():
        for name, fields in variants.items():
            yield Split(f"{axis} {ranks} {name}".strip(), Layout.of_axes({axis: ranks}, **FEW_ROWS | fields))


def _hybrid(ranks: int) -> list[Split]:
    """ZeRO-3 inside halves of the data ranks."""
    if ranks < 4 or ranks % 2:
        return []
    layout = Layout.of_axes({"data": ranks}, **FEW_ROWS, zero=3, shard_inside=ranks // 2)
    return [Split(f"data {ranks} ZeRO-3 inside {ranks // 2}", layout)]


def _meshes(ranks: int) -> Iterator[Split]:
    """2D, 2.5D and 3D meshes of all ranks, and of half of them beside two ranks of an axis in BESIDE_MESHES."""
    for beside, fields in BESIDE_MESHES.items():
        others = 2 if beside else 1
        for kind, depth in (("2d", 1), ("2.5d", 2), ("3d", 1)):
            tensor = ranks // others
            side = round(tensor ** (1 / 3)) if kind == "3d" else math.isqrt(tensor // depth)
            if side < 2 or (side**3 if kind == "3d" else depth * side**2) * others != ranks:
                continue
            rows = side * side if kind == "3d" else depth * side
            degrees = {"tensor": tensor} | ({beside: others} if beside else {})
            mesh = {"tensor_mesh": kind, "tensor_depth": depth, "micro_batch": rows}
            name = f"{beside} {others} × tensor {tensor} {kind}" if beside else f"tensor {tensor} {kind}"
            yield Split(name, Layout.of_axes(degrees, **mesh | fields))
