"""`tightfit bench`: measure what this machine does."""

from typing import Annotated

import typer

from tightfit.cli.options import AsJson, Device, ModelSource

bench = typer.Typer(name="bench", help="Measure what this machine does.", no_args_is_help=True)


@bench.callback()
def _bench() -> None: ...


@bench.command()
def serve(
    model: ModelSource,
    at_once: Annotated[
        list[int] | None, typer.Option("--at-once", min=1, help="Requests at a time; 1, 4 and 16 unless given.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 64,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Requests in all, times those at a time.", min=1)] = 2,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure transformers too, on the same weights (plain ones).")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Latency and throughput of a served model under load.

    \b
    tightfit bench serve smollm2-135m-instruct
    tightfit bench serve my-model --at-once 64 --prompt-tokens 256 --answer-tokens 256
    tightfit bench serve my-model --peers                    beside transformers
    """
    from tightfit.report.load import print_load
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.load import bench_load, measured_rates
    from tightfit.serve.peer_load import TransformersPeer
    from tightfit.serve.start import start_engine

    counts = at_once or [1, 4, 16]
    most = max(counts)
    config = EngineConfig(max_sequences=most, step_tokens=max(EngineConfig.step_tokens, most), prefix_cache=False)
    _, engine = start_engine(model, config, device=device)
    peer = TransformersPeer(engine.model) if peers else None
    rates = measured_rates(engine)
    bench_load(engine, 1, prompt_tokens=prompt_tokens, answer_tokens=2, requests=1, rates=rates)
    load = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    rows = [bench_load(engine, each, requests=rounds * each, rates=rates, seed=each, **load) for each in counts]
    beside = [] if peer is None else [peer.measured(each, **load) for each in counts]
    print_load(model, rows, rates, **load, as_json=as_json, peers=beside)
