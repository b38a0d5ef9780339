"""Cases of what runs and plans leave: metrics, training state, plans, ledgers, records, results."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.rows import append_row
from tests.fuzz.changing import changed_bytes, changed_value, dumped, value
from tests.fuzz.materials import TEXTS, Materials
from tightfit.hardware.calibration import read_calibrations
from tightfit.hardware.collective_rates import OPERATIONS
from tightfit.hardware.machine import parse_machine
from tightfit.memory.comparison import compare, read_ledger
from tightfit.plan.job import read_job
from tightfit.plan.plan import Plan
from tightfit.report.pipeline import read_record
from tightfit.serve.offline import read_finished
from tightfit.serve.prompt_lines import read_prompts, to_request
from tightfit.serve.requests.sampling import Sampling
from tightfit.train.checkpoints.directory import read_position
from tightfit.train.data.loader import make_loader
from tightfit.train.metrics import MetricsLog, SideFiles, read_metrics

Case = Callable[[], object]


def metrics(chance: random.Random, given: Materials, folder: Path) -> Case:
    """metrics.jsonl of a run that goes on."""
    lines = (given.run / "metrics.jsonl").read_bytes().splitlines()
    lines.insert(chance.randrange(len(lines) + 1), dumped(chance, {"step": value(chance), "loss": value(chance)}))
    content = b"\n".join(lines)
    path = folder / "metrics.jsonl"
    path.write_bytes(changed_bytes(chance, content) if chance.random() < 0.5 else content)

    def run() -> None:
        read_metrics(path)
        with MetricsLog(folder, 1, trackers=[], side_files=SideFiles(print)) as log:
            log.add(2, loss=float("nan"))
        assert all(json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines())

    return run


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def state(chance: random.Random, given: Materials, folder: Path) -> Case:
    """state.json of a checkpoint, up to the loader."""
    target = folder / "checkpoints" / "step-00000002"
    shutil.copytree(given.run / "checkpoints" / "step-00000002" / "training", target / "training")
    path = target / "training" / "state.json"
    path.write_bytes(dumped(chance, changed_value(chance, json.loads(path.read_text()), chance.choice((1, 1, 3)))))

    def run() -> None:
        position = read_position(target)
        rows = position.facts.get("rows") if isinstance(position.facts.get("rows"), int) else 3
        make_loader([0] * min(max(rows, 1), 99), micro_batch=2, seed=0).load_state_dict(position.loader)  # type: ignore

    return run


def resumed_run(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A whole run of which one file is damaged, resumed."""
    from tightfit.jobs.load import load_job
    from tightfit.train.loop import run_job

    shutil.copytree(given.run, folder / "run")
    files = [path for path in (folder / "run").rglob("*") if path.is_file() and path.name != "job.yaml"]
    path = chance.choice(sorted(files))
    path.write_bytes(changed_bytes(chance, path.read_bytes()))
    job = load_job(folder / "run" / "job.yaml", [f"output={folder / 'run'}", "steps=3"])
    return lambda: run_job(job, resume=True, quiet=True)


def plan(chance: random.Random, given: Materials, folder: Path) -> Case:
    """plan.json."""
    path = folder / "plan.json"
    path.write_bytes(dumped(chance, changed_value(chance, given.plan, chance.choice((1, 1, 2, 4)))))

    def run() -> None:
        Plan.load(path)
        read_job(path, ["data.train=x", "output=y", "steps=1"])

    return run


def ledger(chance: random.Random, given: Materials, folder: Path) -> Case:
    """ledger.json, beside the one it was made from."""
    for name, content in (("a.json", given.plan), ("b.json", changed_value(chance, given.plan["ledger"], 2))):
        (folder / name).write_bytes(dumped(chance, content) if name == "b.json" else json.dumps(content).encode())
    return lambda: compare(read_ledger(folder / "a.json"), read_ledger(folder / "b.json"))


def record(chance: random.Random, given: Materials, folder: Path) -> Case:
    """pipeline.json."""
    slot = {"rank": 0, "work": "forward", "batch": 0, "stage": 0, "start_s": 0.0, "end_s": 1.0}
    content = {"schedule": "1f1b", "ranks": 2, "micro_batches": 2, "pieces": 1, "slots": [slot, slot]}
    (folder / "pipeline.json").write_bytes(dumped(chance, changed_value(chance, content, chance.choice((1, 2)))))
    return lambda: read_record(folder).waited


def results(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A table of results that is continued."""
    append_row("x", {"a": 1, "b": 2}, folder=folder, commit="c")
    path = folder / "x.csv"
    path.write_bytes(changed_bytes(chance, path.read_bytes()))
    return lambda: append_row("x", {"a": 1, "b": 2}, folder=folder, commit="c")


def prompts(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A line of `tightfit generate`, and an output that is there already."""
    line = {"prompt": "a", "id": "x", "max_tokens": 3, "top_p": 0.5, "stop": ["b"], "n": 1, "logit_bias": {"3": 1.0}}
    other = {**line, "prompt": TEXTS[0], "id": "y"}
    content = b"\n".join(dumped(chance, changed_value(chance, each, chance.choice((1, 2)))) for each in (line, other))
    (folder / "in.jsonl").write_bytes(content)
    answer = {"id": "x", "text": "b", "finish_reason": "stop", "usage": {}}
    (folder / "out.jsonl").write_bytes(changed_bytes(chance, json.dumps(answer).encode() + b"\n"))

    def run() -> None:
        for prompt in read_prompts(folder / "in.jsonl"):
            to_request(prompt, given.tokenizer, Sampling())
        read_finished(folder / "out.jsonl")

    return run


def calibration(chance: random.Random, given: Materials, folder: Path) -> Case:
    """calibration.json, and a plan's costs with it."""
    points = [{"operation": name, "payload_bytes": size, "us": 9.0 + size} for name in OPERATIONS for size in (8, 64)]
    entry = {
        "device": "x",
        "date": "today",
        "products_tflop_s": {"bf16": 9.0},
        "product_us": 1.0,
        "attention_tflop_s": {"bf16": [1.0, 2.0]},
        "copy_gb_s": 1.0,
        "link_gb_s": 1.0,
        "link_both_ways": 1.0,
        "host_adam_params_s": 1.0,
        "layer_launch_ms": 1.0,
        "collectives": {"ranks": 2, "backend": "gloo", "points": points},
    }
    whole = changed_value(chance, {"format": 1, "devices": {"x": entry}}, chance.choice((1, 1, 2)))
    (folder / "calibration.json").write_bytes(dumped(chance, whole))

    def run() -> None:
        for found in read_calibrations(folder / "calibration.json").values():
            found.efficiency(parse_machine("H100-80GB").accelerator)

    return run


KINDS = {
    "metrics.jsonl": metrics,
    "state.json": state,
    "resumed run": resumed_run,
    "plan.json": plan,
    "ledger.json": ledger,
    "pipeline.json": record,
    "results csv": results,
    "prompts": prompts,
    "calibration": calibration,
}
