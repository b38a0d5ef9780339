"""Runs the equivalence check on the processes torchrun has started, or on processes of its own."""

import os

import torch

from tightfit.errors import UserError
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.launch.together import run_together
from tightfit.parallel.mesh import init_distributed, make_mesh
from tightfit.prove.check_target import CheckTarget, exact_target, miniature
from tightfit.prove.equivalence import Verdict, compare
from tightfit.train.precision import choose_device

SMALL_PARAMS = 5_000_000
"""Models of up to this many weights are checked whole unless a miniature is asked for."""
MOST_RANKS = 16
"""Most processes started here; for more, use torchrun."""


def check(
    target: CheckTarget, source: str, *, steps: int = 2, tiny: bool | None = None
) -> tuple[Verdict | None, CheckTarget]:
    """The verdict on `target`, which was read from `source`."""
    if target.layout.ranks == 1:
        raise UserError(f"{source} has one rank, which has nothing to differ from; set layout.data or another degree")
    refuse_untrainable(  # before a miniature, which could be split
        Run(
            layout=target.layout,
            levers=target.levers,
            spec=target.spec,
            adapted=target.adapter.adapted(spec=target.spec),
        )
    )
    target = exact_target(target)
    if tiny or (tiny is None and target.spec.params() > SMALL_PARAMS):
        target = miniature(target)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with init_distributed(target.layout, choose_device("auto")) as (mesh, device):
            assert mesh is not None
            verdict = compare(target, mesh, device, steps=steps)
            return verdict if mesh.get_rank() == 0 else None, target
    if target.layout.ranks > MOST_RANKS:
        raise UserError(
            f"the layout has {target.layout.ranks} ranks, more than the {MOST_RANKS} processes started here; use "
            f"torchrun --nproc-per-node={target.layout.ranks} -m tightfit check {source}"
        )
    return run_together(target.layout.ranks, checked, target, steps), target


def checked(device: torch.device, target: CheckTarget, steps: int) -> Verdict:
    """The verdict, as one of the ranks of a running group."""
    return compare(target, make_mesh(target.layout, device.type), device, steps=steps)
