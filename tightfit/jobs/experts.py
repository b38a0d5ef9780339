"""ExpertTraining: the section of a job about the experts of a routed model while it is trained, without torch.

Neither field belongs to the model: what is saved and served knows nothing of them.
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
    """An expert takes so many times its even share of a micro-batch's tokens; others are dropped. Without, no limit."""

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with these settings."""
        if spec.experts is not None:
            experts = replace(spec.experts, z_weight=self.z_loss, capacity_factor=self.capacity_factor)
            return replace(spec, experts=experts)
        for name in type(self).model_fields:
            if getattr(self, name):
                raise UserError(f"experts.{name} is {getattr(self, name)}, but {spec.family} has no experts; drop it")
        return spec


AS_SAVED = ExpertTraining()
"""What a saved model says of its training: nothing."""
