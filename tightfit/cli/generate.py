"""`tightfit generate`: answer a file of prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tightfit.cli.options import (
    Adapters,
    Device,
    Draft,
    MaxSequences,
    ModelSource,
    Temperature,
    TopK,
    TopP,
    refuse_given,
    takes_options,
)
from tightfit.counted import counted

if TYPE_CHECKING:
    from tightfit.serve.requests.sampling import Sampling

OF_DRAWING = ("temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `tightfit generate`."""

    model: ModelSource
    source: Annotated[
        Path, typer.Option("--in", help='JSON lines: {"prompt": "…"} or {"messages": […]}, with an id of your own.')
    ]
    target: Annotated[Path, typer.Option("--out", help="JSON lines; a file that is there is gone on with.")]
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Most tokens of an answer.")] = 128
    temperature: Temperature = 0.8
    top_k: TopK = 0
    top_p: TopP = 1.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0
    beams: Annotated[
        int, typer.Option(help="Above 1: no drawing, but the likeliest answer a beam search finds.", min=1, max=10)
    ] = 1
    max_sequences: MaxSequences = 64
    draft: Draft = None
    adapter: Adapters = None
    batch_invariant: Annotated[
        bool, typer.Option(help="Answers equal to the bit whatever else is in the file; slower.")
    ] = False
    device: Device = "auto"

    def sampling(self, stop_ids: frozenset[int]) -> "Sampling":
        """How tokens are drawn, up to one of `stop_ids`."""
        from tightfit.serve.requests.sampling import Sampling

        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_ids=stop_ids,
        )


@takes_options
def generate(options: GenerateOptions) -> None:
    """Answer a file of prompts; killed, it goes on where it was.

    \b
    tightfit generate my-model --in prompts.jsonl --out answers.jsonl
    """
    from tightfit.durable import place_of, refuse_unwritable
    from tightfit.errors import UserError
    from tightfit.models.huggingface.adapter_config import named_directories
    from tightfit.serve.config import EngineConfig
    from tightfit.serve.offline import answer_prompts, read_finished
    from tightfit.serve.prompt_lines import check_settings, read_prompts
    from tightfit.serve.start import start_engine

    prompts = read_prompts(options.source)
    refuse_unwritable(place_of(options.target).parent, options.target)
    read_finished(options.target)
    if options.beams > 1:
        refuse_given(options, OF_DRAWING, "but beams draw nothing; leave it or --beams out")
    if others := [f"--{name}" for name in ("draft", "adapter") if options.batch_invariant and getattr(options, name)]:
        raise UserError(f"--batch-invariant does not go with {' and '.join(others)}; leave one of them out")
    adapters = named_directories(options.adapter or [])
    check_settings(prompts, options.sampling(frozenset()))  # before a model is loaded
    config = EngineConfig(
        max_sequences=options.max_sequences,
        step_tokens=max(EngineConfig.step_tokens, options.max_sequences),
        batch_invariant=options.batch_invariant,
    )
    loaded, engine = start_engine(options.model, config, device=options.device, draft=options.draft, adapters=adapters)
    if loaded.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer, so it cannot answer texts")
    sampling = options.sampling(loaded.tokenizer.stop_ids)
    with _progress() as show:
        answered = answer_prompts(engine, prompts, options.target, sampling, show, options.beams)
    if not answered:
        return typer.echo(f"{options.target} has all the answers already; name another --out to make them anew")
    computed = "tokens" if options.beams == 1 else "tokens of all beams"
    typer.echo(f"{counted(answered, 'prompt')} answered, {engine.counts.answer_tokens} {computed}, in {options.target}")
    if (hint := engine.guessing_hint) is not None:
        typer.echo(hint)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar; yields the function that sets the number of answers done and in all."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("answers", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
