"""Rewriting a model layer by layer into another of ordinary weights: what narrowing and factoring have in common.

One layer is in memory at a time; every layer sees calibration rows that came through the layers already rewritten, as
their files hold them; a killed run goes on at the layer it had reached.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightfit.compress.calibration.observation import through
from tightfit.compress.compression import (
    EMBEDDING_SHARD,
    HEAD_SHARD,
    LAYER_SHARDS,
    PLAIN_DTYPE,
    Progress,
    end_state,
    peak_bytes,
    plain_config,
)
from tightfit.compress.cost import CompressionCost, predict
from tightfit.compress.job import ShrinkingJob
from tightfit.compress.layer_compression import change_of_layer
from tightfit.compress.loss_probe import LossProbe
from tightfit.compress.memory import compression_ledger
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import Recipe
from tightfit.compress.report import CompressionReport, LayerReport, WriteExtras
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.models.decoder import Decoder
from tightfit.models.loading import find_source_tokenizer
from tightfit.models.quantized.directory import tensors_to_write
from tightfit.models.quantized.formats.own import Own
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True)
class Rewritten:
    """A layer's tensors under Hugging Face's names, relative errors of its matrices, and its outputs."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]
    outputs: list[Tensor]


class LayerRewriting(ABC):
    """One job: the constructor checks it and announces its cost; nothing is written before `run`."""

    def __init__(
        self, job: ShrinkingJob, announce: Callable[[CompressionCost], None], write_extras: WriteExtras
    ) -> None:
        job.require()
        self.write_extras = write_extras
        self.job, self.began, self.device = job, time.monotonic(), torch.device(job.device)
        self.parts = ModelParts(job.model, self.device)
        self.spec = self.parts.spec
        self.check()
        self.calibration = job.read_calibration(self.spec)
        self.tokenizer = find_source_tokenizer(job.model)
        self.layers = self.prepare()
        self.written = self.written_spec()
        self.config = self.changed_config(plain_config(self.written, self.tokenizer))
        nothing, shape = Recipe(()), self.calibration.tokens.shape
        ledger = compression_ledger(
            self.spec,
            nothing,
            shape[0],
            shape[1],
            rewritten=self.method_name(),
            writing_bytes=job.writing_bytes,
        )
        self.predicted = replace(
            predict(self.spec, nothing, *shape),
            result_bytes=self.result_bytes(),
            memory_bytes=ledger.peak_allocated_bytes(),
            ledger=ledger,
            calibration=self.calibration.describe(),
        )
        announce(self.predicted)
        self.directory = WorkingDirectory(job.out, self._identity(), len(self.layers) + LAYER_SHARDS)

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot be done to a model of this shape."""

    @abstractmethod
    def prepare(self) -> list[int]:
        """Gather what a first pass over all layers has to find; the old numbers of the layers that stay."""

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
        """The method's name in the ledger of compressing (memory.py)."""

    @abstractmethod
    def describe(self) -> str:
        """What is done, in one line."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Options of the method: a run is resumed only with equal ones."""

    def changed_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The result's config.json."""
        return config

    def more_files(self) -> dict[str, str]:
        """Text files beside config, weights and tokenizer."""
        return {}

    def _identity(self) -> dict[str, str]:
        return {
            **self.parts.fingerprint(),
            "settings": json.dumps(self.settings(), sort_keys=True),
            "calibration": self.calibration.fingerprint(),
        }

    def run(self, progress: Progress) -> CompressionReport:
        """Rewrite all layers."""
        with self.directory:
            return self._run(progress)

    def _run(self, progress: Progress) -> CompressionReport:
        stream = self._write_ends()
        probe = LossProbe(stream)
        reports: list[LayerReport] = []
        resumed = followed = 0
        for new, old in enumerate(self.layers):
            number = new + LAYER_SHARDS
            followed = self._follow(probe, followed, old + 1)
            if self.directory.is_done(number):
                reports.append(LayerReport(new, **self.directory.notes(number)))
                resumed += 1
            else:
                reports.append(self._rewritten(new, old, stream))
            stream = through(self.load(new), new, stream)  # as rounded in the file, whichever run made it
            progress(new + 1, len(self.layers), reports[-1])
        self._follow(probe, followed, self.spec.layers)
        return self._finish(reports, resumed, probe.kl(self.parts.head(), stream))

    def _follow(self, probe: LossProbe, begin: int, end: int) -> int:
        """Send the probe through the original's layers [begin, end), also those that are cut; returns `end`."""
        for index in range(begin, end):
            probe.follow(self.parts.layer(index), index)
        return end

    def _write_ends(self) -> list[Tensor]:
        model = self.parts.embedding()
        stream = self.calibration.embedded(model)
        for number, part in {EMBEDDING_SHARD: model, HEAD_SHARD: self.parts.head()}.items():
            if not self.directory.is_done(number):
                state = end_state(part, number, self.written)
                self.directory.write(number, tensors_to_write(self.written, state, {}, Own(), PLAIN_DTYPE))
        return stream

    def _rewritten(self, new: int, old: int, stream: list[Tensor]) -> LayerReport:
        """Rewrite one layer, write it under its new number, and report it."""
        began = time.monotonic()
        model = self.parts.layer(old)
        wanted = through(model, old, stream)
        rewritten = self.rewrite(model, new, old, stream)
        error = change_of_layer(stream, wanted, rewritten.outputs)
        report = LayerReport(new, rewritten.errors, error, time.monotonic() - began)
        notes = {name: value for name, value in asdict(report).items() if name != "index"}
        self.directory.write(new + LAYER_SHARDS, rewritten.tensors, notes)
        return report

    def _finish(self, reports: list[LayerReport], resumed: int, kl: float | None) -> CompressionReport:
        folder = self.directory.path
        with self.directory.writing():
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            if self.tokenizer is not None:
                self.tokenizer.save(folder)
            for name, content in self.more_files().items():
                (folder / name).write_text(content, encoding="utf-8")
            report = self._report(reports, resumed, kl)
            self.directory.finish(lambda folder: self.write_extras(report, folder))
        return report

    def _report(self, reports: list[LayerReport], resumed: int, kl: float | None) -> CompressionReport:
        written = sum(self.directory.shard(number).stat().st_size for number in range(self.directory.shards))
        measured = replace(
            self.predicted,
            result_bytes=written,
            memory_bytes=peak_bytes(self.device),
            seconds=time.monotonic() - self.began,
            kl=kl,
        )
        return CompressionReport(
            path=self.job.out,
            recipe=self.describe(),
            format="float16",
            layers=reports,
            predicted=self.predicted,
            measured=measured,
            resumed_layers=resumed,
            device=self.device.type,
        )
