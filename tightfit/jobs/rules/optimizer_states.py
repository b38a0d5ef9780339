"""Settings that formats of optimizer states, and stochastic rounding, do not go with."""

from tightfit.jobs.rules.rule import RUN_RULES, Run, rule
from tightfit.jobs.rules.shapes import indivisible, mlp_widths
from tightfit.jobs.state_format import BLOCK_8BIT


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


@rule(RUN_RULES, "levers.optimizer_states", "layout.tensor", "model")
def states_share_whole_rows(run: Run) -> str | None:
    """Factored moments are a number per row and column; 8-bit moments have a scale per block within a row."""
    states, tensor = run.levers.optimizer_states, run.layout.tensor
    if tensor == 1:
        return None
    if states == "factored":
        return (
            "levers.optimizer_states is factored, which needs all rows and columns of a weight, but layout.tensor is "
            f"{tensor}; take 8bit or bf16"
        )
    if states != "8bit" or run.spec is None or run.layout.tensor_mesh != "1d" or indivisible(run.spec, tensor):
        return None
    rows = [run.spec.query_size, *(size for _, size in mlp_widths(run.spec))]
    if any(length // tensor % BLOCK_8BIT for length in rows):
        return (
            f"levers.optimizer_states is 8bit, whose blocks of {BLOCK_8BIT} do not divide rows cut in {tensor}; "
            "lower layout.tensor or take bf16"
        )
    return None


@rule(RUN_RULES, "layout.tensor_mesh", "levers.optimizer_states", "model")
def blocks_keep_whole_blocks_of_states(run: Run) -> str | None:
    kind, spec = run.layout.tensor_mesh, run.spec
    if kind == "1d" or spec is None or run.levers.optimizer_states != "8bit":
        return None
    side = run.layout.tensor_axes[1]
    parts = side * side if kind == "3d" else side
    if any(size // parts % BLOCK_8BIT for size in (spec.hidden_size, spec.query_size, spec.mlp_size)):
        return (
            f"levers.optimizer_states is 8bit, whose blocks of {BLOCK_8BIT} do not divide rows cut in {parts} by a "
            f"{kind} mesh; take bf16"
        )
    return None
