"""From a checked job to a run ready to step: model, optimizer, loader, filled with weights or restored.

This is where memory is allocated, after all checks (checks.py). Nothing is written here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tightfit.jobs.job import Job, PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import has_sharded, load_into
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.parallel.ranks import Ranks
from tightfit.printable import Say
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.checkpoints.directory import restore_training_state, restore_weights
from tightfit.train.checkpoints.sharded import restore_sharded_states
from tightfit.train.checks import CheckedRun, check_run, wants_weights
from tightfit.train.data.loader import Loader, make_loader
from tightfit.train.deepspeed_engine import deepspeed_assembled
from tightfit.train.distillation import teach, teacher_spec
from tightfit.train.frozen_base import frozen_model
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import COMPUTE_DTYPES, LossScale
from tightfit.train.run_data import Rows
from tightfit.train.step_graph import StepGraph, step_graph


@dataclass
class Prepared:
    """A run ready to step."""

    job: Job
    device: torch.device
    precision: PrecisionName
    ranks: Ranks
    model: Decoder
    """The decoder: this rank's copy of it, or its shards."""
    module: nn.Module
    """What a training step calls: the decoder, or DDP around it."""
    tokenizer: Tokenizer
    optimizer: MasterAdamW
    scale: LossScale
    loader: Loader
    held_out: Rows | None
    total_steps: int
    facts: dict[str, Any]
    checkpoint: Path | None
    position_step: int
    graph: StepGraph | None
    """CUDA graph of the step, where the GPU would otherwise wait for the host to launch kernels."""

    @property
    def evaluated(self) -> nn.Module:
        """The module to call for a loss without gradients: that of training, without DDP around it."""
        return self.model if isinstance(self.module, DistributedDataParallel) else self.module


def prepare(
    job: Job,
    checkpoint: Path | None,
    say: Say,
    *,
    show_bars: bool,
    device: torch.device,
    mesh: DeviceMesh | None,
    saves: bool = False,
    replaces: bool = False,
) -> Prepared:
    """Everything this rank needs for `job`, restored to where `checkpoint` was taken if there is one.

    `saves`: checkpoints will be written. `replaces`: the first of them replaces an older run in the output.
    """
    checked = check_run(
        job,
        checkpoint,
        say,
        show_bars=show_bars,
        device=device,
        ranks=Ranks.of(mesh),
        saves=saves,
        replaces=replaces,
    )
    return prepare_checked(checked, say, mesh)


def prepare_checked(checked: CheckedRun, say: Say, mesh: DeviceMesh | None) -> Prepared:
    """Allocate and fill what `checked` describes."""
    job, checkpoint, ranks = checked.job, checked.checkpoint, Ranks.of(mesh)
    model, module, optimizer = _assembled(checked, mesh)
    teach(model, job, checked.device, COMPUTE_DTYPES[checked.precision])
    loader, scale = _positioned(checked, ranks)
    if checkpoint is not None:
        restore = restore_sharded_states if has_sharded(checkpoint) else restore_training_state
        restore(checkpoint, optimizer)
        say(f"resumed from {checkpoint}")
    return Prepared(
        job=job,
        device=checked.device,
        precision=checked.precision,
        ranks=ranks,
        model=model,
        module=module,
        tokenizer=checked.tokenizer,
        optimizer=optimizer,
        scale=scale,
        loader=loader,
        held_out=checked.data.evaluated_rows(job.evaluation.max_rows),
        total_steps=checked.total_steps,
        facts=checked.facts,
        checkpoint=checkpoint,
        position_step=checked.first_step,
        graph=_step_graph(checked, module, optimizer),
    )


def _assembled(checked: CheckedRun, mesh: DeviceMesh | None) -> tuple[Decoder, nn.Module, MasterAdamW]:
    """Weights from the checkpoint, the source or the seed, split and optimized as the job says."""
    job, spec, device, precision = checked.job, checked.spec, checked.device, checked.precision

    def load(model: Decoder) -> None:
        torch.manual_seed(job.seed)
        if checked.checkpoint is not None:
            restore_weights(checked.checkpoint, model)
        elif wants_weights(job):
            load_into(model, job.model.source)
        else:
            init_weights(model, device=device)

    if job.engine == "deepspeed":
        return deepspeed_assembled(job, spec, device, precision, load)
    if job.adapter.rank is not None:
        model, fill = frozen_model(checked)
    else:
        model, fill = unfilled(spec, job.layout, precision, device, job.levers), load
    module, optimizer = assemble(
        model,
        mesh,
        job.layout,
        job.levers,
        precision,
        job.optimizer,
        device,
        fill,
        job.seed,
        job.data.sequence_length,
        job.quantize,
    )
    return model, module, optimizer


def _step_graph(checked: CheckedRun, module: nn.Module, optimizer: MasterAdamW) -> StepGraph | None:
    job = checked.job
    if job.engine != "tightfit":
        return None
    workload = Workload.of_job(job, checked.spec, checked.precision, teacher_spec(job))
    return step_graph(module, optimizer, checked.device, workload, job.layout, job.levers)


def _positioned(checked: CheckedRun, ranks: Ranks) -> tuple[Loader, LossScale]:
    job, position = checked.job, checked.position
    loader = make_loader(
        checked.data.train, micro_batch=job.layout.micro_batch, seed=job.seed, rank=ranks.rank, world=ranks.world
    )
    if position is None:
        return loader, LossScale.for_precision(checked.precision)
    loader.load_state_dict(position.loader)
    return loader, LossScale(**position.loss_scale)
