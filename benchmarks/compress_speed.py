"""Seconds and memory of compressing a large model with random weights, as predicted and as measured.

Writes a model of a preset's shape with random weights in bf16 to a folder that is removed afterwards, then does what
`tightfit compress` does with it: GPTQ in 4 bits, groups of 128, calibrated on random tokens. Time does not depend on
what the weights are. Appends to benchmarks/results/compress_speed.csv.

    python -m benchmarks.compress_speed                                  # 8B, 128 x 2048 tokens
    python -m benchmarks.compress_speed --model tiny-llama --samples 4 --length 64 --device cpu
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.rows import RESULTS, append_row
from tightfit.compress.calibration.calibration import Calibration
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.cost import CompressionCost
from tightfit.compress.recipe import recipe_of
from tightfit.compress.report import CompressionReport, LayerReport
from tightfit.models.blank import blank_decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RandomTokensJob(CompressionJob):
    """A job whose calibration rows are random, so that it needs neither text nor a tokenizer."""

    def read_calibration(self, spec: ModelSpec) -> Calibration:
        assert self.samples is not None
        assert self.length is not None
        return Calibration(torch.randint(0, spec.vocab_size, (self.samples, self.length)), "random tokens")


def write_random(folder: Path, spec: ModelSpec, device: str) -> None:
    """A model directory in bf16."""
    torch.manual_seed(0)
    model = blank_decoder(spec, device, torch.bfloat16)
    init_weights(model)
    write_model(folder, model, None)


def announce(cost: CompressionCost) -> None:
    """What is predicted."""
    print(f"predicted: {cost.memory_bytes / 2**30:.2f} GiB, {cost.flops / 1e12:.0f} TFLOP", flush=True)


def told(done: int, layers: int, layer: LayerReport) -> None:
    """Progress."""
    error = float("nan") if layer.layer_error is None else layer.layer_error
    print(f"layer {done} of {layers}: {layer.seconds:.2f} s, error {error:.4f}", flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> CompressionReport:
    """Compress the model in `folder`."""
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    job = RandomTokensJob(
        model=str(folder),
        out=folder.parent / "small",
        recipe=recipe_of(arguments.method, bits=arguments.bits, group=arguments.group),
        data=("random tokens",),
        samples=arguments.samples,
        length=arguments.length,
        device=arguments.device,
    )
    return compress(job, announce, told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset")
    parser.add_argument("--layers", type=int, help="so many of its layers; all if not given")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    spec = preset(arguments.model)
    spec = spec if arguments.layers is None else replace(spec, layers=arguments.layers)
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        (folder := Path(place) / "model").mkdir()
        write_random(folder, spec, arguments.device)
        print(f"random weights written in {time.monotonic() - began:.1f} s", flush=True)
        report = measure(arguments, folder)
    row = {
        "model": arguments.model,
        "layers": spec.layers,
        "recipe": report.recipe,
        "calibration": f"{arguments.samples} x {arguments.length}",
        "seconds": round(report.measured.seconds or 0.0, 1),
        "layer_seconds": round(sum(layer.seconds for layer in report.layers), 1),
        "predicted_bytes": report.predicted.memory_bytes,
        "measured_bytes": report.measured.memory_bytes,
        "predicted_result_bytes": report.predicted.result_bytes,
        "measured_result_bytes": report.measured.result_bytes,
    }
    print(row)
    append_row("compress_speed", row, folder=arguments.results, commit=arguments.commit)


if __name__ == "__main__":
    main()
