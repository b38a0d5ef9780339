"""Where the time of a training step goes: its kernels by group, beside what the same work takes alone.

Profiles one step of train_step.py's workloads and groups what the GPU ran: matrix products by shape and memory order
(TFLOP/s), attention, fused kernels (GB/s of the least they must move), the update, and the time in which the GPU had
nothing to do. Every product of the step is then run again alone, in a short burst and in the step's own sequence: where
the second is slower, the card's power limit is what bounds it (clocks and power while steps run are printed too).
Writes benchmarks/results/step_profile.csv.

    python -m benchmarks.step_profile --case h200-8b --who tightfit
"""

import argparse
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.hf_step import MAKERS
from benchmarks.rows import RESULTS, append_row
from benchmarks.train_step import CASES, Case, Step
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
LOSS = "tightfit::linear_cross_entropy"
PASSES: dict[str, Callable[[Any], float]] = {
    "tightfit::row_norm": lambda s: (4 if s[3] else 2) * prod(s[0]),
    "tightfit::row_norm_backward": lambda s: (4 if s[1] else 3) * prod(s[0]),
    "tightfit::rope": lambda s: 2 * (prod(s[0]) + prod(s[1])),
    "tightfit::rope_": lambda s: 2 * (prod(s[0]) + prod(s[1])),
    "tightfit::glu": lambda s: 3 * prod(s[0]),
    "tightfit::glu_backward_": lambda s: 5 * prod(s[0]),
    "tightfit::gated_mlp_backward_": lambda s: 6 * prod(s[0]),
    "tightfit::scaled_copy": lambda s: 3 * prod(s[0]),  # float32 to 16 bits
    "aten::add": lambda s: 3 * prod(s[0]),
    "aten::add_": lambda s: 3 * prod(s[0]),
    "aten::mul": lambda s: 2 * prod(s[0]),
    "aten::copy_": lambda s: 2 * prod(s[0]),
}
"""Operation → elements of 16 bits it must read and write, from the shapes of its arguments."""

OVER_PARAMETERS = {
    "aten::_fused_adamw_": 14.0,
    "tightfit::adamw_list": 14.0,
    "aten::_foreach_norm": 2.0,
    "tightfit::gradient_norm": 2.0,
    "aten::_foreach_mul_": 4.0,
}
"""Operation → bytes it must move per parameter in bf16."""


class Product(NamedTuple):
    """A matrix product: operation, and shape and strides of its factors (and of what it is added to, first)."""

    operation: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def flop(self) -> float:
        (m, k), (_, n) = self.shapes[-2:]
        return 2.0 * m * k * n

    def __str__(self) -> str:
        (m, k), (_, n) = self.shapes[-2:]
        order = "".join("T" if s[0] == 1 else "N" for s in self.strides[-2:])
        return f"{m}×{k}×{n} {order}" + (" added" if self.operation != "aten::mm" else "")


@dataclass
class Group:
    """What one kind of work took in the step."""

    calls: int = 0
    ms: float = 0.0
    flop: float = 0.0
    moved_bytes: float = 0.0
    alone_ms: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    """The matrix products that are asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"aten::{func._schema.name.removeprefix('aten::')}"
        if name in PRODUCTS:
            factors = [x for x in args if isinstance(x, torch.Tensor)]
            shapes = tuple(tuple(x.shape) for x in factors)
            self.products.append(Product(name, shapes, tuple(tuple(x.stride()) for x in factors)))
        return func(*args, **(kwargs or {}))


def profile(step: Step) -> Any:
    """The events of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as made:
        step()
        torch.cuda.synchronize()
    return made.events()


def grouped(events: Any, products: list[Product], spec: ModelSpec, case: Case) -> dict[str, Group]:
    """What the GPU ran, by the operation that asked for it, or by the kernel's name where none did."""
    groups: dict[str, Group] = defaultdict(Group)
    left = _device_kernels(events)
    ahead = iter(products)
    asked = [e for e in events if e.device_type == DeviceType.CPU and e.kernels and "Buffer Full" not in e.name]
    for event in sorted(asked, key=lambda e: e.time_range.start):
        name, flop, moved = _described(event, ahead, spec, case)
        group = groups[name]
        group.calls += 1
        group.flop += flop
        group.moved_bytes += moved
        for kernel in event.kernels:
            group.ms += kernel.duration / 1e3
            group.kernels[kernel.name] += round(kernel.duration)
            left[kernel.name].subtract({"calls": 1, "us": kernel.duration})
    for name, per_parameter in OVER_PARAMETERS.items():
        if name in groups:
            groups[name].moved_bytes = per_parameter * spec.params()
    for name, rest in left.items():
        if rest["calls"] > 0 and "#" not in name:  # ranges that torch marks are no kernels
            groups[f"kernel {name[:60]}"] = Group(int(rest["calls"]), rest["us"] / 1e3)
    return dict(groups)


def _device_kernels(events: Any) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.device_type == DeviceType.CUDA:
            found[event.name].update({"calls": 1, "us": event.time_range.elapsed_us()})
    return found


def _described(event: Any, ahead: Iterator[Product], spec: ModelSpec, case: Case) -> tuple[str, float, float]:
    """Its group, floating-point operations and bytes."""
    shapes = event.input_shapes
    if event.name in PRODUCTS:
        if _is_inside(event, LOSS):
            left, right = shapes[:2] if event.name == "aten::mm" else shapes[1:3]
            return "loss: products", 2.0 * prod(left) * right[-1], 0.0
        product = next(ahead, None)
        if product is None:
            return "product nobody recorded", 0.0, 0.0
        return f"product {product}", product.flop, 0.0
    if _is_inside(event, LOSS):
        return f"loss: {event.name}", 0.0, 0.0
    if "attention" in event.name:
        scores = case.batch * spec.heads * case.sequence_length**2 * spec.head_dim * 2.0
        return event.name, scores * (2.5 if "backward" in event.name else 1.0), 0.0
    if event.name in OVER_PARAMETERS:
        return event.name, 0.0, 0.0
    passes = PASSES.get(event.name)
    large = bool(shapes and shapes[0] and prod(shapes[0]) > 2**20)
    return event.name + ("" if large else " (small)"), 0.0, 2.0 * passes(shapes) if passes and large else 0.0


def _is_inside(event: Any, name: str) -> bool:
    while event is not None:
        if event.name == name:
            return True
        event = event.cpu_parent
    return False


def idle_ms(events: Any) -> tuple[float, float]:
    """From the first kernel to the last, and how much of that no kernel ran."""
    on_gpu = (e for e in events if e.device_type == DeviceType.CUDA)
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_gpu)
    idle, end = 0.0, spans[0][0]
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return (end - spans[0][0]) / 1e3, idle / 1e3


def _call(product: Product) -> Callable[[], Any]:
    tensors = []
    for shape, stride in zip(product.shapes, product.strides, strict=True):
        made = torch.empty_strided(shape, stride, dtype=torch.bfloat16, device="cuda")
        tensors.append(made.normal_(std=0.05))
    if product.operation == "aten::mm":
        return lambda: torch.mm(*tensors)
    return lambda: tensors[0].addmm_(*tensors[1:], beta=0.5, alpha=0.01)


def _timed_ms(run: Callable[[], Any], rounds: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds


def alone(products: list[Product], groups: dict[str, Group]) -> float:
    """Enter what each product takes alone, after a rest, and return what all take in the step's sequence, in ms."""
    calls = {product: _call(product) for product in dict.fromkeys(products)}
    for product, call in calls.items():
        time.sleep(0.15)
        groups[f"product {product}"].alone_ms = _timed_ms(call, 5) * groups[f"product {product}"].calls

    def sequence() -> None:
        for product in products:
            calls[product]()

    return _timed_ms(sequence, 3)


@contextmanager
def watched_power() -> Iterator[list[str]]:
    """Clock in MHz, power in W and temperature, several times a second."""
    asked = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    watcher = subprocess.Popen(
        ["nvidia-smi", asked, "--format=csv,noheader,nounits", "-lms", "100"], stdout=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    try:
        yield lines
    finally:
        watcher.terminate()
        lines += watcher.communicate()[0].splitlines()


def run(name: str, who: str, folder: Path, commit: str | None) -> None:
    """Profile one implementation on one workload; print and append its rows."""
    case, spec = CASES[name], resolve_spec(CASES[name].model)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, spec.vocab_size, (case.batch, case.sequence_length + 1), generator=generator)
    step = MAKERS[who](spec, case, {"tokens": drawn[:, :-1], "labels": drawn[:, 1:].contiguous()})
    step()
    with Recorder() as recorder:
        step()
    step_ms = _step_ms(step)
    events = profile(step)
    groups = grouped(events, recorder.products, spec, case)
    span_ms, idle = idle_ms(events)
    groups["the GPU idles"] = Group(0, idle)
    del step, events
    torch.cuda.empty_cache()
    sequence_ms = alone(recorder.products, groups)
    of_products = sum(g.ms for n, g in groups.items() if n.startswith("product"))
    print(f"{name} {who}: step {step_ms:.1f} ms, profiled {span_ms:.1f}, idle {idle:.1f}; products {of_products:.1f}, ")
    print(f"  in sequence alone {sequence_ms:.1f}, each alone {sum(g.alone_ms for g in groups.values()):.1f}")
    for label, group in sorted(groups.items(), key=lambda item: -item[1].ms):
        _report(name, who, step_ms, sequence_ms, label, group, folder, commit)


def _step_ms(step: Step) -> float:
    seconds = []
    with watched_power() as lines:
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    print("steps s:", " ".join(f"{s:.3f}" for s in seconds), "| MHz, W, °C:", " ; ".join(lines[-40::4]))
    return sorted(seconds[2:])[3] * 1e3


def _report(
    name: str, who: str, step_ms: float, sequence_ms: float, label: str, group: Group, folder: Path, commit: str | None
) -> None:
    if group.ms < 0.05:
        return
    seconds = group.ms / 1e3
    rate = f"{group.flop / seconds / 1e12:.0f} TFLOP/s" if group.flop else ""
    rate = f"{group.moved_bytes / seconds / 1e9:.0f} GB/s" if group.moved_bytes else rate
    shown = group.kernels.most_common(1)[0][0][:60] if group.kernels else ""
    beside = f"{group.alone_ms:8.2f}" if group.alone_ms else " " * 8
    print(f"  {group.ms:8.2f} ms {beside} alone {group.calls:5d} {rate:>14} {label}  [{shown}]")
    row = {
        "case": name,
        "implementation": who,
        "step_ms": f"{step_ms:.1f}",
        "products_in_sequence_ms": f"{sequence_ms:.1f}",
        "group": label,
        "calls": group.calls,
        "ms": f"{group.ms:.2f}",
        "alone_ms": f"{group.alone_ms:.2f}" if group.alone_ms else "",
        "rate": rate,
    }
    append_row("step_profile", row, folder=folder, commit=commit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", required=True)
    parser.add_argument("--who", choices=MAKERS, action="append", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    for chosen in arguments.case:
        for implementation in arguments.who:
            run(chosen, implementation, arguments.results, arguments.commit)
