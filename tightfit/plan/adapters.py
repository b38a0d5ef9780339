"""Adapters that a question asks for beside its model, as a job would say it."""

from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.workload import Workload


def with_adapters(workload: Workload, model: str, fields: Mapping[str, int]) -> Workload:
    """`workload` with adapters on the model that `model` names, or a sentence where `fields` are none of them."""
    try:
        settings = AdapterTraining.model_validate(dict(fields))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "adapter"
        raise UserError(f"adapter.{field} is {problem['input']!r:.40}: {problem['msg']}; change it") from None
    return replace(workload, adapted=settings.on(model, workload.spec))
