"""`python -m tests.fuzz.killed_compression --kills 50`: compressing that is killed again and again still arrives.

SIGKILL at random instants, as many between any two files as between any others: before the first, between layers, while
index, report and picture are written, after the result has its name. After each, no finished layer is lost, and where
the output exists it is whole, with its report: nobody writes that later. In the end weights and report are those of a
command that nobody disturbed.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.compress.conftest import SPEC, random_model
from tests.distributed.group import PRELOADED
from tests.models.test_tokenizer import CORPUS
from tests.programs import run_main
from tightfit.compress.fit.fitting import fit_ledger
from tightfit.hardware import machine
from tightfit.launch.forked import start_server
from tightfit.models.loading import load_model
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import train_tokenizer

LAYERS = 3
DEEP = replace(SPEC, layers=LAYERS)
OF_METHOD = {
    "gptq": ("--method", "gptq", "--bits", "4", "--group", "32"),
    "structured": ("--method", "structured", "--keep-mlp", "96"),
    "fit": ("--fit", "T4", "--context", "100"),
}
CALIBRATED = ("--samples", "4", "--seq", "64", "--device", "cpu")


@dataclass(frozen=True)
class Command:
    """One `tightfit compress`, to outputs of several names; what it keeps in the cache is its own."""

    folder: Path
    method: str

    def arguments(self, out: Path) -> tuple[str, ...]:
        """What a user types."""
        places = ("--data", str(self.folder / "text.txt"), "--cache", str(self.cache(out)), "--out", str(out))
        return ("compress", str(self.folder / "model"), *OF_METHOD[self.method], *CALIBRATED, *places)

    def cache(self, out: Path) -> Path:
        """Where a choice of bits outlives a kill."""
        return out.with_name(f"{out.name}-cache")

    def start(self, out: Path) -> BaseProcess:
        """In a process of its own."""
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=run_alone, args=(str(self.folder / "told"), *self.arguments(out)))
        process.start()
        return process

    def whole(self, out: Path) -> list[float]:
        """Undisturbed; the seconds from its start to its first file, to the next, …, and to its end."""
        process, times = self.start(out), [time.monotonic()]
        for path in _files(out):
            _wait_for(path, out, process)
            times.append(time.monotonic())
        process.join()
        assert process.exitcode == 0, (self.folder / "told").read_text(encoding="utf-8")
        times.append(time.monotonic())
        return [after - before for before, after in pairwise(times)]


def run_alone(told: str, *arguments: str) -> None:
    """The command on one thread, with a card that has room for some 8 bits a weight; what it says goes to `told`."""
    torch.set_num_threads(1)
    for number in (1, 2):
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    card = machine.parse_machine("T4")
    usable_gib = fit_ledger(DEEP, DEEP.params(), 100).peak_bytes() / 2**30
    small = replace(card, accelerator=replace(card.accelerator, usable_gib=usable_gib))
    setattr(machine, "parse_machine", lambda text: small)  # noqa: B010
    run_main(*arguments)


def write_materials(folder: Path) -> None:
    """A tiny model and its text."""
    (folder / "model").mkdir()
    write_model(folder / "model", random_model(DEEP), train_tokenizer(CORPUS, 265))
    (folder / "text.txt").write_text("\n".join(CORPUS) * 2, encoding="utf-8")


def kill_and_resume(folder: Path, method: str, kills: int, seed: int) -> dict[str, int]:
    """Kill the command so often; how many kills left nothing, some layers, all of them, or the whole result."""
    start_server(PRELOADED)
    command, chance = Command(folder, method), random.Random(seed)
    whole, out = folder / f"{method}-whole", folder / f"{method}-killed"
    gaps_s = command.whole(whole)
    expected = _shards(whole)
    met = dict.fromkeys(("nothing", "layers", "all layers", "result"), 0)
    done = 0
    while sum(met.values()) < kills:
        after = chance.randint(done, len(gaps_s) - 1)
        process = command.start(out)
        if after:
            _wait_for(_files(out)[after - 1], out, process)
        time.sleep(chance.uniform(0, gaps_s[after]))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (folder / "told").read_text(encoding="utf-8")[-2000:]
        reached = _what_is_left(out, expected, done)
        if process.exitcode == -signal.SIGKILL:
            met[reached] += 1
        done = len(_shards(_working(out)))
        if reached == "result":
            _assert_same(out, whole)
            shutil.rmtree(out)
            shutil.rmtree(command.cache(out))
            done = 0
    command.whole(out)
    _assert_same(out, whole)
    assert not _working(out).exists()
    return met


def _working(out: Path) -> Path:
    return out.with_name(f".compressing-{out.name}")


def _shards(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("model-*.safetensors")} if folder.is_dir() else {}


def _what_is_left(out: Path, expected: dict[str, Path], done: int) -> str:
    """How far the killed command has come, by what it left; every shard under its own name is whole and right."""
    if out.exists():
        return "result"
    found = _shards(_working(out))
    assert len(found) >= done, f"{done} shards were finished, and now there are {len(found)}"
    for name, path in found.items():
        _assert_tensors(path, expected[name])
    return "all layers" if len(found) == len(expected) else "layers" if len(found) > 2 else "nothing"


def _files(out: Path) -> list[Path]:
    """What comes to exist one after the other: the shards, the report, the result under its name."""
    shards = [f"model-{number + 1:05}-of-{LAYERS + 2:05}.safetensors" for number in range(LAYERS + 2)]
    return [*(_working(out) / name for name in (*shards, "report.json")), out]


def _wait_for(path: Path, out: Path, process: BaseProcess) -> None:
    """Until it exists, or has gone into the result."""
    while process.is_alive() and not path.exists() and not out.exists():
        time.sleep(0.001)


def _assert_tensors(one: Path, other: Path) -> None:
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys(), one
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), one


def _assert_same(out: Path, whole: Path) -> None:
    """Weights, config and the errors of the report."""
    ours, theirs = _shards(out), _shards(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        _assert_tensors(ours[name], theirs[name])
    assert (out / "config.json").read_text() == (whole / "config.json").read_text()
    assert load_model(str(out)).tokenizer is not None
    told = [_report(folder) for folder in (out, whole)]
    assert len(told[0]["layers"]) == LAYERS
    assert [layer["errors"] for layer in told[0]["layers"]] == [layer["errors"] for layer in told[1]["layers"]]
    assert told[0]["recipe"] == told[1]["recipe"]


def _report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Say how it went, method by method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        write_materials(Path(name))
        for method in OF_METHOD:
            met = kill_and_resume(Path(name), method, asked.kills, asked.seed)
            told = ", ".join(f"{count} left {what}" for what, count in met.items())
            print(f"{method}: {asked.kills} kills, of which {told}; the result arrived all the same", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
