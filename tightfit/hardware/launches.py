"""Host time to launch a layer's kernels, by levers: measured on one host (benchmarks/calibrate_host.py).

Milliseconds of a layer's forward and backward, from steps of a model so narrow that its kernels take microseconds: an
eighth of each phase of eight layers, less the phase's time outside the layers. Such steps are bound by Python, autograd
and Triton's launchers. Hosts differ, and this one varies by about 20 % from minute to minute. A layer that is not
recomputed takes as long as a plain one. Tiles were measured at 2, 4 and 8 and are assumed linear.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """Milliseconds of one layer."""

    forward_ms: float
    backward_ms: float


REST = Launch(3.088, 2.125)
"""Of a step outside the layers: batch, embedding, loss."""
LAYER: dict[str, Launch] = {
    "": Launch(1.230, 1.805),
    "checkpoint_every=1": Launch(1.887, 4.112),
    "checkpoint_every=1 checkpoint_keep=attention": Launch(2.716, 4.807),
    "checkpoint_every=1 checkpoint_keep=matmuls": Launch(2.659, 4.321),
    "tiles=2": Launch(3.001, 10.104),
    "tiles=4": Launch(6.545, 18.333),
    "tiles=8": Launch(10.247, 33.364),
    "tiles=4 checkpoint_every=1": Launch(6.991, 24.253),
    "matmul=fp8-tensor": Launch(3.449, 3.613),
    "matmul=fp8-row": Launch(3.757, 3.379),
    "update_in_backward=true": Launch(1.251, 3.299),
    "offload=optimizer": Launch(1.782, 1.576),
}
"""By levers, as calibration.csv names them."""
STEP_IDLE_MS = 4.0
"""What a card idles in a step whose host is ahead: that waits for the loss and the gradients' norm, then launches anew.
Under the profiler 7.63 and 9.52 (step_profile.csv, "the GPU idles"), about half without it (family_truth.csv)."""
GAPS_MS = 1.0
"""Where the update is launched before that wait: a microsecond between two of some thousand kernels."""
NORM, BIAS = Launch(0.199, 0.183), Launch(0.017, 0.051)
"""Of one norm more than two in a layer (of queries and keys, or after blocks), and of a bias (family_truth.csv)."""
TENSOR_UPDATE_MS = 0.166
"""Of updating one tensor inside backward: of "update_in_backward=true", what it adds for a layer's nine."""
USUAL_TENSORS = 9
UPDATE_REST_MS = 1.514
UPDATE_MS: dict[str, float] = {"": 0.336, "optimizer_states=8bit": 0.709, "optimizer_states=factored": 3.3}
"""The update of a step: its fixed part (synchronisation, norms), and per layer by torch's fused AdamW, by one of our
kernels per weight, and by single torch operations."""
PIECE_LAUNCH_MS = 0.345
"""Of one piece of states on its way to the card and back: "offload=optimizer" updates a layer's seven in 2.41."""
FURTHER_CHUNK_MS = 0.1227
"""Of a factored update, per further chunk of a matrix."""
CHUNK_WEIGHTS = 2**22
"""levers/optimizer_states.py's; a test compares them."""
FROZEN, EXPANDED = Launch(0.08, 0.14), Launch(0.05, 0.05)
"""Of a projection with an adapter beyond a plain one: seven of them add 45 % to a layer (timed on a CPU, as shares of a
plain layer's); and of a coded matrix that is expanded."""
