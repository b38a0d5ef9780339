"""The process that `Compiler` starts, with a pipe's number as argument: it compiles variants of kernels as they come.

Each variant is compiled in a child forked from this process, which has imported the kernels and opens no GPU: the
target comes with the variant. Results go to Triton's cache on disk. Failures are silent here, as the parent compiles
what is missing and gets the message. A broken pipe means that the parent has gone: running compilations are finished,
so that no half-written file is left, and no other is begun.
"""

import importlib
import os
import sys
from collections import deque
from contextlib import suppress
from functools import reduce
from multiprocessing import connection, get_context
from typing import Any

from tightfit.serve.graphs.compiler import Target, Variant, start_hashing

KERNELS = "tightfit.serve.forward.program"
"""The module that imports the kernels of a serving step."""


class AbsentGpu:
    """A driver for Triton where kernels are compiled and none is launched."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_device(self) -> int:
        """The number of the only device."""
        return 0

    def get_current_target(self) -> Any:
        """The target as Triton's own type."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)


def main(pipe: int) -> None:
    """Compile the variants that come through `pipe`, until None comes."""
    hashing = start_hashing()
    with suppress(Exception):  # no C compiler, no driver
        build_driver_module()
    importlib.import_module(KERNELS)
    hashing.join()
    with connection.Connection(pipe, writable=False) as variants:
        compile_all(variants, at_a_time=2 * len(os.sched_getaffinity(0)))  # so that the longest does not begin last


def compile_all(variants: "connection.Connection[Any, Any]", at_a_time: int) -> None:
    """Compile each of `variants` in a child process, until None comes or the pipe breaks."""
    waiting: deque[tuple[Target, Variant]] = deque()
    running: dict[Any, Any] = {}
    complete, listening = False, True
    while waiting or running or not complete:
        while waiting and len(running) < at_a_time:
            process = get_context("fork").Process(target=compile_quietly, args=waiting.popleft())
            process.start()
            running[process.sentinel] = process
        for ready in connection.wait([*running, *([variants] if listening else [])]):
            if ready is not variants:
                running.pop(ready).join()
                continue
            try:
                received = variants.recv()
            except EOFError:
                waiting.clear()
                complete, listening = True, False
                continue
            if received is None:
                complete = True
            else:
                waiting.append(received)


def compile_quietly(target: Target, variant: Variant) -> None:
    """Compile `variant`; an exit status says whether that went well."""
    try:
        compile_variant(target, variant)
    except Exception:
        sys.exit(1)


def compile_variant(target: Target, variant: Variant) -> None:
    """Compile `variant` and its launcher into Triton's cache."""
    from triton.runtime.driver import driver

    driver.set_active(AbsentGpu(target))
    compiled = find_kernel(variant).preload(variant.specialization)
    if target.backend == "cuda":
        build_launcher(compiled)


def find_kernel(variant: Variant) -> Any:
    """The variant's kernel, as `triton.jit` returned it."""
    return reduce(getattr, variant.name.split("."), importlib.import_module(variant.module))


def build_launcher(compiled: Any) -> None:
    """The C function that launches a kernel, which Triton before 3.7 compiles for every signature."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


def build_driver_module() -> None:
    """Triton's bridge to the driver, which it compiles once a cache; opens no GPU."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


if __name__ == "__main__":
    main(int(sys.argv[1]))
