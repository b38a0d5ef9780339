"""The parts of an engine, made from its model and its configuration."""

from collections.abc import Mapping
from dataclasses import replace

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.spec import ModelSpec
from tightfit.plan.serving.cpu_weights import HOST_SHARE
from tightfit.serve.budget import Budget, decide_budget, free_bytes
from tightfit.serve.cache.host_store import HostStore
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.adapters import AdapterSet
from tightfit.serve.forward.rope_tables import length_of_change
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.graphs.steps import Steps, capture
from tightfit.serve.ranks.runner import RankRunner
from tightfit.serve.schedule.window_pages import WindowPages
from tightfit.serve.speculation.draft import DraftModel, make_draft_runner
from tightfit.serve.speculation.proposers import PromptLookup, Proposer
from tightfit.serve.speculation.skipping import make_skipping_runner, skipping_spec
from tightfit.serve.weights.cpu_codes import expand_for_cpu, pack_for_cpu


def refuse_batch_invariant(*, ranks: bool, adapters: bool) -> None:
    """Refuse `batch_invariant` over several ranks or with adapters, for which it is not implemented."""
    if ranks or adapters:
        beside = "ranks" if ranks else "adapters"
        raise UserError(f"batch_invariant is on, which is not there for {beside} yet; leave one of them out")


def prepare_codes(model: Decoder, config: EngineConfig) -> EngineConfig:
    """Convert quantized layers to what a CPU multiplies fastest; the configuration, with `rounded_weights` where such
    layers became plain ones."""
    if config.multiplies_packed:
        pack_for_cpu(model)
    room = HOST_SHARE * free_bytes(model.embed.weight.device)
    if expand_for_cpu(model, int(room)) and config.multiplies_packed:
        return replace(config, rounded_weights=True)
    return config


def make_budget(model: Decoder, config: EngineConfig, draft: Decoder | None, adapters: Mapping[str, Adapter]) -> Budget:
    """The budget of an engine on one rank."""
    return decide_budget(
        model,
        config,
        draft,
        adapter_bytes=sum(adapter.bytes for adapter in adapters.values()),
        draft_spec=skipping_spec(model.spec, config) if config.speculation == "skip" else None,
    )


def make_windows(spec: ModelSpec, config: EngineConfig, budget: Budget) -> WindowPages | None:
    """The pages of layers with a window; None where these keep all positions."""
    if not budget.pages or spec.window is None:
        return None
    sizes = {"pages": budget.pages, "blocks": budget.blocks, "block_size": config.block_size}
    return WindowPages(**sizes, window=spec.window, step_tokens=config.step_tokens)


def make_runner(
    model: Decoder,
    config: EngineConfig,
    budget: Budget,
    adapters: Mapping[str, Adapter],
) -> Runner:
    """The model over a cache of the budget's size."""
    weight, sizes = model.embed.weight, (budget.blocks, config.block_size)
    cache = make_cache(model.spec, *sizes, weight.device, weight.dtype, config.cache_format, budget.pages or None)
    if config.batch_invariant and weight.is_cuda and not cache.has_row_kernel:
        raise UserError("batch_invariant is on, but there is no kernel here for this model's attention; use cpu")
    return Runner(
        model,
        cache,
        budget.max_length,
        config.max_sequences,
        overlap=config.overlap,
        adapters=AdapterSet(model, adapters) if adapters else None,
        half=budget.half_bytes > 0,
        batch_invariant=config.batch_invariant,
    )


def make_proposer(
    runner: Runner | RankRunner, model: Decoder, draft: Decoder | None, budget: Budget, config: EngineConfig
) -> Proposer | None:
    """The source of guessed tokens that the configuration names; None without speculation."""
    match config.speculation:
        case "none":
            return None
        case "lookup":
            return PromptLookup()
        case "skip":
            assert isinstance(runner, Runner), "ranks do not guess by skipping layers"
            return DraftModel(make_draft_steps(make_skipping_runner(runner, budget, config), config))
        case "draft":
            if draft is None:
                raise UserError("speculation is 'draft', but no draft model was given")
            return DraftModel(make_draft_steps(make_draft_runner(draft, model, budget, config), config))


def make_host(
    runner: Runner | RankRunner, spec: ModelSpec, config: EngineConfig, windows: WindowPages | None
) -> HostStore | None:
    """The host store for keys and values of preempted sequences; None over several ranks, and with LongRoPE, whose keys
    are computed again once a sequence outgrows the trained length."""
    if not config.host_bytes or isinstance(runner, RankRunner) or length_of_change(spec) is not None:
        return None
    return HostStore(runner.cache, config.host_bytes, windows)


def make_steps(runner: Runner | RankRunner, config: EngineConfig) -> Steps | None:
    """Steps at fixed addresses on the device; None over several ranks, with LongRoPE, whose frequencies the host
    decides on, and by default on a CPU."""
    if isinstance(runner, RankRunner) or runner.ropes.by_length or not _repeats(runner, config):
        return None
    # On a GPU steps that check guesses are worth their padding where they are captured; they attend row by row.
    can_check = runner.device.type != "cuda" or (runner.cache.has_row_kernel and runner.model.spec.experts is None)
    guesses = config.speculated_tokens if config.speculation != "none" and can_check else 0
    return Steps(runner, repeats=True, guesses=guesses)


def make_draft_steps(runner: Runner, config: EngineConfig) -> Steps:
    """Those of a draft model."""
    return Steps(runner, repeats=_repeats(runner, config) and not runner.ropes.by_length, prompts=False)


def _repeats(runner: Runner, config: EngineConfig) -> bool:
    return runner.device.type == "cuda" if config.async_steps is None else config.async_steps


def capture_steps(
    steps: Steps | None, proposer: Proposer | None, config: EngineConfig, compiler: Compiler | None
) -> None:
    """Capture the steps of a model and of its draft on a GPU, except for routed models: experts gather rows."""
    every = [steps, proposer.steps if isinstance(proposer, DraftModel) else None]
    captured = [each for each in every if each is not None and each.runner.model.spec.experts is None]
    if captured and captured[0].device.type == "cuda" and config.graphs:
        capture(captured, captured[0].device, compiler)
