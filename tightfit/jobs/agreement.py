"""Levers that not every layout and precision can keep: one sentence about the first that does not agree."""

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers


def disagreement(levers: Levers, layout: Layout, precision: str, accumulation: int) -> str | None:
    """What is wrong and what to do about it; None where all is well. `precision` may still be auto."""
    if levers.rounding == "stochastic" and precision != "pure-bf16":
        return (
            f"levers.rounding is stochastic, which is for weights without float32 masters, but precision is "
            f"{precision}; set precision to pure-bf16"
        )
    if levers.optimizer_states == "factored" and layout.zero:
        return (
            f"levers.optimizer_states is factored, which needs all rows of a weight, but layout.zero is {layout.zero}; "
            "set layout.zero to 0 or take 8bit"
        )
    if levers.offload != "none" and (sentence := _offload(levers, layout)):
        return sentence
    if layout.pipeline > 1 and (sentence := _pipeline(levers, layout, accumulation)):
        return sentence
    return _update_in_backward(layout, precision, accumulation) if levers.update_in_backward else None


def _pipeline(levers: Levers, layout: Layout, accumulation: int) -> str | None:
    """A pipeline's stages have many micro-batches under way at once, and meet over gradients after the last one."""
    ranks = layout.pipeline
    if layout.zero > 1:
        return (
            f"layout.zero is {layout.zero}, which sends gradients and weights at each of a pipeline's micro-batches, "
            f"and layout.pipeline is {ranks}; set layout.zero to 1 or layout.pipeline to 1"
        )
    if levers.offload_checkpoints:
        return (
            f"levers.offload_checkpoints keeps inputs of one micro-batch in order, but layout.pipeline is {ranks}; "
            "set it to false"
        )
    recomputes = levers.checkpoint_every or levers.num_checkpoints or levers.checkpoint_budget_bytes is not None
    if layout.schedule == "zero-bubble" and (recomputes or levers.tiles > 1):
        return (
            "layout.schedule is zero-bubble, which goes backward twice, for inputs and for weights, and would "
            "recompute layers both times; take 1f1b, or keep all activations"
        )
    rounds = max(1, accumulation // ranks)
    if layout.schedule in ("interleaved", "zero-bubble") and accumulation % rounds:
        return (
            f"layout.schedule is {layout.schedule}, which takes {accumulation} micro-batches in {rounds} equal rounds; "
            f"make global_batch / (micro_batch × data) a multiple of layout.pipeline ({ranks}) or take 1f1b"
        )
    return None


def _offload(levers: Levers, layout: Layout) -> str | None:
    """States pass through one GPU row by row, and weights that have left must not be remembered by autograd."""
    if layout.ranks > 1:
        return f"levers.offload is {levers.offload}, which is for one GPU, but the layout has {layout.ranks}; use ZeRO"
    if levers.optimizer_states == "factored":
        return "levers.optimizer_states is factored, whose columns cannot be offloaded row by row; take 8bit"
    if levers.offload == "weights" and levers.checkpoint_every != 1:
        return (
            f"levers.offload is weights, which needs every layer run again in backward, but levers.checkpoint_every "
            f"is {levers.checkpoint_every}; set it to 1"
        )
    return None


def _update_in_backward(layout: Layout, precision: str, accumulation: int) -> str | None:
    """A gradient must be the step's, whole and finite, at the end of one backward pass on one GPU."""
    alone = "levers.update_in_backward needs"
    if accumulation > 1:
        return f"{alone} the whole batch in one backward, but there are {accumulation}; raise layout.micro_batch"
    if layout.ranks > 1:
        return f"{alone} gradients that no other rank adds to, but the layout has {layout.ranks} ranks; use one"
    if precision == "fp16":
        return f"{alone} gradients that cannot overflow, but precision is fp16; set it to bf16"
    return None
