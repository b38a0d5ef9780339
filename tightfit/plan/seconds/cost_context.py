"""CostContext: one workload on one machine, and the rates of its cards, links and host that every cost asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from tightfit.hardware.efficiency import MEASURED, Efficiency
from tightfit.hardware.launches import LAYER, UPDATE_MS
from tightfit.hardware.machine import Machine
from tightfit.jobs.workload import Workload
from tightfit.plan.seconds.groups import Group
from tightfit.plan.seconds.rates import Rates, card_rates


@dataclass(frozen=True, kw_only=True)
class CostContext:
    """What stays the same whatever the layout and the levers are."""

    workload: Workload
    machine: Machine
    efficiency: Efficiency
    rates: Rates
    group: Callable[[int, int], Group]
    """From (stride, size) to the Group of ranks."""
    host_share: float
    """The host's time to launch a plain layer and its update, relative to the measured host's."""

    @property
    def launch_share(self) -> float:
        """The same for the engine's launches, relative to ours on the measured host."""
        return self.workload.engine.launch_share * self.host_share


def cost_context(workload: Workload, machine: Machine, layer_launch_ms: float | None = None) -> CostContext:
    """`layer_launch_ms`: the host's measured time to launch a plain layer and its update; None: the default's."""
    efficiency = MEASURED
    if (calibration := machine.calibration) is not None:
        efficiency, layer_launch_ms = calibration.efficiency(machine.accelerator), calibration.layer_launch_ms
    plain_ms = sum(LAYER[""]) + UPDATE_MS[""]
    return CostContext(
        workload=workload,
        machine=machine,
        efficiency=efficiency,
        rates=card_rates(workload, machine, efficiency),
        group=cache(partial(Group, machine)),
        host_share=1.0 if layer_launch_ms is None else layer_launch_ms / plain_ms,
    )
