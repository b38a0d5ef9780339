"""Tables of docs/serving.md: the server on one GPU beside vLLM, and what is predicted beside what was measured."""

import re
from dataclasses import replace
from pathlib import Path

from benchmarks.reports.compression import Row, Table, commits_apart, read_rows
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.models.quantized.held_weights import PLAIN_BYTES, CodedHead
from tightfit.models.quantized.scheme import Scheme
from tightfit.plan.serving.plan import Serving, make_serving
from tightfit.plan.serving.step import Step

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
MEMORY = {
    "weights": "weights",
    "cache": "cache",
    "graphs": "graphs, buffers, libraries",
    "step": "largest step",
    "total": "all of it",
}
"""Lines of the budget by their name in serve_memory.csv."""
STARTS = {"first": "start", "next": "next start"}
DTYPE = "bfloat16"
COLUMNS = {
    ("1b", DTYPE): "Llama-3.2-1B's shape",
    ("8b", DTYPE): "Llama-3.1-8B's shape",
    ("8b", "w8a8"): "the same, weights and inputs in fp8",
}
"""Models and weights that are laid beside the peer."""
REQUESTS = {
    "plain": "greedy",
    "sampled": "temperature 0.8, top-p 0.95",
    "penalty": "a frequency penalty",
    "adapter": "an adapter, the same one",
    "adapters": "eight adapters by turns, and none",
}
UNITS_OF_TIME = ("ms", "s")
PRESETS = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}
PREDICTED = (
    ("1b", DTYPE),
    ("8b", DTYPE),
    ("8b", "fp8"),
    ("8b", "w8a8"),
    ("8b", "int4"),
    ("8b", "int4+head8"),
    ("8b", "int4+head4"),
)
"""Models and weights that the GPU's predictions are laid beside; `head` has the bits of a coded output projection."""


def newest_speeds(results: Path) -> dict[tuple[str, str, str], Row]:
    """The newest row of each model, format of its weights and case; starts are those of serve_start.csv, whose kernels
    are compiled while the server imports."""
    speeds = {(row["model"], row["dtype"], row["case"]): row for row in read_rows(results / "serve_speed.csv")}
    starts = {}
    for row in read_rows(results / "serve_start.csv"):
        model, _, weights = row["model"].partition("-")
        starts[model, weights or DTYPE, STARTS[row["kind"]]] = row | {"value": row["start_s"], "unit": "s"}
    return speeds | starts


def peer_speeds(results: Path) -> dict[tuple[str, str, str], Row]:
    """The same of vLLM."""
    rows = (row for row in read_rows(results / "serve_peers.csv") if row["engine"].startswith("vLLM"))
    return {(row["model"], row["dtype"], row["case"]): row for row in rows}


def beside(results: Path, model: str, weights: str) -> str | None:
    """The commit of ours that vLLM's newest rows of a model were measured beside, in one run on one machine."""
    peers = peer_speeds(results).items()
    rows = [row for (whose, form, case), row in peers if (whose, form) == (model, weights) and case in TOGETHER]
    found = [BESIDE.search(row["note"]) for row in rows]
    commits = {match[1] if match else None for match in found}
    return commits.pop() if len(commits) == 1 else None


def told_speeds(results: Path) -> dict[tuple[str, str, str], Row]:
    """Ours as the page tells them: of the run with vLLM where there is one, else the newest."""
    commits = {column: beside(results, *column) for column in COLUMNS}
    together = {
        (row["model"], row["dtype"], row["case"]): row
        for row in read_rows(results / "serve_speed.csv")
        if row["case"] in TOGETHER and row["commit"] == commits.get((row["model"], row["dtype"]))
    }
    return newest_speeds(results) | together


def speed_rows(results: Path) -> Table:
    """A row a case, and for each model ours and the peer's."""
    ours, theirs = told_speeds(results), peer_speeds(results)
    header = ["", *(name for title in COLUMNS.values() for name in (title, "vLLM"))]
    rows = [
        [title, *(_cell(found.get((*column, case))) for column in COLUMNS for found in (ours, theirs))]
        for case, title in CASES.items()
    ]
    return header, rows


def times_as_fast(results: Path) -> dict[tuple[str, str, str], float]:
    """Our speed beside the peer's, where both were measured: by model, weights and case."""
    ours, theirs = told_speeds(results), peer_speeds(results)
    found = {key: float(ours[key]["value"]) / float(theirs[key]["value"]) for key in theirs if key in ours}
    return {key: 1 / ratio if ours[key]["unit"] in UNITS_OF_TIME else ratio for key, ratio in found.items()}


def behind_text(results: Path) -> str:
    """Where the peer is ahead, and what was measured of it alone."""
    ratios, places = times_as_fast(results), [(*column, case) for column in COLUMNS for case in CASES]
    behind = [f"{_place(key)}: {ratios[key]:.1%}" for key in places if ratios.get(key, 1) < 1]
    alone = [_place(key) for key in places if key in peer_speeds(results) and key not in ratios]
    slower = f"Slower than vLLM, by these rows: {'; '.join(behind)} of its speed." if behind else "Nowhere behind vLLM."
    return slower + (f" Measured of vLLM alone: {'; '.join(alone)}." if alone else "")


def _place(key: tuple[str, str, str]) -> str:
    model, weights, case = key
    return f"{_name(model, weights)}, {CASES[case].rpartition(',')[0]}"


def speed_commits(results: Path) -> str:
    """Where our rows were measured, and whether vLLM's were in the same run."""
    ours = told_speeds(results)
    found = [ours[*column, case] for column in COLUMNS for case in CASES if (*column, case) in ours]
    commits = dict.fromkeys(f"`{row['commit']}`" for row in found)
    devices = dict.fromkeys(row["device"] for row in found)
    engines = ", ".join(dict.fromkeys(row["engine"] for row in peer_speeds(results).values()))
    runs = {column: beside(results, *column) for column in COLUMNS}
    together = ", ".join(f"{_name(*column)} at `{commit}`" for column, commit in runs.items() if commit is not None)
    apart = ", ".join(
        _name(*column)
        for column, commit in runs.items()
        if commit is None and any(key[:2] == column for key in peer_speeds(results))
    )
    told = [
        f"by turns with ours in one run on one machine ({together})" if together else "",
        f"the same workloads on such a card another day, not in one run with us ({apart})" if apart else "",
    ]
    return f"Ours on {', '.join(devices)} at {', '.join(commits)}. {engines} ran {'; '.join(filter(None, told))}."


def _name(model: str, weights: str) -> str:
    return model.upper() if weights == DTYPE else f"{model.upper()} in {weights}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    value = float(row["value"])
    is_whole = row["unit"] == "tok/s" or value >= FEW or (value.is_integer() and row["unit"] == "s")
    return f"{value:,.0f}" if is_whole else f"{value:.1f}"


def speculation_rows(results: Path) -> Table:
    """Speculation on a GPU: the newest row of every draft, number of streams and share of proposals left alone."""
    rows = [row for row in read_rows(results / "serve_speculation.csv") if row["forced_keep"]]
    newest = {(row["way"], row["streams"], row["forced_keep"]): row for row in rows}
    plain = {row["streams"]: row for (way, *_), row in newest.items() if way == "plain"}
    header = ["draft", "streams", "proposals accepted", "tokens a step", "tokens/s", "without", "times as fast"]
    return header, [
        [
            _draft(row["way"]),
            row["streams"],
            f"{float(row['kept_share']):.0%}",
            f"{float(row['tokens_per_step']) / int(row['streams']):.2f}",
            _speed(row),
            _speed(plain[row["streams"]]),
            row["ratio"],
        ]
        for row in newest.values()
        if row["kept_share"]
    ]


def _draft(way: str) -> str:
    kind, skipped = way.replace("-", " ").split()
    return (
        f"the model without {skipped} of its layers" if kind == "skip" else f"a model without {skipped} of the layers"
    )


def request_rows(results: Path) -> Table:
    """What requests ask for, and tokens/s by model and streams: the newest rows."""
    newest = {(row["model"], row["streams"], row["requests"]): row for row in read_rows(results / "serve_requests.csv")}
    columns = list(dict.fromkeys(key[:2] for key in newest))
    header = ["requests", *(f"{model}, {_streams(streams)}" for model, streams in columns)]
    return header, [
        [title, *(_speed(newest.get((*column, kind))) for column in columns)] for kind, title in REQUESTS.items()
    ]


def window_rows(results: Path) -> Table:
    """Of each model, an engine that keeps what windows see and one that keeps all positions: the newest rows."""
    newest = {(row["model"], row["keeps"]): row for row in read_rows(results / "serve_windows.csv")}
    header = [
        "",
        "layers with windows keep",
        "requests of",
        "at a time",
        "output, tok/s",
        "one request",
        "same answers",
    ]
    return header, [
        [
            model,
            keeps,
            f"{int(row['prompt']):,} + {row['answer']} tokens",
            row["at_once"],
            f"{float(row['output_tokens_per_second']):,.0f}",
            f"{float(row['one_request_s']):.2f} s",
            f"{row['same_answers']} of {row['requests']}",
        ]
        for (model, keeps), row in newest.items()
    ]


def on_gpu_at(results: Path, name: str) -> str:
    """Where the newest rows of a table were measured."""
    rows = [row for row in read_rows(results / name) if row["device"].startswith("NVIDIA")]
    return f"On {rows[-1]['device']} at `{rows[-1]['commit']}`." if rows else "Not measured yet."


def _streams(count: str) -> str:
    return "one stream" if count == "1" else f"{count} streams"


def _speed(row: Row | None) -> str:
    return "–" if row is None else f"{float(row['tokens_per_second']):,.0f}"


def memory_rows(results: Path) -> Table:
    """A line a model: GiB that the budget said of a GPU's memory beside what was taken, by the newest rows."""
    header = ["", "weights are", *MEMORY.values()]
    rows = newest_memory(results)
    return header, [[row["model"].upper(), row["weights_in"], *(_memory(row, line) for line in MEMORY)] for row in rows]


def memory_measured(results: Path) -> str:
    """Where that was measured."""
    places = dict.fromkeys(f"{row['device']} at `{row['commit']}`" for row in newest_memory(results))
    return f"On {', '.join(places)}." if places else "Not measured yet."


def newest_memory(results: Path) -> list[Row]:
    """The newest row of each model and format of its weights."""
    return list({(row["model"], row["weights_in"]): row for row in read_rows(results / "serve_memory.csv")}.values())


def _memory(row: Row, line: str) -> str:
    predicted, taken = (float(row[name]) / 1024 for name in (f"predicted_{line}_mib", f"{line}_mib"))
    error = f" ({predicted / taken - 1:+.1%})".replace("-", "−").replace("%", " %") if line == "total" else ""
    return f"{predicted:.2f} for {taken:.2f}{error}"


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
    """Predicted beside measured speeds on an H200: the newest rows of each model and format of its weights, and the
    commit of those that are older than the others of their line."""
    cases = ("first_token", "one_stream_decode", "batch", "prefill")
    header = ["", "weights", *(CASES[case] for case in cases)]
    rows = []
    for model, weights in PREDICTED:
        measured, told = measured_on_gpu(results, model, weights), predicted_on_gpu(model, weights)
        commits = commits_apart([row for row in read_rows(results / "serve_speed.csv") if _is_of(row, model, weights)])
        cells = (_told(told[case], measured.get(case), commits.get(case)) for case in cases)
        rows.append([model.upper(), weights, *cells])
    return header, rows


def _is_of(row: Row, model: str, weights: str) -> bool:
    return (row["model"], row["dtype"]) == (model, weights)


def measured_on_gpu(results: Path, model: str, weights: str) -> dict[str, float]:
    """Values of the newest rows by case."""
    rows = (row for row in read_rows(results / "serve_speed.csv") if _is_of(row, model, weights))
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
    name, (form, _, head_bits) = PRESETS[model], ("bf16" if weights == DTYPE else weights).partition("+head")
    made = make_serving(name, preset(name), parse_machine("H200"), form, length, requests)
    if not head_bits or made.compressed is None:
        return made
    spec, scheme = made.spec, Scheme(bits=int(head_bits), group=128, symmetric=False)
    head = CodedHead(scheme, scheme.held_bytes(spec.vocab_size, spec.hidden_size))
    small = made.compressed
    plain_bytes = small.plain_bytes - PLAIN_BYTES * spec.vocabulary_params
    coded = replace(small, coded_bytes=small.coded_bytes + head.bytes, plain_bytes=plain_bytes, head=head)
    return replace(made, compressed=coded)


def _told(predicted: float, measured: float | None, commit: str | None) -> str:
    form = ",.0f" if predicted >= FEW else ".2f"
    if measured is None:
        return f"{predicted:{form}}, not measured"
    error = _percent(predicted / measured - 1)
    return f"{predicted:{form}} for {measured:{form}} ({error}{'' if commit is None else f', at `{commit}`'})"


def _percent(error: float) -> str:
    return f"{error:+.0%}".replace("-", "−").replace("%", " %")
