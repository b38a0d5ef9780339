"""Compiler: kernels compiled in other processes, side by side, into Triton's cache on disk.

Triton compiles a kernel at its first call, in Python and in C++ that holds the interpreter's lock, so threads hardly
help: ten seconds and more of a first start. A compiler process (compiler_process.py) imports Triton and the kernels
while this process reads weights, and forks a child for every variant; this process then finds the results in the cache,
and compiles what is missing itself. The compiler process is started before the GPU is opened, is no fork of this one,
and ends with it: after its pipe has broken it begins nothing.

Triton's cache keys begin with a hash of its whole library (some 400 MB), which is also computed while weights are read.
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
"""Device files of an NVIDIA driver: of Linux, and of Linux inside Windows."""


class Variant(NamedTuple):
    """A kernel specialized for kinds of arguments: its module, its name, and Triton's description of the arguments."""

    module: str
    name: str
    specialization: str


class Target(NamedTuple):
    """What Triton compiles for: `cuda`, a compute capability such as 90, and the threads of a warp."""

    backend: str
    arch: int
    warp_size: int


class Compiler:
    """A context manager around the compiler process, which takes variants until `finish`."""

    def __init__(self) -> None:
        reader, self._pipe = Pipe(duplex=False)
        with suppress(OSError):  # room for all variants, so that `submit` does not wait for the reader
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
        self._has_variants = False
        self._hashing = start_hashing()

    def wait_until_hashed(self) -> None:
        """Wait for Triton's hash of itself, so that cache keys are made at once."""
        self._hashing.join()

    def submit(self, target: Target, variants: Iterable[Variant]) -> None:
        """Send `variants` to the compiler process."""
        for variant in variants:
            self._has_variants = True
            with suppress(OSError):  # the process has died: `variant` will be missing
                self._pipe.send((target, variant))

    def finish(self) -> None:
        """Wait until every submitted variant is compiled or has failed."""
        with suppress(OSError):
            self._pipe.send(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the process: at once, or after running compilations, so that no half-written file is left."""
        self._pipe.close()
        if not self._has_variants:
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
    """A compiler where `device` ("auto", "cuda" or "cpu") may be an NVIDIA GPU and Triton is installed, else None;
    found out without torch, whose import takes as long as the compiler's own."""
    wanted = device != "cpu" and any(driver.exists() for driver in DRIVERS)
    return Compiler() if wanted and importlib.util.find_spec("triton") is not None else None


def start_hashing() -> Thread:
    """Compute Triton's hash of itself in a thread: until it is done, other threads that need it compute it too."""
    from triton.runtime.cache import triton_key  # not in the thread: two threads that import Triton deadlock

    hashing = Thread(target=triton_key, daemon=True)
    hashing.start()
    return hashing
