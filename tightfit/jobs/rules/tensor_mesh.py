"""Settings that tensor ranks on a 2D, 2.5D or 3D mesh do not go with: shapes of mesh and model, and other splits."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LAYOUT_RULES, RUN_RULES, Run, rule
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout

SHAPES = {"2d": "q × q", "2.5d": "tensor_depth × q × q", "3d": "q × q × q"}


@rule(LAYOUT_RULES, "tensor_mesh", "tensor_depth", "tensor")
def tensor_ranks_fill_their_mesh(layout: "Layout") -> str | None:
    kind, depth = layout.tensor_mesh, layout.tensor_depth
    if (kind == "2.5d") != (depth > 1):
        return (
            f"layout.tensor_depth is {depth} on a {kind} mesh; 2.5d meshes alone have a depth, of at least 2: change "
            "one of them"
        )
    if kind == "1d":
        return None
    axes = layout.tensor_axes
    if min(axes[1:]) < 2 or axes[0] * axes[1] * axes[2] != layout.tensor:
        return (
            f"layout.tensor is {layout.tensor}, but layout.tensor_mesh={kind} has {SHAPES[kind]} ranks with q of at "
            "least 2; give that many"
        )
    return None


def beside_a_mesh(layout: "Layout", split: str, reason: str) -> str | None:
    """A sentence if ranks of `split` are used beside a mesh of tensor ranks, with the `reason` why they cannot be."""
    degree, kind = getattr(layout, split), layout.tensor_mesh
    if kind == "1d" or degree == 1:
        return None
    return f"layout.{split} is {degree}, {reason}, beside layout.tensor_mesh={kind}; set it to 1 or tensor_mesh to 1d"


@rule(RUN_RULES, "layout.tensor_mesh", "model")
def a_mesh_splits_dense_layers(run: Run) -> str | None:
    kind, spec = run.layout.tensor_mesh, run.spec
    if kind == "1d" or spec is None:
        return None
    if spec.experts is not None:
        return f"layout.tensor_mesh is {kind}, but {spec.family} routes whole tokens to experts; set it to 1d"
    if spec.latent is not None:
        return f"layout.tensor_mesh is {kind}, but all heads of {spec.family} share latent vectors; set it to 1d"
    return indivisible_blocks(spec, kind, run.layout.tensor_axes[1])


def indivisible_blocks(spec: ModelSpec, kind: str, side: int) -> str | None:
    """A sentence about the first size that `side` ranks along an axis cannot share evenly; a 3d mesh splits twice."""
    parts = side * side if kind == "3d" else side
    sizes = [
        ("attention heads", spec.heads, side),
        ("numbers of all keys", spec.kv_size, side),
        ("hidden columns", spec.hidden_size, parts),
        ("numbers of all queries", spec.query_size, parts),
        ("MLP columns", spec.mlp_size, parts),
    ]
    for what, size, share in sizes:
        if size % share:
            return (
                f"layout.tensor_mesh={kind} with {side} ranks along an axis cuts the model's {size} {what} in {share}, "
                "which does not divide them; take another number of ranks"
            )
    if spec.kv_heads % side and (side % spec.kv_heads or spec.qk_norm_joint):
        return (
            f"layout.tensor_mesh={kind} has {side} ranks along heads, but the model has {spec.kv_heads} key heads, "
            "which they cannot share; take another number of ranks"
        )
    if (side - 1) * -(-spec.vocab_size // side) >= spec.vocab_size:
        return f"layout.tensor_mesh={kind} leaves a rank without any of {spec.vocab_size} tokens; take fewer ranks"
    return None


@rule(RUN_RULES, "layout.tensor_mesh", "layout.micro_batch")
def a_mesh_deals_out_rows(run: Run) -> str | None:
    layout = run.layout
    if layout.tensor_mesh == "1d" or layout.micro_batch % layout.row_parts == 0:
        return None
    return (
        f"layout.micro_batch is {layout.micro_batch}, but a {layout.tensor_mesh} mesh of {layout.tensor} ranks deals "
        f"out rows in {layout.row_parts} parts; give a multiple of that"
    )
