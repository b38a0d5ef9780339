"""Compiler: kernels compiled in other processes, side by side, into Triton's cache on disk.

Triton compiles a kernel at its first call, in Python and in C++ that holds the interpreter's lock, so threads hardly
help: ten seconds and more of a first start. A process of its own (compiler_process.py) imports what that needs while
this one reads weights, and forks one for every variant; we find what it made in the cache. Whatever it did not make we
compile ourselves. It is started before the GPU is opened, never forked from here, and ends with us: nothing is begun
after its pipe has broken.

Triton's keys to that cache begin with a hash of its whole library (some 400 MB): made here beside the reading too.
"""

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import NamedTuple, Self

PATIENCE_S = 120.0
"""How long the other processes may take before we compile what is missing ourselves."""
PIPE_BYTES = 2**20
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Linux, and Linux inside Windows."""


class Variant(NamedTuple):
    """A kernel for some kinds of arguments: its module and name, and what Triton writes down of those."""

    module: str
    name: str
    specialization: str


class Target(NamedTuple):
    """What Triton compiles for: `cuda`, a compute capability such as 90, and the threads of a warp."""

    backend: str
    arch: int
    warp_size: int


class Compiler:
    """`with` it, the process is there; it takes variants once, until `finish`."""

    def __init__(self) -> None:
        reader, self._pipe = Pipe(duplex=False)
        with suppress(OSError):  # so many pages that `submit` need not wait until somebody reads
            fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with reader:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-W",
                    "ignore",
                    "-m",
                    "tightfit.serve.graphs.compiler_process",
                    str(reader.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[reader.fileno()],
                start_new_session=True,  # Ctrl-C is for us alone
            )
        self._asked = False
        self._hashing = start_hashing()

    def wait_until_hashed(self) -> None:
        """Until keys to the cache can be made at once."""
        self._hashing.join()

    def submit(self, target: Target, variants: Iterable[Variant]) -> None:
        """Have `variants` compiled, beside others."""
        for variant in variants:
            self._asked = True
            with suppress(OSError):  # the process has died, so it will be missing
                self._pipe.send((target, variant))

    def finish(self) -> None:
        """Until all that was submitted has been tried."""
        with suppress(OSError):
            self._pipe.send(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the process: at once, or once what it is compiling is done, so that nothing half made is left."""
        self._pipe.close()
        if not self._asked:
            self._process.kill()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_compiler(device: str) -> Compiler | None:
    """A compiler where `device` ("auto", "cuda" or "cpu") may be an NVIDIA card and Triton is installed; told without
    torch, whose import takes as long as the compiler's own."""
    wanted = device != "cpu" and any(driver.exists() for driver in DRIVERS)
    return Compiler() if wanted and importlib.util.find_spec("triton") is not None else None


def start_hashing() -> Thread:
    """Have Triton hash itself, which it does once a process, and again in any thread that comes before that is done."""
    from triton.runtime.cache import triton_key  # not in the thread: two that import Triton lock one another out

    hashing = Thread(target=triton_key, daemon=True)
    hashing.start()
    return hashing
