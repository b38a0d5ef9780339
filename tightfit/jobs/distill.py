"""Distill: the section of a job that gives it a teacher. L = (1 − α) · CE + α · τ² · D(teacher, student)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tightfit.jobs.section import Section


class Distill(Section):
    teacher: str | None = None
    """A model of the same vocabulary to learn from (compressed ones too); `model` is the model as it began."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """Share of the teacher in the loss; the rest is cross entropy on the data."""
    temperature: float = Field(default=2.0, gt=0, le=100)
    """Divides the logits of both, so that unlikely tokens count."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """forward: KL(teacher ‖ student), mode-covering; reverse: KL(student ‖ teacher), mode-seeking; jsd lies between."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of jsd."""
    features: float = Field(default=0.0, ge=0)
    """Weight of the squared distance of normed hidden states; 0 for none."""
    attention: float = Field(default=0.0, ge=0)
    """Weight of the divergence of attention maps, averaged over heads; 0 for none."""
    contrastive: float = Field(default=0.0, ge=0)
    """Weight of a contrastive loss on last hidden states, whose positive is the teacher's of the token; 0 for none."""
    feature_layers: int = Field(default=2, ge=1)
    """Layers of the student, evenly spaced up to its last, whose hidden states or maps are compared."""
    place: Literal["device", "host"] = "device"
    """Where the teacher's weights are kept; from the host they are copied layer by layer at every step."""

    @model_validator(mode="after")
    def _needs_a_teacher(self) -> Self:
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        given = ", ".join(name for name, default in usual.items() if getattr(self, name) != default)
        if self.teacher is None and given:
            raise ValueError(f"distill has {given}, but no teacher; name one with distill.teacher or drop the section")
        return self
