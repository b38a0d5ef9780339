"""Settings that pipeline ranks and their schedules do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.lever_table import recomputes
from tightfit.jobs.rules.rule import LAYOUT_RULES, RUN_RULES, Run, rule

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout


@rule(LAYOUT_RULES, "stages_per_rank", "schedule", "pipeline")
def several_stages_interleave(layout: "Layout") -> str | None:
    if layout.schedule == "zb-v" and (layout.pipeline == 1 or layout.stages_per_rank != 2):
        return (
            f"layout.stages_per_rank is {layout.stages_per_rank} under schedule zb-v on {layout.pipeline} pipeline "
            "ranks, of which each has two; set stages_per_rank to 2 and pipeline to at least 2, or take 1f1b"
        )
    several = layout.schedule in ("interleaved", "zb-v") and layout.pipeline > 1
    if (layout.stages_per_rank > 1) != several:
        return (
            f"layout.stages_per_rank is {layout.stages_per_rank} under schedule {layout.schedule} on "
            f"{layout.pipeline} pipeline ranks; more than one is what the interleaved schedule of a pipeline has"
        )
    return None


@rule(LAYOUT_RULES, "schedule", "pipeline", "tensor_mesh")
def a_mesh_goes_backward_once(layout: "Layout") -> str | None:
    if layout.splits_backward and layout.tensor_mesh != "1d":
        return (
            f"layout.schedule is {layout.schedule}, which goes backward twice, for inputs and for weights, and a "
            f"{layout.tensor_mesh} mesh would send the blocks of its products both times; take 1f1b"
        )
    return None


@rule(RUN_RULES, "layout.pipeline", "layout.stages_per_rank", "model")
def a_stage_has_a_layer(run: Run) -> str | None:
    stages = run.layout.pipeline * run.layout.stages_per_rank
    if run.spec is None or stages <= run.spec.layers:
        return None
    if run.layout.stages_per_rank > 1:
        return (
            f"layout.pipeline × stages_per_rank is {stages}, but the model has {run.spec.layers} layers; give at most "
            "that many"
        )
    return f"layout.pipeline is {stages}, but the model has {run.spec.layers} layers; give at most that many"


@rule(RUN_RULES, "layout.zero", "layout.pipeline")
def pipelines_shard_optimizer_states_at_most(run: Run) -> str | None:
    if run.layout.pipeline > 1 and run.layout.zero > 1:
        return (
            f"layout.zero is {run.layout.zero}, which sends gradients and weights at each of a pipeline's "
            f"micro-batches, and layout.pipeline is {run.layout.pipeline}; set layout.zero to 1 or layout.pipeline to 1"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "levers")
def zero_bubble_keeps_activations(run: Run) -> str | None:
    if run.layout.splits_backward and recomputes(run.levers):
        return (
            f"layout.schedule is {run.layout.schedule}, which goes backward twice, for inputs and for weights, and "
            "would recompute layers both times; take 1f1b, or keep all activations"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "layout.zero", "model")
def a_shard_has_one_module(run: Run) -> str | None:
    if run.layout.schedule == "zb-v" and run.layout.zero and run.spec is not None and run.spec.tied:
        return (
            f"layout.zero is {run.layout.zero} under schedule zb-v, whose first rank has both ends of the model, and "
            f"{run.spec.family} ties their weight, which FSDP2 shards for one stage alone; set layout.zero to 0 or "
            "take another schedule"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "layout.pipeline", "global_batch")
def schedules_take_equal_rounds(run: Run) -> str | None:
    layout, ranks = run.layout, run.layout.pipeline
    if run.accumulation is None or ranks == 1 or layout.schedule not in ("interleaved", "zero-bubble"):
        return None
    rounds = max(1, run.accumulation // ranks)
    if run.accumulation % rounds:
        return (
            f"layout.schedule is {layout.schedule}, which takes {run.accumulation} micro-batches in {rounds} equal "
            f"rounds; make global_batch / (micro_batch × data) a multiple of layout.pipeline ({ranks}) or take 1f1b"
        )
    return None


def too_few_micro_batches(micro_batches: int, ranks: int) -> str | None:
    """Why a pipeline cannot run without a flush (2bw) if a step has fewer micro-batches than the pipeline ranks."""
    if micro_batches >= ranks:
        return None
    return (
        f"layout.schedule is 2bw, whose {ranks} ranks have micro-batches of two steps in flight at most, but a step "
        f"has {micro_batches}; make global_batch / (micro_batch × data) at least layout.pipeline, or take 1f1b"
    )


@rule(RUN_RULES, "layout.schedule", "layout.pipeline", "global_batch")
def two_versions_are_of_two_steps(run: Run) -> str | None:
    if not run.layout.has_two_versions or run.accumulation is None:
        return None
    return too_few_micro_batches(run.accumulation, run.layout.pipeline)


@rule(RUN_RULES, "layout.schedule", "layout.zero")
def two_versions_are_whole(run: Run) -> str | None:
    if run.layout.has_two_versions and run.layout.zero:
        return (
            f"layout.zero is {run.layout.zero}, but under schedule 2bw a rank computes with two versions of its "
            "weights, of which FSDP2 gathers one; set layout.zero to 0 or take 1f1b"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "precision")
def two_versions_skip_no_step(run: Run) -> str | None:
    if run.layout.has_two_versions and run.precision == "fp16":
        return (
            "precision is fp16, whose loss scale is found by steps that overflow, but under schedule 2bw the next step "
            "is under way by then; set it to bf16 or take 1f1b"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "model")
def two_versions_are_not_of_corrections(run: Run) -> str | None:
    spec = run.spec
    if run.layout.has_two_versions and spec is not None and spec.experts is not None and spec.experts.corrected:
        return (
            f"layout.schedule is 2bw, but {spec.family} corrects the choice of experts after every step, of which "
            "there is one version; take 1f1b"
        )
    return None
