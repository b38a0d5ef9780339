"""`tightfit calibrate`: measure this machine's rates in under a minute.

Sizes grow until one measurement takes long enough to trust, so that a small card or a CPU is not kept busy for minutes
and a large card's numbers are not dominated by launch times. Products run for a second each, as in a step: a card that
gets warm lowers its clock.
"""

import gc
import platform
from datetime import UTC, datetime
from functools import partial

import torch

from tightfit.hardware.calibration import CPU, Calibration
from tightfit.hardware.cpu import has_native_bf16
from tightfit.hardware.cpu_rates import CpuRates
from tightfit.printable import Say
from tightfit.prove.rates import LinkBuffers, attention_times, copy_ms, layer_launch_ms, products, sustained_tflop_s
from tightfit.prove.timing import looped_ms
from tightfit.serve.cpu_timing import measure_cpu_rates

NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONG_ENOUGH_MS = 5.0
LARGEST = {"cuda": 8192, "cpu": 2048}
SECONDS = {"cuda": 1.0, "cpu": 0.3}


def calibrate(device: torch.device, say: Say) -> Calibration:
    """Measure everything; `say` gets a line per result."""
    peaks = {name: _products(device, name, say) for name in _numbers(device)}
    attended = {name: _attention(device, name, say) for name in peaks if name != "fp16" or "bf16" not in peaks}
    fixed_us = _fixed_us(device, "bf16" if device.type == "cuda" else "fp32", peaks)
    moved_ms, moved_gb = copy_ms(device, _count(device, 2**27))
    say(f"copies on the device: {moved_gb / moved_ms * 1e3:,.0f} GB/s read and written")
    link_gb_s, both_ways, adam_params_s = _host(device, say)
    launch_ms = layer_launch_ms(device) if device.type == "cuda" else 0.0
    say(f"launches: {launch_ms:.2f} ms a layer" if launch_ms else "launches: none, the CPU is the device")
    serving = None if device.type == "cuda" else _serving(say)
    gc.collect()
    return Calibration(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else CPU,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        products_tflop_s=peaks,
        product_us=fixed_us,
        attention_tflop_s=attended,
        copy_gb_s=moved_gb / moved_ms * 1e3,
        link_gb_s=link_gb_s,
        link_both_ways=both_ways,
        host_adam_params_s=adam_params_s,
        layer_launch_ms=launch_ms,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        serving=serving,
    )


def _serving(say: Say) -> CpuRates:
    found = measure_cpu_rates()
    read_gb_s = 4 / found.product_ns("fp32", 1)
    say(f"serving: weights read at {read_gb_s:,.1f} GB/s, {found.layer_us:,.0f} µs of calls a layer")
    return found


def _numbers(device: torch.device) -> list[str]:
    """Number formats that the device computes with at a useful rate."""
    if device.type == "cpu":
        return ["fp32", "bf16"] if has_native_bf16() else ["fp32"]
    return ["fp32", "fp16", *(["bf16"] if torch.cuda.get_device_capability(device)[0] >= 8 else [])]


def _count(device: torch.device, count: int) -> int:
    """Elements (float32) of a buffer, out of `count`: fewer on a CPU, and at most a sixteenth of a card's memory."""
    if device.type == "cpu":
        return count // 16
    return min(count, torch.cuda.get_device_properties(device).total_memory // 64)


def _products(device: torch.device, name: str, say: Say) -> float:
    size, dtype = 1024 if device.type == "cuda" else 256, NUMBERS[name]
    while size < LARGEST[device.type] and _product_ms(device, dtype, size) < LONG_ENOUGH_MS:
        size *= 2
    found = sustained_tflop_s(device, dtype, size, SECONDS[device.type])
    say(f"products in {name}: {found:,.3g} TFLOP/s ({size}³)")
    return found


def _product_ms(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Milliseconds of one square product, once the library is loaded and warm."""
    x = torch.randn(size, size, device=device).to(dtype)
    do = partial(torch.mm, x, x)
    looped_ms(do, 2, device)
    return min(looped_ms(do, 2, device) for _ in range(3))


def _attention(device: torch.device, name: str, say: Say) -> tuple[float, float]:
    length, head = (4096, 128) if device.type == "cuda" else (512, 64)
    if device.type == "cuda" and name == "fp32":
        length = 1024
    times = attention_times(device, NUMBERS[name], 2, length, head)
    rates = times.tflop / times.forward_ms * 1e3, 2.5 * times.tflop / times.backward_ms * 1e3
    say(f"attention in {name}: {rates[0]:,.3g} and {rates[1]:,.3g} TFLOP/s forward and backward ({length} tokens)")
    return rates


def _fixed_us(device: torch.device, name: str, peaks: dict[str, float]) -> float:
    """Microseconds that a small product takes beyond its FLOPs at the sustained rate."""
    name = name if name in peaks else "fp32"
    size = 512 if device.type == "cuda" else 64
    measured = list(products(device, NUMBERS[name], size, size, size))
    return max(0.0, min(1e3 * (each.ms - each.tflop / peaks[name] * 1e3) for each in measured))


def _host(device: torch.device, say: Say) -> tuple[float, float, float]:
    """GB/s of the link one way, the share of it with both ways busy, and parameters a second of the host's AdamW."""
    buffers = LinkBuffers(device, _count(device, 2**26))
    into_ms = buffers.ms(into=True)
    both_ms = buffers.ms(into=True, out=True)
    link_gb_s = buffers.gb / into_ms * 1e3
    both_ways = min(1.0, into_ms / both_ms) if device.type == "cuda" else 1.0
    adam_params_s = buffers.host[0].numel() / buffers.host_adam_ms() * 1e3
    say(f"link to the host: {link_gb_s:,.1f} GB/s, {both_ways:.0%} of it each way where both are busy")
    say(f"AdamW on the host: {adam_params_s / 1e9:,.2f} billion parameters a second")
    return link_gb_s, both_ways, adam_params_s
