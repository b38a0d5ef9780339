"""`tightfit generate`: answer a file of prompts."""

from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.options import Device, ModelSource


def generate(
    model: ModelSource,
    source: Annotated[
        Path, typer.Option("--in", help='JSON lines: {"prompt": "…"} or {"messages": […]}, with an id of your own.')
    ],
    target: Annotated[Path, typer.Option("--out", help="JSON lines; a file that is there is gone on with.")],
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option("-t", "--temperature", help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    beams: Annotated[
        int, typer.Option(help="Above 1: no drawing, but the likeliest answer a beam search finds.", min=1, max=10)
    ] = 1,
    max_sequences: Annotated[int, typer.Option(help="Answers under way at a time.", min=1)] = 64,
    draft: Annotated[str | None, typer.Option(help="A smaller model that guesses ahead, with the same tokens.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option(help="Answers equal to the bit whatever else is in the file; slower.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Answer a file of prompts; killed, it goes on where it was.

    \b
    tightfit generate my-model --in prompts.jsonl --out answers.jsonl
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tightfit.errors import UserError
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.offline import answer_file, read_finished, read_prompts
    from tightfit.serve.requests.sampling import Sampling
    from tightfit.serve.start import start_engine

    read_prompts(source)
    read_finished(target)
    if batch_invariant and draft is not None:
        raise UserError("--batch-invariant does not go with --draft; leave one of them out")
    config = EngineConfig(
        max_sequences=max_sequences, step_tokens=max(2048, max_sequences), batch_invariant=batch_invariant
    )
    loaded, engine = start_engine(model, config, device=device, draft=draft)
    if loaded.tokenizer is None:
        raise UserError(f"{model} has no tokenizer, so it cannot answer texts")
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=loaded.tokenizer.stop_ids,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("answers", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        made = answer_file(engine, source, target, sampling, show, beams)
    if not made:
        return typer.echo(f"{target} has all the answers already; name another --out to make them anew")
    typer.echo(f"{made} prompts answered, {engine.counts.answer_tokens} tokens, in {target}")
    if (hint := engine.guessing_hint) is not None:
        typer.echo(hint)
