"""A plan as the job that runs it: the plan's own fields, then the user's overrides, then the schema of a job.

A plan made from a model's name has no data, no output and often no number of steps; the user adds them with `-o`, and
an error names those that are missing. Other fields can be overridden too, but the prediction then no longer holds:
`overridden` names the first planned field from which a job differs.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.load import load_job, parse_job
from tightfit.jobs.paths import JOB_FILE, run_output, with_absolute_paths
from tightfit.models.presets import PRESETS
from tightfit.plan.plan import Plan

PLAN_SUFFIX = ".json"
NEEDED = {"data.train": "FILES", "output": "DIRECTORY", "steps": "COUNT", "tokenizer.source": "train"}
"""Fields that a plan may leave open, with a placeholder for the value in the error's advice."""


def job_of_plan(plan: Plan, source: str, overrides: Sequence[str] = (), *, steps: int | None = None) -> Job:
    """The job that runs `plan`, which was read from `source`; `steps` is the default where neither plan nor overrides
    say how many."""
    fields, given = plan.job_fields(), {override.partition("=")[0].strip() for override in overrides}
    missing = _missing(fields, given)
    if steps and "steps" in missing:
        fields["steps"] = steps
        missing.remove("steps")
    if missing:
        wanted = _placeholders([*missing, *_tokenizer(fields, given)])
        raise UserError(f"{source} does not say everything a run needs; add {wanted}")
    return parse_job(yaml.safe_dump(fields, sort_keys=False), source, overrides)


def run_command(plan: Plan, file: Path) -> str:
    """The command that runs `plan`, which is in `file`, with placeholders for what the plan leaves open."""
    fields = plan.job_fields()
    verb = "train" if plan.layout.ranks == 1 else "launch"
    nodes = f"--nodes {plan.machine.nodes}" if plan.machine.nodes > 1 else ""
    wanted = _placeholders([*_missing(fields, set()), *_tokenizer(fields, set())])
    return " ".join(filter(None, ("tightfit", verb, shlex.quote(str(file)), nodes, wanted)))


def _missing(fields: Mapping[str, Any], given: set[str]) -> list[str]:
    """The fields of a job that a run needs and neither a plan's `fields` nor the overrides named `given` have."""
    known = {
        "data.train": "train" in fields["data"] or bool(given & {"data", "data.train"}),
        "output": "output" in fields or "output" in given,
        "steps": bool({"steps", "epochs"} & (given | {name for name in fields if fields[name] is not None})),
    }
    return [name for name, is_there in known.items() if not is_there]


def _tokenizer(fields: Mapping[str, Any], given: set[str]) -> list[str]:
    """The field that names a tokenizer, where a preset is trained, which has none."""
    is_open = fields["model"]["source"] in PRESETS and "tokenizer" not in fields
    return ["tokenizer.source"] if is_open and not given & {"tokenizer", "tokenizer.source"} else []


def _placeholders(missing: Iterable[str]) -> str:
    return " ".join(f"-o {name}={NEEDED[name]}" for name in missing)


def read_job(path: Path, overrides: Sequence[str] = (), *, steps: int | None = None) -> tuple[Job, Plan | None]:
    """The job at `path` (a job file, the directory of a run, or a plan) and, where it is one, the plan.

    Relative names of files are looked up from the working directory, then beside `path`; a run's output is the
    directory it is in now.
    """
    if path.suffix.lower() == PLAN_SUFFIX and not path.is_dir():
        plan = Plan.load(path)
        return with_absolute_paths(job_of_plan(plan, str(path), overrides, steps=steps), path.parent), plan
    run = run_output(path)
    own_place = [] if run is None else [f"output={json.dumps(str(run))}"]  # wherever the run has been moved to
    file = path / JOB_FILE if path.is_dir() else path
    return with_absolute_paths(load_job(file, [*own_place, *overrides]), file.parent), None


def overridden(plan: Plan, job: Job) -> str | None:
    """The first planned field from which `job` differs, as `layout.zero is 0 and was planned as 3`; None: none."""
    workload = plan.workload
    pairs = [
        ("global_batch", job.global_batch, workload.global_batch),
        ("data.sequence_length", job.data.sequence_length, workload.sequence_length),
        ("precision", job.precision, workload.precision),
        *((f"layout.{name}", getattr(job.layout, name), value) for name, value in plan.layout),
        *((f"levers.{name}", getattr(job.levers, name), value) for name, value in plan.levers),
    ]
    return next((f"{name} is {now} and was planned as {then}" for name, now, then in pairs if now != then), None)
