"""Memory and time of a plan in the engine that an export is for, which differ from tightfit's.

Layout and levers are the plan's, as far as that engine has them; memory and time follow jobs/engine.py.
"""

from dataclasses import dataclass, replace

from tightfit.jobs.engine import ENGINES, EngineName
from tightfit.jobs.levers import Levers
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.plan.cost import Costs
from tightfit.plan.plan import Plan

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class EngineEstimate:
    """Bytes on the fullest card, and seconds of a step."""

    engine_name: EngineName
    gpu_bytes: int
    room_bytes: int
    step_s: float

    def __str__(self) -> str:
        fits = "fits" if self.gpu_bytes <= self.room_bytes else "does not fit"
        return (
            f"with {ENGINES[self.engine_name].is_for} this takes about {self.gpu_bytes / GIB:.1f} GiB of "
            f"{self.room_bytes / GIB:.1f} a GPU ({fits}) and {self.step_s:.2f} s a step"
        )


def engine_estimate(plan: Plan, engine_name: EngineName) -> EngineEstimate:
    """The estimate of `plan` run by another engine: levers that it lacks are left out."""
    workload = replace(plan.workload, engine_name=engine_name)
    lacking = dict(workload.engine.fixed_levers)
    levers = Levers.model_validate({**plan.levers.model_dump(), **lacking})
    if workload.engine.recomputes_all_or_nothing and levers.checkpoint_every:
        levers = levers.model_copy(update={"checkpoint_every": 1})
    return EngineEstimate(
        engine_name=engine_name,
        gpu_bytes=peaks(workload, plan.layout, levers, INSTALLED).gpu_bytes,
        room_bytes=plan.machine.accelerator.memory_bytes,
        step_s=Costs(workload, plan.machine).step(plan.layout, levers).step_s,
    )
