"""Settings that layers in tiles do not go with."""

from typing import TYPE_CHECKING

from tightfit.jobs.rules.rule import LEVER_RULES, RUN_RULES, Run, rule
from tightfit.jobs.rules.shapes import whole_attention

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers


@rule(LEVER_RULES, "checkpoint_keep", "tiles")
def tiles_do_not_hold_products(levers: "Levers") -> str | None:
    if levers.checkpoint_keep == "matmuls" and levers.tiles > 1:
        return "levers.checkpoint_keep is matmuls, which levers.tiles are there not to hold; set it to attention"
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


@rule(RUN_RULES, "levers.tiles", "model")
def tiles_attend_in_groups_of_heads(run: Run) -> str | None:
    return None if run.spec is None else whole_attention(run.spec, "levers.tiles", run.levers.tiles)


@rule(RUN_RULES, "levers.tiles", "adapter.dropout")
def tiles_drop_nothing(run: Run) -> str | None:
    if run.levers.tiles > 1 and run.adapted is not None and run.adapted.drops:
        return (
            f"levers.tiles is {run.levers.tiles}, whose layers are computed twice alike, but adapter.dropout draws "
            "anew; set it to 0"
        )
    return None


@rule(RUN_RULES, "levers.tiles", "layout.tensor_mesh")
def a_mesh_sends_all_tokens_at_once(run: Run) -> str | None:
    tiles, kind = run.levers.tiles, run.layout.tensor_mesh
    if tiles > 1 and kind != "1d":
        return f"levers.tiles is {tiles}, but a {kind} mesh sends blocks of all tokens at once; set it to 1"
    return None
