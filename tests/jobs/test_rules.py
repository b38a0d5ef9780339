"""The rulebook: every rule can be broken and kept, says one sentence with a fix, and is asked by all who should."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.experts import ExpertTraining
from tightfit.jobs.job import Job
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import WeightRounding
from tightfit.jobs.rules.fp8 import FP8_MULTIPLE
from tightfit.jobs.rules.refusals import refused_by_deepspeed, refused_by_trainer, run_rules
from tightfit.jobs.rules.rule import (
    DEEPSPEED_RULES,
    EXTRAS,
    LAYOUT_RULES,
    LEVER_RULES,
    RUN_RULES,
    Run,
    first_refusal,
)
from tightfit.models.presets import preset

SPEC = preset("llama-3.2-1b")
ROUTED = preset("mixtral-8x7b")
BROKEN_LEVERS: dict[str, dict[str, Any]] = {
    "layers_are_chosen_once": {"checkpoint_every": 1, "num_checkpoints": 2},
    "a_budget_chooses_by_itself": {"checkpoint_budget_bytes": 1, "checkpoint_every": 1},
    "keeping_needs_recomputed_layers": {"checkpoint_keep": "attention"},
    "offloaded_checkpoints_need_checkpoints": {"offload_checkpoints": True},
    "a_budget_offloads_all_inputs": {
        "checkpoint_budget_bytes": 1,
        "checkpoint_host_bytes": 1,
        "offload_checkpoints": True,
    },
    "host_settings_need_offloaded_checkpoints": {"checkpoint_format": "fp8", "checkpoint_every": 1},
    "tiles_do_not_hold_products": {"checkpoint_keep": "matmuls", "checkpoint_every": 1, "tiles": 2},
}
BROKEN_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_ranks_fill_their_mesh": {"tensor": 8, "tensor_mesh": "2d"},
    "a_ring_is_of_context_ranks": {"ring": 2, "context": 3},
    "zero_needs_ranks": {"zero": 1},
    "groups_divide_data_ranks": {"shard_inside": 3, "data": 4, "zero": 1},
    "expert_ranks_are_data_ranks": {"expert": 2},
    "groups_hold_all_experts": {"data": 4, "zero": 1, "shard_inside": 2, "expert": 4},
    "experts_take_whole_hidden_states": {"tensor": 4, "tensor_mesh": "2d", "data": 2, "expert": 2},
    "several_stages_interleave": {"stages_per_rank": 2},
    "a_mesh_goes_backward_once": {"tensor": 4, "tensor_mesh": "2d", "pipeline": 2, "schedule": "zero-bubble"},
}
PIPED = {"pipeline": 2}
SQUARE = {"tensor": 4, "tensor_mesh": "2d", "micro_batch": 2}
ROUNDING = WeightRounding(bits=3, group=64, learned=True)
ADAPTED = AdapterTraining(rank=8).adapted()
BROKEN_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "stochastic_rounding_is_for_weights_without_masters": ({}, {"rounding": "stochastic"}, {"precision": "bf16"}),
    "factored_states_need_whole_weights": ({"data": 2, "zero": 1}, {"optimizer_states": "factored"}, {}),
    "offloaded_weights_are_not_remembered_by_autograd": ({}, {"offload": "weights"}, {}),
    "an_update_in_backward_needs_the_steps_gradient": ({}, {"update_in_backward": True}, {"accumulation": 2}),
    "two_versions_are_of_two_steps": ({"pipeline": 4, "schedule": "2bw"}, {}, {"accumulation": 3}),
    "two_versions_are_whole": (PIPED | {"schedule": "2bw", "data": 2, "zero": 1}, {}, {}),
    "two_versions_are_weights_on_the_gpu": (PIPED | {"schedule": "2bw"}, {"offload": "optimizer"}, {}),
    "two_versions_have_no_codes": (PIPED | {"schedule": "2bw"}, {"matmul": "fp8-row"}, {}),
    "two_versions_skip_no_step": (PIPED | {"schedule": "2bw"}, {}, {"precision": "fp16"}),
    "two_versions_are_not_of_corrections": (
        PIPED | {"schedule": "2bw"},
        {},
        {"spec": preset("tiny-deepseek-v3")},
    ),
    "tensor_ranks_divide_the_model": ({"tensor": 3}, {}, {}),
    "a_mesh_splits_dense_layers": (SQUARE, {}, {"spec": preset("tiny-mixtral")}),
    "a_mesh_deals_out_rows": (SQUARE | {"micro_batch": 3}, {}, {}),
    "a_mesh_keeps_attention_or_nothing": (SQUARE, {"checkpoint_every": 1, "checkpoint_keep": "matmuls"}, {}),
    "a_mesh_sends_all_tokens_at_once": (SQUARE, {"tiles": 2}, {}),
    "a_mesh_sums_gradients_once_a_step": (SQUARE, {"update_in_backward": True}, {}),
    "blocks_keep_whole_blocks_of_states": (SQUARE, {"optimizer_states": "8bit"}, {"spec": preset("tiny-llama")}),
    "capacities_are_of_whole_rows": (
        {"context": 2},
        {},
        {"spec": ExpertTraining(capacity_factor=1.0).applied(ROUTED), "sequence_length": 64},
    ),
    "a_stage_has_a_layer": ({"pipeline": 17}, {}, {}),
    "checkpointed_layers_exist": ({}, {"num_checkpoints": 17}, {}),
    "expert_ranks_divide_the_experts": ({"data": 2, "expert": 2}, {}, {}),
    "context_ranks_share_heads": ({"context": 12}, {}, {}),
    "context_ranks_share_rows": ({"context": 4, "ring": 4}, {}, {"sequence_length": 516}),
    "offloaded_states_are_rows": ({}, {"offload": "optimizer", "optimizer_states": "factored"}, {}),
    "pipelines_shard_optimizer_states_at_most": (PIPED | {"data": 2, "zero": 2}, {}, {}),
    "zero_bubble_keeps_activations": (PIPED | {"schedule": "zero-bubble"}, {"tiles": 2}, {}),
    "a_shard_has_one_module": (
        PIPED | {"schedule": "zb-v", "stages_per_rank": 2, "data": 2, "zero": 1},
        {},
        {"spec": preset("llama-3.2-1b")},
    ),
    "schedules_take_equal_rounds": (PIPED | {"schedule": "zero-bubble"}, {}, {"accumulation": 5}),
    "tensor_ranks_hold_part_of_the_logits": ({"tensor": 2}, {"loss": "plain"}, {}),
    "fp8_scales_are_of_whole_matrices": ({"tensor": 2}, {"matmul": "fp8-row"}, {}),
    "states_share_whole_rows": ({"tensor": 2}, {"optimizer_states": "factored"}, {}),
    "tensor_ranks_share_tokens_evenly": ({"tensor": 2, "micro_batch": 1}, {}, {"sequence_length": 511}),
    "fp8_needs_aligned_sizes": ({}, {"matmul": "fp8-row"}, {"spec": replace(SPEC, mlp_size=8193)}),
    "tensor_ranks_split_heads": ({"tensor": 2}, {}, {"spec": preset("tiny-deepseek-v3")}),
    "tiles_attend_in_groups_of_heads": ({}, {"tiles": 2}, {"spec": preset("tiny-deepseek-v3")}),
    "latent_attention_has_no_fp8": ({}, {"matmul": "fp8-row"}, {"spec": preset("tiny-deepseek-v3")}),
    "routed_layers_are_not_tiled": ({}, {"tiles": 2}, {"spec": ROUTED}),
    "a_student_is_whole": ({"tensor": 2}, {}, {"distills": True}),
    "a_teacher_gets_whole_rows": ({"context": 2}, {}, {"distills": True}),
    "distillation_is_fused": ({}, {"loss": "plain"}, {"distills": True}),
    "features_are_kept": ({}, {"checkpoint_every": 1}, {"distills": True, "compares_features": True}),
    "rounded_weights_are_whole": ({"tensor": 2}, {}, {"rounding": ROUNDING}),
    "learned_scales_stay_on_the_gpu": ({}, {"offload": "optimizer"}, {"rounding": ROUNDING}),
    "learned_scales_are_summed_after_backward": (
        {"data": 2, "zero": 1},
        {"update_in_backward": True},
        {"rounding": ROUNDING},
    ),
    "frozen_weights_are_whole": ({"data": 2, "zero": 3}, {}, {"adapted": ADAPTED}),
    "frozen_weights_have_no_fp8_codes": ({}, {"matmul": "fp8-row"}, {"adapted": ADAPTED}),
    "adapters_are_updated_after_backward": ({}, {"update_in_backward": True}, {"adapted": ADAPTED}),
    "frozen_products_are_not_kept": (
        {},
        {"checkpoint_every": 1, "checkpoint_keep": "matmuls"},
        {"adapted": ADAPTED},
    ),
    "adapters_learn_from_data": ({}, {}, {"adapted": ADAPTED, "distills": True}),
    "adapters_are_of_dense_layers": ({}, {}, {"adapted": ADAPTED, "spec": ROUTED}),
    "held_rows_are_whole_groups": (
        {},
        {},
        {"adapted": AdapterTraining(rank=8, bits=4).adapted(), "spec": replace(SPEC, mlp_size=8200)},
    ),
    "adapters_stay_on_the_gpu": ({}, {"offload": "optimizer"}, {"adapted": ADAPTED}),
    "what_the_host_does_is_not_captured": ({}, {"cuda_graph": "always", "offload": "optimizer"}, {}),
    "tiles_drop_nothing": ({}, {"tiles": 2}, {"adapted": AdapterTraining(rank=8, dropout=0.1).adapted()}),
    "small_steps_need_float32": ({}, {}, {"shrinks": True, "precision": "pure-bf16"}),
    "pieces_do_not_shrink": ({}, {"offload": "optimizer"}, {"shrinks": True}),
    "two_versions_shrink_apart": (PIPED | {"schedule": "2bw"}, {}, {"shrinks": True}),
    "rows_are_whole_groups": ({}, {}, {"rounding": ROUNDING, "spec": replace(SPEC, mlp_size=8193)}),
}
BROKEN_DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "deepspeed_splits_over_data_ranks": ({"tensor": 2}, {}, {}),
    "deepspeed_has_no_teacher": ({"data": 2, "zero": 1}, {}, {"distills": True}),
    "deepspeed_rounds_nothing": ({"data": 2, "zero": 1}, {}, {"rounding": ROUNDING}),
    "deepspeed_has_no_adapters": ({"data": 2, "zero": 1}, {}, {"adapted": ADAPTED}),
    "deepspeed_does_not_shrink": ({"data": 2, "zero": 1}, {}, {"shrinks": True}),
    "deepspeed_has_something_to_do": ({"data": 2}, {}, {}),
    "deepspeed_does_not_correct_choices": (
        {"data": 2, "zero": 1},
        {},
        {"spec": preset("tiny-deepseek-v3")},
    ),
    "deepspeed_keeps_masters": ({"data": 2, "zero": 1}, {}, {"precision": "pure-bf16"}),
    "deepspeed_has_no_other_levers": ({"data": 2, "zero": 1}, {"optimizer_states": "8bit"}, {}),
}


def run_of(parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> Run:
    layout, levers, more = parts
    known: dict[str, Any] = {"layout": Layout(**layout), "levers": Levers(**levers), "spec": SPEC}
    return Run(**(known | more))


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in LEVER_RULES] == list(BROKEN_LEVERS)
    assert [rule.name for rule in LAYOUT_RULES] == list(BROKEN_LAYOUTS)
    assert {rule.name for rule in RUN_RULES} == set(BROKEN_RUNS)
    assert {rule.name for rule in DEEPSPEED_RULES} == set(BROKEN_DEEPSPEED)


def is_a_sentence(text: str | None) -> bool:
    return text is not None and "\n" not in text and not text.endswith(".") and ("; " in text or ", but " in text)


@pytest.mark.parametrize(
    ("size", "fix"), [(8193, "rows have no groups of 8"), (8256, "take 64"), (8228, "take 11"), (8200, "take 8")]
)
def test_a_group_that_is_proposed_fits(size: int, fix: str) -> None:
    rule = next(rule for rule in RUN_RULES if rule.name == "rows_are_whole_groups")
    rows = 2024 if size == 8228 else 2048
    spec = replace(SPEC, hidden_size=rows, mlp_size=size, heads=1, kv_heads=1, head_dim=rows)
    run = run_of(({}, {}, {"rounding": replace(ROUNDING, group=256), "spec": spec}))
    assert fix in str(rule.sentence(run))


@pytest.mark.parametrize("name", BROKEN_LEVERS)
def test_levers_that_contradict_each_other(name: str) -> None:
    rule = next(rule for rule in LEVER_RULES if rule.name == name)
    fields = BROKEN_LEVERS[name]
    assert is_a_sentence(rule.sentence(Levers.model_construct(**fields)))
    assert rule.sentence(Levers()) is None
    assert set(rule.concerns) >= set(fields) - {"checkpoint_every", "offload_checkpoints"}
    with pytest.raises(ValidationError, match=r"levers\."):
        Levers(**fields)


@pytest.mark.parametrize("name", BROKEN_LAYOUTS)
def test_degrees_that_contradict_each_other(name: str) -> None:
    rule = next(rule for rule in LAYOUT_RULES if rule.name == name)
    assert is_a_sentence(rule.sentence(Layout.model_construct(**BROKEN_LAYOUTS[name])))
    assert rule.sentence(Layout()) is None
    with pytest.raises(ValidationError, match=r"layout\."):
        Layout(**BROKEN_LAYOUTS[name])


@pytest.mark.parametrize("name", BROKEN_RUNS)
def test_runs_that_are_refused(name: str) -> None:
    rule = next(rule for rule in RUN_RULES if rule.name == name)
    run = run_of(BROKEN_RUNS[name])
    sentence = rule.sentence(run)
    assert is_a_sentence(sentence)
    assert rule.sentence(Run(layout=Layout(), levers=Levers(), spec=SPEC, sequence_length=512)) is None
    assert refused_by_trainer(run) == first_refusal(RUN_RULES, run) is not None


@pytest.mark.parametrize("micro_batches", [None, 1, 3, 4])
def test_a_step_has_a_micro_batch_for_each_rank_under_2bw(micro_batches: int | None) -> None:
    """One alone is refused too; only where their number is not known there is nothing to say."""
    run = run_of(({"pipeline": 4, "schedule": "2bw"}, {}, {"accumulation": micro_batches}))
    sentence = refused_by_trainer(run)
    assert sentence is None if micro_batches in (None, 4) else f"a step has {micro_batches};" in str(sentence)


class Unread:
    """What no rule may look at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"levers.{name} is read and not named")


def test_kept_zeros_are_refused_where_l1_is() -> None:
    """What looks at whole weights; small steps in pure-bf16 are L1's trouble alone."""
    for name in ("pieces_do_not_shrink", "two_versions_shrink_apart"):
        run = replace(run_of(BROKEN_RUNS[name]), shrinks=False, keeps_zeros=True)
        said = refused_by_trainer(run)
        assert said is not None
        assert "optimizer.keep_zeros" in said
    bf16 = run_of(BROKEN_RUNS["small_steps_need_float32"])
    assert refused_by_trainer(replace(bf16, shrinks=False, keeps_zeros=True)) is None


@pytest.mark.parametrize("split", [{"zero": 1, "data": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_a_teacher_is_for_data_ranks_alone(split: dict[str, Any]) -> None:
    said = refused_by_trainer(run_of((split, {}, {"distills": True})))
    assert said is not None
    assert "distill.teacher" in said
    assert f"layout.{next(iter(split))} is" in said
    assert refused_by_trainer(run_of(({"data": 2}, {}, {"distills": True}))) is None


@pytest.mark.parametrize("name", BROKEN_RUNS)
def test_rules_that_are_left_out_would_say_nothing(name: str) -> None:
    """Those that do not name levers read none, and those about a section say nothing where there is none of it."""
    run = run_of(BROKEN_RUNS[name])
    plain = replace(
        run, rounding=None, adapted=None, shrinks=False, keeps_zeros=False, distills=False, compares_features=False
    )
    for rule in RUN_RULES:
        if "levers" not in rule.sections:
            assert rule.sentence(replace(run, levers=Unread())) == rule.sentence(run)  # type: ignore[arg-type]
        if rule.sections & set(EXTRAS):
            assert rule.sentence(plain) is None
    assert set(run_rules(frozenset(EXTRAS))) == set(RUN_RULES)


@pytest.mark.parametrize("name", BROKEN_DEEPSPEED)
def test_what_deepspeed_refuses(name: str) -> None:
    rule = next(rule for rule in DEEPSPEED_RULES if rule.name == name)
    assert is_a_sentence(rule.sentence(run_of(BROKEN_DEEPSPEED[name])))
    assert refused_by_deepspeed(Run(layout=Layout(data=2, zero=3), levers=Levers(tiles=2), precision="bf16")) is None


def test_a_job_asks_the_rulebook() -> None:
    job = {"model": "llama-3.2-1b", "data": "x.txt", "output": "o", "steps": 1, "global_batch": 8}
    for layout, levers, _ in (
        BROKEN_RUNS["pipelines_shard_optimizer_states_at_most"],
        BROKEN_RUNS["tensor_ranks_hold_part_of_the_logits"],
    ):
        with pytest.raises(ValidationError, match="which "):
            Job.model_validate(job | {"layout": layout | {"micro_batch": 1}, "levers": levers})


@pytest.mark.parametrize(
    ("levers", "fix"),
    [
        ({"tiles": 2}, "levers.tiles=1"),
        ({"matmul": "fp8-row"}, "levers.matmul=native"),
        ({"offload": "weights", "checkpoint_every": 1}, "levers.offload=optimizer"),
        ({"offload": "optimizer"}, None),
    ],
)
def test_levers_with_products_of_their_own_do_not_go_with_rounded_weights(
    levers: dict[str, Any], fix: str | None
) -> None:
    rounding = WeightRounding(bits=3, group=64, learned=False)
    sentence = refused_by_trainer(Run(layout=Layout(), levers=Levers(**levers), spec=SPEC, rounding=rounding))
    assert sentence is None if fix is None else sentence is not None and sentence.endswith(f"; set {fix}")


@pytest.mark.parametrize(
    "levers", [{"tiles": 2}, {"checkpoint_every": 2}, {"num_checkpoints": 1}, {"checkpoint_budget_bytes": 10**12}]
)
def test_whatever_computes_layers_again_keeps_no_features_and_goes_backward_once(levers: dict[str, Any]) -> None:
    run = Run(layout=Layout(), levers=Levers(**levers), spec=SPEC)
    assert refused_by_trainer(run) is None
    assert "compares hidden states" in (refused_by_trainer(replace(run, compares_features=True)) or "")
    pipeline = Layout(pipeline=2, schedule="zero-bubble")
    assert "goes backward twice" in (refused_by_trainer(replace(run, layout=pipeline)) or "")


def test_fp8_needs_what_its_kernels_pad_to() -> None:
    """Said twice, as the rulebook must not import kernels."""
    from tightfit.kernels.fp8.fp8_quantize import ALIGNED

    assert FP8_MULTIPLE == ALIGNED
