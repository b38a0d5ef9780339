"""Distillation: the loss of a step compares student and teacher in predictions and, optionally, in hidden states.

The teacher runs on a micro-batch before the student does, without gradients, and its final normed hidden states are
kept; the loss then projects those of both models to logits, a chunk of rows at a time
(kernels/loss/linear_distillation.py). Weights of a teacher in host memory are copied to the device layer by layer.

Hidden states are compared as squared distances of unit-RMS vectors, of student layers evenly spaced up to its last and
the teacher's at the same share of its depth (as TinyBERT, Jiao et al. 2019). Where widths differ, the teacher's are
first projected by a fixed random matrix with orthonormal columns, which need not be learned, saved or resumed. A
student from scratch can adapt to any basis; one that has been trained already is better taught by predictions alone.
Attention maps and the contrastive loss on embeddings: relations.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.jobs.distill import Distill
from tightfit.jobs.job import Job
from tightfit.jobs.teacher import SELF, has_coded_head
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.kernels.loss.linear_distillation import DistillationTerms, linear_distillation
from tightfit.models.decoder import Decoder, ForwardContext, Layer
from tightfit.models.loading import has_weights, load_model, load_source_tokenizer, source_spec
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.train.relations import attention_map, contrastive_loss, map_distance

PROBE = "Tokens of 3 models, 12.5 % apart:\n\tdéjà vu?"


def teacher_source(job: Job) -> str | None:
    """What the job's teacher is loaded from."""
    return job.model.source if job.distill.teacher == SELF else job.distill.teacher


def teacher_spec(job: Job) -> ModelSpec | None:
    """The shape of the job's teacher."""
    source = teacher_source(job)
    return None if source is None else source_spec(source)


def check_teacher(job: Job, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that cannot teach a student of this shape and tokenizer."""
    source = teacher_source(job)
    if source is None:
        return
    taught = source_spec(source)  # whose sentence says where there is no model at all
    if not has_weights(source):
        raise UserError(f"distill.teacher is {source}, which has no weights; give a directory, a run or a GGUF file")
    if taught.vocab_size != spec.vocab_size:
        raise UserError(
            f"distill.teacher has a vocabulary of {taught.vocab_size} and the model one of {spec.vocab_size}; give the "
            f"model the teacher's, with tokenizer.source={source} and model.shape.vocab_size={taught.vocab_size}"
        )
    if has_coded_head(source, taught):
        raise UserError(
            f"distill.teacher is {source}, whose output projection is coded; give a teacher that was compressed "
            "without --head"
        )
    if job.data.sequence_length > taught.max_positions:
        raise UserError(
            f"data.sequence_length is {job.data.sequence_length}, but distill.teacher has {taught.max_positions} "
            "positions; shorten the rows"
        )
    if load_source_tokenizer(source).encode(PROBE) != tokenizer.encode(PROBE):
        raise UserError(f"distill.teacher and the model cut text into different tokens; set tokenizer.source={source}")
    if job.distill.attention and (spec.latent is not None or taught.latent is not None):
        raise UserError("distill.attention compares queries and keys of heads, which latent attention has not; drop it")
    if (job.distill.features or job.distill.attention) and job.distill.feature_layers > spec.layers:
        raise UserError(
            f"distill.feature_layers is {job.distill.feature_layers}, but the model has {spec.layers} layers; lower it"
        )


class HostedTeacher:
    """A frozen decoder, its weights on `device` or on the host, that computes on `device` one layer at a time."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model, self.device = model.eval().requires_grad_(False), device

    @torch.no_grad()
    def hidden_states(
        self, tokens: Tensor, documents: Tensor | None, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Final normed hidden states [B, T, H], and the hidden states after each of `layers`."""
        model, own = self.model, self.model.embed.weight.device
        positions = model.token_positions(tokens, documents, None)
        x = model.embed_tokens(tokens.to(own), positions.to(own)).to(self.device)
        ctx = model.forward_context(x, positions, documents, None)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(model.layers):
            x, _ = self._call(layer, x, ctx)
            if index in layers:
                kept[index] = x
        return self._call(model.norm, x), [kept[index] for index in layers]

    @contextmanager
    def maps_of(self, layers: Sequence[int], documents: Tensor | None) -> Iterator[dict[int, Tensor]]:
        """A dictionary that a forward pass fills with the attention maps of `layers`."""
        found: dict[int, Tensor] = {}
        handles = []
        for index in layers:

            def look(module: Any, inputs: tuple[Tensor, ForwardContext], index: int = index) -> None:
                found[index] = attention_map(module, *inputs, documents)  # while its weights are on the device

            attention = cast(Layer, self.model.layers[index]).attention
            handles.append(attention.register_forward_pre_hook(look))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _call(self, module: nn.Module, *arguments: Any) -> Any:
        """Call `module`, with copies on the device of parameters and buffers that are on the host."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if all(tensor.device == self.device for tensor in tensors.values()):
            return module(*arguments)
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        return torch.func.functional_call(module, moved, arguments)

    @property
    def head_weight(self) -> Tensor:
        """The output projection, on the device."""
        if not isinstance(self.model.head, nn.Linear):
            raise UserError("distill.teacher has a coded output projection; give one that has not")
        return self.model.head.weight.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class TaughtBatch:
    """The teacher's results for one micro-batch."""

    distiller: "Distiller"
    hidden: Tensor
    features: list[Tensor]
    maps: list[Tensor]
    documents: Tensor | None

    def loss(self, model: Decoder, x: Tensor, labels: Tensor, divisor: float | Tensor | None) -> Tensor:
        """(1 − α) · CE + α · τ² · D plus the other distances, summed over counted tokens, divided by `divisor`."""
        own, settings = self.distiller, self.distiller.settings
        divided_by = 1.0 if divisor is None else divisor
        terms = DistillationTerms(
            alpha=settings.alpha,
            temperature=settings.temperature,
            divergence=settings.divergence,
            beta=settings.beta,
            softcap=model.spec.logit_softcap,
            teacher_softcap=own.teacher.model.spec.logit_softcap,
        )
        loss = linear_distillation(
            x,
            model.head.weight,
            self.hidden,
            own.teacher.head_weight,
            labels,
            terms,
            divisor=divided_by,
            chunk_bytes=model.impl.loss_chunk_bytes,
        )
        return loss + self._distances(x, labels != IGNORE) / divided_by

    def _distances(self, x: Tensor, counted: Tensor) -> Tensor:
        """Σ weight · distance over hidden states, attention maps and embeddings."""
        own, settings = self.distiller, self.distiller.settings
        total = x.new_zeros((), dtype=torch.float32)
        if self.features:
            pairs = zip(own.take_features(), self.features, strict=True)
            total = total + settings.features * _mean([feature_distance(*pair, counted) for pair in pairs])
        if self.maps:
            pairs = zip(own.take_maps(self.documents), self.maps, strict=True)
            total = total + settings.attention * _mean([map_distance(*pair, counted) for pair in pairs])
        if settings.contrastive:
            shape = (*counted.shape, -1)
            theirs = own.projected(self.hidden.view(shape))
            total = total + settings.contrastive * contrastive_loss(x.view(shape), theirs, counted)
        return total


def _mean(distances: list[Tensor]) -> Tensor:
    return torch.stack(distances).mean()


def feature_distance(student: Tensor, teacher: Tensor, counted: Tensor) -> Tensor:
    """Σ over counted tokens of the mean squared difference of hidden states brought to unit RMS."""
    difference = _unit(student) - _unit(teacher)
    return (difference.square().mean(-1) * counted).sum()


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def projection(teacher_width: int, student_width: int) -> Tensor | None:
    """A fixed matrix [teacher, student] with orthonormal columns (rows, if it widens); None for equal widths."""
    if teacher_width == student_width:
        return None
    generator = torch.Generator().manual_seed(teacher_width * 1_000_003 + student_width)
    most, least = max(teacher_width, student_width), min(teacher_width, student_width)
    columns = torch.linalg.qr(torch.randn(most, least, dtype=torch.float64, generator=generator)).Q.float()
    return columns if teacher_width > student_width else columns.T.contiguous()


class Distiller:
    """The objective of a student, called before each of its training forward passes to run the teacher."""

    def __init__(self, student: Decoder, teacher: HostedTeacher, settings: Distill) -> None:
        self.teacher, self.settings = teacher, settings
        self._seen: dict[int, Tensor] = {}
        self._looking: dict[int, tuple[Tensor, ForwardContext]] = {}
        self._projection = projection(teacher.model.spec.hidden_size, student.spec.hidden_size)
        self._student = student
        self.student_layers: list[int] = []
        self.teacher_layers: list[int] = []
        if settings.features or settings.attention:
            self._follow(student)

    def _follow(self, student: Decoder) -> None:
        mine, theirs, count = student.spec.layers, self.teacher.model.spec.layers, self.settings.feature_layers
        self.student_layers = [mine * (i + 1) // count - 1 for i in range(count)]
        self.teacher_layers = [theirs * (layer + 1) // mine - 1 for layer in self.student_layers]
        self.teacher_layers = [max(layer, 0) for layer in self.teacher_layers]
        for index in self.student_layers:
            layer = student.layers[index]
            assert isinstance(layer, Layer)

            def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, Any], index: int = index) -> None:
                if torch.is_grad_enabled():
                    self._seen[index] = output[0]

            def look(module: nn.Module, inputs: tuple[Tensor, ForwardContext], index: int = index) -> None:
                if torch.is_grad_enabled():
                    self._looking[index] = inputs

            if self.settings.features:
                layer.register_forward_hook(keep)
            if self.settings.attention:
                layer.attention.register_forward_pre_hook(look)

    def __call__(self, tokens: Tensor, documents: Tensor | None) -> TaughtBatch:
        mapped = self.teacher_layers if self.settings.attention else []
        with self.teacher.maps_of(mapped, documents) as maps:
            hidden, features = self.teacher.hidden_states(tokens, documents, self.teacher_layers)
        features = [self.projected(x) for x in features] if self.settings.features else []
        return TaughtBatch(self, hidden, features, [maps[index] for index in mapped], documents)

    def projected(self, x: Tensor) -> Tensor:
        """The teacher's hidden states in the student's width."""
        return x if self._projection is None else x @ self._projection.to(x)

    def take_maps(self, documents: Tensor | None) -> list[Tensor]:
        """The student's attention maps of this forward pass, whose inputs are then forgotten."""
        maps = []
        for index in self.student_layers:
            attention = cast(Layer, self._student.layers[index]).attention
            maps.append(attention_map(attention, *self._looking.pop(index), documents))
        return maps

    def take_features(self) -> list[Tensor]:
        """The student's hidden states of this forward pass, which are then forgotten."""
        return [self._seen.pop(index) for index in self.student_layers]


def teach(model: Decoder, job: Job, device: torch.device, dtype: torch.dtype) -> None:
    """Give `model` the job's teacher, where it has one."""
    source = teacher_source(job)
    if source is None:
        return
    place = device if job.distill.place == "device" else torch.device("cpu")
    loaded = load_model(source, device=place, dtype=dtype)
    model.objective = Distiller(model, HostedTeacher(loaded.model, device), job.distill)
