"""The kernels of an engine's steps, compiled side by side before the first step is captured.

Triton specializes a kernel for kinds of arguments (dtypes, sizes that are 1 or multiples of 16, constants), so which
variants it will compile is only known from the calls themselves. The very steps that will run are therefore run once
through few layers; a launch that would compile is skipped, and its variant recorded. Variants that Triton's cache on
disk lacks are compiled in other processes (compiler.py), and those that are still missing in threads of this one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from tightfit.serve.graphs.compiler import Compiler, Target, Variant
from tightfit.serve.graphs.compiler_process import find_kernel
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import Step, make_step

PIECES = (10, 100)
"""Tokens of a piece of a prompt beside a single token: less and more than one tile."""
LENGTHS = (1, 500)
"""Lengths of the single token's sequence: one program reads all its keys, or several split them."""


class NotCachedError(Exception):
    """A kernel would have to be compiled."""


def compile_kernels(runs: Iterable[Callable[[], object]], device: torch.device, compiler: Compiler | None) -> None:
    """Compile and load every kernel that `runs` would launch; other processes compile those of the first runs while the
    next are tried."""
    if compiler is not None:
        compiler.wait_until_hashed()
    missing: list[Variant] = []
    with torch.cuda.device(device), torch.inference_mode():
        target = current_target()
        for run in runs:
            found = missing_variants(run, known=missing)
            missing += found
            if compiler is not None:
                compiler.submit(target, found)
    if compiler is not None and missing:
        compiler.finish()

    def load_here(variant: Variant) -> None:
        with torch.cuda.device(device):
            load(variant)

    with ThreadPoolExecutor() as threads:
        list(threads.map(load_here, missing))
    torch.cuda.synchronize(device)


def missing_variants(run: Callable[[], object], known: Iterable[Variant]) -> list[Variant]:
    """Variants that `run` would compile, except `known` ones and those in the cache on disk, which are loaded."""
    with recorded() as variants:
        run()
    return [variant for variant in dict.fromkeys(variants) if variant not in known and not load_cached(variant)]


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """A list of the kernels that this thread would compile inside the block; they are neither compiled nor launched."""
    from triton import knobs

    variants: list[Variant] = []
    here, before = threading.get_ident(), knobs.runtime.jit_cache_hook

    def note(**told: Any) -> bool | None:
        if threading.get_ident() != here:
            return None if before is None else bool(before(**told))
        kernel = told["fn"]
        variants.append(Variant(kernel.module, kernel.name, told["compile"]["specialization_data"]))
        return True

    knobs.runtime.jit_cache_hook = note
    try:
        yield variants
    finally:
        knobs.runtime.jit_cache_hook = before


def load(variant: Variant) -> None:
    """Load `variant` on the current device, from the cache or compiled now."""
    _ = find_kernel(variant).preload(variant.specialization).run  # which loads it


def load_cached(variant: Variant) -> bool:
    """Load `variant` if it is in the cache on disk; whether it was."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    here = threading.get_ident()

    class OnlyCached(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> Any:
            group = super().get_group(filename)
            if not group and threading.get_ident() == here:
                raise NotCachedError
            return group

    with knobs.cache.scope():
        knobs.cache.manager_class = OnlyCached
        try:
            load(variant)
        except NotCachedError:
            return False
    return True


def current_target() -> Target:
    """The target of the current device."""
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


def mixed_steps(
    block_size: int,
    padding_block: int,
    max_length: int,
    device: torch.device,
    *,
    lengths: Iterable[int] = LENGTHS,
    pieces: Iterable[int] = PIECES,
) -> Iterator[Step]:
    """Steps of a single token and a piece of a prompt, which are not captured; all of them in the padding block."""
    for length, count in product(lengths, pieces):
        end, count = min(length, max_length), min(count, max_length)
        chunks = [Chunk(_sequence(end), end - 1, 1, chooses=True), Chunk(_sequence(count), 0, count)]
        for chunk in chunks:
            chunk.sequence.blocks = [padding_block] * -(-chunk.end // block_size)
        yield make_step(chunks, block_size, device)


def _sequence(length: int) -> Sequence:
    return Sequence([0] * length, Sampling(max_tokens=1))
