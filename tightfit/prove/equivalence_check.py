"""Running the equivalence gate: on the processes torchrun has started, or on processes of its own."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tightfit.errors import UserError
from tightfit.launch.together import run_together
from tightfit.parallel.apply import refuse_what_cannot_run
from tightfit.parallel.mesh import init_distributed, make_mesh
from tightfit.parallel.tensor import refusal
from tightfit.prove.check_target import Subject, miniature, read_subject, without_rounding
from tightfit.prove.equivalence import Verdict, compare
from tightfit.train.precision import choose_device

SMALL_PARAMS = 5_000_000
"""Models of up to so many weights are checked whole unless a miniature is asked for."""
MOST_RANKS = 16
"""Processes that are started here at most; more are torchrun's to start."""


def run_check(
    path: Path, overrides: Sequence[str] = (), *, steps: int = 2, tiny: bool | None = None
) -> tuple[Verdict | None, Subject]:
    """The verdict on the plan or job at `path`, on the first rank (None on others), and what was checked."""
    return check(read_subject(path, overrides), str(path), steps=steps, tiny=tiny)


def check(subject: Subject, source: str, *, steps: int = 2, tiny: bool | None = None) -> tuple[Verdict | None, Subject]:
    """The verdict on `subject`, which was read from `source`."""
    if subject.layout.ranks == 1:
        raise UserError(f"{source} has one rank, which has nothing to differ from; set layout.data or another degree")
    refuse_what_cannot_run(subject.layout, subject.levers)
    if sentence := refusal(subject.spec, subject.layout, subject.levers):
        raise UserError(sentence)  # before a miniature, which could be split
    subject = replace(subject, levers=without_rounding(subject.levers))
    if tiny or (tiny is None and subject.spec.params() > SMALL_PARAMS):
        subject = miniature(subject)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with init_distributed(subject.layout, choose_device("auto")) as (mesh, device):
            assert mesh is not None
            verdict = compare(subject, mesh, device, steps=steps)
            return verdict if mesh.get_rank() == 0 else None, subject
    if subject.layout.ranks > MOST_RANKS:
        raise UserError(
            f"the layout has {subject.layout.ranks} ranks, more than the {MOST_RANKS} processes started here; use "
            f"torchrun --nproc-per-node={subject.layout.ranks} -m tightfit check {source}"
        )
    return run_together(subject.layout.ranks, checked, subject, steps), subject


def checked(device: torch.device, subject: Subject, steps: int) -> Verdict:
    """The verdict, as one of the ranks of a running group."""
    return compare(subject, make_mesh(subject.layout, device.type), device, steps=steps)
