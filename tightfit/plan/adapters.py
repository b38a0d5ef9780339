"""Adapters that a question asks for beside its model, as a job would say it."""

from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.plan.answer import Question


def with_adapters(question: Question, fields: Mapping[str, int]) -> Question:
    """`question` with adapters on its model, or a sentence where `fields` are none of them."""
    if question.workload.engine_name != "tightfit":
        engine = question.workload.engine_name
        raise UserError(f"--adapter is planned for tightfit's own engine, but --engine is {engine}; leave one out")
    try:
        settings = AdapterTraining.model_validate(dict(fields))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "adapter"
        raise UserError(f"adapter.{field} is {problem['input']!r:.40}: {problem['msg']}; change it") from None
    adapted = settings.on(question.model, question.workload.spec)
    job = {**question.job, "adapter": dict(fields)}
    return replace(question, workload=replace(question.workload, adapted=adapted), job=job)
