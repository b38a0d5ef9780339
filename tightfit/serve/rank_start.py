"""Starts the ranks of one served model: this process is rank 0 and answers, the others follow it."""

import torch

from tightfit.errors import UserError
from tightfit.models.loading import LoadedModel, load_source_tokenizer, source_spec
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.rank_runner import RankRunner, RankSteps, follow
from tightfit.serve.ranks import Spread, check_spread, find_meeting, join, load_share
from tightfit.serve.start import gpu_dtype, pick_device


def check_ranks(
    source: str, spread: Spread, device: str, *, adapters: bool, draft: str | None, skip: int | None
) -> None:
    """Refuse what ranks cannot do, before any is started."""
    if adapters:
        raise UserError("--adapter is for a model on one rank; leave out --tensor and --pipeline, or merge the adapter")
    if draft:
        raise UserError("--draft is for a model on one rank; leave out --tensor and --pipeline, or use --lookup")
    if skip:
        raise UserError("--skip is for a model on one rank; leave out --tensor and --pipeline, or use --lookup")
    check_spread(source_spec(source), spread, pick_device(device))


def start_first_rank(
    source: str, config: EngineConfig, spread: Spread, store: object, device: str
) -> tuple[LoadedModel, Engine]:
    """The engine of rank 0; the others must be starting."""
    steps = _steps(0, source, config, spread, store, device)
    tokenizer = load_source_tokenizer(source)
    model = steps.share.model
    return LoadedModel(model, tokenizer, source), Engine(model, tokenizer, config, ranks=RankRunner(steps))


def run_other_rank(index: int, source: str, config: EngineConfig, spread: Spread, port: int, device: str) -> None:
    """Rank `index` + 1, until rank 0 has ended."""
    torch.set_num_threads(1)
    follow(_steps(index + 1, source, config, spread, find_meeting(port, spread.ranks), device))


def _steps(rank: int, source: str, config: EngineConfig, spread: Spread, store: object, device: str) -> RankSteps:
    own = join(spread, rank, store, pick_device(device))
    dtype = torch.float32 if own.type == "cpu" else gpu_dtype(own)
    return RankSteps(load_share(source, spread, own, dtype), config)
