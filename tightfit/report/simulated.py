"""The timeline of a step that is never run: rehearsed on fake tensors and replayed through the allocator's model."""

from pydantic import ValidationError

from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.workload import Workload
from tightfit.models.spec import ModelSpec
from tightfit.plan.search.pins import Pins
from tightfit.prove.rehearsal import trace_training_step
from tightfit.report.timeline import Timeline, of_simulation


def simulate_timeline(
    spec: ModelSpec, pins: Pins, *, sequence_length: int, precision: PrecisionName, global_batch: int | None = None
) -> Timeline:
    """The second step of `spec` under the layout and levers in `pins`; micro-batches have one row by default."""
    try:
        layout = Layout.model_validate({"micro_batch": 1, **pins.layout})
        levers = Levers.model_validate(pins.levers)
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    refuse_untrainable(
        Run(layout=layout, levers=levers, precision=precision, spec=spec, sequence_length=sequence_length)
    )
    rows = layout.micro_batch * layout.data
    if global_batch is not None and (global_batch < 1 or global_batch % rows):
        raise UserError(f"the global batch of {global_batch} rows is not a multiple of {rows}; change one of the two")
    workload = Workload(
        spec=spec, sequence_length=sequence_length, global_batch=global_batch or rows, precision=precision
    )
    return of_simulation(trace_training_step(workload, layout, levers))
