"""Tables of docs/serving.md: the server on one GPU beside vLLM, and what is predicted beside what was measured."""

import re
from dataclasses import replace
from pathlib import Path

from benchmarks.reports.compression import Row, Table, read_rows
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.models.quantized.held_weights import HeldWeights
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.serving import Serving, make_serving
from tightfit.plan.serving_step import Step

MODELS = {"1b": "Llama-3.2-1B's shape", "8b": "Llama-3.1-8B's shape"}
CASES = {
    "one_stream_decode": "one stream, tokens/s",
    "batch": "64 × (256 + 256), tokens/s",
    "mixed": "256 of mixed lengths, tokens/s",
    "prefill": "prompts, 16 × 4,096, tokens/s",
    "first_token": "first token after 256, ms",
    "start": "first start on a machine, s",
    "next start": "next start, s",
}
TOGETHER = ("one_stream_decode", "batch", "mixed", "prefill", "first_token")
"""What both measure in one run; starts of ours are measured apart."""
BESIDE = re.compile(r"beside ours at (\w+)")
FEW = 100
"""Below this a number has a digit after its point."""
STARTS = {"first": "start", "next": "next start"}
DTYPE = "bfloat16"
PRESETS = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}
SCHEMES = {"fp8": Scheme(kind="fp8", bits=8, group=0), "int4": Scheme(bits=4, group=128)}
PREDICTED = (("1b", DTYPE), ("8b", DTYPE), ("8b", "fp8"), ("8b", "int4"))
"""Models and weights that the GPU's predictions are laid beside."""


def newest_speeds(results: Path) -> dict[tuple[str, str], Row]:
    """The newest row of each model and case with weights in 16 bits."""
    speeds = {
        (row["model"], row["case"]): row
        for row in read_rows(results / "serve_speed.csv")
        if row["dtype"] == DTYPE and row["case"] != "start"
    }
    starts = {
        (row["model"], STARTS[row["kind"]]): row | {"value": row["start_s"], "unit": "s"}
        for row in read_rows(results / "serve_start.csv")
    }
    return speeds | starts


def peer_speeds(results: Path) -> dict[tuple[str, str], Row]:
    """The newest row of each model and case of vLLM."""
    rows = read_rows(results / "serve_peers.csv")
    return {(row["model"], row["case"]): row for row in rows if row["engine"].startswith("vLLM")}


def beside(results: Path) -> str | None:
    """The commit of ours that the newest rows of vLLM were measured beside, in one run on one machine."""
    found = [BESIDE.search(row["note"]) for row in peer_speeds(results).values() if row["case"] in TOGETHER]
    commits = {match[1] if match else None for match in found}
    return commits.pop() if len(commits) == 1 else None


def told_speeds(results: Path) -> dict[tuple[str, str], Row]:
    """Ours as the page tells them: of the run with vLLM where there is one, else the newest."""
    commit = beside(results)
    together = {
        (row["model"], row["case"]): row
        for row in read_rows(results / "serve_speed.csv")
        if row["dtype"] == DTYPE and row["case"] in TOGETHER and row["commit"] == commit
    }
    return newest_speeds(results) | together


def speed_rows(results: Path) -> Table:
    """A row a case, and for each model ours and the peer's."""
    ours, theirs = told_speeds(results), peer_speeds(results)
    header = ["", *(name for title in MODELS.values() for name in (title, "vLLM"))]
    rows = [
        [title, *(_cell(found.get((model, case))) for model in MODELS for found in (ours, theirs))]
        for case, title in CASES.items()
    ]
    return header, rows


def speed_commits(results: Path) -> str:
    """Where our rows were measured, and whether vLLM's were in the same run."""
    ours = told_speeds(results)
    found = [ours[model, case] for model in MODELS for case in CASES if (model, case) in ours]
    commits = dict.fromkeys(f"`{row['commit']}`" for row in found)
    devices = dict.fromkeys(row["device"] for row in found)
    engines = ", ".join(dict.fromkeys(row["engine"] for row in peer_speeds(results).values()))
    together = beside(results)
    run = (
        f"by turns with ours at `{together}` in one run on one machine"
        if together
        else "the same workloads on such a card another day, not in one run with us"
    )
    return f"Ours on {', '.join(devices)} at {', '.join(commits)}. {engines} ran {run} (`serve_peers.csv`)."


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    value = float(row["value"])
    is_whole = row["unit"] == "tok/s" or value >= FEW or (value.is_integer() and row["unit"] == "s")
    return f"{value:,.0f}" if is_whole else f"{value:.1f}"


def cpu_prediction_rows(results: Path) -> Table:
    """Predicted beside measured milliseconds on CPUs, the newest row of each case."""
    header = ["CPU", "model", "weights", "requests", "prompt", "first token, ms", "between tokens, ms"]
    rows = [
        [
            row["device"].removesuffix(" CPU"),
            row["model"],
            row["weights"],
            row["at_once"],
            row["prompt_tokens"],
            *(_beside(row, name) for name in ("first_token_ms", "between_tokens_ms")),
        ]
        for row in newest_predictions(results)
    ]
    return header, rows


def newest_predictions(results: Path) -> list[Row]:
    """The newest row of each CPU, model and load."""
    keys = ("device", "model", "weights", "at_once", "prompt_tokens", "threads")
    return list({tuple(row[key] for key in keys): row for row in read_rows(results / "serve_predicted.csv")}.values())


def prediction_error(row: Row, name: str) -> float:
    """What is predicted of `name`, as a share above what was measured."""
    return float(row[f"predicted_{name}"]) / float(row[name]) - 1


def _beside(row: Row, name: str) -> str:
    return f"{row[f'predicted_{name}']} for {row[name]} ({_percent(prediction_error(row, name))})"


def gpu_prediction_rows(results: Path) -> Table:
    """Predicted beside measured speeds on an H200: the newest rows of each model and format of its weights."""
    cases = ("first_token", "one_stream_decode", "batch", "prefill")
    header = ["", "weights", *(CASES[case] for case in cases)]
    rows = []
    for model, weights in PREDICTED:
        measured, told = measured_on_gpu(results, model, weights), predicted_on_gpu(model, weights)
        rows.append([model.upper(), weights, *(_told(told[case], measured.get(case)) for case in cases)])
    return header, rows


def measured_on_gpu(results: Path, model: str, weights: str) -> dict[str, float]:
    """Values of the newest rows by case."""
    rows = (row for row in read_rows(results / "serve_speed.csv") if (row["model"], row["dtype"]) == (model, weights))
    return {row["case"]: float(row["value"]) for row in rows}


def predicted_on_gpu(model: str, weights: str) -> dict[str, float]:
    """The cases of benchmarks/serve_speed.py as `plan --serve` tells them of an H200."""
    one = _serving(model, weights)
    short = Step(tokens=64 * 256, answers=64, pairs=64 * 256**2 / 2, cache_bytes=0)
    together = one.rates.step_seconds(one.spec, one.read_bytes, short)
    long = Step(tokens=4 * 4096, answers=4, pairs=4 * 4096**2 / 2, cache_bytes=0)
    return {
        "first_token": 1e3 * _serving(model, weights, 256).predicted_first_token_seconds,
        "one_stream_decode": _serving(model, weights, 512).predicted_tokens_per_second,
        "batch": 64 * 256 / (together + 256 * 64 / _serving(model, weights, 384, 64).predicted_tokens_per_second),
        "prefill": 4 * 4096 / one.rates.step_seconds(one.spec, one.read_bytes, long),
    }


def _serving(model: str, weights: str, length: int = 1, requests: int = 1) -> Serving:
    name = PRESETS[model]
    plain = make_serving(name, preset(name), parse_machine("H200"), "bf16", length, requests)
    if weights == DTYPE:
        return plain
    scheme, ends = SCHEMES[weights], 2 * plain.spec.vocab_size * plain.spec.hidden_size
    bits = scheme.bits + (32 / scheme.group if scheme.group else 0)  # a scale and a zero point of 16 bits a group
    held_bytes = int((plain.spec.params() - ends) * bits / 8) + 2 * ends
    return replace(plain, compressed=HeldWeights(held_bytes, 0, 0, weights, scheme))


def _told(predicted: float, measured: float | None) -> str:
    if measured is None:
        return "–"
    form = ",.0f" if measured >= FEW else ".2f"
    return f"{predicted:{form}} for {measured:{form}} ({_percent(predicted / measured - 1)})"


def _percent(error: float) -> str:
    return f"{error:+.0%}".replace("-", "−").replace("%", " %")
