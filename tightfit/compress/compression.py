"""`compress`: from a model and a recipe to a directory of smaller weights, one layer in memory at a time.

The calibration rows go through the model layer by layer: layer i + 1 gets the outputs of the compressed layer i. Where
rounding is learned, they go through the original model as well. A resumed run finds its finished layers on disk and
sends the rows through those again, which costs a forward pass.
"""

import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tightfit.compress.calibration.observation import through
from tightfit.compress.calibration.own_text import describe_own_text
from tightfit.compress.cost import CompressionCost, predict, pruned, schemes, unties
from tightfit.compress.finished_layer import load_finished
from tightfit.compress.fit.bit_choice import settled_for
from tightfit.compress.format_choice import choose_format
from tightfit.compress.head_compression import code_head, with_codes
from tightfit.compress.job import ShrinkingJob
from tightfit.compress.layer_compression import Coded, LayerResult, compress_layer
from tightfit.compress.linear_sets import EXPERT_STACKS
from tightfit.compress.loss_probe import LossProbe
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import Recipe
from tightfit.compress.report import CompressionReport, LayerReport, WriteExtras, no_extras
from tightfit.compress.rounding.rotation import Rotation, rotated_spec
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.errors import UserError
from tightfit.memory.ledger import Ledger
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.loading import find_source_tokenizer
from tightfit.models.quantized.directory import (
    module_schemes,
    module_shapes,
    shapes_of,
    tensors_to_write,
    transformers_limit,
)
from tightfit.models.quantized.matrices import HEAD, codable
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer

PLAIN_DTYPE = torch.float16
EMBEDDING_SHARD, HEAD_SHARD = 0, 1
"""The first two shards; layers follow."""
LAYER_SHARDS = 2


@dataclass(frozen=True, kw_only=True)
class CompressionJob(ShrinkingJob):
    """What the user asked for."""

    recipe: Recipe
    format: str | None = None
    expected_kl: float | None = None
    """KL divergence (nats a token) that `--fit` expects of the recipe it chose; None for other recipes."""
    measuring: Ledger | None = None
    """Ledger of the measurements by which `--fit` chose the recipe, where this run made them."""


Progress = Callable[[int, int, LayerReport], None]
"""Called after every layer: layers done, layers in all, and the report of this one. A coded output projection counts as
one more, whose error has its name."""


def compress(
    job: CompressionJob,
    announce: Callable[[CompressionCost], None],
    progress: Progress,
    write_extras: WriteExtras = no_extras,
) -> CompressionReport:
    """Do `job`; `announce` is called with the predicted cost before anything is written."""
    return _Compression(job, announce, write_extras).run(progress)


class _Compression:
    def __init__(
        self, job: CompressionJob, announce: Callable[[CompressionCost], None], write_extras: WriteExtras
    ) -> None:
        job.require()
        self.write_extras = write_extras
        self.began = time.monotonic()
        self.device = torch.device(job.device)
        self.parts = ModelParts(job.model, self.device)
        self.spec = self.parts.spec
        self.job = job = replace(job, recipe=settled_for(job.recipe, self.spec))
        self.written_spec = self._written_spec()
        self.schemes = self._chosen_schemes()
        self.form = choose_format(self.schemes, job.format, job.recipe)
        self.tokenizer = find_source_tokenizer(job.model)
        self.config = self._config()  # a result that the format cannot express is refused before any text is read
        self.calibration = job.read_calibration(self.spec) if job.data else None
        writes = self.calibration is None and job.recipe.is_calibrated
        cost = self._predicted(writes=writes).after(job.measuring)
        self.predicted = replace(cost, kl=job.expected_kl, transformers_limit=self._transformers_limit())
        announce(self.predicted)
        if writes:
            self.calibration = job.read_calibration(self.spec)
        names = shapes_of(self.spec)
        self.layer_names = [[n for n in names if n.startswith(f"layers.{i}.")] for i in range(self.spec.layers)]
        self.directory = WorkingDirectory(job.out, self._identity(), self.spec.layers + LAYER_SHARDS)
        self.resumed = 0
        """Layers that an earlier run had compressed."""

    def _written_spec(self) -> ModelSpec:
        """The shape of the result; where the recipe rotates, `self.parts` rotates what it reads from now on."""
        recipe, written = self.job.recipe, self.spec
        if (step := recipe.rotation) is not None:
            written = rotated_spec(self.spec)
            self.parts.rotation = Rotation(self.spec, step.seed)
        return replace(written, tied=written.tied and not unties(recipe))

    def _chosen_schemes(self) -> dict[str, Scheme]:
        """The scheme of every matrix that is coded; refuse a recipe that does nothing to this model, or cannot."""
        job, spec = self.job, self.spec
        if spec.sinks:
            raise UserError(f"{spec.family} models have biased experts, which are not compressed; take another")
        names = codable(spec)
        job.recipe.require_named(names)
        chosen = schemes(spec, job.recipe)
        if not pruned(spec, job.recipe) and not chosen:
            raise UserError("the recipe keeps every layer as it is; let a step after the last keep code or prune some")
        job.recipe.require_effect(names)
        if not chosen and job.format is not None:
            raise UserError(f"--format is {job.format}, a layout of codes, but the recipe quantizes nothing; drop it")
        return chosen

    def _predicted(self, *, writes: bool) -> CompressionCost:
        """The cost with the calibration rows that were read or, where the model `writes` them, will be generated."""
        job, spec = self.job, self.spec
        if writes:
            shape = job.own_text_shape(spec)
            cost = predict(spec, job.recipe, *shape, writing_bytes=job.writing_bytes)
            return replace(cost, calibration=describe_own_text(*shape))
        if self.calibration is None:
            return predict(spec, job.recipe, 0, 0)
        rows, length = self.calibration.tokens.shape
        return replace(predict(spec, job.recipe, rows, length), calibration=self.calibration.describe())

    def _identity(self) -> dict[str, str]:
        return {
            **self.parts.fingerprint(),
            "recipe": self.job.recipe.fingerprint(),
            "calibration": "" if self.calibration is None else self.calibration.fingerprint(),
            "format": self._format_name,
        }

    @property
    def _format_name(self) -> str:
        return self.form.name if self.schemes else "float16"

    def _config(self) -> dict[str, Any]:
        config = plain_config(self.written_spec, self.tokenizer)
        if not self.schemes:
            return config
        theirs, plain = module_schemes(self.written_spec, self.schemes)
        self.form.check(theirs)
        self.form.check_shapes(theirs, module_shapes(self.written_spec))
        return {**config, "quantization_config": self.form.config(theirs, plain)}

    def _transformers_limit(self) -> str:
        if not self.schemes:
            return ""
        by_module = module_schemes(self.written_spec, self.schemes)
        return transformers_limit(self.form, self.written_spec, *by_module)

    def run(self, progress: Progress) -> CompressionReport:
        with self.directory:
            return self._run(progress)

    def _run(self, progress: Progress) -> CompressionReport:
        reports, stream, probe = self._write_layers(progress)
        head_error = self._write_head(stream, progress)
        kl = self._kl(probe, stream) if stream else None
        return self._finish(reports, head_error, kl)

    def _write_embedding(self) -> list[Tensor]:
        """Write the embedding; the calibration rows embedded."""
        model = self.parts.embedding()
        if not self.directory.is_done(EMBEDDING_SHARD):
            self._write(EMBEDDING_SHARD, end_state(model, EMBEDDING_SHARD, self.written_spec), {})
        return [] if self.calibration is None else self.calibration.embedded(model)

    def _write_layers(self, progress: Progress) -> tuple[list[LayerReport], list[Tensor], LossProbe]:
        """Write the embedding and every layer that is not written yet; the layers' reports, the calibration rows after
        the last (no caller may hold those before it), and those of the original model."""
        stream = self._write_embedding()
        probe = LossProbe(stream)
        original = stream if self.job.recipe.learns else []
        reports: list[LayerReport] = []
        for index in range(self.spec.layers):
            number = index + LAYER_SHARDS
            if self.directory.is_done(number):
                original = self._through_original(index, original, probe)
                stream = self._through_finished(index, stream)
                reports.append(LayerReport(index, **self.directory.notes(number)))
                self.resumed += 1
            else:
                result = self._compress(index, stream, original, probe)
                stream, original = result.outputs, result.original
                reports.append(LayerReport(index, result.errors, result.layer_error, result.seconds))
            progress(index + 1, self._steps, reports[-1])
        return reports, stream, probe

    @property
    def _steps(self) -> int:
        """Layers to code, and the output projection."""
        return self.spec.layers + (HEAD in self.schemes)

    def _write_head(self, stream: list[Tensor], progress: Progress) -> float | None:
        """Write final norm and output projection; the error of the projection where the recipe has it coded."""
        began, step = time.monotonic(), self.job.recipe.coding(HEAD)
        if not self.directory.is_done(HEAD_SHARD):
            model = self.parts.head()
            state = end_state(model, HEAD_SHARD, self.written_spec)
            coded: Coded = {}
            notes: dict[str, Any] = {}
            if step is not None:
                coded[f"{HEAD}.weight"], notes["error"] = code_head(model, stream, step)
                del state[f"{HEAD}.weight"]
            self._write(HEAD_SHARD, state, coded, notes)
        found: float | None = self.directory.notes(HEAD_SHARD).get("error")
        if found is not None:
            report = LayerReport(self.spec.layers, {HEAD: found}, None, time.monotonic() - began)
            progress(self._steps, self._steps, report)
        return found

    def _write(self, number: int, plain: dict[str, Tensor], coded: Coded, notes: dict[str, Any] | None = None) -> None:
        tensors = tensors_to_write(self.written_spec, plain, coded, self.form, PLAIN_DTYPE)
        self.directory.write(number, tensors, notes)

    def _kl(self, probe: LossProbe, stream: list[Tensor]) -> float | None:
        """The loss on some calibration rows, with the output projection as it was written."""
        head = self.parts.head()
        if HEAD not in self.schemes:
            return probe.kl(head, stream)
        config = self.config["quantization_config"]
        return probe.kl(head, stream, with_codes(head, self.directory.tensors(HEAD_SHARD), self.form, config))

    def _compress(self, index: int, stream: list[Tensor], original: list[Tensor], probe: LossProbe) -> LayerResult:
        model = self.parts.layer(index)
        probe.follow(model, index)
        result = compress_layer(model, index, self.job.recipe, stream, PLAIN_DTYPE, original=original)
        prefix = f"layers.{index}."
        coded = {prefix + (name if name in EXPERT_STACKS else f"{name}.weight"): w for name, w in result.coded.items()}
        plain = {name: model.state_dict()[name] for name in self.layer_names[index] if name not in coded}
        notes = {"errors": result.errors, "layer_error": result.layer_error, "seconds": result.seconds}
        self._write(index + LAYER_SHARDS, plain, coded, notes)
        return result

    def _through_original(self, index: int, original: list[Tensor], probe: LossProbe) -> list[Tensor]:
        """The original's outputs of a finished layer (none unless rounding is learned); `probe` follows."""
        if self.calibration is None:
            return []
        model = self.parts.layer(index)
        probe.follow(model, index)
        return through(model, index, original)

    def _through_finished(self, index: int, stream: list[Tensor]) -> list[Tensor]:
        """The calibration rows after a layer that an earlier run has compressed."""
        if not stream:
            return stream
        tensors, config = self.directory.tensors(index + LAYER_SHARDS), self.config.get("quantization_config", {})
        model = load_finished(tensors, index, self.written_spec, self.form, config, self.device)
        return through(model, index, stream)

    def _finish(self, reports: list[LayerReport], head_error: float | None, kl: float | None) -> CompressionReport:
        folder, tokenizer = self.directory.path, self.tokenizer
        with self.directory.writing():
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(folder)
            report = replace(self._report(reports, kl), head_error=head_error)
            self.directory.finish(lambda folder: self.write_extras(report, folder))
        return report

    def _report(self, reports: list[LayerReport], kl: float | None) -> CompressionReport:
        shards = [self.directory.shard(number).stat().st_size for number in range(self.directory.shards)]
        measured = replace(
            self.predicted,
            result_bytes=sum(shards),
            memory_bytes=peak_bytes(self.device),
            bits_per_weight=self.predicted.bits_per_weight,
            seconds=time.monotonic() - self.began,
            ledger=None,
            kl=kl,
        )
        return CompressionReport(
            path=self.job.out,
            recipe=self.job.recipe.describe(),
            format=self._format_name,
            layers=reports,
            predicted=self.predicted,
            measured=measured,
            resumed_layers=self.resumed,
            device=self.device.type,
        )


def plain_config(spec: ModelSpec, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json of a model whose weights are not coded."""
    special = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return config_from_spec(spec, dtype=str(PLAIN_DTYPE).removeprefix("torch."), extra=special)


def end_state(model: Decoder, number: int, spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors of shard `number`, EMBEDDING_SHARD or HEAD_SHARD, from `model`, which has the other's as well where they
    were tied; where they stay so (`spec`), the embedding is both."""
    others = "embed.weight" if number == HEAD_SHARD else "head.weight"
    left = {others, *(("head.weight",) if spec.tied else ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left}


def peak_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
