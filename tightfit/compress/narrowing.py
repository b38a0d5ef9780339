"""`narrow`: from a model to a smaller one of the same family, by structured pruning (`structured.py`).

A first pass over all layers finds which of them matter least, where layers are cut; a second cuts heads, channels and
experts of the others, each seeing inputs that came through the layers already cut. One layer is in memory at a time,
and a killed run goes on at the layer it had reached. What comes out has no trace of the cutting: an ordinary config and
ordinary weights, to be fine-tuned, compressed further or served.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tightfit.compress.calibration import Calibration, read_calibration
from tightfit.compress.compression import EMBEDDING, HEAD, LAYER_SHARDS, PLAIN_DTYPE, Progress, peak_bytes
from tightfit.compress.cost import CompressionCost, predict
from tightfit.compress.finished_layer import load_finished
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.observation import run_layer
from tightfit.compress.recipe import Recipe
from tightfit.compress.report import CompressionReport, LayerReport
from tightfit.compress.structured import KeptShape, block_influence, cut_layer, cut_spec
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.loading import has_weights, load_source_tokenizer
from tightfit.models.quantized.directory import tensors_to_write
from tightfit.models.quantized.formats.own import Own


@dataclass(frozen=True, kw_only=True)
class NarrowingJob:
    """What the user asked for."""

    model: str
    out: Path
    kept: KeptShape
    data: tuple[str, ...] = ()
    field: str = "text"
    samples: int = 128
    length: int | None = None
    device: str = "cpu"
    cache: Path = Path("~/.cache/tightfit")
    progress: bool = False


def narrow(job: NarrowingJob, announce: Callable[[CompressionCost], None], progress: Progress) -> CompressionReport:
    """Do `job`; `announce` hears the predicted cost before anything is written."""
    return _Narrowing(job, announce).run(progress)


class _Narrowing:
    def __init__(self, job: NarrowingJob, announce: Callable[[CompressionCost], None]) -> None:
        if not has_weights(job.model):
            raise UserError(f"{job.model} has no weights to compress; give a directory, a run or a GGUF file that has")
        if not job.data:
            raise UserError("structured pruning looks at the inputs of layers; give it text with --data")
        if job.out.exists():
            raise UserError(f"{job.out} exists already; name a new place or remove it first")
        self.job, self.began, self.device = job, time.monotonic(), torch.device(job.device)
        self.parts = ModelParts(job.model, self.device, None)
        self.spec = self.parts.spec
        job.kept.check(self.spec)
        self.calibration = self._read_calibration()
        self.layers = self._choose_layers()
        self.cut = cut_spec(self.spec, job.kept, self.layers)
        self.tokenizer = load_source_tokenizer(job.model)
        special = {"bos_token_id": self.tokenizer.bos_id, "eos_token_id": self.tokenizer.eos_id}
        self.config = config_from_spec(self.cut, dtype=str(PLAIN_DTYPE).removeprefix("torch."), extra=special)
        at_work = predict(self.spec, Recipe(()), *self.calibration.tokens.shape)
        self.predicted = replace(at_work, result_bytes=2 * self.cut.params())
        announce(self.predicted)
        self.directory = WorkingDirectory(job.out, self._identity(), len(self.layers) + LAYER_SHARDS)

    def _read_calibration(self) -> Calibration:
        job = self.job
        length = min(2048, self.spec.max_positions) if job.length is None else job.length
        return read_calibration(
            job.model,
            self.spec,
            job.data,
            samples=job.samples,
            length=length,
            cache=job.cache,
            field=job.field,
            progress=job.progress,
        )

    def _choose_layers(self) -> list[int]:
        """The layers that stay: those of the greatest influence, in their order."""
        everything = list(range(self.spec.layers))
        if self.job.kept.layers is None or self.job.kept.layers == self.spec.layers:
            return everything
        stream, influences = self._embedded(self.parts.embedding()), []
        for index in everything:
            made = _through(self.parts.layer(index), index, stream)
            influences.append(block_influence(stream, made))
            stream = made
        ranked = sorted(everything, key=lambda index: influences[index], reverse=True)
        return sorted(ranked[: self.job.kept.layers])

    @torch.no_grad()
    def _embedded(self, model: Decoder) -> list[Tensor]:
        """The calibration rows as the first layer gets them."""
        batches = [tokens.to(self.device) for tokens in self.calibration.batches()]
        return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in batches]

    def _identity(self) -> dict[str, str]:
        tokens = self.calibration.tokens
        return {
            "model": str(Path(self.job.model).resolve()) if Path(self.job.model).exists() else self.job.model,
            "kept": json.dumps(asdict(self.job.kept)),
            "calibration": f"{list(tokens.shape)} {hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]}",
        }

    def run(self, progress: Progress) -> CompressionReport:
        stream = self._write_ends()
        reports: list[LayerReport] = []
        resumed = 0
        for new, old in enumerate(self.layers):
            number = new + LAYER_SHARDS
            if self.directory.is_done(number):
                stream = self._through_finished(new, stream)
                reports.append(LayerReport(new, **self.directory.notes(number)))
                resumed += 1
            else:
                stream = self._cut(new, old, stream, reports)
            progress(new + 1, len(self.layers), reports[-1])
        return self._finish(reports, resumed)

    def _write_ends(self) -> list[Tensor]:
        model = self.parts.embedding()
        stream = self._embedded(model)
        ends = {EMBEDDING: model, HEAD: self.parts.head()}
        for number, part in ends.items():
            state = dict(part.state_dict())
            if self.cut.tied:  # the embedding is written with the first shard alone
                state.pop("head.weight", None)
                if number == HEAD:
                    state.pop("embed.weight", None)
            if not self.directory.is_done(number):
                self.directory.write(number, tensors_to_write(self.cut, state, {}, Own(), PLAIN_DTYPE))
        return stream

    def _cut(self, new: int, old: int, stream: list[Tensor], reports: list[LayerReport]) -> list[Tensor]:
        """Cut one layer, write it under its new number and report it; the calibration rows after it."""
        began = time.monotonic()
        model = self.parts.layer(old)
        wanted = _through(model, old, stream)
        made = cut_layer(model, old, self.job.kept, stream)
        change = sum(float((a - b).square().sum()) for a, b in zip(made.outputs, wanted, strict=True))
        added = sum(float((b - x).square().sum()) for b, x in zip(wanted, stream, strict=True))
        report = LayerReport(new, made.errors, change / max(added, 1e-30), time.monotonic() - began)
        state = {f"layers.{new}.{name}": tensor.contiguous() for name, tensor in made.state.items()}
        notes = {name: value for name, value in asdict(report).items() if name != "index"}
        self.directory.write(new + LAYER_SHARDS, tensors_to_write(self.cut, state, {}, Own(), PLAIN_DTYPE), notes)
        reports.append(report)
        return self._through_finished(new, stream)  # as rounded in the file, whichever run made it

    def _through_finished(self, new: int, stream: Sequence[Tensor]) -> list[Tensor]:
        tensors = self.directory.tensors(new + LAYER_SHARDS)
        return _through(load_finished(tensors, new, self.cut, Own(), {}, self.device), new, stream)

    def _finish(self, reports: list[LayerReport], resumed: int) -> CompressionReport:
        folder = self.directory.path
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        self.tokenizer.save(folder)
        written = sum(self.directory.shard(number).stat().st_size for number in range(self.directory.shards))
        self.directory.finish()
        measured = replace(
            self.predicted,
            result_bytes=written,
            memory_bytes=peak_bytes(self.device),
            seconds=time.monotonic() - self.began,
        )
        told = self.job.kept.describe(self.spec)
        lost = sorted(set(range(self.spec.layers)) - set(self.layers))
        told += f" (without layers {', '.join(map(str, lost))})" if lost else ""
        return CompressionReport(self.job.out, told, "float16", reports, self.predicted, measured, resumed)


@torch.no_grad()
def _through(model: Decoder, index: int, stream: Sequence[Tensor]) -> list[Tensor]:
    """The calibration rows after layer `index`, the only one that `model` has."""
    layer = model.layers._modules[str(index)]
    assert isinstance(layer, Layer)
    return [run_layer(model, layer, x) for x in stream]
