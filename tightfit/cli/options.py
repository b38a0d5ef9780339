"""Options that several verbs share, and verbs that take theirs as one dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.models import ArgumentInfo

from tightfit.errors import UserError
from tightfit.hardware.sizes import parse_count

Options = TypeVar("Options")

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run or checkpoint, a Hugging Face directory, a GGUF file, or smollm2-135m-instruct.",
    ),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option(help="What to compute in; auto is float32 on a CPU and on a GPU what the weights are stored in."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Compare weights with the checksums that came with them.")
]
Override = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", help="Change a field: -o layout.micro_batch=1. May be repeated."),
]
TextField = Annotated[str, typer.Option(help="Column or key that holds the text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Temperature = Annotated[float, typer.Option("-t", "--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this probability.")]
MaxSequences = Annotated[int, typer.Option(help="Answers under way at a time.", min=1)]
Adapters = Annotated[
    list[str] | None, typer.Option(help="NAME=DIRECTORY of a LoRA adapter that requests may ask for. Repeatable.")
]
Draft = Annotated[str | None, typer.Option(help="A smaller model that guesses ahead, with the same tokens.")]


def count_option(*names: str, text: str, least: int = 1) -> Any:
    """An option whose value is a count of at least `least`: 4096, 4k, 61.44M; `text` is its help."""

    def read(param: typer.CallbackParam, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [read(param, each) for each in value]
        if not isinstance(value, str):
            return value
        name = param.opts[-1]
        found = parse_count(value, name)
        if found < least:
            raise UserError(f"{name} is {value}; give at least {least:,}")
        return found

    return typer.Option(*names, parser=str, callback=read, metavar="COUNT", help=text)


def takes_options(verb: Callable[[Options], None]) -> Callable[..., None]:
    """`verb` as typer reads it: every field of the dataclass that it takes is a parameter."""
    kind = get_type_hints(verb)["options"]

    @wraps(verb)
    def with_each_option(**given: Any) -> None:
        verb(kind(**given))

    with_each_option.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    return with_each_option


def refuse_given(options: Any, names: tuple[str, ...], reason: str) -> None:
    """Refuse the first of the options `names` that was given, as it would be ignored; `reason` ends the sentence."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            told = "given" if value is True else ", ".join(value) if isinstance(value, list) else value
            raise UserError(f"{_option_name(options, field.name)} is {told}, {reason}")


def _option_name(options: Any, name: str) -> str:
    """What a user calls a field: `--seq` for `sequence_length`, JOB for an argument."""
    told = get_type_hints(type(options), include_extras=True)[name].__metadata__[0]
    if isinstance(told, ArgumentInfo):
        return told.metavar or name.upper()
    words = (told.default, *(told.param_decls or ()))  # typer first stores the first name as a default
    long = [word for word in words if isinstance(word, str) and word.startswith("--")]
    return long[0] if long else f"--{name.replace('_', '-')}"
