"""LaunchTime: what the host needs to launch a micro-batch's kernels and the update's (hardware/launches.py).

Levers are taken to add up: what checkpointing adds to a layer's launches is paid by layers that are computed again,
what fp8 adds by all. Tiles' share is linear in their number, with what they add beside checkpointing measured apart.
Layers of other families launch a few kernels more or fewer; routed ones many more, which is not counted.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.hardware.launches import (
    CHUNK_WEIGHTS,
    FURTHER_CHUNK_MS,
    LAYER,
    REST,
    UPDATE_MS,
    UPDATE_REST_MS,
    Launch,
)
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw, state_format

PLAIN = LAYER[""]
RECOMPUTED = {
    "nothing": LAYER["checkpoint_every=1"],
    "attention": LAYER["checkpoint_every=1 checkpoint_keep=attention"],
    "matmuls": LAYER["checkpoint_every=1 checkpoint_keep=matmuls"],
    "everything": PLAIN,
}


@dataclass(frozen=True)
class LaunchTime:
    """Of `layers` layers of `layer_params` weights each, and of `outside` weights beside them."""

    layers: int
    layer_params: float
    outside: float

    def pass_s(self, levers: Levers, levels: tuple[tuple[str, float], ...]) -> tuple[float, float]:
        """Forward and backward of one micro-batch, with the shares of layers that keep so much for it."""
        return tuple(  # type: ignore[return-value]
            1e-3 * (rest + self.layers * each) for rest, each in zip(REST, self._layer_ms(levers, levels), strict=True)
        )

    def _layer_ms(self, levers: Levers, levels: tuple[tuple[str, float], ...]) -> Launch:
        forward, backward = PLAIN if levers.tiles == 1 else _tiled(levers.tiles)
        for level, share in levels:
            more = _beyond(LAYER["tiles=4 checkpoint_every=1"], LAYER["tiles=4"]) if levers.tiles > 1 else _beyond(
                RECOMPUTED[level], PLAIN
            )  # fmt: skip
            forward, backward = forward + share * more.forward_ms, backward + share * more.backward_ms
        for name in _pulled(levers):
            more = _beyond(LAYER[name], PLAIN)
            forward, backward = forward + more.forward_ms, backward + more.backward_ms
        return Launch(forward, backward)

    def update_s(self, levers: Levers, *, wide: bool) -> float:
        """Of the update that follows backward."""
        form = state_format(levers, wide=wide)
        name = "" if is_torch_adamw(levers, wide=wide) else "optimizer_states=8bit"
        chunks = 0.0
        if form == "factored":
            name = "optimizer_states=factored"
            chunks = (self.layers * self.layer_params + self.outside) / CHUNK_WEIGHTS - 7 * self.layers
        return 1e-3 * (UPDATE_REST_MS + self.layers * UPDATE_MS[name] + max(0.0, chunks) * FURTHER_CHUNK_MS)


def _beyond(a: Launch, b: Launch) -> Launch:
    return Launch(a.forward_ms - b.forward_ms, a.backward_ms - b.backward_ms)


@lru_cache
def _tiled(tiles: int) -> Launch:
    """On the line through two and eight tiles."""
    few, many = LAYER["tiles=2"], LAYER["tiles=8"]
    return Launch(*(a + (b - a) * (tiles - 2) / 6 for a, b in zip(few, many, strict=True)))


def _pulled(levers: Levers) -> list[str]:
    """The levers of these that are pulled."""
    names = [] if levers.matmul == "native" else [f"matmul={levers.matmul}"]
    names += ["update_in_backward=true"] if levers.update_in_backward else []
    return names + (["offload=optimizer"] if levers.offload != "none" else [])
