"""One server of forked processes (launch/forked.py) for all workers of a whole suite under `pytest -n`.

Each worker would have its own, which imports torch and the training loop for 6 s of a core. What deals tests out starts
one while workers collect, and ends it by ending; workers find its address in their environment. Not on a machine with a
GPU, whose kernels are not interpreted, nor where Python's server asks who calls for a key (3.14).
"""

import multiprocessing.forkserver
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from tightfit.launch.forked import GPU_FILES, start_server

PRELOADED = ["tests.preloaded"]
ADDRESS = "TEST_FORKSERVER"
SERVER: Any = multiprocessing.forkserver._forkserver


def can_be_shared() -> bool:
    """Whether one server does for all workers."""
    return not any(map(os.path.exists, GPU_FILES)) and not hasattr(SERVER, "_forkserver_authkey")


def start_for_workers() -> None:
    """Have a server import what forked processes need, and tell workers that are started later where it is."""
    os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py says in workers
    with silent():
        start_server(PRELOADED)
    os.environ[ADDRESS] = SERVER._forkserver_address


@contextmanager
def silent() -> Iterator[None]:
    """What is started inside prints to nobody, as it would from a worker: not between the dots of the suite."""
    kept = {number: os.dup(number) for number in (1, 2)}
    nobody = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(nobody, number)
        yield
    finally:
        for number, own in kept.items():
            os.dup2(own, number)
            os.close(own)
        os.close(nobody)


def connect() -> None:
    """Take it for the server of this process, where there is one."""
    if (address := os.environ.pop(ADDRESS, None)) is None:
        return
    SERVER._forkserver_address = address
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # forked processes are sent it
    SERVER.ensure_running = multiprocessing.forkserver.ensure_running = resource_tracker.ensure_running
