"""What a 2D, 2.5D or 3D mesh of tensor ranks holds that a line of them does not.

Activations need little of their own: on a mesh a rank has `rows / parts` rows of a micro-batch, and of those a q-th of
heads, columns and residual stream, which is what LocalShape counts with (Xu and You 2021: 1/q² of all activations; Wang
et al. 2022: 1/(d q²); Bian et al. 2021: 1/q³). What differs: the product of a gated MLP is kept, as down's weight
gradient is made of it by another product (saved.py), the head's columns are gathered for the loss, and products of a 3D
mesh gather q times what a rank has of both operands and scatter q times its result (collectives/cubic.py):

    S, I: stream and MLP columns of a rank    down's backward: dY q S, its input q I, the input's gradient q I and I
    W: a gathered matrix, twice               gate and up's: their input q S, both gradients 2 q I, dX q S and S

The embedding gathers its columns over depth ranks, forward and backward, which is most of a first stage's. Not counted:
the float32 temporaries of norms, which are no fused kernels on a mesh, but smaller than these.
"""

from typing import NamedTuple

from tightfit.memory.formulas.local_shape import LocalShape


class CubicMlp(NamedTuple):
    """What the products of an MLP on a 3D mesh take beside what is kept."""

    forward_bytes: int
    """Of the down projection: its input gathered, its result before and after it is scattered."""
    down_backward_bytes: int
    """Of the down projection's backward: gathered gradients and input, and the gradient of its input."""
    up_backward_bytes: int
    """Of the backward of gate and up."""


def cubic_mlp(shape: LocalShape) -> CubicMlp | None:
    """None on other meshes, whose products send blocks one by one."""
    spec, side = shape.spec, shape.tensor
    if not shape.mesh_ranks or shape.mesh_ranks != side**3:
        return None
    stream_bytes, inner_bytes = shape.stream_bytes, shape.inner_bytes(spec.mlp_size)
    weight_bytes = 2 * shape.element_bytes * spec.hidden_size * spec.mlp_size // side**2  # as it comes, and in order
    return CubicMlp(
        forward_bytes=side * inner_bytes + (side + 1) * stream_bytes + weight_bytes,
        down_backward_bytes=side * stream_bytes + (2 * side + 1) * inner_bytes + weight_bytes,
        up_backward_bytes=(2 * side + 1) * stream_bytes + spec.up_projections * (side * inner_bytes + weight_bytes),
    )


def cubic_table_bytes(shape: LocalShape) -> int:
    """An embedding on a 3D mesh with the columns of all its depth ranks, as they come and in order; 0 on others."""
    if not shape.mesh_ranks or shape.mesh_ranks != shape.tensor**3:
        return 0
    return 2 * shape.columns(shape.spec.vocab_size) * shape.columns(shape.spec.hidden_size) * shape.element_bytes


def gathered_head_bytes(shape: LocalShape) -> int:
    """The output projection's rows of this rank with all their columns, while the loss multiplies with them."""
    spec = shape.spec
    return shape.columns(spec.vocab_size) * spec.hidden_size * shape.element_bytes if shape.mesh_ranks else 0
