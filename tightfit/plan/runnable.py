"""What of a plan can be run today: the planner knows more ways of splitting and saving than the trainer does yet."""

from typing import Any

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.section import Section

RUNNABLE = {
    "layout": (
        "data",
        "zero",
        "shard_inside",
        "tensor",
        "sequence_parallel",
        "pipeline",
        "schedule",
        "stages_per_rank",
        "micro_batch",
    ),
    "levers": (
        "checkpoint_every",
        "num_checkpoints",
        "checkpoint_keep",
        "checkpoint_budget_bytes",
        "offload_checkpoints",
        "checkpoint_host_bytes",
        "checkpoint_format",
        "loss",
        "loss_chunk_bytes",
        "optimizer_states",
        "rounding",
        "update_in_backward",
        "tiles",
        "matmul",
        "offload",
        "offload_keep_bytes",
        "offload_gradient_bytes",
        "offload_update",
    ),
}


def not_yet(layout: Layout, levers: Levers) -> str | None:
    """One sentence about the first choice that can be planned but not trained yet; None when all of it runs."""
    for section, chosen in (("layout", layout), ("levers", levers)):
        for name, value in chosen:
            default = type(chosen).model_fields[name].default
            if name not in RUNNABLE[section] and value != default:
                runs = ", ".join(f"{section}.{other}" for other in RUNNABLE[section])
                return (
                    f"{section}.{name} is {value}, which can be planned but not trained yet; "
                    f"set it to {default} and use {runs}"
                )
    return None


def runnable_only() -> dict[str, dict[str, Any]]:
    """Every field that must stay at its default for the trainer to run a plan, by section."""
    sections: dict[str, type[Section]] = {"layout": Layout, "levers": Levers}
    return {
        section: {name: info.default for name, info in schema.model_fields.items() if name not in RUNNABLE[section]}
        for section, schema in sections.items()
    }
