"""`tightfit serve`: an OpenAI-compatible server."""

from typing import Annotated

import typer

from tightfit.cli.options import Device

SERVE_EXTRA = "pip install 'tightfit[serve]'"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A run or checkpoint, a Hugging Face directory, a GGUF file, or smollm2-135m-instruct (the default "
            "where it is installed, else runs/stdlib).",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; MODEL where not given.")] = None,
    draft: Annotated[str | None, typer.Option(help="A smaller model that guesses ahead, with the same tokens.")] = None,
    lookup: Annotated[bool, typer.Option(help="Guess ahead from what the prompt says.")] = False,
    guesses: Annotated[int, typer.Option(help="Tokens guessed at a time.", min=1, max=16)] = 4,
    api_key: Annotated[
        str | None, typer.Option(envvar="TIGHTFIT_API_KEY", help="Clients have to send it as their API key.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(help="Answers under way at a time.", min=1)] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a prompt and its answer.", min=2)] = None,
    step_tokens: Annotated[int, typer.Option(help="Tokens a step computes at most.", min=1)] = 2048,
    cache_gib: Annotated[
        float | None, typer.Option(help="Memory for keys and values; decided from what is free where not given.")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Find equal beginnings of prompts in the cache.")] = True,
    max_requests: Annotated[int, typer.Option(help="Requests open at a time; more get status 429.", min=1)] = 512,
    max_body_mib: Annotated[float, typer.Option(help="Size of a request's body.")] = 8.0,
    max_seconds: Annotated[float, typer.Option(help="How long a request may take.")] = 600.0,
    drain_seconds: Annotated[int, typer.Option(help="How long open requests may go on after SIGTERM.", min=0)] = 60,
    device: Device = "auto",
) -> None:
    """Serve a model to OpenAI clients, with a chat page at /.

    \b
    tightfit serve
    tightfit serve my-model --max-length 4096 --port 9000
    tightfit serve my-model --draft my-smaller-model
    """
    from tightfit.errors import UserError
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.start import default_model, start_engine

    try:
        from tightfit.serve.http.guards import ServerLimits
        from tightfit.serve.http.server import ServerOptions
        from tightfit.serve.http.server import serve as run_server
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}, which the base install leaves out: {SERVE_EXTRA}") from None

    source = model or default_model()
    config = EngineConfig(
        max_sequences=max_sequences,
        step_tokens=max(step_tokens, max_sequences),
        max_length=max_length,
        cache_bytes=None if cache_gib is None else int(cache_gib * 2**30),
        prefix_cache=prefix_cache,
        speculation="draft" if draft else "lookup" if lookup else "none",
        speculated_tokens=guesses,
    )
    loaded, engine = start_engine(source, config, device=device, draft=draft)
    limits = ServerLimits(
        api_key=api_key,
        body_bytes=int(max_body_mib * 2**20),
        request_seconds=max_seconds,
        requests=max_requests,
    )
    typer.echo(engine.describe())
    typer.echo(f"{source} on http://{host}:{port} (chat page at /, OpenAI clients at /v1)")
    run_server(
        loaded, engine, ServerOptions(host=host, port=port, name=name, drain_seconds=drain_seconds, limits=limits)
    )
