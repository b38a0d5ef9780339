"""Records: what one GPU trains with which levers, how fast, in how much memory, beside peers on the same work.

Each case is a shape and some ways to train it: ours with given levers (or `fit`: what the planner picks for the card or
for a smaller one), Hugging Face's model as it is and with Liger, and DeepSpeed with its optimizer on the host, each
where it is installed. Weights are random, tokens too; times are medians of steps after the first two, memory is the
allocator's peak and the host's pinned pages (of DeepSpeed, what the process grew by). Out of memory is a result too.
Writes benchmarks/results/levers.csv; `1b-ladder` has every lever alone, which `tightfit picture levers` draws.

    python benchmarks/levers.py --case 3b-offload --case 8b-24gb
    python benchmarks/levers.py --ladder
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from results import RESULTS, append_row

from tightfit.bench.memory_truth import Case as Truth
from tightfit.bench.memory_truth import filled, huggingface_step
from tightfit.hardware.cpu import peak_resident_bytes
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.host import pinned_bytes
from tightfit.models.decoder import Implementations
from tightfit.models.resolve import resolve_spec
from tightfit.plan.answer import Question, answer
from tightfit.plan.host_room import usable_host_bytes
from tightfit.plan.pins import Pins, parse_pins
from tightfit.plan.runnable import runnable_only
from tightfit.train.fitting import cap_memory, this_machine, with_memory
from tightfit.train.rehearsal import build
from tightfit.train.step import ignore

GIB = 2**30
WARM_UP = 2
FIT = "fit"
Step = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a shape: whose, in which precision, with which levers."""

    who: str = "tightfit"
    levers: str = ""
    precision: PrecisionName = "bf16"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and the ways to train it; `cap_gb` makes the card smaller."""

    model: str
    length: int
    ways: tuple[Way, ...]
    rows: int = 1
    steps: int = 5
    layers: int | None = None
    cap_gb: float | None = None

    @property
    def workload(self) -> Workload:
        """One step, in mixed precision until a way says otherwise."""
        spec = resolve_spec(self.model)
        spec = replace(spec, max_positions=max(spec.max_positions, self.length), layers=self.layers or spec.layers)
        return Workload(spec=spec, sequence_length=self.length, global_batch=self.rows)


PURE: Any = {"precision": "pure-bf16"}
BACK = "update_in_backward=true"
AWAY = f"offload=optimizer {BACK} checkpoint_every=1"
ALL_AWAY = f"offload=weights {BACK} checkpoint_every=1 offload_checkpoints=true tiles=8 loss_chunk_bytes=0"
PEERS = (Way(who="huggingface", **PURE), Way(who="huggingface+liger", **PURE))
CHECKPOINTED = (
    Way(who="huggingface", levers="checkpoint_every=1", **PURE),
    Way(who="huggingface+liger", levers="checkpoint_every=1", **PURE),
)
DEEPSPEED = Way(who="deepspeed", levers="checkpoint_every=1 offload=optimizer")
OFFLOADED = (Way(levers="checkpoint_every=1"), Way(levers=AWAY), Way(levers=f"{AWAY} offload_update=auto"), DEEPSPEED)
CASES: dict[str, Case] = {
    "3b-offload": Case(model="llama-3.2-3b", length=8192, ways=OFFLOADED),
    "3b-offload-short": Case(model="llama-3.2-3b", length=512, ways=OFFLOADED),
    "8b-32k-away": Case(
        model="llama-3.1-8b", length=32_768, steps=2,
        ways=(Way(levers=ALL_AWAY), Way(levers=f"checkpoint_every=1 {BACK}")),
    ),
    "8b-256k": Case(
        model="llama-3.1-8b", length=262_144, steps=1,
        ways=(Way(levers=f"{ALL_AWAY} optimizer_states=8bit", **PURE),),
    ),
    "8b-512k-4-layers": Case(
        model="llama-3.1-8b", length=524_288, steps=1, layers=4,
        ways=(Way(levers=f"{ALL_AWAY} optimizer_states=8bit checkpoint_format=fp8", **PURE),),
    ),
    "8b-32k": Case(
        model="llama-3.1-8b", length=32_768, steps=3,
        ways=(Way(levers=FIT, **PURE), Way(levers="checkpoint_every=1", **PURE), *CHECKPOINTED),
    ),
    "8b-8k": Case(
        model="llama-3.1-8b", length=8192,
        ways=(Way(**PURE), Way(levers="matmul=fp8-tensor", **PURE), Way(levers="matmul=fp8-row", **PURE), *PEERS),
    ),
    "8b-8k-fp32-states": Case(model="llama-3.1-8b", length=8192, ways=(Way(levers=FIT), Way(levers=AWAY))),
    "8b-24gb": Case(model="llama-3.1-8b", length=2048, cap_gb=24, ways=(Way(levers=FIT),)),
    "1b-16gb": Case(model="llama-3.2-1b", length=8192, cap_gb=16, ways=(Way(levers=FIT),)),
    "cpu-tiny": Case(
        model="tiny-llama", length=64, rows=2, steps=2,
        ways=(Way(precision="fp32"), Way(precision="fp32", levers="checkpoint_every=1 tiles=2"),
              Way(precision="fp32", levers=FIT)),
    ),
}  # fmt: skip
LADDER = (
    "", "checkpoint_every=1", "checkpoint_every=1 checkpoint_keep=attention",
    "checkpoint_every=1 checkpoint_keep=matmuls", "checkpoint_every=1 offload_checkpoints=true", "tiles=8", BACK,
    "optimizer_states=bf16", "optimizer_states=8bit", "optimizer_states=factored", "offload=optimizer",
    f"offload=optimizer {BACK}", f"offload=weights {BACK} checkpoint_every=1", "matmul=fp8-tensor",
)  # fmt: skip
CASES["1b-ladder"] = Case(model="llama-3.2-1b", length=16_384, ways=tuple(Way(levers=each) for each in LADDER))


def levers_of(case: Case, way: Way) -> Levers:
    """Given, or what the planner picks for this card."""
    if way.levers != FIT:
        return Levers(**parse_pins([f"levers.{each}" for each in way.levers.split()]).levers)
    cap = None if case.cap_gb is None else int(case.cap_gb * 1e9)
    machine = this_machine(1, cap) if torch.cuda.is_available() else with_memory(
        parse_machine("H200", usable_host_bytes()), cap or 80 * GIB
    )  # fmt: skip
    pins = Pins({"micro_batch": case.rows}, runnable_only()["levers"])
    workload = replace(case.workload, precision=way.precision)
    return answer(Question(model=case.model, workload=workload, machine=machine, pins=pins)).plan.levers


def make_ours(case: Case, way: Way, levers: Levers, device: torch.device) -> Step:
    """A step of tightfit."""
    workload = replace(case.workload, precision=way.precision)
    program = build(workload, Layout(micro_batch=case.rows), levers, device, Implementations(), fill=filled)
    return lambda: program.step(ignore).loss


def make_huggingface(case: Case, way: Way, levers: Levers, device: torch.device) -> Step:
    """A step of transformers' model, with Liger's kernels where the way says so."""
    truth = Truth(
        model=case.model, sequence_length=case.length, micro_batch=case.rows, precision="pure-bf16",
        checkpoint_every=levers.checkpoint_every, implementation="huggingface",
    )  # fmt: skip
    step = huggingface_step(truth, device, prepare=_with_liger if way.who.endswith("liger") else None)

    def run_step() -> float:
        step(ignore)
        return 0.0

    return run_step


def _with_liger(model: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def make_deepspeed(case: Case, way: Way, levers: Levers, device: torch.device) -> Step:
    """ZeRO-3 of one rank with float32 states and Adam on the host, over transformers' model."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    from tightfit.models.huggingface.config import config_from_spec

    spec = case.workload.spec
    config = AutoConfig.for_model(**config_from_spec(spec, dtype="bfloat16"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if find_spec("liger_kernel"):
        _with_liger(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settings = {
        "train_micro_batch_size_per_gpu": case.rows, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=model.parameters(), config=settings)
    tokens = torch.randint(spec.vocab_size, (case.rows, case.length), device=device)

    def step() -> float:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


MAKERS = {"tightfit": make_ours, "huggingface": make_huggingface, "huggingface+liger": make_huggingface,
          "deepspeed": make_deepspeed}  # fmt: skip
NEEDS = {"huggingface": "transformers", "huggingface+liger": "liger_kernel", "deepspeed": "deepspeed"}


@dataclass
class Found:
    """What one way took; nothing but its levers where memory ran out."""

    levers: Levers
    seconds: list[float]
    loss: float = 0.0
    allocated: int = 0
    reserved: int = 0
    host: int = 0


def run(case: Case, way: Way, device: torch.device) -> Found:
    """Build it, warm it up, time it."""
    _clear(device)
    levers, before, resident = levers_of(case, way), pinned_bytes(), peak_resident_bytes()
    found = Found(levers, [])
    step: Step | None = None
    try:
        step = MAKERS[way.who](case, way, levers, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP + case.steps if case.steps > 1 else 1):
            seconds, found.loss = _timed(step, device)
            found.seconds.append(seconds)
        found.host = pinned_bytes() - before
        if way.who == "deepspeed":
            found.host = max(0, peak_resident_bytes() - resident)
        if device.type == "cuda":
            found.allocated, found.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found.seconds = found.seconds[WARM_UP:] or found.seconds
    except torch.OutOfMemoryError:
        found.seconds = []
    finally:
        step = None
        _clear(device)
    return found


def _timed(step: Step, device: torch.device) -> tuple[float, float]:
    """Seconds and loss of one step."""
    began = time.perf_counter()
    loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, loss


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row_of(name: str, case: Case, way: Way, found: Found) -> dict[str, Any]:
    """A row of the results."""
    seconds = statistics.median(found.seconds) if found.seconds else None
    pulled = found.levers.model_dump(exclude_defaults=True)
    return {
        "case": name, "implementation": way.who, "model": case.model, "layers": case.workload.spec.layers,
        "sequence_length": case.length, "rows": case.rows, "precision": way.precision,
        "levers": " ".join(f"{key}={value}" for key, value in pulled.items()), "fitted": int(way.levers == FIT),
        "cap_gb": case.cap_gb or "", "steps": len(found.seconds),
        "step_s": "" if seconds is None else f"{seconds:.4f}",
        "tokens_per_second": "" if seconds is None else f"{case.rows * case.length / seconds:.0f}",
        "peak_allocated_gib": f"{found.allocated / GIB:.3f}", "peak_reserved_gib": f"{found.reserved / GIB:.3f}",
        "host_gib": f"{found.host / GIB:.3f}", "loss": f"{found.loss:.4f}",
        "result": "ok" if found.seconds else "out of memory",
    }  # fmt: skip


def ways_here(case: Case, only: str | None) -> Iterator[Way]:
    """Those that are installed."""
    for way in case.ways:
        if only in (None, way.who) and (way.who not in NEEDS or find_spec(NEEDS[way.who])):
            yield way


def main() -> None:
    """Run the chosen cases and append a row for every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", default=[])
    parser.add_argument("--ladder", action="store_true", help="every lever alone, for the picture")
    parser.add_argument("--only", choices=MAKERS, help="this implementation alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in [*chosen.case, *(["1b-ladder"] if chosen.ladder else [])]:
        case = CASES[name]
        if case.cap_gb is not None:
            cap_memory(int(case.cap_gb * 1e9))
        for way in ways_here(case, chosen.only):
            row = row_of(name, case, way, run(case, way, device))
            append_row("levers", row, folder=chosen.results, commit=chosen.commit)
            print(" ".join(str(value) or "-" for value in row.values()), flush=True)
        if case.cap_gb is not None and device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
