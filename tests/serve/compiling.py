"""Compiles kernels of models' engines for a card that is not here, `python -m tests.serve.compiling llama gpt2`, in
real processes.

Needs a process in which kernels are not interpreted, and an empty cache. Tensors are on the CPU; what asks for the card
is told of an H200's, and launches do nothing. Prints what was found as JSON.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import torch

from tests.slow_halves import compute_in_float32
from tightfit.collectives.shards import copy_whole
from tightfit.kernels import operators, overlap, triton_support
from tightfit.kernels.norm import row_norm
from tightfit.models.blank import blank_decoder
from tightfit.models.huggingface.adapter import Adapter, LowRank
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.serve.forward.adapters import AdapterSet
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.graphs import warm_up
from tightfit.serve.graphs.compiler import Compiler, Target, Variant
from tightfit.serve.graphs.compiler_process import AbsentGpu, compile_all
from tightfit.serve.graphs.steps import Steps

H200 = Target("cuda", 90, 32)
CPU = torch.device("cpu")
ADAPTED = ("qwen3",)
"""Models that are served with adapters."""
SMALL = ("glu", "greedy", "rotate_store")
"""Kernels that compile in a fraction of a second."""


class PretendedGpu(AbsentGpu):
    """One on which launches do nothing."""

    def __init__(self) -> None:
        super().__init__(H200)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
        )

    def get_current_stream(self, device: int) -> int:
        """Some."""
        return device

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        """What launches a kernel."""
        return lambda *_: None


def pretend() -> None:
    """From now on kernels are compiled as for an H200, whatever device their tensors are on."""
    instead: dict[Any, Any] = {
        triton_support.use_triton: lambda impl, x: impl != "torch" and x.dtype in triton_support.DTYPES,
        operators.multiprocessors: lambda device: 132,
        operators.on_device_of: lambda x: nullcontext(),
        overlap.can_overlap: lambda device: True,
        row_norm._shared_bytes: lambda device: 224 * 1024,
    }
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("tightfit.")]
    for module, (function, stand_in) in ((m, pair) for m in ours for pair in instead.items()):
        if getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, stand_in)
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.device = lambda device: nullcontext()
    cuda.synchronize = lambda device=None: None
    triton_support.triton.runtime.driver.set_active(PretendedGpu())


def make_steps(name: str) -> Steps:
    """Those of an engine of a few sequences, which guesses."""
    spec = replace(resolve_spec(name), vocab_size=256)
    model = blank_decoder(spec, CPU, torch.bfloat16)
    copy_whole(model.embed.weight, torch.zeros_like(model.embed.weight))
    adapters = AdapterSet(model, adapters_of(spec) if name.removeprefix("tiny-") in ADAPTED else {})
    runner = Runner(model, make_cache(spec, 9, 16, CPU, torch.bfloat16), 128, 40, adapters=adapters)
    return Steps(runner, repeats=True, guesses=4)


def adapters_of(spec: ModelSpec) -> dict[str, Adapter]:
    """Two, of different ranks, of some projections."""
    outputs = {"attention.q": spec.query_size, "attention.v": spec.kv_size, "mlp.up": spec.mlp_size}

    def change(rank: int, size: int) -> LowRank:
        return LowRank(
            *(torch.zeros(shape, dtype=torch.bfloat16) for shape in ((rank, spec.hidden_size), (size, rank)))
        )

    return {
        f"of {rank}": Adapter(
            "",
            rank,
            {f"layers.{i}.{part}": change(rank, size) for i in range(spec.layers) for part, size in outputs.items()},
        )
        for rank in (4, 8)
    }


def every_run(steps: Steps) -> Iterator[Callable[[], Any]]:
    """What will be captured, through all layers, and steps of other lengths than are tried."""
    whole, checks = steps.graphs, steps.checks
    assert whole is not None
    assert checks is not None
    for size in checks.sizes:
        yield lambda size=size: checks.runner.project(checks._check(size))  # type: ignore[misc]
    for kind in whole._kinds:
        yield lambda kind=kind: whole._try_decoding(kind)  # type: ignore[misc]
    for size in (64, 128):
        yield lambda size=size: whole.runner.project(whole._read_prompt(size))  # type: ignore[misc]
    for length, piece in ((2, 127), (17, 3), (100, 33), (128, 16)):
        for step in warm_up.mixed_steps(16, whole.padding_block, 128, CPU, lengths=[length], pieces=[piece]):
            yield lambda step=step: whole.runner.logits(step)  # type: ignore[misc]


def recorded(runs: Iterator[Callable[[], Any]]) -> set[Variant]:
    """Variants that `runs` would compile."""
    with torch.inference_mode(), warm_up.recorded() as variants:
        for run in runs:
            run()
    return set(variants)


@contextmanager
def compilations() -> Iterator[list[bool]]:
    """Whether what this process asks Triton to compile is in its cache."""
    from triton import knobs

    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    yield found
    knobs.compilation.listener = None


def compile_here(runs: Sequence[Callable[[], Any]], compiler: Compiler | None) -> list[bool]:
    """What this process had to do beside `compiler`, as if it had loaded nothing before."""
    from tightfit.kernels.decoding import greedy, rotate_store
    from tightfit.kernels.mlp import glu

    for kernel in (glu._forward_kernel, greedy._kernel, rotate_store._kernel):
        kernel.device_caches.clear()
    with compilations() as found:
        warm_up.compile_kernels(runs, CPU, compiler)
    return found


def is_running(compiler: Compiler) -> bool:
    """Whether the process or any it forked is there."""
    try:
        os.killpg(compiler._process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Print what the tests want to know."""
    pretend()
    compute_in_float32()
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        made = make_steps(f"tiny-{name}")
        tried = recorded(chain.from_iterable(part.trials() for part in made.parts))
        needed = recorded(every_run(made))
        found[name] = {
            "tried": sorted(each.module.split(".")[-1] for each in tried),
            "not tried": sorted(each.module for each in needed - tried),
            "of no use": sorted(each.module for each in tried - needed),
        }
    found["imported"] = sorted({"sympy", "torch.distributed.tensor"} & set(sys.modules))
    small = [each for each in tried if each.module.split(".")[-1] in SMALL]
    launches = [partial(note, each) for each in small]
    with Compiler() as dying:
        os.kill(dying._process.pid, signal.SIGKILL)
        dying._process.wait()
        found["without processes"] = compile_here(launches[:1], dying)
    with Compiler() as compiler:
        found["with processes"] = compile_here(launches, compiler)
        found["exit code"] = compiler._process.returncode
        found["left running"] = is_running(compiler)
    found["again"] = compile_here(launches, None)
    found["compiled once more"] = len(recorded(every_run(made)) & set(small))
    found["begun after the pipe broke"] = [name.split(".")[-1] for name in abandoned(tried)]
    print(json.dumps(found))


def abandoned(variants: set[Variant]) -> list[str]:
    """What is in an empty cache after two were asked for, one at a time, by somebody who has gone."""
    named = {each.module.split(".")[-1]: each for each in variants}
    reader, writer = Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with writer:
            for name in ("greedy", "glu"):
                writer.send((H200, named[name]))
        with reader:
            compile_all(reader, at_a_time=1)
        return [each.module for each in named.values() if warm_up.load_cached(each)]


def note(variant: Variant) -> None:
    """As if a step had called for `variant`."""
    from triton import knobs

    hook: Any = knobs.runtime.jit_cache_hook
    kernel = SimpleNamespace(module=variant.module, name=variant.name)
    hook(fn=kernel, compile={"specialization_data": variant.specialization})


if __name__ == "__main__":
    main()
