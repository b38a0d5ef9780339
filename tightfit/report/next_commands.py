"""Commands for a run that has just ended, which hold for it: its data, and its conversations."""

import shlex
from pathlib import Path

from tightfit.jobs.job import Job
from tightfit.train.data.sources import STANDARD_LIBRARY
from tightfit.train.loop import RunResult
from tightfit.train.quantized_result import FOLDER

README = "README.md"
QUESTION, BEGINNING, CODE = "Who are you?", "The ", "import "


def next_commands(result: RunResult, job: Job) -> list[str]:
    """To go on with a run that was stopped; else to sample and evaluate what it made, and to give that to others."""
    run = shlex.quote(near(result.run))
    if result.step < result.steps and not result.stopped_early:
        return [f"tightfit train {run} --resume"]
    exported = f"tightfit export {run} my-model        # a Hugging Face directory"
    if job.quantize.bits is not None and (result.run / FOLDER).is_dir():  # checkpoints are not rounded
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
    """Text that is there: what is held out where that is files, else what was trained on."""
    if job.data.train == [STANDARD_LIBRARY]:
        return README if Path(README).is_file() else STANDARD_LIBRARY
    names = job.data.held_out if isinstance(job.data.held_out, list) and job.data.held_out else job.data.train
    return shlex.quote(near(Path(names[0])) if Path(names[0]).is_absolute() else names[0])


def near(path: Path) -> str:
    """As short as the working directory allows."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
