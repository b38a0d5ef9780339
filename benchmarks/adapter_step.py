"""A step of adapters on a frozen model (LoRA, QLoRA): memory and time, predicted beside measured, and PEFT beside it.

The step is the trainer's (prove/rehearsal.py builds it on a real device), of random weights; predictions by formula, by
simulation and by the planner's costs are made in the same run. `peft` is transformers' model in bf16 with PEFT's
adapters of the same rank and targets, sdpa, fused AdamW; it is left out where peft is not installed. Writes
benchmarks/results/adapter_step.csv.

    python -m benchmarks.adapter_step --case 8b-int4 --case 8b-bf16
    python -m benchmarks.adapter_step --case cpu-tiny --results DIR      (a check of the script, without a GPU)
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.peers.checkpointing import checkpoint_layers
from benchmarks.rows import RESULTS, append_row
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import PrecisionName
from tightfit.jobs.workload import Workload
from tightfit.levers.adapter import initialise
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.decoder import Implementations
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.prove.rehearsal import build, rehearse
from tightfit.train.step import ignore

GIB = 2**30
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row's question."""

    model: str = "llama-3.1-8b"
    sequence_length: int = 4096
    micro_batch: int = 1
    accumulation: int = 1
    precision: PrecisionName = "bf16"
    adapter: AdapterTraining = field(default_factory=lambda: AdapterTraining(rank=16))
    levers: Levers = field(default_factory=lambda: Levers(checkpoint_every=1))
    machine: str = "H200"
    device: Literal["cuda", "cpu"] = "cuda"
    peer: bool = False
    """Whether PEFT can train it in the same way."""

    @property
    def layout(self) -> Layout:
        return Layout(micro_batch=self.micro_batch)

    @property
    def workload(self) -> Workload:
        return Workload(
            spec=preset(self.model),
            sequence_length=self.sequence_length,
            global_batch=self.micro_batch * self.accumulation,
            precision=self.precision,
            adapted=self.adapter.adapted(),
        )


PACKED = AdapterTraining(rank=16, bits=4)
CASES = {
    "8b-int4": Case(adapter=PACKED),
    "8b-int4-kept": Case(adapter=PACKED, levers=Levers()),
    "8b-int4-24gb": Case(adapter=PACKED, accumulation=4, levers=Levers(checkpoint_budget_bytes=12 * GIB)),
    "8b-int4-32k": Case(adapter=PACKED, sequence_length=32_768, levers=Levers(checkpoint_every=1, tiles=8)),
    "8b-int4-qv": Case(adapter=AdapterTraining(rank=16, bits=4, targets=["q", "v"])),
    "8b-bf16": Case(peer=True),
    "8b-bf16-kept": Case(levers=Levers(), peer=True),
    "cpu-tiny": Case(model="tiny-llama", sequence_length=64, precision="fp32", adapter=PACKED, device="cpu", peer=True),
}
Step = Callable[[], None]


def ours(case: Case) -> Step:
    """The trainer's step."""
    device = torch.device(case.device)
    program = build(
        case.workload,
        case.layout,
        case.levers,
        device,
        Implementations(),
        fill=lambda model: initialise(model, 0),
    )

    def step() -> None:
        program.step(ignore)

    return step


def pefts(case: Case) -> Step:
    """Transformers' model with PEFT's adapters, in the dtype of the case."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    from tightfit.models.huggingface.config import config_from_spec

    spec, dtype = case.workload.spec, torch.float32 if case.precision == "fp32" else torch.bfloat16
    config = AutoConfig.for_model(**config_from_spec(spec, dtype=str(dtype).removeprefix("torch.")))
    with torch.device(case.device):
        base: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if case.levers.checkpoint_every:
        checkpoint_layers(base)
        base.enable_input_require_grads()
    targets = [f"{name}_proj" for name in case.adapter.projections()]
    settings = peft.LoraConfig(r=case.adapter.rank, lora_alpha=case.adapter.alpha, target_modules=targets)
    model: Any = peft.get_peft_model(base, settings).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5, fused=True)
    shape = case.micro_batch, case.sequence_length
    tokens = torch.randint(spec.vocab_size, shape, device=case.device)

    def step() -> None:
        for _ in range(case.accumulation):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(make: Callable[[Case], Step], case: Case) -> dict[str, str]:
    """Peak memory and seconds of a step; empty where the card was too small."""
    on_gpu = case.device == "cuda"
    try:
        step = make(case)
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()  # of what was rounded
            torch.cuda.reset_peak_memory_stats()
        step()
        seconds = _timed(step, on_gpu=on_gpu)
    except torch.OutOfMemoryError:
        return {"measured_gib": "", "measured_reserved_gib": "", "measured_step_ms": ""}
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (0, 0)
    return {
        "measured_gib": f"{peaks[0] / GIB:.4f}",
        "measured_reserved_gib": f"{peaks[1] / GIB:.4f}",
        "measured_step_ms": f"{1e3 * seconds:.1f}",
    }


def _timed(step: Step, *, on_gpu: bool) -> float:
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - began) / STEPS


def predicted(case: Case) -> dict[str, str]:
    """By formula, by simulation, and by the planner's costs."""
    formula = training_ledger(case.workload, case.layout, case.levers)
    simulated = rehearse(case.workload, case.layout, case.levers)
    seconds = Costs(case.workload, parse_machine(case.machine)).step(case.layout, case.levers).step_s
    return {
        "formula_gib": f"{formula.peak_allocated_bytes() / GIB:.4f}",
        "simulated_gib": f"{simulated.peak_allocated_bytes() / GIB:.4f}",
        "simulated_reserved_gib": f"{simulated.peak_reserved_bytes() / GIB:.4f}",
        "predicted_step_ms": f"{1e3 * seconds:.1f}",
    }


def rows(name: str, case: Case) -> list[dict[str, str]]:
    """Ours, and PEFT's where there is one."""
    asked = {"case": name, "model": case.model, "adapter": _written(case.adapter), "levers": _written(case.levers)}
    sizes = {"sequence_length": case.sequence_length, "micro_batch": case.micro_batch}
    sizes["accumulation"] = case.accumulation
    said = predicted(case)
    none = dict.fromkeys(said, "")
    made = [{"implementation": "tightfit", **said, **measured(ours, case)}]
    torch.cuda.empty_cache()
    if case.peer and find_spec("peft") is not None:
        made.append({"implementation": "peft", **none, **measured(pefts, case)})
    return [{**asked, **{key: str(value) for key, value in sizes.items()}, **row, **_rate(case, row)} for row in made]


def _written(settings: AdapterTraining | Levers) -> str:
    """`rank=16 bits=4`: what was given."""
    return " ".join(f"{name}={getattr(settings, name)}" for name in sorted(settings.model_fields_set))


def _rate(case: Case, row: dict[str, str]) -> dict[str, str]:
    tokens = case.workload.tokens
    return {"tokens_per_second": f"{1e3 * tokens / float(ms):.0f}" if (ms := row["measured_step_ms"]) else ""}


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=tuple(CASES), required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for name in chosen.case:
        for row in rows(name, CASES[name]):
            append_row("adapter_step", row, folder=chosen.results, commit=chosen.commit)
            print(" ".join(value or "-" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
