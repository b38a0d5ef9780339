"""Commands to try after a run, made for it: with its directory, its data, and `--chat` after training on chats."""

import shlex
from pathlib import Path

from tightfit.jobs.job import Job
from tightfit.train.data.sources import STANDARD_LIBRARY
from tightfit.train.loop import RunResult
from tightfit.train.quantized_result import FOLDER

README = "README.md"
QUESTION, BEGINNING, CODE = "Who are you?", "The ", "import "


def next_commands(result: RunResult, job: Job) -> list[str]:
    """Resume a run that was stopped; else sample, evaluate and export its model."""
    run = shlex.quote(near(result.run))
    if result.step < result.steps and not result.stopped_early:
        return [f"tightfit train {run} --resume"]
    exported = f"tightfit export {run} my-model        # a Hugging Face directory"
    if job.quantize.bits is not None and (result.run / FOLDER).is_dir():  # checkpoints are not quantized
        run = shlex.quote(near(result.run / FOLDER))
        exported = f"tightfit serve {run}        # also a directory for other programs"
    chat = " --chat" if job.objective == "sft" else ""
    field = "" if chat or job.data.field == "text" else f" --field {shlex.quote(job.data.field)}"
    return [
        f'tightfit sample {run}{chat} -p "{_prompt(job)}"',
        f"tightfit evaluate {run}{chat} --data {_evaluated(job)}{field}",
        exported,
    ]


def _prompt(job: Job) -> str:
    if job.objective == "sft":
        return QUESTION
    return CODE if job.data.train == [STANDARD_LIBRARY] else BEGINNING


def _evaluated(job: Job) -> str:
    """Text to evaluate on: held-out files if the job names some, else the training data."""
    if job.data.train == [STANDARD_LIBRARY]:
        return README if Path(README).is_file() else STANDARD_LIBRARY
    names = job.data.held_out if isinstance(job.data.held_out, list) and job.data.held_out else job.data.train
    return shlex.quote(near(Path(names[0])) if Path(names[0]).is_absolute() else names[0])


def near(path: Path) -> str:
    """`path` relative to the working directory if it is inside, else as it is."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
