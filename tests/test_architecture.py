"""The house rules: imports point one way, planning needs no torch, starting is quick, nothing wakes the GPU early."""

import ast
import importlib
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.group import PRELOADED
from tightfit.parallel.forked import start_server

PACKAGE = Path(__file__).parent.parent / "tightfit"
FLOORS = [
    ["errors", "durable"],
    ["hardware", "models.spec", "jobs", "levers.policy"],
    ["memory.ledger", "memory.formulas"],
    ["plan"],
    ["kernels", "models", "levers", "parallel", "memory"],
    ["train", "compress", "serve", "hf", "bench"],
    ["report"],
    ["cli", "__main__"],
]
TORCH_FREE = ["hardware.cpu", "models.spec", "models.presets", "models.huggingface.config", "models.resolve",
              "jobs.job", "jobs.load", "jobs.fields", "jobs.workload", "memory.ledger", "durable", "cli.main",
              "report.tables", "hardware.catalog", "hardware.machine", "hardware.local", "hardware.efficiency",
              "plan.answer", "plan.serving", "plan.export.files", "plan.runnable", "plan.job", "report.plan",
              "levers.policy.recompute", "levers.policy.budget", "levers.policy.offload", "levers.policy.tiles",
              "levers.policy.loss_chunks", "levers.policy.updates", "memory.formulas.training",
              "memory.formulas.serving", "memory.comparison", "report.memory",
              "report.ledger", "report.timeline"]  # fmt: skip


def modules() -> dict[str, Path]:
    found = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def floor(module: str) -> int:
    matches = [
        (len(room), level)
        for level, rooms in enumerate(FLOORS)
        for room in rooms
        if f"{module}.".startswith(f"{room}.")
    ]
    assert matches, f"{module} is in no room of the house"
    return max(matches)[1]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.removeprefix("tightfit.") for name in names if name.startswith("tightfit.")}


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, path in modules().items()
        if module != "__init__"
        for other in imported(path)
        if floor(other) > floor(module)
    ]
    assert wrong == []


def test_planning_modules_do_not_import_torch() -> None:
    code = f"import sys\nfor m in {TORCH_FREE!r}: __import__('tightfit.' + m)\n"
    code += "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def import_all(names: list[str]) -> None:
    """Forked from a server that has imported some of them and nothing of the tests' own that uses a GPU."""
    import torch

    for name in names:
        importlib.import_module(name)
    assert set(names) <= set(sys.modules)
    assert "deepspeed" not in sys.modules
    assert not torch.cuda.is_initialized()
    assert not torch.cuda._is_in_bad_fork(), "a module that the server imports initialised CUDA"


def test_no_module_initialises_cuda_or_imports_deepspeed() -> None:
    names = [f"tightfit.{name}" for name in modules() if name not in ("__main__", "__init__")]
    assert "tightfit.train.loop" in names
    start_server(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=import_all, args=(names,))
    process.start()
    process.join()
    assert process.exitcode == 0


def seconds_to_run(*arguments: str) -> float:
    """The best of seven, as the machine may be shared."""
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@pytest.mark.alone
@pytest.mark.parametrize("arguments", [["-c", "import tightfit"], ["-m", "tightfit", "--help"]])
def test_starting_is_quick(arguments: list[str]) -> None:
    """Under 0.3 s where a bare interpreter needs 0.035: counted in bare starts, which a busy machine slows as well."""
    assert seconds_to_run(*arguments) < 0.3 / 0.035 * seconds_to_run("-c", "pass")


def test_files_and_functions_stay_readable() -> None:
    long_files = [str(path) for path in modules().values() if len(path.read_text().splitlines()) > 500]
    assert long_files == []
