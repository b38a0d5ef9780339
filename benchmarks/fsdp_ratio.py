"""Our FSDP2 path beside torch's plain FSDP2: the same decoder, rows, loss and clipping, two processes, one run.

Plain is what torch's own tutorial does: `fully_shard` on every layer and on the model, fused AdamW over its DTensors,
`clip_grad_norm_`. Ours is what `tightfit train` runs under `layout.zero`. Steps alternate, and each pair gives a ratio,
so that whatever else the machine does falls on both; losses must agree all along. Only ratios are written, to
benchmarks/results/fsdp_ratio.csv: seconds of two processes on a CPU say nothing about GPUs.

    python -m benchmarks.fsdp_ratio
    python -m benchmarks.fsdp_ratio --model tiny-llama --rows 1 --length 32 --pairs 3 --dry-run
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.rows import append_row
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.launch.together import run_together
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.resolve import resolve_spec
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import Ranks
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.optimizer.adamw import decays
from tightfit.train.precision import LossScale
from tightfit.train.step import Batch, train_step

RANKS = 2
LIMIT = 1.03
WARM_UP = 3
SETTINGS = Optimizer(lr=1e-4)
Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Case:
    """A model with the rows of each process; what is split under `zero` 2 and 3."""

    model: str
    rows: int
    sequence_length: int
    zero: int
    pairs: int


def fill(model: Decoder) -> None:
    """The same weights for both."""
    torch.manual_seed(0)
    init_weights(model)


def make_ours(case: Case, device: torch.device) -> Step:
    """One step of tightfit's FSDP2; returns the mean loss over both processes."""
    layout = Layout(data=RANKS, zero=case.zero, micro_batch=case.rows)  # type: ignore[arg-type]
    mesh, spec = make_mesh(layout, device.type), resolve_spec(case.model)
    model = unfilled(spec, layout, "fp32", device)
    module, optimizer = assemble(model, mesh, layout, Levers(), "fp32", SETTINGS, device, fill)
    ranks, scale = Ranks.of(mesh), LossScale()
    return lambda batch: train_step(module, optimizer, [batch], device, SETTINGS.lr, scale, ranks=ranks).loss


def make_plain(case: Case, device: torch.device) -> Step:
    """One step of torch's FSDP2 as its tutorial has it."""
    model = blank_decoder(resolve_spec(case.model), device, torch.float32)
    fill(model)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=case.zero == 3)
    fully_shard(model)
    optimizer = _adamw(model)

    def step(batch: Batch) -> float:
        tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
        loss = model(tokens, labels, divisor=float(labels.numel())).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(_mean(loss.detach()))

    return step


def _adamw(model: Decoder) -> torch.optim.AdamW:
    decayed = [p for name, p in model.named_parameters() if decays(name, p)]
    plain = [p for name, p in model.named_parameters() if not decays(name, p)]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)


def _mean(loss: Tensor) -> Tensor:
    """What is reported is that of all rows, on both sides."""
    dist.all_reduce(loss)
    return loss / RANKS


def measured(device: torch.device, case: Case) -> list[float]:
    """Seconds of our step over theirs, for each pair of steps; who goes first changes from pair to pair."""
    sides = {"ours": make_ours(case, device), "plain": make_plain(case, device)}
    spec, generator, ratios = resolve_spec(case.model), torch.Generator().manual_seed(dist.get_rank()), []
    for number in range(WARM_UP + case.pairs):
        shape = (case.rows, case.sequence_length)
        tokens, labels = (torch.randint(spec.vocab_size, shape, generator=generator) for _ in range(2))
        batch = {"tokens": tokens, "labels": labels}
        order = ("ours", "plain") if number % 2 else ("plain", "ours")
        found = {side: timed(sides[side], batch) for side in order}
        (ours, our_loss), (plain, plain_loss) = found["ours"], found["plain"]
        if abs(our_loss - plain_loss) > 1e-4 * abs(plain_loss):
            raise RuntimeError(f"step {number}: our loss is {our_loss}, plain FSDP2's {plain_loss}")
        if number >= WARM_UP:
            ratios.append(ours / plain)
    return ratios


def measured_all(device: torch.device, cases: Sequence[Case]) -> list[list[float]]:
    """The ratios of each case, one after the other in the same processes."""
    return [measured(device, case) for case in cases]


def timed(step: Step, batch: Batch) -> tuple[float, float]:
    """Seconds from both processes being ready to both having done, and the loss."""
    dist.barrier()
    began = time.perf_counter()
    loss = step(batch)
    dist.barrier()
    return time.perf_counter() - began, loss


def main() -> None:
    """Both stages, one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano-llama")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    cases = [Case(options.model, options.rows, options.length, zero, options.pairs) for zero in (3, 2)]
    found = run_together(RANKS, measured_all, cases, modules=[assemble.__module__])
    for case, ratios in zip(cases, found, strict=True):
        low, middle, high = statistics.quantiles(ratios, n=4)
        verdict = "ok" if middle <= LIMIT else "SLOW"
        print(f"zero {case.zero}: {middle:.3f} (quartiles {low:.3f} to {high:.3f}), {verdict}")
        quartiles = {"ratio_p25": f"{low:.4f}", "ratio_p50": f"{middle:.4f}", "ratio_p75": f"{high:.4f}"}
        if not options.dry_run:
            append_row("fsdp_ratio", {"ranks": RANKS, **asdict(case), **quartiles})


if __name__ == "__main__":
    main()
