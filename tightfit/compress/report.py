"""What a compression reports: errors layer by layer, the cost as predicted and as measured."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tightfit.compress.cost import CompressionCost


@dataclass(frozen=True)
class LayerReport:
    """The relative errors of one layer's matrices and of the layer (see LayerResult), and what it took."""

    index: int
    errors: dict[str, float]
    layer_error: float | None
    seconds: float


@dataclass(frozen=True)
class CompressionReport:
    """What was done, layer by layer, what it was said to cost and what it did cost."""

    path: Path
    recipe: str
    format: str
    layers: list[LayerReport]
    predicted: CompressionCost
    measured: CompressionCost
    resumed_layers: int
    device: str = "cpu"
    """Whose memory was measured: that of a GPU, or of the whole process on a CPU."""


Beside = Callable[[CompressionReport, Path], None]
"""Writes what lies beside the weights into their directory, before this gets its name: a kill loses neither."""


def nothing_beside(report: CompressionReport, folder: Path) -> None:
    """Weights alone."""
