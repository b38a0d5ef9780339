"""`engine: deepspeed`: the same job through DeepSpeed's ZeRO-1, 2 or 3, with the JSON that the planner exports.

Model, rows, loss, learning rate, evaluation and checkpoints are ours; sharded weights, gradient reduction, clipping and
the update are DeepSpeed's. The loss is divided by the counted tokens of the whole step, so gradients must be summed
over ranks and micro-batches; DeepSpeed averages over ranks, so the loss is multiplied by the rank count before
backward.

Under ZeRO-3 DeepSpeed all-gathers weights where a module's forward is called. Our layers read weights of their children
directly (fused MLPs, tiles, recomputation), so each layer is made a leaf module that is gathered whole; the head stays
gathered for as long as the model runs, because the fused loss reads its weight. DeepSpeed's hooks see only tensors and
tuples of a module's result, hence `Objective` around the decoder.

Limits: every process first holds the whole model in float32 in host memory. In mixed precision DeepSpeed makes its
masters from weights already rounded to 16 bits, so a run that starts at random differs from ours by that rounding.
DeepSpeed does not resume runs, but its checkpoints are complete: our engine resumes from them.
Source: Rajbhandari et al. 2020 (ZeRO), Ren et al. 2021 (ZeRO-Offload); behaviour of DeepSpeed 0.19.
"""

import importlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.exports.deepspeed import settings
from tightfit.jobs.job import Job, PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder, DecoderOutput, Layer
from tightfit.models.spec import ModelSpec
from tightfit.parallel.apply import apply
from tightfit.parallel.ranks import Ranks
from tightfit.train.optimizer.adamw import MasterAdamW, decays
from tightfit.train.precision import LossScale
from tightfit.train.step import Batch, NotFiniteError, OnPhase, StepResult, inputs

INSTALL = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8"
SHARED_MEMORY = "deepspeed_shm_comm"
MOMENTS = ("exp_avg", "exp_avg_sq")
Fill = Callable[[Decoder], None]


def load_deepspeed(device: torch.device) -> Any:
    """Import the deepspeed package, which learns its accelerator and local rank from the environment alone."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError:
        raise UserError(f"engine is deepspeed, which is not installed; run `{INSTALL}`") from None
    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setLevel(logging.ERROR)  # DeepSpeed would print between our own lines, to stdout
    warnings.filterwarnings("ignore", r"`torch.distributed\.\w+` is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False  # takes minutes to compile, and gloo needs it not
    return deepspeed


def refuse_what_deepspeed_cannot(job: Job, checkpoint: Path | None, device: torch.device) -> None:
    """Refuse sharded saving, resuming and a missing package, before anything slow."""
    if job.saving.sharded:
        raise UserError(
            "saving.sharded is true, but engine deepspeed holds weights and states in its own way; set it to false"
        )
    if checkpoint is not None:
        raise UserError(
            f"engine is deepspeed, which does not resume runs; set engine to tightfit to go on from {checkpoint}"
        )
    load_deepspeed(device)


def deepspeed_assembled(
    job: Job, spec: ModelSpec, device: torch.device, precision: PrecisionName, fill: Fill
) -> tuple[Decoder, nn.Module, MasterAdamW]:
    """The decoder, the module to call for its loss, and an optimizer that leaves every step to DeepSpeed."""
    model = blank_decoder(spec, "cpu", torch.float32)
    fill(model)
    apply(model, None, job.layout, job.levers, precision)
    module = DeepSpeedModule(model, job, precision, device)
    optimizer = MasterAdamW(nn.Module(), job.optimizer)
    optimizer.engine = module
    return model, module, optimizer


class Objective(nn.Module):
    """The decoder's loss as two tensors: the one for backward, auxiliary losses included, and the reported one."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, share: float | Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """`share`: this micro-batch's share of the step's counted tokens."""
        output = self.decoder(**arguments)
        objective = output.loss
        if output.auxiliary is not None:
            objective = objective + output.auxiliary * share
        return objective, output.loss.detach()


class DeepSpeedModule(nn.Module):
    """DeepSpeed's engine around a decoder: loss, steps, and weights and states under the names of a checkpoint."""

    def __init__(self, decoder: Decoder, job: Job, precision: PrecisionName, device: torch.device) -> None:
        super().__init__()
        self.package = load_deepspeed(device)
        self.spec, self.has_masters = decoder.spec, precision in ("bf16", "fp16")
        self.config = self.configuration(job, Workload.of_job(job, decoder.spec, precision))
        self.stage: int = self.config["zero_optimization"]["stage"]
        self.steps = 0
        self._initialize(Objective(decoder))

    @staticmethod
    def configuration(job: Job, workload: Workload) -> dict[str, Any]:
        """The DeepSpeed JSON that a plan of this job is exported as."""
        return settings(workload, job.layout, job.levers, job.optimizer)

    def _initialize(self, objective: Objective) -> None:
        if not dist.is_initialized():
            alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        self.package.utils.set_z3_leaf_modules(objective, [Layer])
        groups = _groups(objective.decoder)
        engine, *_ = self.package.initialize(model=objective, model_parameters=groups, config=self.config)
        if self.stage == 3:
            self.package.zero.register_external_parameter(objective, objective.decoder.head.weight)
        self.engine: Any = engine

    def forward(self, **arguments: Any) -> DecoderOutput:
        """The loss without gradients, for evaluation."""
        self.engine.eval()
        _, loss = self.engine(share=0.0, **arguments)
        self.engine.train()
        return DecoderOutput(None, loss, None)

    def train_step(
        self,
        batches: Sequence[Batch],
        device: torch.device,
        lr: float,
        scale: LossScale,
        on_phase: OnPhase,
        ranks: Ranks,
    ) -> StepResult:
        """Like `train_step` of train/step.py; NotFiniteError is raised before weights change unless its
        `weights_changed` is set."""
        counts = [int((batch["labels"] != IGNORE).sum()) for batch in batches]
        tokens = int(ranks.sum(torch.tensor(sum(counts), device=device)))
        total = torch.tensor(max(tokens, 1), device=device)
        mean = torch.zeros((), device=device)
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True), 1):
            on_phase("forward")
            objective, loss = self.engine(share=count / total, **inputs(batch, device), divisor=total)
            mean += loss
            on_phase("backward")
            self.engine.backward(objective * ranks.world, scale_wrt_gas=False)
            if number < len(batches):
                self.engine.step()  # counts the micro-batch
        on_phase("optimizer")
        return self._update(float(ranks.sum(mean)), tokens, lr, scale)

    def _update(self, loss: float, tokens: int, lr: float, scale: LossScale) -> StepResult:
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss}")
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        applied = bool(self.engine.was_step_applied())
        norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm) and not scale.dynamic:
            raise NotFiniteError(f"the gradient norm is {norm}", weights_changed=applied)
        self.steps += applied
        if scale.dynamic:
            scale.value = float(self.engine.optimizer.loss_scale)
        return StepResult(loss, norm, tokens, skipped=not applied)

    def weights(self, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
        """Every weight, whole, in host memory of the first rank; nothing on the others. All ranks call this."""
        found = {}
        for name, tensor in self.engine.module.decoder.state_dict(keep_vars=True).items():
            with self.package.zero.GatheredParameters([tensor], enabled=self.stage == 3):
                if ranks.first:
                    found[name] = tensor.detach().to("cpu", dtype, copy=True)
        return found

    def states(self, ranks: Ranks) -> dict[str, Tensor]:
        """The optimizer states under the names of our own optimizer, in host memory of the first rank; nothing on the
        others. All ranks call this."""
        return {name: tensor.to("cpu") for name, tensor in self._states() if ranks.first}

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        look, optimizer = self.package.utils, self.engine.optimizer
        if self.stage < 3:  # states are linked once, after the first group's first update, when other groups have none
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.engine.module.decoder.named_parameters():
            yield f"step/{name}", torch.tensor(float(self.steps))
            for moment in MOMENTS:
                yield f"{moment}/{name}", look.safe_get_full_optimizer_state(parameter, moment)
            if self.has_masters:
                yield f"master/{name}", look.safe_get_full_fp32_param(parameter)


def _groups(decoder: Decoder) -> list[dict[str, Any]]:
    """Parameters with and without weight decay, as in our own optimizer; the decay itself is in the configuration."""
    named = list(decoder.named_parameters())
    decayed = [parameter for name, parameter in named if decays(name, parameter)]
    return [
        {"params": decayed},
        {"params": [parameter for name, parameter in named if not decays(name, parameter)], "weight_decay": 0.0},
    ]
