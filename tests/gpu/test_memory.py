"""A measured ledger on the GPU: it is what the allocator says, states are exact, and the simulation is near it.

So is that of a rank among fake ones: of tensor ranks, and of stages of a pipeline, sharded and not.
"""

import gc
from typing import Literal

import pytest
import torch

from benchmarks.truth.case import Case
from benchmarks.truth.prediction import formulas, measure, predict
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.segments import rounded
from tightfit.memory.ledger import Ledger
from tightfit.memory.measurement import measured
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.prove.rehearsal import build, claim_tensors, rehearse

CUDA = torch.device("cuda")
SPEC = preset("smollm2-135m")
LAYOUT = Layout(micro_batch=8)
STEPS = 2
GIVEN_ALONG = 0.03
"""Share of a model of small matrices that is the ends of blocks, which were not worth splitting off."""


def clear() -> None:
    """Give back what earlier tests left with the allocator and with cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measured_step(workload: Workload, levers: Levers) -> tuple[Ledger, int]:
    """The ledger of two steps, and the peak of what they allocated by torch's own count."""
    clear()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with measured(CUDA) as measuring:
        program = build(workload, LAYOUT, levers, CUDA, Implementations(), tracer=measuring.tracer, fill=init_weights)
        claim_tensors(measuring.tracer, program.decoder, program.optimizer)
        for _ in range(STEPS):
            program.step(measuring.tracer.begin)
        peak = torch.cuda.max_memory_allocated() - before
    ledger = measuring.ledger()
    del program, measuring
    clear()
    return ledger, peak


def in_blocks(width: int) -> int:
    """All parameters of the model at `width` bytes each, every tensor in a block of its own."""
    with torch.device("meta"):
        model = Decoder(SPEC)
    return sum(rounded(width * parameter.numel()) for parameter in model.parameters())


@pytest.mark.parametrize(("precision", "checkpoint_every"), [("bf16", 0), ("bf16", 1), ("pure-bf16", 0)])
def test_the_ledger_is_what_the_allocator_says(precision: PrecisionName, checkpoint_every: int) -> None:
    workload = Workload(spec=SPEC, sequence_length=512, global_batch=8, precision=precision)
    levers = Levers(checkpoint_every=checkpoint_every)
    ledger, peak = measured_step(workload, levers)
    assert ledger.peak_allocated_bytes() == peak
    simulated = rehearse(workload, LAYOUT, levers)
    assert simulated.peak_allocated_bytes() == pytest.approx(peak, rel=0.03)
    states = {"bf16": {"master weights": 4, "optimizer states": 8}, "pure-bf16": {"optimizer states": 4}}[precision]
    for phase in ("forward", "backward"):
        lines = ledger.at(phase)
        for component, width in states.items():
            held = sum(line.bytes for line in lines if line.component == component and not line.detail)
            each = width // 2 if component == "optimizer states" else width
            times = 2 if component == "optimizer states" else 1
            least = times * in_blocks(each)
            assert least <= held <= (1 + GIVEN_ALONG) * least, (phase, component)
        weights = sum(line.bytes for line in lines if line.component == "weights")
        assert in_blocks(2) <= weights <= (1 + GIVEN_ALONG) * in_blocks(2), phase


@pytest.mark.parametrize(
    ("split", "ranks", "stage", "micro_batches", "zero"),
    [
        ("tensor=3", 3, 0, 1, 0),
        ("tensor=3 sequence_parallel=false", 3, 0, 2, 0),
        ("pipeline=3", 3, 1, 6, 0),
        ("pipeline=3", 6, 0, 6, 1),
        ("pipeline=3 schedule=zero-bubble", 3, 2, 6, 0),
    ],
)
def test_a_rank_of_a_split_allocates_what_its_simulation_does(
    split: str, ranks: int, stage: int, micro_batches: int, zero: Literal[0, 1]
) -> None:
    case = Case(
        model="smollm2-135m",
        sequence_length=768,
        micro_batch=4,
        ranks=ranks,
        split=split,
        stage=stage,
        accumulation=micro_batches,
        zero=zero,
    )
    found, said = measure(case), predict(case)
    assert found.allocated_bytes is not None
    assert said.simulated_bytes == pytest.approx(found.allocated_bytes, rel=0.03)
    assert formulas(case).peak_allocated_bytes() == pytest.approx(found.allocated_bytes, rel=0.06)
