"""ExpertTraining: the section of a job on how a routed model's experts are trained, without torch.

Neither field belongs to the model: a saved or served model does not have them (`ModelSpec.as_saved`).
"""

from dataclasses import replace

from pydantic import Field

from tightfit.errors import UserError
from tightfit.jobs.section import Section
from tightfit.models.spec import ModelSpec


class ExpertTraining(Section):
    z_loss: float = Field(default=0.0, ge=0, le=1)
    """Weight of the router's z-loss (ST-MoE), the mean square of its logits' logsumexp; 0.001 is usual, 0 for none."""
    capacity_factor: float | None = Field(default=None, gt=0, le=1e6)
    """Most tokens of an expert, times its even share of a micro-batch; the others are dropped. Without, no limit."""

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with these settings."""
        if spec.experts is not None:
            experts = replace(spec.experts, z_weight=self.z_loss, capacity_factor=self.capacity_factor)
            return replace(spec, experts=experts)
        for name in type(self).model_fields:
            if getattr(self, name):
                raise UserError(f"experts.{name} is {getattr(self, name)}, but {spec.family} has no experts; drop it")
        return spec
