"""Settings that decoupled L1 and `keep_zeros` do not go with."""

from tightfit.jobs.rules.rule import DEEPSPEED_RULES, RUN_RULES, Run, rule


@rule(RUN_RULES, "optimizer.l1", "precision")
def small_steps_need_float32(run: Run) -> str | None:
    if run.shrinks and run.precision == "pure-bf16":
        return (
            "optimizer.l1 moves weights by less than pure-bf16's weights can show; set precision to bf16, which has "
            "float32 masters"
        )
    return None


@rule(RUN_RULES, "optimizer.l1", "layout.schedule")
def two_versions_shrink_apart(run: Run) -> str | None:
    if run.weight_setting and run.layout.has_two_versions:
        return f"{run.weight_setting} is for one version of the weights, and schedule 2bw has two; take 1f1b"
    return None


@rule(DEEPSPEED_RULES, "optimizer.l1")
def deepspeed_does_not_shrink(run: Run) -> str | None:
    if run.weight_setting:
        return f"{run.weight_setting} is not there with engine deepspeed; leave it out, or set engine to tightfit"
    return None
