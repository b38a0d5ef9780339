"""Predicted against measured memory and step time: the table that says how far to trust a plan.

Predictions are made first, by formula and by simulation, and need no GPU; then each step runs on one. Rows of several
ranks are rank 0 of a fake process group on that GPU. Writes benchmarks/results/memory_truth.csv,
lever_truth.csv with `--levers`, split_truth.csv with `--splits` and family_truth.csv with `--families`.

    python -m benchmarks.memory_truth predict --predictions FILE     (no GPU; minutes)
    python -m benchmarks.memory_truth measure --predictions FILE --results DIR     (an H200; minutes)
    python -m benchmarks.memory_truth repredict      (no GPU: when predictions change and what is measured does not)
    python -m benchmarks.memory_truth repredict --quick     (seconds: only formulas or costs have changed; predict too)

The last appends rows with today's predictions beside the newest measurements; `commit` is the measured code's and
`predicted_commit` that of the predictions.

Hosts of one kind launch a layer in 2 to 5 ms, from day to day and from minute to minute. So right before and after a
step is timed, `host_layer_ms` is measured as `tightfit calibrate` does, on a model that is no row here, and the step's
time is predicted for that host, as slow as the mean of both; all else was predicted before. Where the two are further
apart than `STEADY`, nobody knows what the host was during the step, which is measured again, `TRIES` times at most.
`--host-bound` takes the rows that this matters for.
"""

import argparse
import csv
import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports.scatter import newest
from benchmarks.rows import RESULTS, append_row, current_commit
from benchmarks.truth.case import Case
from benchmarks.truth.families import family_cases
from benchmarks.truth.prediction import (
    CUDA,
    GIB,
    Measurement,
    Prediction,
    formulas,
    is_captured,
    measure,
    predict,
    step_seconds,
)
from tightfit.errors import UserError
from tightfit.hardware.launches import LAYER, UPDATE_MS
from tightfit.prove.rates import layer_launch_ms

TIMED = ("memory_truth", "lever_truth", "family_truth")
"""Tables with steps of one rank."""
STEADY, TRIES = 1.25, 3
SLOW_HOST_MS = 1.5 * (sum(LAYER[""]) + UPDATE_MS[""])


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


def lever_cases() -> Iterator[Case]:
    """Every other lever, alone and with those it usually comes with; 1B and 3B shapes."""

    def of(more: str, length: int = 8192, model: str = "llama-3.2-1b", **others: Any) -> Case:
        return Case(model=model, sequence_length=length, micro_batch=1, more=more, **others)

    three: dict[str, Any] = {"model": "llama-3.2-3b", "checkpoint_every": 1}
    yield of("optimizer_states=bf16")
    yield of("optimizer_states=8bit")
    yield of("optimizer_states=factored")
    yield of("optimizer_states=fp32 rounding=stochastic", precision="pure-bf16")
    yield of("update_in_backward=true")
    yield of("num_checkpoints=8")
    yield of("checkpoint_keep=attention", checkpoint_every=1)
    yield of("checkpoint_keep=matmuls", checkpoint_every=1)
    yield of("checkpoint_budget_bytes=3000000000")
    yield of("offload_checkpoints=true", checkpoint_every=1)
    yield of("tiles=4")
    yield of("tiles=4", checkpoint_every=1)
    yield of("matmul=fp8-tensor")
    yield of("matmul=fp8-row")
    yield of("offload=optimizer")
    yield of("offload=optimizer update_in_backward=true")
    yield of("offload=weights update_in_backward=true", checkpoint_every=1)
    yield of("optimizer_states=8bit update_in_backward=true", **three)
    yield of("offload_checkpoints=true", 32_768, precision="pure-bf16", **three)
    yield of("offload=optimizer update_in_backward=true", **three)


def split_cases() -> Iterator[Case]:
    """8B over groups of shards, tensor, pipeline and context ranks, and mixtures; plain ZeRO is among the others.

    And routed models over expert ranks.
    """

    def of(
        split: str, ranks: int, length: int = 4096, *, model: str = "llama-3.1-8b", rows: int = 1, **others: Any
    ) -> Case:
        return Case(model=model, sequence_length=length, micro_batch=rows, ranks=ranks, split=split, **others)

    yield of("shard_inside=4", 8, zero=3, checkpoint_every=1)
    yield of("shard_inside=4", 8, zero=2, checkpoint_every=1)
    yield of("shard_inside=2", 8, 8192, zero=3, checkpoint_every=1, accumulation=2)
    for tensor in (2, 4, 8):
        yield of(f"tensor={tensor}", tensor, 16_384, precision="pure-bf16")
        yield of(f"tensor={tensor} sequence_parallel=false", tensor, 16_384, precision="pure-bf16")
    yield of("tensor=4", 4, 8192, checkpoint_every=1)
    yield of("tensor=2", 8, 8192, zero=3)
    for stage in range(4):
        yield of("pipeline=4", 4, accumulation=8, stage=stage)
    for stage in (0, 3):
        yield of("pipeline=4 schedule=zero-bubble", 4, 2048, accumulation=8, stage=stage)
    yield of("pipeline=4 schedule=interleaved stages_per_rank=2", 4, accumulation=8)
    yield of("pipeline=2 tensor=2", 8, zero=1, accumulation=4)
    yield of("pipeline=4 schedule=zb-v stages_per_rank=2", 4, 2048, accumulation=8)
    yield of("tensor=4 tensor_mesh=2d", 4, 8192, rows=2, checkpoint_every=1)
    yield of("tensor=8 tensor_mesh=2.5d tensor_depth=2", 8, 4096, rows=4)
    yield of("tensor=8 tensor_mesh=3d", 8, 32_768, rows=4, checkpoint_every=1, precision="pure-bf16")
    yield of("expert=8", 8, model="qwen3-30b-a3b", zero=3, checkpoint_every=1)
    yield of("expert=4", 8, model="qwen3-30b-a3b", zero=3, checkpoint_every=1, accumulation=2)
    yield of("expert=8", 8, 8192, model="qwen3-30b-a3b", zero=1, precision="pure-bf16", checkpoint_every=1)
    yield of("expert=8", 8, 8192, model="mixtral-8x7b", zero=1, precision="pure-bf16", checkpoint_every=1)
    yield of("expert=4 tensor=2", 8, 8192, model="mixtral-8x7b", precision="pure-bf16", checkpoint_every=1)
    yield of("context=2", 4, 8192, zero=3)
    yield of("context=4", 4, 65_536, zero=3, checkpoint_every=1)
    yield of("context=8", 8, 131_072, zero=3, checkpoint_every=1, precision="pure-bf16")
    yield of("context=4 ring=4", 4, 32_768, zero=3)
    yield of("context=4 ring=4", 4, 131_072, zero=3, checkpoint_every=1)
    yield of("context=8 ring=2", 8, 131_072, zero=3, checkpoint_every=1)
    yield of("context=2 ring=2 tensor=2", 8, 32_768, zero=3, checkpoint_every=1)


def rank_lever_cases() -> Iterator[Case]:
    """States, weights and checkpoints on the host, updates in backward and tiles, as one of several ranks."""

    def of(more: str, ranks: int = 8, length: int = 4096, **others: Any) -> Case:
        settings: dict[str, Any] = {"model": "llama-3.1-8b", "checkpoint_every": 1} | others
        return Case(sequence_length=length, micro_batch=1, ranks=ranks, more=more, **settings)

    away = "offload=optimizer"
    for zero in (1, 2, 3):
        yield of(away, zero=zero)
    yield of(away, zero=3, accumulation=2)
    yield of(away, zero=3, precision="pure-bf16")
    yield of(away, 2, model="llama-3.2-1b", zero=0)
    yield of(away, zero=3, split="shard_inside=4")
    yield of(f"{away} optimizer_states=8bit", zero=3)
    yield of(f"{away} offload_checkpoints=true", zero=3, length=16_384)
    yield of(f"{away} update_in_backward=true", zero=3)
    yield of("update_in_backward=true", zero=3)
    yield of(away, 4, split="tensor=4")
    yield of(away, 8, zero=3, split="tensor=2")
    for stage in (0, 1):
        yield of(away, 2, split="pipeline=2", accumulation=4, stage=stage)
    yield of(away, 4, zero=1, split="pipeline=2", accumulation=4)
    yield of("offload_checkpoints=true", 4, split="pipeline=4", accumulation=8)
    yield of("offload=weights", 4, split="tensor=4")
    yield of("offload=weights offload_checkpoints=true", 2, split="pipeline=2", accumulation=4)
    yield of("tiles=4", 4, 16_384, split="tensor=4 sequence_parallel=false")
    yield of("tiles=4 offload=optimizer", zero=3, length=16_384)
    for zero in (1, 2, 3):
        yield of("offload=weights", zero=zero)
    yield of("offload=weights", zero=3, precision="pure-bf16", checkpoint_every=0)
    yield of("offload=weights update_in_backward=true", zero=3)
    yield of("offload=weights", 8, zero=3, split="tensor=2")
    yield of("offload=weights", 4, zero=1, split="pipeline=2", accumulation=4)
    yield of("update_in_backward=true", 4, split="tensor=4")
    yield of("update_in_backward=true offload=optimizer", 4, split="tensor=4")
    yield of("update_in_backward=true", 8, zero=3, split="tensor=2")
    yield of("tiles=4", 4, 16_384, split="tensor=4")
    yield of("tiles=4", 8, 16_384, zero=3, split="tensor=2")


def _host(said: Prediction, found: Measurement) -> dict[str, str]:
    """Columns of the levers' table."""
    values = {
        "formula_host_gib": said.formula_host_bytes,
        "simulated_host_gib": said.simulated_host_bytes,
        "measured_host_gib": found.host_bytes,
    }
    return {name: f"{value / GIB:.4f}" for name, value in values.items()}


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.4f}"


def _error(predicted: int | None, measured: int | None) -> str:
    return "" if predicted is None or measured is None else f"{100 * (predicted / measured - 1):+.2f}"


def _row(
    case: Case, said: Prediction, found: Measurement, commit: str, host_layer_ms: float | None = None
) -> dict[str, Any]:
    return {
        **case.columns(),
        "predicted_commit": commit,
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
        **(_host(said, found) if case.more or case.is_family else {}),
        **({"host_layer_ms": f"{host_layer_ms:.3f}" if host_layer_ms else ""} if case.table in TIMED else {}),
    }


def is_host_bound(case: Case) -> bool:
    """Whether its step would be longer by a twentieth on a host half as slow again as the calibrated one, or is
    captured because of such hosts."""
    if case.implementation != "tightfit" or case.ranks > 1:
        return False
    return is_captured(case) or step_seconds(case, host_layer_ms=SLOW_HOST_MS) > 1.05 * step_seconds(case)


def for_host(case: Case, said: Prediction, host_layer_ms: float | None) -> Prediction:
    """The same prediction for a host that launches a layer in so long, which says nothing of this case's own step."""
    if said.step_s is None or host_layer_ms is None:
        return said
    if abs(step_seconds(case) / said.step_s - 1) > 1e-6:
        raise UserError(f"the costs of {case.model} have changed since they were predicted; predict again")
    return replace(said, step_s=step_seconds(case, host_layer_ms=host_layer_ms))


def _predictions(wanted: list[Case], workers: int) -> Iterator[Prediction]:
    """In the order of the cases, from processes of one thread each: what they run is not made faster by more."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(wanted)), torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(predict, wanted, chunksize=1)


def _predict(wanted: list[Case], path: Path, workers: int) -> None:
    made = []
    for case, said in zip(wanted, _predictions(wanted, workers), strict=True):
        made.append({"case": case.columns(), "prediction": asdict(said), "commit": current_commit()})
        print(*case.columns().values(), _gib(said.formula_bytes), _gib(said.simulated_bytes), said.step_s, flush=True)
    path.write_text(json.dumps(made, indent=1), encoding="utf-8")


def _predict_quickly(wanted: list[Case], path: Path, folder: Path) -> None:
    """The same where only formulas and costs have changed: what was simulated is that of a case's newest row."""
    rows = {Case.of_row(row): row for row in newest(folder / f"{wanted[0].table}.csv")}
    made = []
    for case in (case for case in wanted if case in rows):
        ledger = formulas(case)
        said = Prediction(
            formula_bytes=ledger.peak_allocated_bytes(),
            simulated_bytes=round(float(rows[case]["simulated_gib"]) * GIB),
            simulated_reserved_bytes=round(float(rows[case]["simulated_reserved_gib"]) * GIB),
            step_s=step_seconds(case) if case.ranks == 1 else None,
            formula_host_bytes=ledger.allocated_bytes("backward", place="host"),
            simulated_host_bytes=round(float(rows[case].get("simulated_host_gib") or 0) * GIB),
        )
        made.append({"case": case.columns(), "prediction": asdict(said), "commit": current_commit()})
    path.write_text(json.dumps(made, indent=1), encoding="utf-8")


def _measure(wanted: list[Case], predictions: Path, folder: Path, commit: str | None) -> None:
    known = {_case_of(entry["case"]): entry for entry in json.loads(predictions.read_text(encoding="utf-8"))}
    for case in (case for case in wanted if case in known):
        said = Prediction(**known[case]["prediction"])
        found, host_layer_ms = _steadily(case) if said.step_s is not None else (measure(case), None)
        said = for_host(case, said, host_layer_ms)
        row = _row(case, said, found, known[case]["commit"], host_layer_ms)
        append_row(case.table, row, folder=folder, commit=commit)
        print(" ".join(str(value) or "-" for value in row.values()), flush=True)


def _steadily(case: Case) -> tuple[Measurement, float]:
    """Beside a host that launches as fast after it as before, and how fast: the milliseconds of a layer."""
    before_ms = layer_launch_ms(CUDA)
    for _ in range(TRIES):
        found = measure(case)
        after_ms = layer_launch_ms(CUDA)
        host_layer_ms = round((before_ms + after_ms) / 2, 3)
        if max(before_ms, after_ms) <= STEADY * min(before_ms, after_ms):
            break
        before_ms = after_ms
    return found, host_layer_ms


def _case_of(columns: dict[str, Any]) -> Case:
    return Case(**columns, is_family="layers" in columns)


def _measured(row: dict[str, str]) -> Measurement:
    allocated, reserved = (
        round(float(row[name]) * GIB) if row[name] else None for name in ("measured_gib", "measured_reserved_gib")
    )
    host = round(float(row.get("measured_host_gib") or 0) * GIB)
    seconds = float(row["measured_step_ms"]) / 1e3 if row["measured_step_ms"] else None
    return Measurement(allocated, reserved, seconds, host)


def _host_layer_ms(row: dict[str, str]) -> float | None:
    """What the host took to launch a layer right before a row was measured, where that is known."""
    return float(row["host_layer_ms"]) if row.get("host_layer_ms") else None


def _repredict(wanted: list[Case], folder: Path, workers: int) -> None:
    """Measured values and their conditions are copied from each case's newest row."""
    path = folder / f"{wanted[0].table}.csv"
    rows = {Case.of_row(row): row for row in newest(path)}
    with path.open("a", encoding="utf-8", newline="") as file:
        for case, said in zip(wanted, _predictions(wanted, workers), strict=True):
            old = rows[case]
            host_layer_ms = _host_layer_ms(old)
            said = for_host(case, said, host_layer_ms)
            row = {**old, **_row(case, said, _measured(old), current_commit(), host_layer_ms)}
            csv.DictWriter(file, fieldnames=list(old)).writerow(row)
            file.flush()
            print(" ".join(str(value) or "-" for value in row.values()), flush=True)


def _unmeasured(wanted: list[Case], folder: Path) -> list[Case]:
    """Those that the table does not have yet."""
    path = folder / f"{wanted[0].table}.csv"
    measured = {Case.of_row(row) for row in newest(path)} if path.exists() else set()
    return [case for case in wanted if case not in measured]


def _repredict_quickly(wanted: list[Case], folder: Path) -> None:
    """The same where only formulas and costs have changed: what was simulated is copied too."""
    path = folder / f"{wanted[0].table}.csv"
    rows = {Case.of_row(row): row for row in newest(path)}
    with path.open("a", encoding="utf-8", newline="") as file:
        for case in wanted:
            old = rows[case]
            if case.implementation != "tightfit":
                continue
            formula_bytes = formulas(case).peak_allocated_bytes()
            said = {
                "formula_gib": _gib(formula_bytes),
                "formula_error_percent": _error(formula_bytes, _measured(old).allocated_bytes),
                "predicted_step_ms": f"{1e3 * step_seconds(case, host_layer_ms=_host_layer_ms(old)):.1f}"
                if case.ranks == 1
                else "",
            }
            if any(old[name] != value for name, value in said.items()):
                row = {**old, "predicted_commit": current_commit(), **said}
                csv.DictWriter(file, fieldnames=list(old)).writerow(row)


def _table_cases(chosen: argparse.Namespace) -> Iterator[Case]:
    if chosen.families:
        return family_cases()
    if chosen.rank_levers:
        return rank_lever_cases()
    return lever_cases() if chosen.levers else split_cases() if chosen.splits else cases()


def main() -> None:
    """Predict into a file, measure beside the predictions in it, or predict anew beside what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=("predict", "measure", "repredict"))
    parser.add_argument("--predictions", type=Path, help="the file between predict and measure")
    parser.add_argument("--only", help="cases of this model alone")
    parser.add_argument("--having", default="", help="cases whose levers contain this text alone")
    parser.add_argument("--length", type=int, help="cases of rows so long alone")
    parser.add_argument("--ranks", choices=("one", "many"), help="cases of one rank, which are timed, or of many alone")
    parser.add_argument("--levers", action="store_true", help="the other levers' cases, for lever_truth.csv")
    parser.add_argument("--splits", action="store_true", help="cases of splits and their mixtures, for split_truth.csv")
    parser.add_argument("--rank-levers", action="store_true", help="levers of several ranks, for rank_lever_truth.csv")
    parser.add_argument("--families", action="store_true", help="cases of every family, for family_truth.csv")
    parser.add_argument("--host-bound", action="store_true", help="cases whose step depends on how fast the host is")
    parser.add_argument("--new", action="store_true", help="only cases that the table does not have yet")
    parser.add_argument("--quick", action="store_true", help="predict anew by formulas and costs alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that predict")
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    every = _table_cases(chosen)
    wanted = [
        case
        for case in every
        if chosen.only in (None, case.model)
        and chosen.having in case.more
        and chosen.length in (None, case.sequence_length)
        and chosen.ranks in (None, "one" if case.ranks == 1 else "many")
        and (not chosen.host_bound or is_host_bound(case))
    ]
    if chosen.new:
        wanted = _unmeasured(wanted, RESULTS)
    if chosen.action == "repredict":
        wanted = [case for case in wanted if case not in _unmeasured(wanted, chosen.results)]
        if chosen.quick:
            return _repredict_quickly(wanted, chosen.results)
        return _repredict(wanted, chosen.results, chosen.workers)
    if chosen.predictions is None:
        parser.error("--predictions FILE is where predictions go, and where measure finds them")
    if chosen.action == "predict" and chosen.quick:
        return _predict_quickly(wanted, chosen.predictions, chosen.results)
    if chosen.action == "predict":
        return _predict(wanted, chosen.predictions, chosen.workers)
    return _measure(wanted, chosen.predictions, chosen.results, chosen.commit)


if __name__ == "__main__":
    main()
