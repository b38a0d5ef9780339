"""Rewriting a model layer by layer into another of ordinary weights: what narrowing and factoring have in common.

One layer is in memory at a time; every layer sees calibration rows that came through the layers already rewritten, as
their files hold them; a killed run goes on at the layer it had reached.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightfit.compress.calibration import Calibration, read_calibration
from tightfit.compress.compression import EMBEDDING, HEAD, LAYER_SHARDS, PLAIN_DTYPE, Progress, peak_bytes
from tightfit.compress.cost import CompressionCost, predict
from tightfit.compress.memory import compression_ledger
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.observation import run_layer
from tightfit.compress.recipe import Recipe
from tightfit.compress.report import CompressionReport, LayerReport
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.durable import refuse_existing
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.loading import has_weights, load_source_tokenizer
from tightfit.models.quantized.directory import tensors_to_write
from tightfit.models.quantized.formats.own import Own
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RewritingJob:
    """What the user asked for."""

    model: str
    out: Path
    data: tuple[str, ...] = ()
    field: str = "text"
    samples: int = 128
    length: int | None = None
    device: str = "cpu"
    cache: Path = Path("~/.cache/tightfit")
    progress: bool = False


@dataclass(frozen=True)
class Rewritten:
    """A layer's tensors under Hugging Face's names, relative errors of its matrices, and its outputs."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]
    outputs: list[Tensor]


class LayerRewriting(ABC):
    """One job: checked when it is made, and its cost announced; nothing is written before `run`."""

    def __init__(self, job: RewritingJob, announce: Callable[[CompressionCost], None]) -> None:
        if not has_weights(job.model):
            raise UserError(f"{job.model} has no weights to compress; give a directory, a run or a GGUF file that has")
        if not job.data:
            raise UserError("this method looks at the inputs of layers; give it text with --data")
        refuse_existing(job.out)
        self.job, self.began, self.device = job, time.monotonic(), torch.device(job.device)
        self.parts = ModelParts(job.model, self.device, None)
        self.spec = self.parts.spec
        self.check()
        self.calibration = self._read_calibration()
        self.tokenizer = load_source_tokenizer(job.model)
        self.layers = self.prepare()
        self.written = self.written_spec()
        special = {"bos_token_id": self.tokenizer.bos_id, "eos_token_id": self.tokenizer.eos_id}
        plain = config_from_spec(self.written, dtype=str(PLAIN_DTYPE).removeprefix("torch."), extra=special)
        self.config = self.changed_config(plain)
        nothing, shape = Recipe(()), self.calibration.tokens.shape
        ledger = compression_ledger(self.spec, nothing, shape[0], shape[1], rewritten=self.method_name())
        self.predicted = replace(
            predict(self.spec, nothing, *shape),
            result_bytes=self.result_bytes(),
            memory_bytes=ledger.peak_allocated_bytes(),
            ledger=ledger,
        )
        announce(self.predicted)
        self.directory = WorkingDirectory(job.out, self._identity(), len(self.layers) + LAYER_SHARDS)

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot be done to a model of this shape."""

    @abstractmethod
    def prepare(self) -> list[int]:
        """Whatever has to be known of all layers first; the layers that stay, by their old numbers."""

    @abstractmethod
    def written_spec(self) -> ModelSpec:
        """The shape of the result."""

    @abstractmethod
    def rewrite(self, model: Decoder, new: int, old: int, stream: list[Tensor]) -> Rewritten:
        """Rewrite layer `old`, the only one of `model`, which will be layer `new`."""

    @abstractmethod
    def load(self, new: int) -> Decoder:
        """A decoder with the finished layer `new` only."""

    @abstractmethod
    def result_bytes(self) -> int:
        """Bytes of the tensors that will be written."""

    @abstractmethod
    def method_name(self) -> str:
        """What is done, as the ledger of compressing knows it (memory.py)."""

    @abstractmethod
    def describe(self) -> str:
        """What is done, in one line."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What makes two such jobs the same."""

    def changed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The result's config.json."""
        return config

    def more_files(self) -> dict[str, str]:
        """Text files beside config, weights and tokenizer."""
        return {}

    def _read_calibration(self) -> Calibration:
        job = self.job
        return read_calibration(
            job.model,
            self.spec,
            job.data,
            samples=job.samples,
            length=min(2048, self.spec.max_positions) if job.length is None else job.length,
            cache=job.cache,
            field=job.field,
            progress=job.progress,
        )

    @torch.no_grad()
    def embedded(self, model: Decoder) -> list[Tensor]:
        """The calibration rows as the first layer gets them."""
        batches = [tokens.to(self.device) for tokens in self.calibration.batches()]
        return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in batches]

    def _identity(self) -> dict[str, str]:
        tokens = self.calibration.tokens
        return {
            "model": str(Path(self.job.model).resolve()) if Path(self.job.model).exists() else self.job.model,
            "settings": json.dumps(self.settings(), sort_keys=True),
            "calibration": f"{list(tokens.shape)} {hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]}",
        }

    def run(self, progress: Progress) -> CompressionReport:
        """Rewrite all layers."""
        with self.directory:
            return self._run(progress)

    def _run(self, progress: Progress) -> CompressionReport:
        stream = self._write_ends()
        reports: list[LayerReport] = []
        resumed = 0
        for new, old in enumerate(self.layers):
            number = new + LAYER_SHARDS
            if self.directory.is_done(number):
                reports.append(LayerReport(new, **self.directory.notes(number)))
                resumed += 1
            else:
                reports.append(self._rewritten(new, old, stream))
            stream = through(self.load(new), new, stream)  # as rounded in the file, whichever run made it
            progress(new + 1, len(self.layers), reports[-1])
        return self._finish(reports, resumed)

    def _write_ends(self) -> list[Tensor]:
        model = self.parts.embedding()
        stream = self.embedded(model)
        for number, part in {EMBEDDING: model, HEAD: self.parts.head()}.items():
            state = dict(part.state_dict())
            if self.written.tied:  # the embedding is written with the first shard alone
                state.pop("head.weight", None)
                if number == HEAD:
                    state.pop("embed.weight", None)
            if not self.directory.is_done(number):
                self.directory.write(number, tensors_to_write(self.written, state, {}, Own(), PLAIN_DTYPE))
        return stream

    def _rewritten(self, new: int, old: int, stream: list[Tensor]) -> LayerReport:
        """Rewrite one layer, write it under its new number, and report it."""
        began = time.monotonic()
        model = self.parts.layer(old)
        wanted = through(model, old, stream)
        made = self.rewrite(model, new, old, stream)
        change = sum(float((a - b).square().sum()) for a, b in zip(made.outputs, wanted, strict=True))
        added = sum(float((b - x).square().sum()) for b, x in zip(wanted, stream, strict=True))
        report = LayerReport(new, made.errors, change / max(added, 1e-30), time.monotonic() - began)
        notes = {name: value for name, value in asdict(report).items() if name != "index"}
        self.directory.write(new + LAYER_SHARDS, made.tensors, notes)
        return report

    def _finish(self, reports: list[LayerReport], resumed: int) -> CompressionReport:
        folder = self.directory.path
        with self.directory.writing():
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            self.tokenizer.save(folder)
            for name, content in self.more_files().items():
                (folder / name).write_text(content, encoding="utf-8")
            written = sum(self.directory.shard(number).stat().st_size for number in range(self.directory.shards))
            self.directory.finish()
        measured = replace(
            self.predicted,
            result_bytes=written,
            memory_bytes=peak_bytes(self.device),
            seconds=time.monotonic() - self.began,
        )
        return CompressionReport(self.job.out, self.describe(), "float16", reports, self.predicted, measured, resumed)


@torch.no_grad()
def through(model: Decoder, index: int, stream: Sequence[Tensor]) -> list[Tensor]:
    """The calibration rows after layer `index`, the only one that `model` has."""
    layer = model.layers._modules[str(index)]
    assert isinstance(layer, Layer)
    return [run_layer(model, layer, x) for x in stream]
