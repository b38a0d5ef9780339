"""Questions to the planner, as tests ask them."""

from tightfit.hardware.machine import parse_machine
from tightfit.jobs.engine import EngineName
from tightfit.jobs.job import PrecisionName
from tightfit.models.presets import preset
from tightfit.plan.answer import Answer, Question, answer, make_workload
from tightfit.plan.search.pins import parse_pins


def question(
    model: str,
    on: str,
    seq: int | None = None,
    rows: int | None = None,
    *pins: str,
    host: str | None = None,
    precision: PrecisionName | None = None,
    lossy: bool = False,
    engine: EngineName = "tightfit",
) -> Question:
    """`tightfit plan MODEL --on … --seq … --global-batch … -o …`."""
    machine = parse_machine(on, host)
    workload = make_workload(preset(model), machine, sequence_length=seq, rows=rows, precision=precision, engine=engine)
    return Question(model=model, workload=workload, machine=machine, pins=parse_pins(pins), lossy=lossy)


def planned(
    model: str,
    on: str,
    seq: int | None = None,
    rows: int | None = None,
    *pins: str,
    host: str | None = None,
    precision: PrecisionName | None = None,
    lossy: bool = False,
) -> Answer:
    """The answer to that."""
    return answer(question(model, on, seq, rows, *pins, host=host, precision=precision, lossy=lossy))
