"""What a compression reports: errors layer by layer, the cost as predicted and as measured."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tightfit.compress.cost import CompressionCost


@dataclass(frozen=True)
class LayerReport:
    """The relative errors of one layer's matrices and of the layer (see LayerResult), and the seconds it took."""

    index: int
    errors: dict[str, float]
    layer_error: float | None
    seconds: float


@dataclass(frozen=True)
class CompressionReport:
    """What was done, layer by layer, its predicted and its measured cost."""

    path: Path
    recipe: str
    format: str
    layers: list[LayerReport]
    predicted: CompressionCost
    measured: CompressionCost
    resumed_layers: int
    device: str = "cpu"
    """Whose memory was measured: that of a GPU, or of the whole process on a CPU."""
    head_error: float | None = None
    """The relative error of the output projection; None where it stayed plain."""


WriteExtras = Callable[[CompressionReport, Path], None]
"""Writes further files, such as the report, into the directory of the weights before this gets its final name."""


def no_extras(report: CompressionReport, folder: Path) -> None:
    """Write no further files."""
