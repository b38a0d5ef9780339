"""What of a model tensor ranks can share evenly."""

from tightfit.models.spec import ModelSpec


def mlp_widths(spec: ModelSpec) -> list[tuple[str, int]]:
    """The widths of a model's MLPs, by name."""
    if spec.experts is None:
        return [("MLP columns", spec.mlp_size)]
    found = [("columns of an expert", spec.experts.mlp_size)]
    if spec.experts.shared_size:
        found.append(("columns of the shared expert", spec.experts.shared_size))
    return [*found, ("MLP columns", spec.mlp_size)] if spec.experts.dense_layers else found


def indivisible(spec: ModelSpec, tensor: int) -> str | None:
    """About the first size that `tensor` ranks cannot share evenly; None where they share all of them.

    Fewer key heads than ranks are shared as well, if as many ranks have each: every one computes a part of the head.
    """
    keys = spec.kv_size if tensor % spec.kv_heads == 0 else spec.kv_heads
    sizes = [("attention heads", spec.heads), ("key and value heads", keys), *mlp_widths(spec)]
    for what, size in sizes:
        if size % tensor:
            named = spec.kv_heads if what.startswith("key") else size
            return f"layout.tensor is {tensor}, but the model has {named} {what}; give a number that divides them"
    if (tensor - 1) * -(-spec.vocab_size // tensor) >= spec.vocab_size:
        return f"layout.tensor is {tensor}, which leaves a rank without any of {spec.vocab_size} tokens; lower it"
    return None


def uneven_share(rows: int, length: int, tensor: int) -> str | None:
    """About rows whose tokens `tensor` ranks cannot share evenly."""
    if rows * length % tensor == 0:
        return None
    return (
        f"{rows} rows of {length} tokens cannot be split evenly over {tensor} tensor ranks; "
        "change data.sequence_length or set layout.sequence_parallel=false"
    )
