"""A GPU that runs out of memory: what is said of it is true, the checkpoint is safe, and the exit code is its own.

The error is torch's, raised where an allocation would have failed; tests/gpu/test_oom.py has it raised by a real GPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.cli.conftest import Run
from tests.train.jobs import latest_checkpoint, tiny_job
from tightfit.jobs.job import Job
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.overheads import INSTALLED
from tightfit.memory.formulas.training import peaks
from tightfit.models.layers.mlp import Mlp
from tightfit.models.presets import preset
from tightfit.train import out_of_memory
from tightfit.train.loop import run_job
from tightfit.train.out_of_memory import EXIT_CODE, Running, RunOutOfMemoryError, Shortage, _advice, sizes_of

GIB = 2**30
LAYERS = preset("tiny-llama").layers
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is "
    "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated memory 76.00 GiB "
    "is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
CAPPED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 100.00 GiB is "
    "free. 22.35 GiB allowed; Of the allocated memory 21.50 GiB is allocated by PyTorch, and 0.60 GiB is reserved by "
    "PyTorch but unallocated."
)


def test_sizes_are_read_from_torchs_words() -> None:
    wanted, missing, limit = sizes_of(MESSAGE)
    assert (wanted, missing) == (2 * GIB, GIB // 2)
    assert limit == pytest.approx(79.1 * GIB)
    wanted, missing, limit = sizes_of(CAPPED)
    assert limit == pytest.approx(22.35 * GIB + 500 * 2**20)
    assert wanted == GIB // 2
    assert missing == pytest.approx((0.5 - 0.25) * GIB, rel=1e-6)
    assert sizes_of("CUDA out of memory. Tried to allocate 3.00 MiB.") == (3 * 2**20, 3 * 2**20, 0)
    assert sizes_of("something else") == (0, 0, 0)


@pytest.fixture
def failing() -> Iterator[Callable[..., None]]:
    """Makes training fail where it is in an MLP, forward or backward, for the given time."""
    handles = []

    def install(when: int, *, backward: bool) -> None:
        calls = [0]

        def fail(gradient: Tensor) -> None:
            raise torch.OutOfMemoryError(MESSAGE)

        def watch(module: nn.Module, arguments: Any, made: Any) -> None:
            if isinstance(module, Mlp) and torch.is_grad_enabled():
                calls[0] += 1
                if calls[0] == when and not backward:
                    fail(made)
                if calls[0] == when:
                    made[0].register_hook(fail)

        handles.append(register_module_forward_hook(watch))

    yield install
    for handle in handles:
        handle.remove()


def shortage(job: Job) -> Shortage:
    with pytest.raises(RunOutOfMemoryError) as caught:
        run_job(job, quiet=True)
    return caught.value.shortage


def job_in(folder: Path, corpus: Path, cache: Path, **changes: Any) -> Job:
    fields = {"global_batch": 2, "steps": 6, "saving": {"every": 2, "keep": 2}}
    return tiny_job(folder / "run", corpus, cache, **{**fields, **changes})


def test_forward_names_the_module_and_the_operation(
    tmp_path: Path, corpus: Path, token_cache: Path, failing: Callable[..., None]
) -> None:
    job = job_in(tmp_path, corpus, token_cache)
    failing(when=4 * LAYERS + 2, backward=False)  # four steps, then the second layer of the fifth
    found = shortage(job)
    assert (found.step, found.phase) == (5, "forward")
    assert found.module.startswith("layers.1")
    assert found.operation.split(":")[0] in ("models/decoder.py", "models/layers/mlp.py")
    assert (found.wanted_bytes, found.missing_bytes) == (2 * GIB, GIB // 2)
    assert found.safe.endswith("step-00000004")
    assert latest_checkpoint(job.output) is not None


def test_what_was_held_is_what_model_and_optimizer_own(
    tmp_path: Path, corpus: Path, token_cache: Path, failing: Callable[..., None]
) -> None:
    failing(when=2, backward=True)
    found = shortage(job_in(tmp_path, corpus, token_cache))
    assert (found.step, found.phase) == (1, "backward")
    assert "layers.1" in found.module
    held = found.held.by_component("backward")
    assert held["optimizer states"] == 2 * held["weights"]
    assert 0 < held["gradients"] < held["weights"]
    assert "no checkpoint had been saved yet" in found.safe


def test_advice_saves_what_was_missing_for_the_least_time(
    tmp_path: Path, corpus: Path, token_cache: Path, failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction for a tiny model cannot save half a GiB, so one is asked about whose states are as large, on a host
    with room for them."""
    monkeypatch.setattr(out_of_memory, "usable_host_bytes", lambda: 64 * GIB)
    failing(when=1, backward=False)
    assert shortage(job_in(tmp_path, corpus, token_cache)).advice is None
    job = tiny_job(tmp_path / "other", corpus, token_cache, global_batch=1, layout={"micro_batch": 1}, precision="bf16")
    workload = Workload(spec=preset("llama-3.2-1b"), sequence_length=8192, global_batch=1)
    running = Running(job, workload, nn.Linear(1, 1), None, torch.device("cpu"))  # type: ignore[arg-type]
    now = peaks(workload, job.layout, job.levers, INSTALLED).gpu_bytes
    slower = []
    for missing in (GIB // 4, 3 * GIB, 12 * GIB):
        advice = _advice(running, missing)
        assert advice is not None
        assert advice.gpu_bytes <= now - missing
        assert advice.overrides
        assert Levers.model_validate(yaml.safe_load(_as_yaml(advice.overrides))) == advice.levers
        slower.append(advice.slower)
    assert slower == sorted(slower)
    assert _advice(running, 200 * GIB) is None
    capped = _advice(running, GIB // 4, 14 * GIB)
    assert capped is not None
    assert capped.gpu_bytes <= 14 * GIB


def _as_yaml(overrides: tuple[str, ...]) -> str:
    return "\n".join(each.removeprefix("-o levers.").replace("=", ": ", 1) for each in overrides)


def test_one_screen_and_an_exit_code_of_its_own(
    tmp_path: Path,
    corpus: Path,
    token_cache: Path,
    failing: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_in(tmp_path, corpus, token_cache)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")), encoding="utf-8")
    failing(when=2 * LAYERS + 1, backward=False)
    run = Run(capfd, monkeypatch, "train", str(file))
    assert run.code == EXIT_CODE == 3
    assert "Traceback" not in run.err
    for words in (
        "Out of GPU memory",
        "step 3",
        "forward",
        "2.00 GiB",
        "512 MiB",
        "layers.0",
        "optimizer states",
        "step-00000002",
        "--fit",
    ):
        shown = "".join(run.err.replace("│", " ").split())  # whose lines may be broken inside a long path
        assert words.replace(" ", "") in shown, words
    assert len(run.err.splitlines()) < 60
    again = Run(capfd, monkeypatch, "train", str(tmp_path / "run"), "--resume", "--json")
    assert again.code == 0
    assert again.json["step"] == 6
