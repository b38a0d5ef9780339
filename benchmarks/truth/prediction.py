"""The memory truth table: what is predicted for a case, by formula and by simulation, and how it is measured.

Predictions need no GPU. Measuring builds the same step on one: cases of several ranks run as one rank of a fake process
group (the first, or the first of a pipeline stage), which allocates what that rank of the real one would and waits for
nobody. What other ranks would have sent is whatever was in memory. So their steps are not timed: what a fake collective
takes is not what a real one would, and kernels on such values draw less power.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.peers.checkpointing import checkpoint_layers
from benchmarks.truth.case import Case as Case
from tightfit.collectives.shards import local
from tightfit.hardware.machine import parse_machine
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.host import pinned_bytes
from tightfit.memory.ledger import Ledger
from tightfit.memory.simulation import fake_world
from tightfit.memory.trace import ledger_of
from tightfit.memory.tracing import Tracer
from tightfit.models.decoder import Implementations
from tightfit.parallel.mesh import make_mesh
from tightfit.plan.cost import Costs
from tightfit.prove.rehearsal import build, rehearse_stage, trace_step
from tightfit.train.short_collections import short_collections
from tightfit.train.step import NotFiniteError, OnPhase, ignore

GIB = 2**30
CUDA = torch.device("cuda")
FEW = 2**22
SHORT_S = 1.5


@dataclass(frozen=True)
class Prediction:
    """Bytes by formula (none for Hugging Face's model) and by simulation, and the step's seconds (one rank alone)."""

    formula_bytes: int | None
    simulated_bytes: int
    simulated_reserved_bytes: int
    step_s: float | None
    formula_host_bytes: int = 0
    simulated_host_bytes: int = 0


def predict(case: Case, machine: str = "H200") -> Prediction:
    """What is said of `case` beforehand."""
    simulated = _simulated(case, machine)
    if case.implementation == "huggingface":
        return Prediction(None, simulated.peak_allocated_bytes(), simulated.peak_reserved_bytes(), None)
    formula = formulas(case)
    seconds = step_seconds(case, machine)
    return Prediction(
        formula.peak_allocated_bytes(),
        simulated.peak_allocated_bytes(),
        simulated.peak_reserved_bytes(),
        seconds if case.ranks == 1 else None,
        *(each.allocated_bytes("backward", place="host") for each in (formula, simulated)),
    )


def step_seconds(case: Case, machine: str = "H200", host_layer_ms: float | None = None) -> float:
    """By the planner's costs, with a host as fast as the calibrated one or as one that launches a layer in so long."""
    costs = Costs(case.workload, parse_machine(machine), layer_launch_ms=host_layer_ms)
    return costs.step(case.layout, case.levers).step_s


def is_captured(case: Case, machine: str = "H200") -> bool:
    """Whether its steps are launched as a CUDA graph."""
    return Costs(case.workload, parse_machine(machine)).layout_cost(case.layout).is_captured(case.levers)


def formulas(case: Case) -> Ledger:
    """By formula, of the case's pipeline stage."""
    ledger = training_ledger(case.workload, case.layout, case.levers)
    return Ledger(ledger.source, tuple(replace(line, rank=0) for line in ledger.lines if line.rank == case.stage))


def _simulated(case: Case, machine: str) -> Ledger:
    if case.implementation == "tightfit":
        captured = is_captured(case, machine)
        return rehearse_stage(case.workload, case.layout, case.levers, stage=case.stage, captured=captured)

    def make(mesh: Any, tracer: Tracer) -> Callable[[OnPhase], object]:
        return huggingface_step(case, torch.device("cpu"), attention=_unmasked_attention())

    return ledger_of(trace_step(make, case.layout, warm_up=True).replay().peaks, "simulation")


@dataclass(frozen=True)
class Measurement:
    """What happened; no bytes where the card was too small."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    step_s: float | None
    host_bytes: int = 0


def measure(case: Case) -> Measurement:
    """Run `case` on this GPU: two steps to warm up (and to capture), then two or three in a row, timed together.

    Not one by one: with states on the host, part of an update runs beside the next step. Short rows of steps are timed
    three times, of which the median counts: a host is slower now and then.
    """
    _clear()
    pinned = pinned_bytes()
    try:
        with _world(case):
            step = _real_step(case)
            torch.cuda.reset_peak_memory_stats()
            step(ignore)
            step(ignore)
            with short_collections(CUDA):
                seconds = _median_of_rows(step, 2 if case.sequence_length > 16_384 else 3)
        timed = seconds if case.ranks == 1 else None
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Measurement(*peaks, timed, pinned_bytes() - pinned)
    except torch.OutOfMemoryError:
        return Measurement(None, None, None)
    finally:
        step = None  # type: ignore[assignment]
        _clear()


def _median_of_rows(step: Callable[[OnPhase], object], count: int) -> float:
    """Seconds of a step in the median of three rows of `count`, or in the first where that took long."""
    first = _timed(step, count)
    if first * count > SHORT_S:
        return first
    return statistics.median((first, _timed(step, count), _timed(step, count)))


def _timed(step: Callable[[OnPhase], object], count: int) -> float:
    """Seconds of one of `count` steps in a row that follow another, as in a run: what states on the host have to do
    beside the next step is waited for by none."""
    stream = torch.cuda.current_stream()
    step(ignore)
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step(ignore)
    stream.synchronize()
    return (time.perf_counter() - began) / count


def _clear() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def _world(case: Case) -> Iterator[None]:
    if case.ranks == 1:
        yield
        return
    with fake_world(case.ranks, case.stage * (case.ranks // case.layout.pipeline)):
        yield


def _real_step(case: Case) -> Callable[[OnPhase], object]:
    if case.implementation == "huggingface":
        return huggingface_step(case, CUDA)
    mesh = make_mesh(case.layout, CUDA.type) if case.ranks > 1 else None
    program = build(case.workload, case.layout, case.levers, CUDA, Implementations(), mesh, fill=filled)
    if case.ranks == 1:  # whose step is timed: all micro-batches, not the two that hold as much as all
        program = replace(program, batches=program.batches[:1] * case.accumulation)

    def step(on_phase: OnPhase) -> None:
        try:
            program.step(on_phase)
        except NotFiniteError:
            if case.ranks == 1:
                raise
            # What other ranks would have sent is whatever was in memory; update all the same.
            program.optimizer.step(1e-5, torch.ones((), device=CUDA))

    return step


@torch.no_grad()
def filled(model: nn.Module) -> None:
    """Values like those of a new model: nothing is timed on zeros. A host draws a few and repeats them."""
    few = 0.02 * torch.randn(FEW)
    for parameter in model.parameters():
        own = local(parameter)
        if own.ndim < 2:
            own.fill_(1.0)
        elif own.device.type == "cuda":
            own.normal_(std=0.02)
        else:
            flat = own.view(-1)
            for begin in range(0, flat.numel(), FEW):
                flat[begin : begin + FEW].copy_(few[: flat.numel() - begin])


def _unmasked_attention() -> str:
    """Their sdpa without the mask they would make of fake tensors only: plain causal attention needs none."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    return "sdpa_unmasked"


def huggingface_step(
    case: Case, device: torch.device, attention: str = "sdpa", prepare: Callable[[Any], None] | None = None
) -> Callable[[OnPhase], object]:
    """A step of transformers' own model in an equally careful loop: bf16 states, fused AdamW, clipping, sdpa."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tightfit.models.huggingface.config import config_from_spec

    config = AutoConfig.for_model(**config_from_spec(case.workload.spec, dtype="bfloat16"))
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    if prepare is not None:
        prepare(model)
    if case.checkpoint_every:
        checkpoint_layers(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(case.workload.spec.vocab_size, (case.micro_batch, case.sequence_length), device=device)

    def step(on_phase: OnPhase) -> None:
        on_phase("forward")
        loss = model(input_ids=tokens, labels=tokens, shift_labels=tokens, use_cache=False).loss
        on_phase("backward")
        loss.backward()
        on_phase("optimizer")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
