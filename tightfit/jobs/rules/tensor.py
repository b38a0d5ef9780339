"""Settings that tensor ranks in a line do not go with; tensor_mesh.py is about meshes."""

from tightfit.jobs.rules.rule import RUN_RULES, Run, rule
from tightfit.jobs.rules.shapes import indivisible, uneven_share, whole_attention


@rule(RUN_RULES, "layout.tensor", "layout.tensor_mesh", "model")
def tensor_ranks_divide_the_model(run: Run) -> str | None:
    if run.spec is None or run.layout.tensor_mesh != "1d":
        return None
    return indivisible(run.spec, run.layout.tensor)


@rule(RUN_RULES, "layout", "data.sequence_length")
def tensor_ranks_share_tokens_evenly(run: Run) -> str | None:
    layout, length = run.layout, run.sequence_length
    in_a_line = layout.tensor > 1 and layout.tensor_mesh == "1d"
    if not in_a_line or not layout.sequence_parallel or length is None:
        return None
    return uneven_share(layout.micro_batch, layout.local_length(length), layout.tensor)


@rule(RUN_RULES, "layout.tensor", "model")
def tensor_ranks_split_heads(run: Run) -> str | None:
    if run.spec is None or run.layout.tensor_mesh != "1d":  # a mesh has norms over heads of several ranks
        return None
    return whole_attention(run.spec, "layout.tensor", run.layout.tensor)
