"""The parts of an engine, made from its model and its configuration."""

from collections.abc import Mapping
from dataclasses import replace

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.spec import ModelSpec
from tightfit.serve.budget import HOST_SHARE, Budget, decide_budget, free_bytes
from tightfit.serve.cache.host_store import HostStore
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.adapters import AdapterSet
from tightfit.serve.forward.rope_tables import length_of_change
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.graphs.async_steps import AsyncSteps
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.ranks.runner import RankRunner
from tightfit.serve.speculation.draft import make_draft_runner, make_skipping_runner, skipping_spec
from tightfit.serve.speculation.proposers import DraftModel, PromptLookup, Proposer
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


def make_runner(model: Decoder, config: EngineConfig, budget: Budget, adapters: Mapping[str, Adapter]) -> Runner:
    """The model over a cache of the budget's size."""
    weight = model.embed.weight
    cache = make_cache(model.spec, budget.blocks, config.block_size, weight.device, weight.dtype, config.cache_format)
    if config.batch_invariant and cache.storage.is_cuda and not cache.has_row_kernel:
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
            return DraftModel(make_skipping_runner(runner, budget, config))
        case "draft":
            if draft is None:
                raise UserError("speculation is 'draft', but no draft model was given")
            return DraftModel(make_draft_runner(draft, model, budget, config))


def make_host(runner: Runner | RankRunner, spec: ModelSpec, config: EngineConfig) -> HostStore | None:
    """The host store for keys and values of preempted sequences; None over several ranks, and with LongRoPE, whose keys
    are computed again once a sequence outgrows the trained length."""
    if not config.host_bytes or isinstance(runner, RankRunner) or length_of_change(spec) is not None:
        return None
    return HostStore(runner.cache, config.host_bytes)


def make_async_steps(runner: Runner | RankRunner, config: EngineConfig, compiler: Compiler | None) -> AsyncSteps | None:
    """The launcher of steps that do not wait for the host; None over several ranks, and by default on a CPU."""
    on_gpu = runner.device.type == "cuda"
    if isinstance(runner, RankRunner) or not (on_gpu if config.async_steps is None else config.async_steps):
        return None
    capture = on_gpu and config.graphs and runner.model.spec.experts is None
    return AsyncSteps(runner, capture=capture, compiler=compiler)
