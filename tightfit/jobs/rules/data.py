"""Settings that data ranks and their ZeRO stages do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LAYOUT_RULES, rule

if TYPE_CHECKING:
    from tightfit.jobs.layout import Layout


@rule(LAYOUT_RULES, "zero", "data")
def zero_needs_ranks(layout: "Layout") -> str | None:
    if layout.zero and layout.gradient_ranks == 1:
        return f"layout.zero is {layout.zero}, but one data rank has nobody to split with; raise layout.data"
    return None


@rule(LAYOUT_RULES, "shard_inside", "data", "zero")
def groups_divide_data_ranks(layout: "Layout") -> str | None:
    if layout.shard_inside and (not layout.zero or layout.data % layout.shard_inside):
        return (
            f"layout.shard_inside is {layout.shard_inside}, but layout.data is {layout.data} and layout.zero is "
            f"{layout.zero}; give a divisor of the data ranks, and say what they split with layout.zero"
        )
    return None
