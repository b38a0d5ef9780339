"""`tightfit serve`: an OpenAI-compatible server."""

import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tightfit.cli.options import Adapters, Device, Draft, MaxSequences, count_option, refuse_given, takes_options

if TYPE_CHECKING:
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.graphs.compiler import Compiler
    from tightfit.serve.http.server import ServerOptions
    from tightfit.serve.ranks.share import Spread

LARGEST = 10**9
"""The limit for numbers of GiB, MiB or seconds."""
API_KEY = "TIGHTFIT_API_KEY"
SERVE_EXTRA = "pip install 'tightfit[serve]'"
OF_EXPORTS = ("on", "weights", "image", "out")
OF_OUR_SERVER = (
    *("step_tokens", "cache_gib", "host_cache_gib", "max_requests", "max_body_mib", "max_seconds", "drain_seconds"),
    "device",
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments and options of `tightfit serve`."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A run or checkpoint, a Hugging Face directory, a GGUF file, or smollm2-135m-instruct (the default "
            "where it is installed, else runs/stdlib).",
        ),
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000
    name: Annotated[str | None, typer.Option(help="What clients call the model; MODEL where not given.")] = None
    draft: Draft = None
    lookup: Annotated[bool, typer.Option(help="Guess ahead from what the prompt says.")] = False
    skip: Annotated[
        int | None, typer.Option(help="Guess ahead with the model itself, leaving out so many of its layers.", min=1)
    ] = None
    guesses: Annotated[int, typer.Option(help="Tokens guessed at a time.", min=1, max=16)] = 4
    adapter: Adapters = None
    api_key: Annotated[str | None, typer.Option(envvar=API_KEY, help="Clients have to send it as their API key.")] = (
        None
    )
    max_sequences: MaxSequences = 64
    max_length: Annotated[int | None, count_option(text="Tokens of a prompt and its answer.", least=2)] = None
    step_tokens: Annotated[int, count_option(text="Tokens a step computes at most.")] = 2048
    cache_gib: Annotated[
        float | None, typer.Option(help="Memory for keys and values; decided from what is free where not given.")
    ] = None
    host_cache_gib: Annotated[
        float, typer.Option(help="Host memory for preempted answers; without it they are computed again.", min=0)
    ] = 0.0
    cache_format: Annotated[
        Literal["model", "int8", "fp8"], typer.Option(help="What keys and values are kept in; int8 and fp8 take half.")
    ] = "model"
    prefix_cache: Annotated[bool, typer.Option(help="Find equal beginnings of prompts in the cache.")] = True
    batch_invariant: Annotated[
        bool, typer.Option(help="Answers equal to the bit whatever else is in the batch; slower.")
    ] = False
    max_requests: Annotated[int, typer.Option(help="Requests open at a time; more get status 429.", min=1)] = 512
    max_body_mib: Annotated[float, typer.Option(help="Size of a request's body.")] = 8.0
    max_seconds: Annotated[float, typer.Option(help="How long a request may take.")] = 600.0
    drain_seconds: Annotated[int, typer.Option(help="How long open requests may go on after SIGTERM.", min=0)] = 60
    tensor: Annotated[int | None, typer.Option(help="Cards that share every layer.", min=1)] = None
    pipeline: Annotated[int | None, typer.Option(help="Cards that have some of the layers each.", min=1)] = None
    replicas: Annotated[int | None, typer.Option(help="Copies of the model at one address.", min=1, max=256)] = None
    export: Annotated[
        Literal["vllm", "k8s"] | None,
        typer.Option(help="Serve nothing; write a vLLM script or a Kubernetes manifest from the plan."),
    ] = None
    on: Annotated[str | None, typer.Option(help="With --export: the machine, such as 8xH100-80GB.")] = None
    weights: Annotated[str | None, typer.Option(help="With --export: what vLLM loads, where that is not MODEL.")] = None
    image: Annotated[str | None, typer.Option(help="With --export k8s: the container image.")] = None
    out: Annotated[Path | None, typer.Option(help="With --export: the file; serve-vllm.sh or serve-k8s.yaml.")] = None
    device: Device = "auto"

    @property
    def adapters(self) -> dict[str, Path]:
        """Directories of adapters by their names."""
        from tightfit.models.huggingface.adapter_config import named_directories

        return named_directories(self.adapter or [])

    @property
    def guessing_options(self) -> list[str]:
        """The given options that turn on speculation."""
        return [f"--{name}" for name in ("draft", "lookup", "skip") if getattr(self, name)]


@takes_options
def serve(options: ServeOptions) -> None:
    """Serve a model to OpenAI clients, with a chat page at /.

    \b
    tightfit serve
    tightfit serve my-model --max-length 4096 --port 9000
    tightfit serve my-model --draft my-smaller-model
    tightfit serve my-model --tensor 2 --replicas 4
    tightfit serve my-model --export k8s --on 8xH100-80GB
    """
    _check(options)
    if options.export is not None:
        return _export(options, options.export)
    from tightfit.serve.graphs.compiler import start_compiler

    cards = (options.tensor or 1) * (options.pipeline or 1) * (options.replicas or 1)
    compiler = start_compiler(options.device) if cards == 1 else None  # first, to import while we import
    with compiler or nullcontext():
        _serve(options, compiler)


def _check(options: ServeOptions) -> None:
    """Refuse options that do not go together."""
    from tightfit.errors import UserError

    if (called := options.name or options.model) in options.adapters:
        raise UserError(f"--adapter names {called!r}, which is the model; give the adapter another name")
    if len(options.guessing_options) > 1:
        raise UserError(f"{' and '.join(options.guessing_options)} are ways to guess ahead; choose one")
    if options.batch_invariant:
        _check_invariant(options)
    if options.export is not None and options.skip:
        raise UserError(f"--skip is {options.skip}, which vLLM does not have; use --draft or --lookup with --export")
    if not options.guessing_options:
        refuse_given(options, ("guesses",), "but speculation is off; add --draft, --lookup or --skip or leave it out")
    _check_sizes(options)
    if (key := options.api_key) is not None and (not key.isprintable() or key != key.strip() or not key):
        raise UserError("--api-key is empty, or has spaces around it or what no header can carry; give another key")
    if options.export is None:
        refuse_given(options, OF_EXPORTS, "which is about --export; add that or leave it out")
    else:
        refuse_given(options, OF_OUR_SERVER, "which is about our own server; leave it or --export out")
        if options.api_key not in (None, os.environ.get(API_KEY)):
            raise UserError("--api-key is given, but no key is written to a file; set VLLM_API_KEY where vLLM runs")


def _check_invariant(options: ServeOptions) -> None:
    """Refuse options that --batch-invariant does not go with."""
    from tightfit.errors import UserError

    splits = [f"--{option}" for option in ("tensor", "pipeline") if (getattr(options, option) or 1) > 1]
    others = [f"--{option}" for option in ("adapter", "export") if getattr(options, option)]
    if refused := [*options.guessing_options, *splits, *others]:
        raise UserError(f"--batch-invariant does not go with {' and '.join(refused)}; leave one of them out")


def _check_sizes(options: ServeOptions) -> None:
    """Refuse amounts of memory or time that are not above 0 and below LARGEST."""
    from tightfit.errors import UserError

    given = {name: getattr(options, name) for name in ("cache_gib", "max_body_mib", "max_seconds")}
    given["host_cache_gib"] = options.host_cache_gib or None  # 0 is allowed
    for name, number in given.items():
        if number is not None and not 0 < number < LARGEST:
            raise UserError(f"--{name.replace('_', '-')} is {number:g}; give a number above 0 and below {LARGEST:,}")


def _serve(options: ServeOptions, compiler: "Compiler | None") -> None:
    from tightfit.errors import UserError
    from tightfit.models.loading import source_spec, weights_path
    from tightfit.models.presets import PRESETS
    from tightfit.serve.ranks.share import Spread
    from tightfit.serve.start import OF_ONE_RANK, check_ranks, default_model, gpu_count

    try:
        from tightfit.serve.http.address import check_address, own_names
        from tightfit.serve.http.guards import ServerLimits
        from tightfit.serve.http.replicas import serve_replicas
        from tightfit.serve.http.server import ServerOptions
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}, which the base install leaves out: {SERVE_EXTRA}") from None

    check_address(options.host, options.port)
    source, spread = options.model or default_model(), Spread(options.tensor or 1, options.pipeline or 1)
    if source not in PRESETS:
        weights_path(source)  # which says so where there is no such model
    positions = source_spec(source).max_positions
    if (options.max_length or 0) > positions:
        raise UserError(f"--max-length is {options.max_length}, but {source} has {positions} positions; lower it")
    if spread.ranks > 1:
        given = {option: getattr(options, option.replace("-", "_")) for option in OF_ONE_RANK}
        check_ranks(source, spread, options.device, given=given)
    limits = ServerLimits(
        api_key=options.api_key,
        names=own_names(options.host),
        body_bytes=int(options.max_body_mib * 2**20),
        request_seconds=options.max_seconds,
        requests=options.max_requests,
    )
    server = ServerOptions(
        host=options.host, port=options.port, name=options.name, drain_seconds=options.drain_seconds, limits=limits
    )
    if options.replicas is not None and options.replicas > 1:
        gpus = gpu_count(options.device)
        return serve_replicas(sys.argv[1:], server, replicas=options.replicas, cards=spread.ranks, gpus=gpus)
    _serve_one(source, spread, server, options, compiler)


def _serve_one(
    source: str, spread: "Spread", server: "ServerOptions", options: ServeOptions, compiler: "Compiler | None"
) -> None:
    """Serve one copy of the model, over its ranks."""
    from tightfit.launch.forked import Forked
    from tightfit.serve.http.server import serve as run_server
    from tightfit.serve.ranks.share import open_store
    from tightfit.serve.ranks.watch import RankWatch
    from tightfit.serve.start import run_other_rank, start_engine, start_first_rank

    config = _engine_config(options)
    with ExitStack() as others:
        if spread.ranks > 1:
            store = open_store(spread.ranks)
            arguments = (source, config, spread, store.port, options.device)
            forked = Forked(spread.ranks - 1, run_other_rank, arguments, [run_other_rank.__module__])
            others.enter_context(RankWatch(others.enter_context(forked)))
            loaded, engine = start_first_rank(source, config, spread, store, options.device)
        else:
            loaded, engine = start_engine(
                source,
                config,
                device=options.device,
                draft=options.draft,
                adapters=options.adapters,
                compiler=compiler,
            )
        typer.echo(engine.describe())
        typer.echo(f"{source} on http://{server.host}:{server.port} (chat page at /, OpenAI clients at /v1)")
        run_server(loaded, engine, server)
        if (hint := engine.guessing_hint) is not None:
            typer.echo(hint)


def _engine_config(options: ServeOptions) -> "EngineConfig":
    from tightfit.serve.config import EngineConfig

    return EngineConfig(
        max_sequences=options.max_sequences,
        step_tokens=max(options.step_tokens, options.max_sequences),
        max_length=options.max_length,
        cache_bytes=None if options.cache_gib is None else int(options.cache_gib * 2**30),
        cache_format=options.cache_format,
        prefix_cache=options.prefix_cache,
        batch_invariant=options.batch_invariant,
        speculation="draft" if options.draft else "lookup" if options.lookup else "skip" if options.skip else "none",
        skipped_layers=options.skip or 0,
        host_bytes=int(options.host_cache_gib * 2**30),
        speculated_tokens=options.guesses,
    )


def _export(options: ServeOptions, form: Literal["vllm", "k8s"]) -> None:
    from tightfit.errors import UserError
    from tightfit.exports.serving_files import export_serving, served_weights
    from tightfit.exports.vllm import EngineOptions
    from tightfit.hardware.machine import parse_machine
    from tightfit.models.huggingface.adapter_config import largest_rank
    from tightfit.models.resolve import resolve_spec
    from tightfit.plan.serving.deployment import make_deployment

    if options.model is None:
        raise UserError("--export needs a MODEL: a Hugging Face directory, or a preset with --weights")
    weights = served_weights(options.model, options.weights)
    deployment = make_deployment(
        options.model,
        resolve_spec(options.model),
        parse_machine(options.on or "local"),
        length=options.max_length,
        requests=options.max_sequences,
        tensor=options.tensor,
        pipeline=options.pipeline,
        replicas=options.replicas,
        cache=options.cache_format,
    )
    engine = EngineOptions(
        weights=weights,
        name=options.name or options.model,
        host=options.host,
        port=options.port,
        draft=options.draft,
        lookup=options.lookup,
        guesses=options.guesses,
        prefix_cache=options.prefix_cache,
        adapters={key: str(path.resolve()) for key, path in options.adapters.items()},
        largest_rank=max(map(largest_rank, options.adapters.values()), default=0),
    )
    path = export_serving(form, deployment, engine, out=options.out, image=options.image)
    typer.echo(deployment.describe())
    typer.echo(f"wrote {path}")
