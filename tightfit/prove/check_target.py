"""The target of the equivalence check: a model shape with a layout and levers, at full size or as a miniature.

A miniature keeps the features that parallelism could get wrong (grouped heads, tied embeddings, norms, biases, windows,
experts, odd vocabularies, a layer per stage, adapters) and shrinks every size to the least that the layout can split,
so that it trains in milliseconds on a CPU. Tokens are random: rows of several documents, with different numbers of
counted labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tightfit.errors import UserError
from tightfit.jobs.adapter import NOT_ADAPTED, AdapterTraining
from tightfit.jobs.job import Job, Optimizer, PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.models.loading import source_spec
from tightfit.models.resolve import reshaped
from tightfit.models.spec import Experts, Latent, ModelSpec
from tightfit.plan.plan import Plan
from tightfit.train.step import Batch

HEAD, WIDTH, LENGTH, ROWS, SMALL_RANK = 8, 16, 32, 2, 4
MOST_MICRO_BATCHES = 3
NO_LEVERS = Levers()
ROUNDING = ("optimizer_states", "rounding", "matmul", "checkpoint_format")
SETTINGS = Optimizer(lr=1e-3, eps=1e-4)
"""With the usual eps, Adam makes full updates from gradients that are pure rounding error, and these would differ."""
CARRIED = ("clip_norm", "l1", "keep_zeros")
"""Settings of the optimizer that a job's or a plan's target has; the others are those above."""


@dataclass(frozen=True)
class CheckTarget:
    """A model shape, its layout, and `passes` micro-batches per step for each data rank."""

    spec: ModelSpec
    layout: Layout
    levers: Levers = NO_LEVERS
    passes: int = 1
    length: int = LENGTH
    precision: PrecisionName = "fp32"
    settings: Optimizer = SETTINGS
    seed: int = 0
    adapter: AdapterTraining = NOT_ADAPTED
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Sections and fields of the job that ranks and single process train without."""

    def micro_batches(self, step: int) -> list[Batch]:
        """Micro-batches of all data ranks in the loader's order: the first of rank 0, of rank 1, …"""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return [self._batch(generator) for _ in range(self.passes * self.layout.data)]

    def _batch(self, generator: torch.Generator) -> Batch:
        shape = (self.layout.micro_batch, self.length)
        tokens, labels = (torch.randint(self.spec.vocab_size, shape, generator=generator) for _ in range(2))
        counted = torch.randint(1, self.length + 1, (shape[0], 1), generator=generator)
        labels[torch.arange(self.length)[None] >= counted] = IGNORE
        ends = torch.randint(1, self.length, (shape[0], 1), generator=generator)
        return {"tokens": tokens, "labels": labels, "documents": (torch.arange(self.length)[None] >= ends).int()}


def target_of(asked: Job | Plan) -> CheckTarget:
    """The target of a job or plan, in float32 whatever its precision."""
    return _target_of_job(asked) if isinstance(asked, Job) else _target_of_plan(asked)


def _target_of_plan(plan: Plan) -> CheckTarget:
    rows, passes = plan.layout.micro_batch * plan.layout.data, plan.workload.global_batch
    workload, adapted = plan.workload, plan.workload.adapted
    left_out = {
        "quantize": workload.rounding is not None,
        "distill": workload.teacher is not None,
        "adapter.bits": adapted is not None and adapted.base.scheme is not None,
        "adapter.dropout": adapted is not None and adapted.drops,
    }
    return CheckTarget(
        plan.workload.spec,
        plan.layout,
        plan.levers,
        _few(passes // rows, plan.layout),
        plan.workload.sequence_length,
        settings=_settings(Optimizer.model_validate(plan.job.get("optimizer", {}))),
        adapter=NOT_ADAPTED if adapted is None else exact_adapter(adapted.settings),
        left_out=_named(left_out),
    )


def _target_of_job(job: Job) -> CheckTarget:
    spec = job.experts.applied(reshaped(source_spec(job.model.source), job.model.shape, job.model.source))
    if sentence := job.refusal(spec):
        raise UserError(sentence)
    left_out = {
        "quantize": job.quantize.bits is not None,
        "distill": job.distill.teacher is not None,
        "adapter.bits": job.adapter.bits is not None,
        "adapter.dropout": job.adapter.dropout > 0,
    }
    passes = _few(job.accumulation, job.layout)
    return CheckTarget(
        spec,
        job.layout,
        job.levers,
        passes,
        job.data.sequence_length,
        settings=_settings(job.optimizer),
        seed=job.seed,
        adapter=exact_adapter(job.adapter),
        left_out=_named(left_out),
    )


def _settings(of: Optimizer) -> Optimizer:
    return SETTINGS.model_copy(update={name: getattr(of, name) for name in CARRIED})


def _named(left_out: dict[str, bool]) -> tuple[str, ...]:
    return tuple(name for name, is_set in left_out.items() if is_set)


def exact_adapter(adapter: AdapterTraining) -> AdapterTraining:
    """The adapters without dropout, which differs from rank to rank, and on a plain model: quantized weights are the
    same on all ranks."""
    return adapter.model_copy(update={"bits": None, "dropout": 0.0})


def exact_target(target: CheckTarget) -> CheckTarget:
    """The target without lossy levers, whose rounding differs by more than a wrong sum would. Updates inside backward
    are not clipped, as clipping is by an estimate that depends on the order of gradients."""
    levers = Levers.model_validate(target.levers.model_dump(exclude=set(ROUNDING)))
    unclipped = target.settings.model_copy(update={"clip_norm": 0.0})
    return replace(
        target,
        levers=levers,
        settings=unclipped if levers.update_in_backward else target.settings,
        left_out=(*target.left_out, *_lossy(target.levers)),
    )


def _lossy(levers: Levers) -> Iterator[str]:
    """The lossy levers that are set, by name."""
    usual = Levers()
    yield from (f"levers.{name}" for name in ROUNDING if getattr(levers, name) != getattr(usual, name))


def _few(passes: int, layout: Layout) -> int:
    return max(1, min(passes, _enough(layout)))


def _enough(layout: Layout) -> int:
    """Micro-batches beyond which more would show nothing new: without flushes between steps, one per stage."""
    return max(MOST_MICRO_BATCHES, layout.pipeline if layout.has_two_versions else 1)


def miniature(target: CheckTarget) -> CheckTarget:
    """A model of the same structure at the smallest sizes that the layout allows."""
    rows = min(max(ROWS, target.layout.row_parts), target.layout.micro_batch)
    layout = target.layout.model_copy(update={"micro_batch": rows})
    passes = max(target.passes, min(_enough(layout), layout.pipeline))
    length = layout.whole_length(LENGTH)
    spec, adapter = _small(target.spec, layout, length), target.adapter
    if adapter.rank is not None:
        adapter = adapter.model_copy(update={"rank": min(adapter.rank, SMALL_RANK)})
    return replace(target, spec=spec, layout=layout, passes=passes, length=length, adapter=adapter)


def _small(spec: ModelSpec, layout: Layout, length: int) -> ModelSpec:
    t = layout.tensor_axes[2]  # ranks that share heads and columns
    sharing_heads = t * layout.ulysses_ranks
    blocks = t * t if layout.tensor_mesh == "3d" else t
    kv_heads = min(sharing_heads, spec.kv_heads) if spec.latent is None else max(2, sharing_heads)
    heads = max(sharing_heads, kv_heads * min(2, spec.heads // spec.kv_heads))
    head_dim = max(HEAD, 2 * t // kv_heads)
    layers = min(spec.layers, max(2, layout.pipeline * layout.stages_per_rank))
    rope = spec.rope if spec.rope is None or spec.rope.scaling != "longrope" else replace(spec.rope, scaling="none")
    window = None if spec.window is None else length // 4
    return replace(
        spec,
        vocab_size=96 + spec.vocab_size % 2,
        hidden_size=2 * WIDTH if layout.tensor_mesh == "1d" else -(-2 * WIDTH // blocks) * blocks,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=WIDTH * blocks,
        max_positions=2 * length,
        rope=rope,
        window=window,
        window_layers=tuple(layer for layer in spec.window_layers if layer < layers),
        experts=None if spec.experts is None else _few_experts(spec.experts, layers, layout),
        latent=None if spec.latent is None else _short_latent(spec.latent, head_dim),
    )


def _short_latent(latent: Latent, head_dim: int) -> Latent:
    half = head_dim // 2
    return Latent(kv_rank=6, rope_dim=half, value_dim=half, query_rank=8 if latent.query_rank else 0)


def _few_experts(experts: Experts, layers: int, layout: Layout) -> Experts:
    groups = min(2, experts.groups)
    return replace(
        experts,
        count=-(-4 // layout.expert) * layout.expert * groups,  # the next multiple of the expert ranks
        groups=groups,
        chosen_groups=1,
        per_token=min(2, experts.per_token),
        mlp_size=WIDTH * layout.tensor,
        shared_size=WIDTH * layout.tensor if experts.shared_size else 0,
        dense_layers=tuple(layer for layer in experts.dense_layers if layer < layers - 1),
    )
