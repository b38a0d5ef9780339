"""A teacher takes the seconds that its own shape says, whichever student it teaches."""

from dataclasses import replace

import pytest

from tests.hardware.test_calibration import MEASURED as CALIBRATION
from tests.plan.questions import question
from tightfit.jobs.layout import Layout
from tightfit.jobs.teacher import Teacher
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.seconds.teacher import teacher_s


def test_a_teacher_on_the_host_comes_over_the_measured_link() -> None:
    asked = question("llama-3.2-1b", "RTX4090", 2048, 1)
    machine = replace(asked.machine, calibration=CALIBRATION)
    seconds = []
    for place in ("device", "host"):
        teacher = Teacher(spec=asked.workload.spec, weight_bytes=10**10, place=place, features=0)
        ctx = Costs(replace(asked.workload, teacher=teacher), machine).ctx
        seconds.append(teacher_s(ctx, Layout(micro_batch=1)))
    assert seconds[1] - seconds[0] == pytest.approx(10 / CALIBRATION.link_gb_s)


@pytest.mark.parametrize("length", [2048, 32768])
def test_a_student_changes_nothing_about_its_teacher(length: int) -> None:
    spec = preset("llama-3.1-8b")  # heads of 128; those of the smallest student have 64, the last's vocabulary is odd
    teacher = Teacher(spec=spec, weight_bytes=2 * spec.params(), place="device", features=0)
    seconds = []
    for student in ("llama-3.2-1b", "llama-3.1-8b", "gpt2"):
        asked = question("llama-3.2-1b", "1xH100-80GB", length, 8)
        workload = replace(
            asked.workload, spec=replace(preset(student), max_positions=spec.max_positions), teacher=teacher
        )
        ctx = Costs(workload, asked.machine).ctx
        seconds.append(teacher_s(ctx, Layout(micro_batch=1)))
    assert seconds == [seconds[1]] * 3
