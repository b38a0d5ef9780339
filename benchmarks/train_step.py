"""Tokens per second of a training step: tightfit beside a Hugging Face model in an equally careful loop.

Same shape, same weights, same random tokens, same optimizer (fused AdamW), same clipping, same machine, alternating in
one run; the first losses must agree before anything is timed. Writes benchmarks/results/train_step.csv.

    python -m benchmarks.train_step --case cpu
    python -m benchmarks.train_step --case h200-1b        (GPU, bf16 states, no checkpointing)
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rows import RESULTS, append_row
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.huggingface.weights import to_hf_state
from tightfit.models.initialisation import init_weights
from tightfit.models.layers.mlp import RoutedMlp
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import Batch, train_step
from tightfit.train.step_graph import step_graph


@dataclass(frozen=True)
class Case:
    """One workload."""

    model: str
    batch: int
    sequence_length: int
    device: str
    dtype: torch.dtype
    steps: int
    together: bool
    """Whether both fit in memory side by side, so that their steps can alternate."""
    reshape: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    """Another shape of the model's family."""


CASES = {
    "cpu": Case("nano-llama", 8, 256, "cpu", torch.float32, 30, True),
    "cpu-tiny": Case("tiny-llama", 2, 64, "cpu", torch.float32, 4, True),
    "h200-1b": Case("llama-3.2-1b", 2, 8192, "cuda", torch.bfloat16, 12, False),
    "h200-8b": Case("llama-3.1-8b", 1, 8192, "cuda", torch.bfloat16, 6, False),
    "h200-135m": Case("smollm2-135m", 8, 2048, "cuda", torch.bfloat16, 20, False),
}
SETTINGS = Optimizer(lr=1e-5)
Step = Callable[[], float]
Maker = Callable[[ModelSpec, Case, Batch], Step]


def make_ours(spec: ModelSpec, case: Case, batch: Batch) -> Step:
    """A step of tightfit; returns its loss."""
    model = _our_model(spec, case)
    optimizer, device = MasterAdamW(model, SETTINGS), torch.device(case.device)
    workload = Workload(
        spec=spec,
        sequence_length=case.sequence_length,
        global_batch=case.batch,
        precision="fp32" if case.dtype == torch.float32 else "pure-bf16",
    )
    graph = step_graph(model, optimizer, device, workload, Layout(micro_batch=case.batch), Levers())
    return lambda: train_step(model, optimizer, [batch], device, SETTINGS.lr, LossScale(), graph=graph).loss


def make_theirs(spec: ModelSpec, case: Case, batch: Batch, prepare: Callable[[Any], Any] = lambda model: model) -> Step:
    """A step of the Hugging Face model (once `prepare` has seen it) with sdpa attention, fused AdamW and clipping."""
    model = prepare(_their_model(spec, case))
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)

    def step() -> float:
        tokens, labels = batch["tokens"].to(case.device), batch["labels"].to(case.device)
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        value = loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def _our_model(spec: ModelSpec, case: Case) -> Decoder:
    torch.manual_seed(0)
    with torch.device(case.device):
        model = Decoder(spec).to(case.dtype)
    init_weights(model)
    return model


def _their_model(spec: ModelSpec, case: Case) -> Any:
    ours = _our_model(spec, case)
    config = config_from_spec(spec, dtype=str(case.dtype).removeprefix("torch."))
    hf_config = AutoConfig.for_model(**config)
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=_attention(spec, case), dtype=case.dtype
        )
    missing = set(model.load_state_dict(to_hf_state(ours, spec), strict=False).missing_keys)
    missing -= {"lm_head.weight", *_fill_experts(model, ours, missing)}
    assert not missing, missing
    model.tie_weights()
    return model.train()


def _attention(spec: ModelSpec, case: Case) -> str:
    """The attention of transformers: sdpa, which it refuses with attention sinks; on a CPU flex attention has no
    backward pass."""
    if not spec.sinks:
        return "sdpa"
    return "flex_attention" if case.device == "cuda" else "eager"


@torch.no_grad()
def _fill_experts(model: Any, ours: Decoder, missing: Collection[str]) -> Iterator[str]:
    """Copy experts that transformers stacks when it loads a directory, and name what was copied."""
    stacked = [(name, module) for name, module in model.named_modules() if f"{name}.gate_up_proj" in missing]
    routed = [layer.mlp for layer in ours.layers if isinstance(layer.mlp, RoutedMlp)]
    for (name, theirs), mlp in zip(stacked, routed if stacked else (), strict=True):
        theirs.gate_up_proj.copy_(torch.cat([mlp.experts.gate, mlp.experts.up], dim=1))
        theirs.down_proj.copy_(mlp.experts.down)
        block = model.get_submodule(name.rpartition(".")[0])
        block.gate.weight.copy_(mlp.router.weight)
        yield from (f"{name}.gate_up_proj", f"{name}.down_proj", f"{name.rpartition('.')[0]}.gate.weight")


def measure(steps: dict[str, Step], case: Case) -> dict[str, list[float]]:
    """Seconds of each step, implementations alternating; the first two of each are warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(case.steps + 2):
        for name, step in steps.items():
            _wait(case)
            began = time.perf_counter()
            step()
            _wait(case)
            seconds[name].append(time.perf_counter() - began)
    return {name: values[2:] for name, values in seconds.items()}


def _wait(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()


MAKERS: dict[str, Maker] = {"huggingface": make_theirs, "tightfit": make_ours}


def run_case(
    name: str,
    folder: Path,
    commit: str | None,
    makers: dict[str, Maker] = MAKERS,
    rounds: int = 2,
    table: str = "train_step",
    steps: int | None = None,
) -> None:
    """Measure the implementations, one after the other `rounds` times where they do not fit together; append rows."""
    case = replace(CASES[name], steps=steps or CASES[name].steps)
    spec = case.reshape(resolve_spec(case.model))
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, spec.vocab_size, (case.batch, case.sequence_length + 1), generator=generator)
    batch = {"tokens": drawn[:, :-1], "labels": drawn[:, 1:].contiguous()}
    groups = [list(makers)] if case.together else [[n] for n in makers] * rounds
    first_losses: dict[str, float] = {}
    for group in groups:
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made = {n: makers[n](spec, case, batch) for n in group}
        first_losses |= {n: step() for n, step in made.items()}
        for n, values in measure(made, case).items():
            _report(table, name, case, n, values, first_losses[n], folder, commit)
        del made
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
    spread = max(first_losses.values()) - min(first_losses.values())
    assert spread < (1e-4 if case.dtype == torch.float32 else 2e-2), first_losses


def _report(
    table: str, name: str, case: Case, who: str, seconds: list[float], loss: float, folder: Path, commit: str | None
) -> None:
    low, median, high = (q * 1e3 for q in statistics.quantiles(seconds, n=10)[1:8:3])
    tokens = case.batch * case.sequence_length
    peak = torch.cuda.max_memory_allocated() / 2**30 if case.device == "cuda" else 0.0
    row = {
        "case": name,
        "implementation": who,
        "model": case.model,
        "batch": case.batch,
        "sequence_length": case.sequence_length,
        "dtype": str(case.dtype).removeprefix("torch."),
        "step_ms_p20": f"{low:.1f}",
        "step_ms_p50": f"{median:.1f}",
        "step_ms_p80": f"{high:.1f}",
        "tokens_per_second": f"{tokens / median * 1e3:.0f}",
        "peak_gib": f"{peak:.2f}",
        "first_loss": f"{loss:.5f}",
    }
    print({k: row[k] for k in ("case", "implementation", "step_ms_p50", "tokens_per_second", "peak_gib", "first_loss")})
    append_row(table, row, folder=folder, commit=commit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    for chosen in arguments.case:
        run_case(chosen, arguments.results, arguments.commit)
