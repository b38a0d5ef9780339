"""Section: what every part of a job file has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, unknown fields refused, attribute docstrings are the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
