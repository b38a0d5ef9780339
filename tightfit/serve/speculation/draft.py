"""The draft model of speculative decoding: its own cache over the same blocks, and steps that end in logits."""

from collections.abc import Sequence as Items
from dataclasses import replace

from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.serve.budget import Budget
from tightfit.serve.config import EngineConfig
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.step import make_step, ordered
from tightfit.serve.speculation.skipping import SkippingRunner, kept_layers


class DraftSteps:
    """Runs chunks through the draft model; its cache has block b wherever the target's has block b."""

    def __init__(self, runner: Runner | SkippingRunner) -> None:
        self.runner = runner

    def run(self, chunks: Items[Chunk]) -> Tensor:
        """Logits after the last token of each chunk, in the order given."""
        order = ordered(chunks)
        step = make_step(order, self.runner.cache.block_size, self.runner.device, last_rows=True)
        logits = self.runner.logits(step)
        row_of = {id(chunk): row for row, chunk in enumerate(order)}
        return logits[[row_of[id(chunk)] for chunk in chunks]]


def make_draft_runner(draft: Decoder, target: Decoder, budget: Budget, config: EngineConfig) -> DraftSteps:
    """The draft model of `target`; both must have the same vocabulary."""
    if draft.spec.vocab_size != target.spec.vocab_size:
        raise UserError(
            f"the draft model has {draft.spec.vocab_size} tokens and the model {target.spec.vocab_size}; "
            "give a draft with the same tokenizer"
        )
    if draft.spec.max_positions < budget.max_length:
        raise UserError(
            f"the draft model has {draft.spec.max_positions} positions and requests may have {budget.max_length}; "
            "give a smaller max length"
        )
    weight = draft.embed.weight
    cache = make_cache(draft.spec, budget.blocks, config.block_size, weight.device, weight.dtype)
    return DraftSteps(Runner(draft.eval(), cache, budget.max_length, config.max_sequences))


def skipping_spec(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The shape of the cache for the layers that guess, where a model skips some of its own."""
    return replace(spec, layers=len(kept_layers(spec.layers, config.skipped_layers)))


def make_skipping_runner(target: Runner, budget: Budget, config: EngineConfig) -> DraftSteps:
    """The draft that is `target` itself without some of its layers."""
    spec, weight = target.model.spec, target.model.embed.weight
    kept = kept_layers(spec.layers, config.skipped_layers)
    cache = make_cache(skipping_spec(spec, config), budget.blocks, config.block_size, weight.device, weight.dtype)
    return DraftSteps(SkippingRunner(target, kept, cache))
