"""Pins: decided fields stay decided, and nonsense is one sentence."""

import pytest

from tests.covering import sampled
from tests.plan.questions import planned
from tightfit.errors import UserError
from tightfit.jobs.rules.refusals import refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.plan.plan import Plan
from tightfit.plan.search.pins import Pins, parse_pins


@pytest.mark.parametrize(
    ("pin", "section", "name", "value"),
    [
        ("layout.zero=3", "layout", "zero", 3),
        ("levers.offload=none", "levers", "offload", "none"),
        ("levers.offload_checkpoints=true", "levers", "offload_checkpoints", True),
        (" layout.schedule = gpipe", "layout", "schedule", "gpipe"),
    ],
)
def test_parse(pin: str, section: str, name: str, value: object) -> None:
    assert getattr(parse_pins([pin]), section) == {name: value}


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("layout.zero=4", ["layout.zero", "'4'", "data ranks split"]),
        ("layout.zero", ["layout.zero", "layout.FIELD=value"]),
        ("optimizer.lr=1", ["optimizer.lr=1", "levers.FIELD=value"]),
        ("layout.tensr=2", ["layout.tensr", "tensor"]),
        ("levers.nonsense=2", ["levers.nonsense", "checkpoint_every"]),
        ("layout.tensor=0", ["layout.tensor", "'0'", "greater than or equal to 1"]),
        ("layout.tensor=[", ["layout.tensor", "'['"]),
        ("levers.offload=disk", ["levers.offload", "disk"]),
    ],
)
def test_bad_pins(pin: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_pins([pin])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@sampled(3)
@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["layout.tensor=3"], ["layout.tensor is 3", "8 GPUs"]),
        (["layout.data=8", "layout.tensor=2"], ["layout.data=8 × layout.tensor=2", "8 GPUs"]),
        (["layout.expert=2"], ["layout.expert is 2", "llama has no experts"]),
        (["layout.tensor_depth=5"], ["layout.tensor_depth=5", "drop it"]),
        (["layout.micro_batch=5"], ["64", "5"]),
        (["layout.pipeline=8", "layout.schedule=interleaved", "layout.stages_per_rank=5"], ["32 layers"]),
        (["layout.shard_inside=3"], ["layout.shard_inside is 3", "divisor"]),
        (["levers.num_checkpoints=99"], ["levers.num_checkpoints is 99", "32 layers"]),
        (["levers.num_checkpoints=8", "levers.checkpoint_every=1"], ["leave one at 0"]),
        (["levers.checkpoint_budget_bytes=1000"], ["levers.checkpoint_budget_bytes is 1000", "alone take"]),
        (["levers.checkpoint_keep=matmuls", "levers.checkpoint_every=0"], ["no layer is recomputed"]),
        (["levers.offload_checkpoints=true", "levers.checkpoint_every=0"], ["checkpoint_every"]),
    ],
)
def test_pins_that_leave_nothing(pins: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        planned("llama-3.1-8b", "8xH100-80GB", 512, 64, *pins)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("rows", "pins", "words"),
    [
        (1, [], ["global batch 1", "512 GPUs", "a multiple of 512 rows"]),
        (5, ["layout.schedule=zero-bubble"], ["global batch 5", "layout.schedule=zero-bubble", "512 rows"]),
        (3, ["layout.zero=1", "levers.tiles=1"], ["global batch 3", "512 rows"]),
    ],
)
def test_rows_that_cannot_be_split_are_named(rows: int, pins: list[str], words: list[str]) -> None:
    """Not a rule that only one of a thousand layouts breaks."""
    with pytest.raises(UserError) as error:
        planned("gpt2-xl", "64x8xL4", 1024, rows, *pins)
    for word in words:
        assert word in str(error.value)


def test_rows_are_split_as_pinned() -> None:
    """Also in pieces that the search would not try."""
    plan = planned("llama-3.1-8b", "8xH100-80GB", 1000, 8, "layout.context=8").plan
    assert (plan.layout.context, plan.layout.ring) == (8, 1)
    assert refused(plan) is None
    with pytest.raises(UserError, match="rows of 1001 tokens cannot be split evenly over 8 context ranks"):
        planned("llama-3.1-8b", "8xH100-80GB", 1001, 8, "layout.context=8")


def test_shapes_of_the_model_limit_the_layout() -> None:
    with pytest.raises(
        UserError, match=r"layout.tensor is 16, but the model has 9 attention heads; give a number that divides them"
    ):
        planned("smollm2-135m", "16xH100-80GB", 512, 64, "layout.tensor=16")
    with pytest.raises(UserError, match=r"layout.pipeline is 64.*30 layers"):
        planned("smollm2-135m", "64xH100-80GB", 512, 64, "layout.pipeline=64")
    with pytest.raises(UserError, match=r"global batch 6 .*\(8\)"):
        planned("smollm2-135m", "8xH100-80GB", 512, 6, "layout.data=8")


@sampled(5)
@pytest.mark.parametrize(
    "pin",
    [
        "layout.zero=2",
        "layout.tensor=4",
        "layout.pipeline=2",
        "layout.schedule=gpipe",
        "layout.schedule=2bw",
        "layout.context=2",
        "layout.micro_batch=2",
        "layout.sequence_parallel=false",
        "levers.checkpoint_every=3",
        "levers.loss=plain",
        "levers.tiles=2",
        "levers.offload=optimizer",
        "levers.loss_chunk_bytes=1000000",
        "levers.num_checkpoints=8",
        "levers.checkpoint_keep=matmuls",
        "levers.checkpoint_budget_bytes=8000000000",
        "levers.checkpoint_format=fp8",
        "levers.checkpoint_host_bytes=1000000000",
        "layout.shard_inside=4",
        "layout.stages_per_rank=3",
        "layout.stages_per_rank=8",
        "levers.matmul=fp8-row",
        "levers.offload_keep_bytes=5",
    ],
)
def test_a_pinned_field_stays(pin: str) -> None:
    pins = [pin, "layout.pipeline=2"] if "schedule" in pin else [pin]
    plan = planned("llama-3.2-1b", "8xH100-80GB", 2048, 64, *pins).plan
    section, _, rest = pin.partition(".")
    name, _, value = rest.partition("=")
    assert str(getattr(getattr(plan, section), name)).lower() == value


def test_other_mathematics_are_never_chosen_unasked() -> None:
    """2bw would be faster, as ranks do not wait, but its gradients are of older weights."""
    asked = ("llama-3.2-1b", "8xH100-80GB", 2048, 64, "layout.pipeline=8", "layout.micro_batch=8")
    unasked, pinned = (planned(*asked, *more) for more in ((), ("layout.schedule=2bw",)))
    assert unasked.plan.layout.schedule != "2bw"
    assert pinned.plan.time.step_s < unasked.plan.time.step_s
    assert any("one update old" in note for note in pinned.notes)
    assert not any("one update old" in note for note in unasked.notes)


def refused(plan: Plan) -> str | None:
    return refused_by_trainer(Run(layout=plan.layout, levers=plan.levers, spec=plan.workload.spec))


def test_pins_leave_what_the_trainer_runs() -> None:
    found = planned("llama-3.1-8b", "8xV100-32GB", 512, 8, "layout.zero=3").plan
    assert found.layout.zero == 3
    assert refused(found) is None
    split = planned("llama-3.1-8b", "8xH100-80GB", 4096, 8, "layout.context=2").plan
    assert split.layout.context == 2
    assert refused(split) is None
    ring = planned("llama-3.1-8b", "8xH100-80GB", 4096, 8, "layout.context=4", "layout.ring=2").plan
    assert (ring.layout.context, ring.layout.ring) == (4, 2)
    assert refused(ring) is None


def test_pins_print_as_they_are_written() -> None:
    pins = parse_pins(["layout.zero=3", "levers.offload=none"])
    assert str(pins) == "layout.zero=3, levers.offload=none"
    assert pins.without("layout", "zero") == Pins({}, {"offload": "none"})
    assert not Pins()
