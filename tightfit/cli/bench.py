"""`tightfit bench`: measure what this machine does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli.options import AsJson, Device, ModelSource, count_option

if TYPE_CHECKING:
    from tightfit.serve.engine import Engine
    from tightfit.serve.llama_peer import LlamaCppPeer
    from tightfit.serve.peer_load import TransformersPeer

bench = typer.Typer(name="bench", help="Measure what this machine does.", no_args_is_help=True)


@bench.callback()
def _bench() -> None: ...


@bench.command()
def serve(
    model: ModelSource,
    at_once: Annotated[
        list[int] | None, typer.Option("--at-once", min=1, help="Requests at a time; 1, 4 and 16 unless given.")
    ] = None,
    prompt_tokens: Annotated[int, count_option(text="Tokens of a prompt.")] = 64,
    answer_tokens: Annotated[int, count_option(text="Tokens of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(help="Requests in all, times those at a time.", min=1)] = 2,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure transformers on the same plain weights, llama.cpp on a GGUF file.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Latency and throughput of a served model under load.

    \b
    tightfit bench serve smollm2-135m-instruct
    tightfit bench serve my-model --at-once 64 --prompt-tokens 256 --answer-tokens 256
    tightfit bench serve my-model --peers                    beside transformers, or llama.cpp for a GGUF file
    """
    from tightfit.report.load import print_load
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.load import bench_load, measured_rates, refuse_long
    from tightfit.serve.start import start_engine

    counts = at_once or [1, 4, 16]
    most = max(counts)
    config = EngineConfig(max_sequences=most, step_tokens=max(EngineConfig.step_tokens, most), prefix_cache=False)
    _, engine = start_engine(model, config, device=device)
    refuse_long(engine, prompt_tokens, answer_tokens)
    others = _peers(model, engine) if peers else {}
    rates = measured_rates(engine)
    bench_load(engine, 1, prompt_tokens=prompt_tokens, answer_tokens=min(2, answer_tokens), requests=1, rates=rates)
    load = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    rows = [bench_load(engine, each, requests=rounds * each, rates=rates, seed=each, **load) for each in counts]
    beside = {name: [peer.measured(each, **load) for each in counts] for name, peer in others.items()}
    print_load(model, rows, rates, **load, as_json=as_json, peers=beside)


def _peers(model: str, engine: "Engine") -> "dict[str, LlamaCppPeer | TransformersPeer]":
    """Programs to measure with the same weights: llama.cpp for a GGUF file on a CPU, else transformers."""
    from tightfit.models.gguf.model import smollm2_path
    from tightfit.models.loading import SMOLLM2
    from tightfit.serve.llama_peer import LlamaCppPeer
    from tightfit.serve.peer_load import TransformersPeer

    path = smollm2_path() if model == SMOLLM2 else Path(model).expanduser()
    if path.suffix == ".gguf" and engine.runner.device.type == "cpu":
        return {"llama.cpp": LlamaCppPeer(path, engine.model.spec.vocab_size)}
    return {"transformers": TransformersPeer(engine.model)}
