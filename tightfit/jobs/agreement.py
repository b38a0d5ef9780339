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
    return _update_in_backward(layout, precision, accumulation) if levers.update_in_backward else None


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
