"""Layouts and adapters in words: only what differs from the defaults."""

from tightfit.jobs.layout import Layout
from tightfit.jobs.projections import PROJECTIONS
from tightfit.jobs.workload import Workload


def describe_layout(layout: Layout, *, alone: str = "one GPU") -> str:
    """`pipeline 4 (1f1b) × data 8 (ZeRO-1) × tensor 8, micro-batch 2`; `alone` where nothing is split."""
    parts = []
    if layout.pipeline > 1:
        pieces = f" × {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        parts.append(f"pipeline {layout.pipeline} ({layout.schedule}{pieces})")
    zero = f"ZeRO-{layout.zero}" if layout.zero else "DDP"
    if layout.data > 1 or layout.zero:
        parts.append(f"data {layout.data} ({zero})")
    if layout.context > 1:
        parts.append(f"context {layout.context} {_ring(layout)}")
    if layout.tensor > 1:
        mesh = "" if layout.tensor_mesh == "1d" else f" {describe_mesh(layout)}"
        parts.append(f"tensor {layout.tensor}{mesh}")
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{' × '.join(parts) or alone}{experts}, micro-batch {layout.micro_batch}"


def describe_adapters(workload: Workload) -> str:
    """`rank 4 on q, v: 5,120 weights; 753,312 frozen in int4 g64 asym`; empty where the model itself is trained."""
    adapted, spec = workload.adapted, workload.spec
    if adapted is None:
        return ""
    where = "all projections" if adapted.projections == PROJECTIONS else ", ".join(adapted.projections)
    held = workload.precision if adapted.base.scheme is None else adapted.base.scheme.describe()
    return f"rank {adapted.rank} on {where}: {adapted.params(spec):,} weights; {spec.params():,} frozen in {held}"


def describe_mesh(layout: Layout) -> str:
    """`in a line` or `on a 3d mesh (2 × 2 × 2)`."""
    if layout.tensor_mesh == "1d":
        return "in a line"
    axes = layout.tensor_axes[1:] if layout.tensor_mesh == "2d" else layout.tensor_axes
    return f"on a {layout.tensor_mesh} mesh ({' × '.join(map(str, axes))})"


def _ring(layout: Layout) -> str:
    """How context ranks communicate: `(heads)`, `(ring)` or, with both, `(ring of 2)`."""
    if layout.ring == 1:
        return "(heads)"
    return "(ring)" if layout.ring == layout.context else f"(ring of {layout.ring})"
