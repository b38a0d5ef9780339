"""The command line: assembles the verbs and turns a UserError into one sentence and exit code 2.

Verbs import what they need when they run, so `tightfit --help` does not wait for torch.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import cleandoc
from typing import Any, NoReturn

import typer

import tightfit
from tightfit.cli.batch import batch
from tightfit.cli.bench import bench
from tightfit.cli.calibrate import calibrate
from tightfit.cli.check import check
from tightfit.cli.compare import compare
from tightfit.cli.compress import compress
from tightfit.cli.doctor import doctor
from tightfit.cli.evaluate import evaluate
from tightfit.cli.export import export
from tightfit.cli.generate import generate
from tightfit.cli.hardware import hardware
from tightfit.cli.launch import launch
from tightfit.cli.measure import measure
from tightfit.cli.models import models
from tightfit.cli.picture import picture
from tightfit.cli.plan import plan
from tightfit.cli.resuming import ResumingCommand
from tightfit.cli.sample import sample
from tightfit.cli.serve import serve
from tightfit.cli.train import train
from tightfit.durable import NO_ROOM
from tightfit.errors import UserError

TRAIN_EXTRA = {"torch", "numpy", "safetensors", "tokenizers", "transformers", "torchdata", "pyarrow", "matplotlib"}
INSTALL_LINE = "pip install 'tightfit[train]'"
app = typer.Typer(
    name="tightfit",
    help="Train, shrink and serve large language models on the GPUs people actually have.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS = (
    sample,
    serve,
    generate,
    evaluate,
    compress,
    models,
    plan,
    measure,
    check,
    doctor,
    compare,
    batch,
    hardware,
    calibrate,
    export,
)


def _flowing(verb: Callable[..., Any]) -> str:
    """The verb's docstring with every paragraph on one line, which wraps at the terminal's width; examples, which begin
    with \\b, keep their lines."""
    paragraphs = cleandoc(verb.__doc__ or "").split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


for resuming in (train, launch):
    app.command(cls=ResumingCommand, help=_flowing(resuming))(resuming)
for verb in VERBS:
    app.command(help=_flowing(verb))(verb)
app.add_typer(bench)
app.add_typer(picture)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(tightfit.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None: ...


@cache
def _command() -> Any:
    """The command of all verbs, built once: that takes typer longer than some verbs take to run."""
    return typer.main.get_command(app)


def main() -> NoReturn:
    """Run the command line."""
    try:
        _run()
    except UserError as error:
        print(f"tightfit: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAIN_EXTRA:
            raise
        print(f"tightfit: this needs {missing}, which the base install leaves out: {INSTALL_LINE}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            print("tightfit: interrupted", file=sys.stderr)
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer make exit code 1 of it
            _end_without_reader()
        raise
    except BrokenPipeError:
        _end_without_reader()
    except PermissionError as error:
        place = error.filename or "a file"
        print(f"tightfit: {place}: {error.strerror}; see who may read and write it, or name another", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        with suppress(OSError):
            sys.stdout.close()  # what it still holds cannot be written either
        print(f"tightfit: cannot write the output: {error.strerror}; make room and run the same again", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _run() -> None:
    """The verb, to where its output is with its reader: at the interpreter's end it is too late to tell that it cannot
    be."""
    try:
        _command()()
    finally:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()


def _end_without_reader() -> NoReturn:
    """End as a shell expects where the reader (head, less) has gone; what is still held is written nowhere."""
    sys.stderr.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
