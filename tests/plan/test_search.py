"""The search against trying everything; what it prefers when things are equal; and how quick it is."""

from dataclasses import replace

import pytest

from tests.covering import sampled
from tests.plan.questions import planned, question
from tests.speed import within_turns
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import recomputes
from tightfit.jobs.levers import Levers
from tightfit.jobs.saving import writers_of_node
from tightfit.jobs.teacher import Teacher
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.plan.answer import Question
from tightfit.plan.cost import Costs
from tightfit.plan.search.candidate import Candidate
from tightfit.plan.search.lever_choices import weaker
from tightfit.plan.search.search import COMFORT, HOPELESS, REPORTED_KINDS, LayoutKind, kind_of, search


def by_trying_everything(asked: Question) -> dict[LayoutKind, float]:
    """The fastest time of every kind over all layouts and levers, without any shortcut."""
    space, machine = asked.space, asked.machine
    costs = Costs(asked.workload, machine)
    room = COMFORT * machine.accelerator.memory_bytes
    best: dict[LayoutKind, float] = {}
    has_host = machine.host_bytes is not None
    pairs = ((layout, levers) for layout in space.layouts() for levers in space.levers_of(layout, host=has_host))
    for layout, levers in pairs:
        needed, ranks_here = peaks(asked.workload, layout, levers, INSTALLED), min(machine.per_node, layout.ranks)
        host = ranks_here * needed.host_bytes + writers_of_node(layout, ranks_here) * needed.saved_bytes
        if needed.gpu_bytes > room or (machine.host_bytes is not None and host > machine.host_bytes):
            continue
        step_s = costs.step(layout, levers).step_s
        if levers.update_in_backward and levers.offload == "none":  # which is not taken for what it saves of time
            step_s = max(step_s, costs.step(layout, levers.model_copy(update={"update_in_backward": False})).step_s)
        best[kind_of(layout)] = min(step_s, best.get(kind_of(layout), step_s))
    return best


@sampled(3)
@pytest.mark.parametrize(
    "asked",
    [
        question("llama-3.1-8b", "4xA100-80GB", 4096, 8),
        question("llama-3.1-8b", "8xV100-32GB", 512, 8),
        question("llama-2-13b", "4xA100-80GB:pcie", 2048, 4, host="256GB"),
        question("mixtral-8x7b", "8xH200", 2048, 8),
        question("llama-3.1-8b", "2xRTX4090", 1024, 4, host="256GB"),
        question("llama-3.1-8b", "H100-80GB", 4096, 4, host="215GB"),  # room for most states
    ],
    ids=lambda asked: f"{asked.model} {asked.machine.text}",
)
def test_finds_what_trying_everything_finds(asked: Question) -> None:
    truth = by_trying_everything(asked)
    found = {kind_of(plan.layout): plan.step_s for plan in search(asked.space).plans}
    fastest = min(truth.values())
    told = [step_s for step_s in sorted(truth.values())[:REPORTED_KINDS] if step_s < HOPELESS * fastest]
    assert sorted(found.values())[: len(told)] == pytest.approx(told)
    assert [kind for kind, step_s in truth.items() if step_s < told[-1] and found[kind] != pytest.approx(step_s)] == []


def test_what_changes_a_step_is_not_taken_for_its_speed() -> None:
    """Updates inside backward clip by an estimate: where all fits without, a percent or two is no reason."""
    asked = question("llama-3.2-3b", "H200", 4096, 4)
    best = search(asked.space).best
    assert best is not None
    assert not best.levers.update_in_backward
    faster = best.levers.model_copy(update={"update_in_backward": True})
    assert Costs(asked.workload, asked.machine).step(best.layout, faster).step_s < best.step_s  # so it was a choice
    small = search(question("llama-3.1-8b", "RTX4090", 1024, 4, host="256GB").space).best
    assert small is not None
    assert small.levers.update_in_backward


def test_levers_only_ever_save_memory() -> None:
    """What the shortcuts rest on: a set of levers that is weaker in all needs at least as much."""
    asked = question("llama-3.1-8b", "8xA100-80GB", 4096, 64)
    levers = asked.space.levers()
    for layout in (Layout(data=8, zero=3, micro_batch=2), Layout(data=2, tensor=2, pipeline=2, micro_batch=4)):
        needed = [peaks(asked.workload, layout, each, INSTALLED).gpu_bytes for each in levers]
        pairs = [(i, j) for i, a in enumerate(levers) for j, b in enumerate(levers) if weaker(a, b)]
        assert len(pairs) > len(levers)
        assert [(levers[i], levers[j]) for i, j in pairs if needed[i] < needed[j] * 0.999] == []


def test_larger_micro_batches_need_more_memory_while_gradients_add_up() -> None:
    asked = question("llama-3.1-8b", "8xA100-80GB", 1024, 64)
    for zero in (0, 1, 2, 3):
        layouts = [Layout(data=8, zero=zero, micro_batch=rows) for rows in (1, 2, 4)]
        needed = [peaks(asked.workload, layout, Levers(), INSTALLED).gpu_bytes for layout in layouts]
        assert needed == sorted(needed)


@sampled(2)
@pytest.mark.parametrize(
    "asked",
    [
        question("llama-3.1-8b", "8xV100-32GB", 512, 8),
        question("llama-3.1-8b", "8xV100-32GB", 512, 32),
        question("gemma-2-2b", "8xT4", 1024, 16),
        question("llama-3.2-1b", "H100-80GB", 2048, 16),
    ],
    ids=lambda asked: f"{asked.model} {asked.machine.text} {asked.workload.global_batch} rows",
)
def test_the_leanest_of_a_family_are_the_leanest(asked: Question) -> None:
    """Where pipelines are not full, larger micro-batches may need less: families are ruled out by all of these."""
    space = asked.space
    fewer = 0
    for family in space.families():

        def least(layouts: list[Layout]) -> int:
            strongest = ((each, space.levers_of(each, host=False)[-1]) for each in layouts)
            return min(peaks(asked.workload, *each, INSTALLED).gpu_bytes for each in strongest)

        chosen = space.leanest(family)
        assert least(chosen) == least(family), family[0]
        fewer += len(chosen) < len(family)
    assert fewer > 0


def test_simple_plans_win_ties() -> None:
    best = planned("smollm2-135m", "8xH100-80GB", 1024, 512).plan
    assert best.layout.data == 8
    assert best.layout.zero == 0
    assert best.levers == Levers()


def test_plans_leave_room_where_they_can_and_say_so_where_not() -> None:
    roomy = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64)
    assert roomy.plan.gpu_peak_bytes <= COMFORT * roomy.plan.machine.accelerator.memory_bytes
    pins = ("layout.zero=3", "layout.data=8", "layout.micro_batch=1", "levers.checkpoint_every=0", "levers.tiles=1")
    tight = planned("llama-3.1-8b", "8xH100-80GB", 16384, 64, *pins, "levers.loss_chunk_bytes=0")
    if tight.plan.gpu_peak_bytes > COMFORT * tight.plan.machine.accelerator.memory_bytes:
        assert any(note.startswith("tight") for note in tight.notes)


def test_offload_waits_until_somebody_says_what_the_host_has() -> None:
    unknown = planned("llama-3.1-8b", "8xRTX4090", 4096, 64)
    assert unknown.plan.levers.offload == "none"
    small = planned("llama-3.1-8b", "H100-80GB", 4096, 8, host="32GB")
    assert not small.plan.fits
    assert any("host memory" in str(change) for change in small.changes)
    large = planned("llama-3.1-8b", "H100-80GB", 4096, 8, host="256GB")
    assert large.plan.fits
    assert large.plan.levers.offload != "none"
    assert large.plan.host_peak_bytes <= 256e9


def test_lossy_states_are_never_chosen_unasked() -> None:
    asked = ("llama-3.1-8b", "H100-80GB", 4096, 8, "levers.offload=none")
    assert planned(*asked).plan.levers.optimizer_states == "auto"
    allowed = planned("llama-3.1-8b", "2xA100-40GB", 2048, 8, "levers.offload=none", lossy=True)
    assert allowed.plan.levers.optimizer_states in ("bf16", "8bit")
    pinned = planned("llama-3.1-8b", "8xH100-80GB", 4096, 64, "levers.optimizer_states=8bit")
    assert pinned.plan.levers.optimizer_states == "8bit"


def test_pinned_levers_leave_the_layouts_that_can_have_them() -> None:
    factored = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "levers.optimizer_states=factored").plan
    assert factored.layout.zero == 0
    inside = planned("llama-3.2-1b", "H100-80GB", 2048, 8, "levers.update_in_backward=true").plan
    assert inside.layout.micro_batch == 8
    many = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "levers.update_in_backward=true").plan
    assert many.layout.zero >= 1
    assert (many.layout.micro_batch * many.layout.data, many.layout.pipeline) == (64, 1)
    split = planned("llama-3.2-1b", "8xH100-80GB", 2048, 8, "levers.update_in_backward=true", "layout.tensor=8").plan
    assert (split.layout.micro_batch, split.layout.zero) == (8, 0)
    with pytest.raises(UserError, match="update_in_backward"):
        planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, "levers.update_in_backward=true", "layout.pipeline=8")


def test_large_questions_are_quick() -> None:
    """Seconds of a processor that makes 18 million turns of a loop in one of them."""
    for asked, seconds in (
        (question("llama-3.1-405b", "128x8xH100-80GB", 8192, 2048), 5.0),
        (question("llama-3.1-8b", "8xV100-32GB", 512, 64), 1.0),
    ):
        with within_turns(18 * seconds):
            assert search(asked.space).plans


@pytest.mark.parametrize("compared", [{"features": 2}, {"maps": 1}])
def test_layers_that_a_teacher_compares_are_not_computed_again(compared: dict[str, int]) -> None:
    """Without that, these rows are planned with layers computed again, which the trainer then refuses."""
    asked = question("llama-3.2-1b", "RTX-4090", 2048, 16, "layout.micro_batch=8")
    spec = asked.workload.spec

    def best(teacher: Teacher) -> Candidate | None:
        return search(replace(asked, workload=replace(asked.workload, teacher=teacher)).space).best

    only_logits = best(Teacher(spec=spec, weight_bytes=2 * spec.params(), place="host"))
    assert only_logits is not None
    assert recomputes(only_logits.levers)
    compares_layers = best(Teacher(spec=spec, weight_bytes=2 * spec.params(), place="host", **compared))
    assert compares_layers is None or not recomputes(compares_layers.levers)


def test_weights_that_shrink_are_not_offloaded() -> None:
    """Pieces on their way to the host are updated where optimizer.l1 does not reach them: the trainer refuses it."""
    asked = question("llama-3.1-8b", "RTX-4090", 512, 8)
    usual = search(asked.space)
    assert usual.best is not None
    assert usual.best.levers.offload != "none"
    shrinking = search(replace(asked, workload=replace(asked.workload, shrinks=True)).space)
    assert {each.levers.offload for each in (*shrinking.plans, shrinking.nearest)} == {"none"}
