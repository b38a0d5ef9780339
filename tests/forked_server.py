"""The server of forked processes, forked itself from a worker that has collected all tests.

Started afresh, as `tightfit.launch.forked` does, it imports for seven seconds of a core what each worker has imported
already. It is forked before the first test, while the worker has computed nothing, and then runs the very command that
would have been executed. What a new interpreter would not have is put back: files that are open, the worker's output,
handlers of signals, and what the worker knows of servers.

Only in workers (`pytest -n`), which run tests of many files; and not where there is a GPU, which they have opened.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.group import PRELOADED
from tightfit.launch.forked import start_server


def fork_server(config: pytest.Config) -> None:
    """Have this process's server forked from it."""
    resource_tracker.ensure_running()  # which is a new program
    captured: Any = config.pluginmanager.getplugin("capturemanager")
    captured.resume_global_capture()  # what ranks write belongs to the test that runs
    try:
        with patch.object(util, "spawnv_passfds", _fork):
            start_server(PRELOADED)
    finally:
        captured.suspend_global_capture()


def wanted() -> bool:
    """Whether this is a worker that may fork."""
    return "PYTEST_XDIST_WORKER" in os.environ and not torch.cuda.is_available()


def _fork(executable: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """In place of executing Python with `arguments`, the last of which is what it should run."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _let_go(kept)
        exec(arguments[-1], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _let_go(kept: Sequence[int]) -> None:
    """Of what is the worker's alone. Its files stay open, on nothing: who has them may close them by their numbers."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (nothing, *kept):
            try:
                os.dup2(nothing, number, inheritable=False)
            except OSError:
                continue  # the listing's own
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for known in (forkserver._forkserver, resource_tracker._resource_tracker):
        type(known).__init__(known)
