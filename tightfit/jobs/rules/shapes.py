"""Whether ranks can share a model's heads, columns and tokens evenly."""

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
    """A sentence about the first size that `tensor` ranks cannot share evenly; None where they can share all.

    Fewer key heads than ranks are allowed if each has the same number of ranks, which split the head between them.
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


def unshared_heads(spec: ModelSpec, tensor: int, ulysses_ranks: int, context: int) -> str | None:
    """A sentence if `ulysses_ranks` of the `context` ranks cannot share evenly the heads of one of `tensor` ranks.

    Each gets some of the query heads and the key heads these use; with fewer key heads than ranks, several ranks get
    the same one.
    """
    heads, kv_heads = spec.heads // tensor, max(1, spec.kv_heads // tensor)
    if heads % ulysses_ranks == 0 and (kv_heads % ulysses_ranks == 0 or ulysses_ranks % kv_heads == 0):
        return None
    split = f", after {tensor} tensor ranks have shared them" if tensor > 1 else ""
    return (
        f"{ulysses_ranks} of layout.context={context} ranks exchange heads, but the model has {heads} query and "
        f"{kv_heads} key heads{split}; set layout.ring so that context / ring divides them, or to {context}"
    )


def unshared_rows(length: int, context: int, ring: int) -> str | None:
    """A sentence if context ranks cannot share rows of `length` tokens evenly; a ring's ranks have two pieces each."""
    if length % context == 0 and (ring == 1 or length % (2 * ring) == 0):
        return None
    pieces = context if ring == 1 else context * 2
    return (
        f"rows of {length} tokens cannot be split evenly over {context} context ranks; make data.sequence_length a "
        f"multiple of {pieces}"
    )


def uneven_share(rows: int, length: int, tensor: int) -> str | None:
    """A sentence if `tensor` ranks cannot share the tokens of `rows` rows evenly."""
    if rows * length % tensor == 0:
        return None
    return (
        f"{rows} rows of {length} tokens cannot be split evenly over {tensor} tensor ranks; "
        "change data.sequence_length or set layout.sequence_parallel=false"
    )


def whole_attention(spec: ModelSpec, setting: str, parts: int) -> str | None:
    """A sentence if `setting` splits attention's heads into `parts` groups and the model's attention cannot be split.

    Latent attention has vectors that all heads share; norms over all heads together need all of them.
    """
    if parts == 1 or (spec.latent is None and not spec.qk_norm_joint):
        return None
    return f"{setting} is {parts}, but attention of {spec.family} is not taken apart by heads; set it to 1"
