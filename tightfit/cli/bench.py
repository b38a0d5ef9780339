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
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Latency and throughput of a served model under load.

    \b
    tightfit bench serve smollm2-135m-instruct
    tightfit bench serve my-model --at-once 64 --prompt-tokens 256 --answer-tokens 256
    """
    import json
    from dataclasses import asdict

    from tightfit.serve.config import EngineConfig
    from tightfit.serve.load import bench_load, measured_rates
    from tightfit.serve.start import start_engine

    counts = at_once or [1, 4, 16]
    most = max(counts)
    config = EngineConfig(max_sequences=most, step_tokens=max(EngineConfig.step_tokens, most), prefix_cache=False)
    _, engine = start_engine(model, config, device=device)
    rates = measured_rates(engine)
    bench_load(engine, 1, prompt_tokens=prompt_tokens, answer_tokens=2, requests=1, rates=rates)
    rows = [
        bench_load(
            engine,
            each,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            requests=rounds * each,
            rates=rates,
            seed=each,
        )
        for each in counts
    ]
    if as_json:
        typer.echo(json.dumps({"model": model, "rows": [asdict(row) for row in rows]}))
        return
    read, products = rates.bytes_per_second / 1e9, rates.product_flops / 1e12
    typer.echo(f"{model}, prompts of {prompt_tokens} tokens, answers of {answer_tokens}: median and 90th percentile,")
    typer.echo(f"beside predictions (≈) from {read:,.1f} GB/s and {products:,.2f} TFLOP/s, both measured here,")
    typer.echo("and the most that reading weights, keys and values allows")
    typer.echo(f"{'at once':>7}{'first token, ms':>26}{'between tokens, ms':>26}{'tokens/s':>18}{'at most':>10}")
    for row in rows:
        first = f"{row.first_token_ms:.1f} / {row.first_token_ms_p90:.1f} ≈ {row.predicted_first_token_ms:.1f}"
        between = (
            f"{row.between_tokens_ms:.2f} / {row.between_tokens_ms_p90:.2f} ≈ {row.predicted_between_tokens_ms:.2f}"
        )
        speed = f"{row.tokens_per_second:,.1f} ≈ {row.predicted_tokens_per_second:,.1f}"
        typer.echo(f"{row.at_once:>7}{first:>26}{between:>26}{speed:>18}{row.most_tokens_per_second:>10,.1f}")
