"""Layout, levers, precision and shape together: what is neither planned nor trained.

First what nobody could train, then what `tightfit train` does not do.
"""

from tightfit.jobs.rules.levers import recomputes
from tightfit.jobs.rules.rule import Rule, Run, rule
from tightfit.jobs.rules.shapes import indivisible, mlp_widths, uneven_share, unshared_heads, unshared_rows
from tightfit.jobs.state_format import BLOCK_8BIT

RUN_RULES: list[Rule[Run]] = []
FP8_MULTIPLE = 16
"""Sizes of matrices whose fp8 codes tensor cores multiply; kernels/fp8_quantize.py pads to the same."""


@rule(RUN_RULES, "levers.rounding", "precision")
def stochastic_rounding_is_for_weights_without_masters(run: Run) -> str | None:
    if run.levers.rounding == "stochastic" and run.precision not in (None, "pure-bf16"):
        return (
            f"levers.rounding is stochastic, which is for weights without float32 masters, but precision is "
            f"{run.precision}; set precision to pure-bf16"
        )
    return None


@rule(RUN_RULES, "levers.optimizer_states", "layout.zero")
def factored_states_need_whole_weights(run: Run) -> str | None:
    if run.levers.optimizer_states == "factored" and run.layout.zero:
        return (
            f"levers.optimizer_states is factored, which needs all rows of a weight, but layout.zero is "
            f"{run.layout.zero}; set layout.zero to 0 or take 8bit"
        )
    return None


@rule(RUN_RULES, "levers.offload", "levers.checkpoint_every", "layout.zero")
def offloaded_weights_are_not_remembered_by_autograd(run: Run) -> str | None:
    """FSDP2 gathers them again for backward itself."""
    if run.levers.offload == "weights" and run.levers.checkpoint_every != 1 and not run.layout.zero:
        return (
            f"levers.offload is weights, which needs every layer run again in backward, but levers.checkpoint_every "
            f"is {run.levers.checkpoint_every}; set it to 1"
        )
    return None


@rule(RUN_RULES, "levers.update_in_backward", "layout", "precision")
def an_update_in_backward_needs_the_steps_gradient(run: Run) -> str | None:
    """It must be whole and finite when backward has passed a layer, and be freed then."""
    if not run.levers.update_in_backward:
        return None
    what, layout = "levers.update_in_backward frees gradients during backward", run.layout
    if run.accumulation > 1:
        return (
            f"{what}, but those of {run.accumulation} micro-batches add up and are all there before the last one's "
            "backward; raise layout.micro_batch, or leave the lever out"
        )
    if layout.pipeline > 1:
        return (
            f"{what}, but a pipeline's micro-batches add theirs up, and with one micro-batch all but one of "
            f"layout.pipeline={layout.pipeline} ranks would wait; set layout.pipeline=1, or leave the lever out"
        )
    if layout.reducing > 1 and not layout.zero:
        return f"{what}, but layout.zero is 0, where DDP's buckets hold all of them; set layout.zero to 1, 2 or 3"
    if run.precision == "fp16":
        return "levers.update_in_backward needs gradients that cannot overflow, but precision is fp16; set it to bf16"
    return None


@rule(RUN_RULES, "layout.tensor", "layout.tensor_mesh", "model")
def tensor_ranks_divide_the_model(run: Run) -> str | None:
    """Those in a line; tensor_mesh.py has the others."""
    if run.spec is None or run.layout.tensor_mesh != "1d":
        return None
    return indivisible(run.spec, run.layout.tensor)


@rule(RUN_RULES, "layout.expert", "model")
def expert_ranks_divide_the_experts(run: Run) -> str | None:
    expert = run.layout.expert
    if run.spec is None or expert == 1:
        return None
    if run.spec.experts is None:
        return f"layout.expert is {expert}, but {run.spec.family} has no experts; set it to 1"
    if run.spec.experts.count % expert:
        return (
            f"layout.expert is {expert}, which does not divide the model's {run.spec.experts.count} experts; "
            "give a divisor of them"
        )
    return None


@rule(RUN_RULES, "layout.context", "layout.ring", "layout.tensor", "model")
def context_ranks_share_heads(run: Run) -> str | None:
    layout = run.layout
    if run.spec is None or layout.exchanging == 1:
        return None
    return unshared_heads(run.spec, layout.tensor, layout.exchanging, layout.context)


@rule(RUN_RULES, "layout.context", "layout.ring", "data.sequence_length")
def context_ranks_share_rows(run: Run) -> str | None:
    if run.sequence_length is None or run.layout.context == 1:
        return None
    return unshared_rows(run.sequence_length, run.layout.context, run.layout.ring)


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


@rule(RUN_RULES, "levers.num_checkpoints", "model")
def checkpointed_layers_exist(run: Run) -> str | None:
    count = run.levers.num_checkpoints
    if run.spec is None or count <= run.spec.layers:
        return None
    return f"levers.num_checkpoints is {count}, but the model has {run.spec.layers} layers; give at most that many"


@rule(RUN_RULES, "levers.offload", "levers.optimizer_states")
def offloaded_states_are_rows(run: Run) -> str | None:
    if run.levers.offload != "none" and run.levers.optimizer_states == "factored":
        return (
            "levers.optimizer_states is factored, whose second moment is two vectors a matrix, of which the host would "
            "have nothing to hold and no piece can be updated without all rows; take 8bit, or set levers.offload=none"
        )
    return None


@rule(RUN_RULES, "layout.zero", "layout.pipeline")
def pipelines_shard_optimizer_states_at_most(run: Run) -> str | None:
    if run.layout.pipeline > 1 and run.layout.zero > 1:
        return (
            f"layout.zero is {run.layout.zero}, which sends gradients and weights at each of a pipeline's "
            f"micro-batches, and layout.pipeline is {run.layout.pipeline}; set layout.zero to 1 or layout.pipeline to 1"
        )
    return None


@rule(RUN_RULES, "layout.schedule", "levers.checkpoint_every", "levers.tiles")
def zero_bubble_keeps_activations(run: Run) -> str | None:
    if run.layout.splits_backward and (recomputes(run.levers) or run.levers.tiles > 1):
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
    rounds = max(1, run.accumulation // ranks)
    if ranks > 1 and layout.schedule in ("interleaved", "zero-bubble") and run.accumulation % rounds:
        return (
            f"layout.schedule is {layout.schedule}, which takes {run.accumulation} micro-batches in {rounds} equal "
            f"rounds; make global_batch / (micro_batch × data) a multiple of layout.pipeline ({ranks}) or take 1f1b"
        )
    return None


def too_few_micro_batches(micro_batches: int, ranks: int) -> str | None:
    """Why a pipeline of so many ranks cannot go on without a flush with so few micro-batches a step."""
    if micro_batches >= ranks:
        return None
    return (
        f"layout.schedule is 2bw, whose {ranks} ranks have micro-batches of two steps in flight at most, but a step "
        f"has {micro_batches}; make global_batch / (micro_batch × data) at least layout.pipeline, or take 1f1b"
    )


@rule(RUN_RULES, "layout.schedule", "layout.pipeline", "global_batch")
def two_versions_are_of_two_steps(run: Run) -> str | None:
    if not run.layout.has_two_versions or run.accumulation == 1:  # one is what is said where it is not known
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


@rule(RUN_RULES, "layout.schedule", "levers.offload", "levers.matmul")
def two_versions_are_weights_on_the_gpu(run: Run) -> str | None:
    if not run.layout.has_two_versions:
        return None
    if run.levers.offload != "none":
        return (
            f"levers.offload is {run.levers.offload}, whose updates are still on their way when the next step begins, "
            "but schedule 2bw exchanges two versions of the weights then; set it to none or take 1f1b"
        )
    if run.levers.matmul != "native":
        return (
            f"levers.matmul is {run.levers.matmul}, which keeps one version's codes, and schedule 2bw has two versions "
            "of the weights; set it to native or take 1f1b"
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


@rule(RUN_RULES, "levers.loss", "layout.tensor")
def tensor_ranks_hold_part_of_the_logits(run: Run) -> str | None:
    if run.levers.loss == "plain" and run.layout.tensor > 1:
        return (
            f"levers.loss is plain, which needs all logits, but layout.tensor is {run.layout.tensor}; "
            "set levers.loss=fused"
        )
    return None


@rule(RUN_RULES, "levers.matmul", "layout.tensor")
def fp8_scales_are_of_whole_matrices(run: Run) -> str | None:
    if run.levers.matmul != "native" and run.layout.tensor > 1:
        return (
            f"levers.matmul is {run.levers.matmul}, whose scales are of whole matrices, but layout.tensor is "
            f"{run.layout.tensor}; set levers.matmul=native"
        )
    return None


@rule(RUN_RULES, "levers.optimizer_states", "layout.tensor", "model")
def states_share_whole_rows(run: Run) -> str | None:
    """Factored moments are a number per row and column; 8-bit ones share a scale within a row."""
    states, tensor = run.levers.optimizer_states, run.layout.tensor
    if tensor == 1:
        return None
    if states == "factored":
        return (
            "levers.optimizer_states is factored, which needs all rows and columns of a weight, but layout.tensor is "
            f"{tensor}; take 8bit or bf16"
        )
    if states != "8bit" or run.spec is None or run.layout.tensor_mesh != "1d":
        return None
    rows = [run.spec.query_size, *(size for _, size in mlp_widths(run.spec))]
    if any(length // tensor % BLOCK_8BIT for length in rows):
        return (
            f"levers.optimizer_states is 8bit, whose blocks of {BLOCK_8BIT} do not divide rows cut in {tensor}; "
            "lower layout.tensor or take bf16"
        )
    return None


@rule(RUN_RULES, "layout.sequence_parallel", "layout.tensor", "layout.context", "data.sequence_length")
def tensor_ranks_share_tokens_evenly(run: Run) -> str | None:
    layout, length = run.layout, run.sequence_length
    in_a_line = layout.tensor > 1 and layout.tensor_mesh == "1d"
    if not in_a_line or not layout.sequence_parallel or length is None:
        return None
    return uneven_share(layout.micro_batch, length // layout.context, layout.tensor)


@rule(RUN_RULES, "levers.matmul", "model")
def fp8_needs_aligned_sizes(run: Run) -> str | None:
    if run.levers.matmul == "native" or run.spec is None:
        return None
    spec = run.spec
    dense = spec.experts is None or bool(spec.experts.dense_layers)
    sizes = [spec.hidden_size, spec.query_size, spec.kv_size, *([spec.mlp_size] if dense else [])]
    if odd := next((size for size in sizes if size % FP8_MULTIPLE), None):
        return (
            f"levers.matmul asks for fp8, which needs sizes in multiples of {FP8_MULTIPLE}, but the model has one of "
            f"{odd}; set it to native"
        )
    return None


@rule(RUN_RULES, "layout.tensor", "levers.tiles", "levers.matmul", "model")
def some_attention_is_whole(run: Run) -> str | None:
    """Latent attention has vectors that all heads share; norms over all heads together need all of them."""
    spec = run.spec
    if spec is None or (spec.latent is None and not spec.qk_norm_joint):
        return None
    tensor = run.layout.tensor if run.layout.tensor_mesh == "1d" else 1  # a mesh has norms over heads of several ranks
    wanted = {"layout.tensor": tensor, "levers.tiles": run.levers.tiles}
    for name, degree in wanted.items():
        if degree > 1:
            return f"{name} is {degree}, but attention of {spec.family} is not taken apart by heads; set it to 1"
    if spec.latent is not None and run.levers.matmul != "native":
        return f"levers.matmul is {run.levers.matmul}, but {spec.family} is trained without fp8; set it to native"
    return None


@rule(RUN_RULES, "experts.capacity_factor", "layout.context")
def capacities_are_of_whole_rows(run: Run) -> str | None:
    limited = run.spec is not None and run.spec.experts is not None and run.spec.experts.capacity_factor is not None
    if limited and run.layout.context > 1:
        return (
            f"experts.capacity_factor counts the tokens of whole rows, but layout.context is {run.layout.context}, "
            "whose ranks have pieces of them; drop one of the two"
        )
    return None


@rule(RUN_RULES, "levers.tiles", "model")
def routed_layers_are_not_tiled(run: Run) -> str | None:
    spec = run.spec
    if run.levers.tiles > 1 and spec is not None and all(spec.is_routed(layer) for layer in range(spec.layers)):
        return (
            f"levers.tiles is {run.levers.tiles}, but all MLPs of {spec.family} are routed to experts, which are not "
            "tiled; set it to 1"
        )
    return None
