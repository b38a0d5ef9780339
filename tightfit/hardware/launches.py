"""Host time to launch a layer's kernels, by levers: measured on two hosts (benchmarks/calibrate_host.py).

Milliseconds of a layer's forward and backward, from steps of a model so narrow that its kernels take microseconds: the
time of a pass through eight layers, less its time outside the layers, divided by eight. Such steps are bound by Python,
autograd and Triton's launchers. Hosts differ, and one host varies by about 20 % from minute to minute. With
checkpointing, a layer that is not recomputed takes as long as a plain one. Tiles were measured at 2, 4 and 8 and are
assumed linear.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """Milliseconds of one layer."""

    forward_ms: float
    backward_ms: float

    def beyond(self, base: "Launch") -> "Launch":
        """What this takes longer than `base`."""
        return Launch(self.forward_ms - base.forward_ms, self.backward_ms - base.backward_ms)


NOTHING = Launch(0.0, 0.0)
REST = Launch(2.992, 1.783)
"""Launches of a step outside the layers: batch, embedding, loss."""
LAYER: dict[str, Launch] = {
    "": Launch(1.211, 1.645),
    "checkpoint_every=1": Launch(1.751, 3.886),
    "checkpoint_every=1 checkpoint_keep=attention": Launch(2.549, 4.247),
    "checkpoint_every=1 checkpoint_keep=matmuls": Launch(2.570, 4.031),
    "tiles=2": Launch(2.854, 8.933),
    "tiles=4": Launch(6.111, 18.267),
    "tiles=8": Launch(10.119, 32.643),
    "tiles=4 checkpoint_every=1": Launch(7.050, 22.786),
    "matmul=fp8-tensor": Launch(3.285, 3.423),
    "matmul=fp8-row": Launch(3.491, 3.050),
    "offload=optimizer": Launch(1.607, 1.552),
}
"""Launches of one layer by levers, as calibration.csv names them."""
STEP_IDLE_MS = 4.0
"""Idle time of a card per step though its host is ahead: the host waits for the loss and the gradients' norm, and only
then launches further kernels. Under the profiler 7.63 and 9.52 (step_profile.csv, "the GPU idles"), about half without
it (family_truth.csv)."""
GAP_SHARE = 1 / 40
"""Where the update is launched before that wait, a card idles only in gaps between kernels: this share of the host's
launch time."""
REPLAY_MS = 0.5
"""Host time of a micro-batch that is a CUDA graph: its batch, and one launch."""
SLOW_HOST = 2.0
"""The launch time of a slow host, as a multiple of the measured one."""
NORM, BIAS = Launch(0.199, 0.183), Launch(0.017, 0.051)
"""One norm beyond a layer's two (of queries and keys, or after blocks), and one bias."""
EXPERTS, ROPE_AND_GATE = Launch(1.254, 1.150), Launch(0.481, 0.532)
"""Routing tokens to experts, beyond a plain MLP; and rope and gate, which GPT-2's layers lack."""
MATRIX_UPDATE_MS, VECTOR_UPDATE_MS, LATE_UPDATE_MS = 0.296, 0.060, 1.034
"""Updates inside backward: of a matrix there, of a norm or a bias after it, and the fixed part after it. Means over
families, scaled up from a host that launched a plain layer in two thirds of the time."""
USUAL_TENSORS, USUAL_MATRICES = 9, 7
UPDATE_REST_MS = 1.544
UPDATE_MS: dict[str, float] = {"": 0.316, "optimizer_states=8bit": 0.660, "optimizer_states=factored": 3.042}
"""The update of a step: its fixed part (synchronisation, norms), and per layer of nine tensors by torch's fused AdamW,
by one of our kernels per weight, and by single torch operations."""
PIECE_LAUNCH_MS = 0.336
"""One piece of offloaded states, copied in, updated, copied out: "offload=optimizer" takes 2.35 for a layer's seven."""
FURTHER_CHUNK_MS = 0.1227
"""Each further chunk of a matrix in a factored update."""
CHUNK_WEIGHTS = 2**22
"""Chunk size of levers/optimizer_states.py; a test compares the two."""
FROZEN, EXPANDED = Launch(0.08, 0.14), Launch(0.05, 0.05)
"""A projection with an adapter, beyond a plain one: seven of them add 45 % to a layer (timed on a CPU, as shares of a
plain layer's time); and dequantizing a matrix."""
