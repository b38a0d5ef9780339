"""Predicted against measured memory and step time: the table that says how far to trust a plan.

Predictions are made first, by formula and by simulation, and need no GPU; then each step runs on one. Rows of several
ranks are rank 0 of a fake process group on that GPU. Writes benchmarks/results/memory_truth.csv.

    python benchmarks/memory_truth.py predict --predictions FILE     (no GPU; minutes)
    python benchmarks/memory_truth.py measure --predictions FILE --results DIR     (an H200; minutes)
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from results import RESULTS, append_row

from tightfit.bench.memory_truth import GIB, Case, Measurement, Prediction, measure, predict


def cases() -> Iterator[Case]:
    """Shapes from 135M to 8B, 512 to 65 536 tokens, every lever, four precisions, ZeRO 0 to 3, and Hugging Face."""

    def of(model: str, length: int, rows: int, **more: Any) -> Case:
        return Case(model=model, sequence_length=length, micro_batch=rows, **more)

    small, one, three, eight = "smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"
    pure: dict[str, Any] = {"precision": "pure-bf16"}
    yield of(small, 512, 8)
    yield of(small, 2048, 8)
    yield of(small, 8192, 4)
    yield of(small, 2048, 8, precision="fp32")
    yield of(small, 2048, 8, precision="fp16")
    yield of(small, 2048, 8, **pure)
    yield of(small, 2048, 8, checkpoint_every=1)
    yield of(small, 2048, 8, checkpoint_every=3)
    yield of(small, 2048, 8, loss="plain")
    yield of(small, 2048, 8, accumulation=2)
    yield of(one, 512, 4)
    yield of(one, 2048, 4)
    yield of(one, 8192, 1)
    yield of(one, 8192, 1, loss="plain")
    yield of(one, 8192, 2, checkpoint_every=2)
    yield of(one, 8192, 2, **pure)
    yield of(one, 8192, 2, checkpoint_every=1, **pure)
    yield of(one, 2048, 4, precision="fp32")
    yield of(one, 4096, 2, accumulation=2)
    yield of(one, 32_768, 1, checkpoint_every=1)
    yield of(one, 65_536, 1, checkpoint_every=1, **pure)
    yield of(three, 512, 2)
    yield of(three, 2048, 2)
    yield of(three, 4096, 2, loss="plain")
    yield of(three, 8192, 1, checkpoint_every=1)
    yield of(three, 16_384, 1, checkpoint_every=1, **pure)
    yield of(three, 65_536, 1, checkpoint_every=1, **pure)
    yield of(eight, 512, 1, checkpoint_every=1)
    yield of(eight, 4096, 1, checkpoint_every=1)
    yield of(eight, 8192, 1, **pure)
    yield of(eight, 8192, 1, checkpoint_every=1, **pure)
    yield of(eight, 16_384, 1, checkpoint_every=2, **pure)
    yield of(eight, 32_768, 1, checkpoint_every=1, **pure)
    yield of(eight, 32_768, 1, checkpoint_every=1, loss="plain", **pure)
    for zero in (0, 1, 2, 3):
        yield of(one, 4096, 2, zero=zero, ranks=8)
    yield of(one, 4096, 2, zero=1, ranks=8, accumulation=2)
    yield of(one, 4096, 2, zero=3, ranks=8, accumulation=2)
    yield of(one, 8192, 1, zero=3, ranks=8, **pure)
    yield of(three, 8192, 1, zero=3, ranks=8)
    yield of(eight, 4096, 1, zero=1, ranks=8, checkpoint_every=1)
    yield of(eight, 4096, 1, zero=2, ranks=8, checkpoint_every=1)
    yield of(eight, 4096, 1, zero=3, ranks=8, checkpoint_every=1)
    yield of(eight, 16_384, 1, zero=3, ranks=8, checkpoint_every=1)
    yield of(eight, 16_384, 1, zero=3, ranks=8)
    theirs: dict[str, Any] = {"implementation": "huggingface", "loss": "plain", **pure}
    yield of(small, 2048, 8, **theirs)
    yield of(one, 8192, 2, **theirs)
    yield of(one, 8192, 2, checkpoint_every=1, **theirs)
    yield of(eight, 8192, 1, checkpoint_every=1, **theirs)


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.4f}"


def _error(predicted: int | None, measured: int | None) -> str:
    return "" if predicted is None or measured is None else f"{100 * (predicted / measured - 1):+.2f}"


def _row(case: Case, said: Prediction, found: Measurement) -> dict[str, Any]:
    return {
        **case.columns(),
        "formula_gib": _gib(said.formula_bytes),
        "simulated_gib": _gib(said.simulated_bytes),
        "measured_gib": _gib(found.allocated_bytes),
        "simulated_reserved_gib": _gib(said.simulated_reserved_bytes),
        "measured_reserved_gib": _gib(found.reserved_bytes),
        "formula_error_percent": _error(said.formula_bytes, found.allocated_bytes),
        "simulated_error_percent": _error(said.simulated_bytes, found.allocated_bytes),
        "reserved_error_percent": _error(said.simulated_reserved_bytes, found.reserved_bytes),
        "predicted_step_ms": "" if said.step_s is None else f"{1e3 * said.step_s:.1f}",
        "measured_step_ms": "" if found.step_s is None else f"{1e3 * found.step_s:.1f}",
    }


def main() -> None:
    """Predict into a file, or measure beside the predictions in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=("predict", "measure"))
    parser.add_argument("--predictions", type=Path, required=True)
    parser.add_argument("--only", help="cases of this model alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    wanted = [case for case in cases() if chosen.only in (None, case.model)]
    if chosen.action == "predict":
        made = []
        for case in wanted:
            said = predict(case)
            made.append({"case": case.columns(), "prediction": asdict(said)})
            print(case, _gib(said.formula_bytes), _gib(said.simulated_bytes), said.step_s, flush=True)
        chosen.predictions.write_text(json.dumps(made, indent=1), encoding="utf-8")
        return
    known = {Case(**entry["case"]): entry["prediction"] for entry in json.loads(chosen.predictions.read_text())}
    for case in wanted:
        row = _row(case, Prediction(**known[case]), measure(case))
        append_row("memory_truth", row, folder=chosen.results, commit=chosen.commit)
        print(" ".join(str(value) or "-" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
