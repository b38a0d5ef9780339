"""Tables of docs/serving.md: the server on one GPU beside vLLM, and what is predicted of CPUs beside what they take."""

from pathlib import Path

from benchmarks.reports.compression import Row, Table, read_rows

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
FEW = 100
"""Below this a number has a digit after its point."""
STARTS = {"first": "start", "next": "next start"}
DTYPE = "bfloat16"


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


def speed_rows(results: Path) -> Table:
    """A row a case, and for each model ours and the peer's."""
    ours = newest_speeds(results)
    peers = read_rows(results / "serve_peers.csv")
    theirs = {(row["model"], row["case"]): row for row in peers if row["engine"].startswith("vLLM")}
    header = ["", *(name for title in MODELS.values() for name in (title, "vLLM"))]
    rows = [
        [title, *(_cell(found.get((model, case))) for model in MODELS for found in (ours, theirs))]
        for case, title in CASES.items()
    ]
    return header, rows


def speed_commits(results: Path) -> str:
    """Where our rows were measured."""
    ours = newest_speeds(results)
    found = [ours[model, case] for model in MODELS for case in CASES if (model, case) in ours]
    commits = dict.fromkeys(f"`{row['commit']}`" for row in found)
    devices = dict.fromkeys(row["device"] for row in found)
    return f"Ours on {', '.join(devices)} at {', '.join(commits)}."


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
    error = f"{prediction_error(row, name):+.0%}".replace("-", "−").replace("%", " %")
    return f"{row[f'predicted_{name}']} for {row[name]} ({error})"
