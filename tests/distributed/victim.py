"""A rank that kills itself with SIGKILL, which nothing can catch: at start-up, in a step, or in a save."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightfit.cli.train import train_as_rank
from tightfit.models.resolve import checkpoints_of

Original = Callable[..., Any]


def train_or_die(when: str, victim: int, once: str, arguments: list[str]) -> None:
    """`tightfit train ARGUMENTS` as a rank; the victim dies `when`, and if `once` names a file, the first time only."""
    if os.environ["RANK"] == str(victim) and not (once and Path(once).exists()):
        ways = {"start": die, "first step": in_the_first_step, "step": in_a_step, "save": in_a_save}
        {**ways, "write": beside_training}[when](once)
    train_as_rank(arguments)


def die(once: str) -> None:
    if once:
        Path(once).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_first_step(once: str) -> None:
    """Nothing has been saved."""
    import tightfit.train.optimizer.adamw as module

    replace(module.MasterAdamW, "step", lambda calls, _: calls == 1, once)


def in_a_step(once: str) -> None:
    """The third: a checkpoint has been saved after the second."""
    import tightfit.train.optimizer.adamw as module

    replace(module.MasterAdamW, "step", lambda calls, _: calls == 3, once)


def in_a_save(once: str) -> None:
    """The second: its folder is half written."""
    import tightfit.train.checkpoints.directory as module

    replace(module, "_write_training_state", lambda _, given: checkpoints_of(given[0].parents[2]), once)


def beside_training(once: str) -> None:
    """The second checkpoint in pieces, which is written in the background."""
    import tightfit.train.checkpoints.sharded as module

    replace(module.PieceWriter, "write_data", lambda calls, _: calls == 2, once)


def replace(owner: Any, name: str, due: Callable[[int, tuple[Any, ...]], object], once: str) -> None:
    """The function under `name` kills us in place of the call that is `due`."""
    original, calls = getattr(owner, name), []

    def called(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if due(len(calls), given):
            die(once)
        return original(*given, **options)

    setattr(owner, name, called)
