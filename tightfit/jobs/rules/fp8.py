"""Settings that products in fp8 do not go with."""

from tightfit.jobs.rules.rule import RUN_RULES, Run, rule

FP8_MULTIPLE = 16
"""Sizes of fp8 matrices must be multiples of this for tensor cores; kernels/fp8/fp8_quantize.py pads to the same."""


@rule(RUN_RULES, "levers.matmul", "layout.tensor")
def fp8_scales_are_of_whole_matrices(run: Run) -> str | None:
    if run.levers.matmul != "native" and run.layout.tensor > 1:
        return (
            f"levers.matmul is {run.levers.matmul}, whose scales are of whole matrices, but layout.tensor is "
            f"{run.layout.tensor}; set levers.matmul=native"
        )
    return None


@rule(RUN_RULES, "levers.matmul", "model")
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


@rule(RUN_RULES, "levers.matmul", "model")
def latent_attention_has_no_fp8(run: Run) -> str | None:
    if run.levers.matmul != "native" and run.spec is not None and run.spec.latent is not None:
        return f"levers.matmul is {run.levers.matmul}, but {run.spec.family} is trained without fp8; set it to native"
    return None


@rule(RUN_RULES, "layout.schedule", "levers.matmul")
def two_versions_have_no_codes(run: Run) -> str | None:
    if run.layout.has_two_versions and run.levers.matmul != "native":
        return (
            f"levers.matmul is {run.levers.matmul}, which keeps one version's codes, and schedule 2bw has two versions "
            "of the weights; set it to native or take 1f1b"
        )
    return None
