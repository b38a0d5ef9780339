"""`tightfit evaluate`: loss and perplexity of a model on text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tightfit.cli.options import AsJson, Device, Precision, TextField, Verify, count_option, refuse_given, takes_options
from tightfit.cli.outputs import is_picture, refuse_foreign


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The arguments and options of `tightfit evaluate`."""

    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A run or checkpoint, a Hugging Face directory, a GGUF file, or smollm2-135m-instruct; several with "
            "--against.",
        ),
    ]
    data: Annotated[list[str], typer.Option("--data", "-d", help="File or directory of text; may be repeated.")]
    field: TextField = "text"
    chat: Annotated[
        bool, typer.Option("--chat", help="The data are conversations; what the assistant says counts.")
    ] = False
    sequence_length: Annotated[
        int | None,
        count_option("--seq", text="Tokens per row; the model's positions, at most 2048, by default.", least=2),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Rows per forward pass.")] = 4
    against: Annotated[
        str | None, typer.Option(help="Another model, such as the one this was compressed from, to compare with.")
    ] = None
    picture: Annotated[
        Path | None, typer.Option(help="Draw size against perplexity and KL (--against); ends in .png or .svg.")
    ] = None
    cache: Annotated[Path, typer.Option(help="Where tokenized shards are kept.")] = Path("~/.cache/tightfit")
    device: Device = "auto"
    precision: Precision = "auto"
    verify: Verify = True
    as_json: AsJson = False

    @property
    def rows(self) -> dict[str, Any]:
        """How text becomes rows of a batch."""
        return {
            "field": self.field,
            "sequence_length": self.sequence_length,
            "batch": self.batch,
            "cache": self.cache,
        }


@takes_options
def evaluate(options: EvaluateOptions) -> None:
    """Measure a model's loss and perplexity on text.

    Documents are packed into rows without attention across their borders; all tokens but the first of each count.

    \b
    tightfit evaluate runs/stdlib --data notes.txt
    tightfit evaluate smollm2-135m-instruct --data README.md --seq 512 --json
    tightfit evaluate runs/mine --chat --data conversations.jsonl
    tightfit evaluate small --data README.md --against smollm2-135m-instruct
    tightfit evaluate 8bit 4bit 3bit --data README.md --against smollm2-135m-instruct --picture sizes.png
    """
    if options.chat:
        refuse_given(options, ("field",), "but conversations have keys of their own; leave it or --chat out")
    if options.against is not None:
        refuse_with_against(chat=options.chat, precision=options.precision != "auto", no_verify=not options.verify)
        return _compare(options, options.against)
    _refuse_without_against(options.models, options.picture)
    from tightfit.report.tables import print_evaluation
    from tightfit.train.evaluation import evaluate_source

    result = evaluate_source(
        options.models[0],
        options.data,
        chat=options.chat,
        device=options.device,
        precision=options.precision,
        verified=options.verify,
        progress=not options.as_json,
        **options.rows,
    )
    print_evaluation(result, as_json=options.as_json)


def _compare(options: EvaluateOptions, against: str) -> None:
    """Compare every model with `against`; a compressed model's report gets the result."""
    from tightfit.compress.comparison import compare_sources
    from tightfit.models.loading import weight_file_bytes, weights_path
    from tightfit.report.compression import print_comparison
    from tightfit.report.compression_report import Compared, add_comparison, draw_sizes
    from tightfit.report.figure import check_picture_path
    from tightfit.train.precision import choose_device

    models, data, picture = options.models, options.data, options.picture
    if picture is not None:
        check_picture_path(picture)
        refuse_foreign(picture, is_picture, "a picture")
    original, sizes = (against, weight_file_bytes(against)), [weight_file_bytes(model) for model in models]
    device = choose_device(options.device)
    found = []
    for model, size in zip(models, sizes, strict=True):
        result = compare_sources(model, against, data, device=device, progress=not options.as_json, **options.rows)
        found.append(Compared(model, size, result))
        add_comparison(weights_path(model), found[-1], against, data)
    print_comparison(found, original, as_json=options.as_json)
    if picture is not None:
        draw_sizes(found, original, picture)


def _refuse_without_against(models: list[str], picture: Path | None) -> None:
    from tightfit.errors import UserError

    if len(models) > 1:
        raise UserError(f"there are {len(models)} models; say with --against what to compare them with, or name one")
    if picture is not None:
        raise UserError("--picture draws models beside another; name that one with --against")


def refuse_with_against(**given: bool) -> None:
    """Refuse the first given option that a comparison of two models does not take."""
    from tightfit.errors import UserError

    for name, is_given in given.items():
        if is_given:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} does not go with --against, which compares on text, in float32; leave one out")
