"""`narrow`: from a model to a smaller one of the same family, by structured pruning (`structured.py`).

A first pass over all layers finds which of them matter least, where layers are cut; a second cuts heads, channels and
experts of the others. What comes out has no trace of the cutting: an ordinary config and ordinary weights, to be
fine-tuned, compressed further or served.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tightfit.compress.calibration.observation import through
from tightfit.compress.compression import LAYER_SHARDS, PLAIN_DTYPE, Progress
from tightfit.compress.cost import CompressionCost
from tightfit.compress.finished_layer import load_finished
from tightfit.compress.job import ShrinkingJob
from tightfit.compress.report import CompressionReport, WriteExtras, no_extras
from tightfit.compress.structure.rewriting import LayerRewriting, Rewritten
from tightfit.compress.structure.structured import KeptShape, block_influence, cut_layer, cut_spec
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.directory import tensors_to_write
from tightfit.models.quantized.formats.own import Own
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class NarrowingJob(ShrinkingJob):
    """What the user asked for."""

    kept: KeptShape


def narrow(
    job: NarrowingJob,
    announce: Callable[[CompressionCost], None],
    progress: Progress,
    write_extras: WriteExtras = no_extras,
) -> CompressionReport:
    """Do `job`; `announce` is called with the predicted cost before anything is written."""
    return _Narrowing(job, announce, write_extras).run(progress)


class _Narrowing(LayerRewriting):
    job: NarrowingJob

    def check(self) -> None:
        self.job.kept.check(self.spec)

    def prepare(self) -> list[int]:
        """The layers that stay: those of the greatest influence, in their order."""
        everything = list(range(self.spec.layers))
        if self.job.kept.layers is None or self.job.kept.layers == self.spec.layers:
            return everything
        stream, influences = self.calibration.embedded(self.parts.embedding()), []
        for index in everything:
            outputs = through(self.parts.layer(index), index, stream)
            influences.append(block_influence(stream, outputs))
            stream = outputs
        ranked = sorted(everything, key=lambda index: influences[index], reverse=True)
        return sorted(ranked[: self.job.kept.layers])

    def written_spec(self) -> ModelSpec:
        return cut_spec(self.spec, self.job.kept, self.layers)

    def result_bytes(self) -> int:
        return 2 * self.written.params()

    def settings(self) -> dict[str, Any]:
        return asdict(self.job.kept)

    def method_name(self) -> str:
        return "structured"

    def describe(self) -> str:
        lost = sorted(set(range(self.spec.layers)) - set(self.layers))
        told = self.job.kept.describe(self.spec)
        noun = "layer" if len(lost) == 1 else "layers"
        return told + (f" (without {noun} {', '.join(map(str, lost))})" if lost else "")

    def rewrite(self, model: Decoder, new: int, old: int, stream: list[Tensor]) -> Rewritten:
        cut = cut_layer(model, old, self.job.kept, stream)
        state = {f"layers.{new}.{name}": tensor.contiguous() for name, tensor in cut.state.items()}
        return Rewritten(tensors_to_write(self.written, state, {}, Own(), PLAIN_DTYPE), cut.errors, cut.outputs)

    def load(self, new: int) -> Decoder:
        tensors = self.directory.tensors(new + LAYER_SHARDS)
        return load_finished(tensors, new, self.written, Own(), {}, self.device)
