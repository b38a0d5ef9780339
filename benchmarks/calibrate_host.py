"""What the host takes: to launch a layer under each lever, and to hand states and weights over the link.

Launching: steps of a model so narrow that its kernels take microseconds are as long as the host needs to launch them.
Two depths tell a layer from the rest, and the phases of a step forward from backward and update. The link: one layer of
8B's size on a handful of tokens, whose step is the passing of its states.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.truth.prediction import filled
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.ledger import Phase
from tightfit.models.decoder import Implementations
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.plan.search.pins import parse_pins
from tightfit.prove.rates import narrow_spec
from tightfit.prove.rehearsal import Program, build
from tightfit.train.short_collections import short_collections
from tightfit.train.step import ignore

BACK = "update_in_backward=true"
LAUNCHED: tuple[tuple[str, PrecisionName], ...] = (
    ("", "bf16"),
    ("", "pure-bf16"),
    ("", "fp32"),
    ("loss=plain", "bf16"),
    ("checkpoint_every=1", "bf16"),
    ("checkpoint_every=1 checkpoint_keep=attention", "bf16"),
    ("checkpoint_every=1 checkpoint_keep=matmuls", "bf16"),
    ("checkpoint_every=1 offload_checkpoints=true", "bf16"),
    ("tiles=2", "bf16"),
    ("tiles=4", "bf16"),
    ("tiles=8", "bf16"),
    ("tiles=4 checkpoint_every=1", "bf16"),
    ("matmul=fp8-tensor", "bf16"),
    ("matmul=fp8-row", "bf16"),
    (BACK, "bf16"),
    (f"{BACK} checkpoint_every=1", "bf16"),
    ("optimizer_states=8bit", "bf16"),
    ("optimizer_states=factored", "bf16"),
    ("offload=optimizer", "bf16"),
    (f"offload=optimizer {BACK}", "bf16"),
    (f"offload=weights {BACK} checkpoint_every=1", "bf16"),
)
FEW, MORE = 2, 8
STEPS, WARM_UPS = 9, 3
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
Programs = dict[tuple[str, int], Program]
"""By name and number of layers."""


def levers_of(text: str) -> Levers:
    """As they are pinned on the command line, launched kernel by kernel."""
    return Levers(**parse_pins([f"levers.{each}" for each in text.split()]).levers, cuda_graph="never")


def launches(device: torch.device) -> Iterator[tuple[str, float]]:
    """Milliseconds of a layer, and of the rest of the step, by phase and levers."""
    size = 256 if device.type == "cuda" else 16
    programs = {
        (f"{precision}{' ' + text if text else ''}", layers): narrow_program(
            narrow_spec(layers, size), text, precision, device
        )
        for text, precision in LAUNCHED
        for layers in (FEW, MORE)
    }
    yield from by_layer(programs, device)


def by_layer(programs: Programs, device: torch.device) -> Iterator[tuple[str, float]]:
    """Of programs by name and depth: a layer's milliseconds in each phase, and the rest of that phase."""
    medians = phases_ms(programs, device)
    for name in dict.fromkeys(name for name, _ in programs):
        few, more = medians[name, FEW], medians[name, MORE]
        for phase in PHASES:
            each = (more[phase] - few[phase]) / (MORE - FEW)
            yield f"a layer's {phase}, {name}", each
            yield f"the rest of {phase}, {name}", few[phase] - FEW * each


def narrow_program(spec: ModelSpec, text: str, precision: PrecisionName, device: torch.device) -> Program:
    """A step on as many tokens as the model is wide."""
    workload = Workload(spec=spec, sequence_length=spec.hidden_size, global_batch=1, precision=precision)
    return build(workload, Layout(micro_batch=1), levers_of(text), device, Implementations(), fill=filled)


def phases_ms(programs: Programs, device: torch.device) -> dict[tuple[str, int], dict[Phase, float]]:
    """The median of each phase of each program's steps, which take turns: a slow minute of the host is everyone's."""
    for program in programs.values():
        for _ in range(WARM_UPS):
            program.step(ignore)
    with short_collections(device):
        turns = [{key: _phases(program, device) for key, program in programs.items()} for _ in range(STEPS)]
    return {key: {phase: statistics.median(turn[key][phase] for turn in turns) for phase in PHASES} for key in programs}


def _phases(program: Program, device: torch.device) -> dict[Phase, float]:
    """Milliseconds from the beginning of one phase to that of the next, without waiting for the card in between."""
    seen: list[tuple[Phase, float]] = []
    _wait(device)
    program.step(lambda phase: seen.append((phase, time.perf_counter())))
    _wait(device)
    ends = [at for _, at in seen[1:]] + [time.perf_counter()]
    found = {phase: (end - at) * 1e3 for (phase, at), end in zip(seen, ends, strict=True)}
    return {phase: found[phase] for phase in PHASES}


def link_updates(device: torch.device) -> Iterator[tuple[str, float, int]]:
    """Milliseconds of a step on a few tokens and the weights that are away, by levers."""
    on_gpu = device.type == "cuda"
    spec = replace(preset("llama-3.1-8b"), layers=2, vocab_size=1024) if on_gpu else narrow_spec(2, 16)
    for text in (
        "offload=optimizer",
        "offload=optimizer offload_update=host",
        f"offload=weights {BACK} checkpoint_every=1",
    ):
        workload = Workload(spec=spec, sequence_length=64 if on_gpu else 8, global_batch=1)
        program = build(workload, Layout(micro_batch=1), levers_of(text), device, Implementations(), fill=filled)
        program.step(ignore)
        _wait(device)
        began = time.perf_counter()
        for _ in range(4):
            program.step(ignore)
        if program.optimizer.offloading is not None:
            program.optimizer.offloading.synchronize()
        yield text, (time.perf_counter() - began) * 1e3 / 4, spec.params()
        del program
        gc.collect()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
