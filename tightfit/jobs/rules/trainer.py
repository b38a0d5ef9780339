"""What can be planned, but `tightfit train` does not do today."""

from tightfit.jobs.rules.levers import recomputes
from tightfit.jobs.rules.rule import Rule, Run, rule
from tightfit.jobs.rules.shapes import mlp_widths, uneven_share
from tightfit.jobs.state_format import BLOCK_8BIT

TRAINER_RULES: list[Rule[Run]] = []
FP8_MULTIPLE = 16
"""Sizes of matrices whose fp8 codes tensor cores multiply; kernels/fp8_quantize.py pads to the same."""


@rule(TRAINER_RULES, "levers.offload", "levers.optimizer_states")
def offloaded_states_are_rows(run: Run) -> str | None:
    if run.levers.offload != "none" and run.levers.optimizer_states == "factored":
        return "levers.optimizer_states is factored, whose columns cannot be offloaded row by row; take 8bit"
    return None


@rule(TRAINER_RULES, "layout.zero", "layout.pipeline")
def pipelines_shard_optimizer_states_at_most(run: Run) -> str | None:
    if run.layout.pipeline > 1 and run.layout.zero > 1:
        return (
            f"layout.zero is {run.layout.zero}, which sends gradients and weights at each of a pipeline's "
            f"micro-batches, and layout.pipeline is {run.layout.pipeline}; set layout.zero to 1 or layout.pipeline to 1"
        )
    return None


@rule(TRAINER_RULES, "layout.schedule", "levers.checkpoint_every", "levers.tiles")
def zero_bubble_keeps_activations(run: Run) -> str | None:
    piped = run.layout.pipeline > 1 and run.layout.schedule == "zero-bubble"
    if piped and (recomputes(run.levers) or run.levers.tiles > 1):
        return (
            "layout.schedule is zero-bubble, which goes backward twice, for inputs and for weights, and would "
            "recompute layers both times; take 1f1b, or keep all activations"
        )
    return None


@rule(TRAINER_RULES, "layout.schedule", "layout.pipeline", "global_batch")
def schedules_take_equal_rounds(run: Run) -> str | None:
    layout, ranks = run.layout, run.layout.pipeline
    rounds = max(1, run.accumulation // ranks)
    if ranks > 1 and layout.schedule in ("interleaved", "zero-bubble") and run.accumulation % rounds:
        return (
            f"layout.schedule is {layout.schedule}, which takes {run.accumulation} micro-batches in {rounds} equal "
            f"rounds; make global_batch / (micro_batch × data) a multiple of layout.pipeline ({ranks}) or take 1f1b"
        )
    return None


@rule(TRAINER_RULES, "levers.loss", "layout.tensor")
def tensor_ranks_hold_part_of_the_logits(run: Run) -> str | None:
    if run.levers.loss == "plain" and run.layout.tensor > 1:
        return (
            f"levers.loss is plain, which needs all logits, but layout.tensor is {run.layout.tensor}; "
            "set levers.loss=fused"
        )
    return None


@rule(TRAINER_RULES, "levers.matmul", "layout.tensor")
def fp8_scales_are_of_whole_matrices(run: Run) -> str | None:
    if run.levers.matmul != "native" and run.layout.tensor > 1:
        return (
            f"levers.matmul is {run.levers.matmul}, whose scales are of whole matrices, but layout.tensor is "
            f"{run.layout.tensor}; set levers.matmul=native"
        )
    return None


@rule(TRAINER_RULES, "levers.optimizer_states", "layout.tensor", "model")
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
    if states != "8bit" or run.spec is None:
        return None
    rows = [run.spec.query_size, *(size for _, size in mlp_widths(run.spec))]
    if any(length // tensor % BLOCK_8BIT for length in rows):
        return (
            f"levers.optimizer_states is 8bit, whose blocks of {BLOCK_8BIT} do not divide rows cut in {tensor}; "
            "lower layout.tensor or take bf16"
        )
    return None


@rule(TRAINER_RULES, "layout.sequence_parallel", "layout.tensor", "layout.context", "data.sequence_length")
def tensor_ranks_share_tokens_evenly(run: Run) -> str | None:
    layout, length = run.layout, run.sequence_length
    if layout.tensor == 1 or not layout.sequence_parallel or length is None:
        return None
    return uneven_share(layout.micro_batch, length // layout.context, layout.tensor)


@rule(TRAINER_RULES, "levers.matmul", "model")
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


@rule(TRAINER_RULES, "layout.tensor", "levers.tiles", "levers.matmul", "model")
def some_attention_is_whole(run: Run) -> str | None:
    """Latent attention has vectors that all heads share; norms over all heads together need all of them."""
    spec = run.spec
    if spec is None or (spec.latent is None and not spec.qk_norm_joint):
        return None
    wanted = {"layout.tensor": run.layout.tensor, "levers.tiles": run.levers.tiles}
    for name, degree in wanted.items():
        if degree > 1:
            return f"{name} is {degree}, but attention of {spec.family} is not taken apart by heads; set it to 1"
    if spec.latent is not None and run.levers.matmul != "native":
        return f"levers.matmul is {run.levers.matmul}, but {spec.family} is trained without fp8; set it to native"
    return None


@rule(TRAINER_RULES, "levers.tiles", "model")
def routed_layers_are_not_tiled(run: Run) -> str | None:
    spec = run.spec
    if run.levers.tiles > 1 and spec is not None and all(spec.is_routed(layer) for layer in range(spec.layers)):
        return (
            f"levers.tiles is {run.levers.tiles}, but all MLPs of {spec.family} are routed to experts, which are not "
            "tiled; set it to 1"
        )
    return None
