"""Kernels of an engine's steps are compiled in other processes: all that are needed, no others, come what may."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.covering import thorough
from tightfit.models.decoder import Decoder
from tightfit.models.resolve import resolve_spec
from tightfit.serve.forward.runner import Runner, make_cache
from tightfit.serve.graphs.compiler import start_compiler

pytest.importorskip("triton", reason="pip install triton")


MODELS = ("llama", "qwen3", "phi3", "gpt2", "gemma2")
OTHERS = ("mistral", "qwen2", "gemma", "gemma3")
"""Whose windows, biases and norms are those of MODELS in other company. The last of each are compiled."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, MODELS)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, OTHERS)


def compiled(tmp_path_factory: pytest.TempPathFactory, models: tuple[str, ...]) -> Any:
    """What tests/serve/compiling.py says. It takes some ten seconds: two processes import torch and hash Triton."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("cache", "temporary")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folders["cache"]), "TMPDIR": str(folders["temporary"])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.serve.compiling", *models]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    left = [str(path) for path in folders["temporary"].iterdir()]
    return json.loads(made.stdout) | {"left": left + [str(p) for p in folders["cache"].rglob("tmp.*")]}


@pytest.mark.parametrize(("fixture", "models"), [("found", MODELS), thorough("others", OTHERS)])
def test_trials_through_few_layers_have_all_kernels_of_the_steps_and_no_others(
    fixture: str, models: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    said = request.getfixturevalue(fixture)
    for name in models:
        assert said[name]["not tried"] == said[name]["of no use"] == [], name
        assert {"paged_attention", "paged_prefill", "greedy", "row_norm"} <= set(said[name]["tried"]), name


def test_other_processes_compile_and_this_one_finds_it_in_the_cache(found: Any) -> None:
    assert found["with processes"] == [True] * 3
    assert found["exit code"] == 0
    assert not found["left running"]


def test_without_them_it_is_compiled_here(found: Any) -> None:
    assert found["without processes"] == [False]


def test_what_is_in_the_cache_is_loaded_without_them(found: Any) -> None:
    assert found["again"] == [True] * 3
    assert found["compiled once more"] == 0, "what steps launch is not what was loaded"


def test_nothing_is_begun_for_somebody_who_has_gone_and_nothing_half_made_is_left(found: Any) -> None:
    assert found["begun after the pipe broke"] == ["greedy"]
    assert found["left"] == []


def test_weights_are_there_without_what_takes_seconds_to_import(found: Any) -> None:
    assert found["imported"] == []


def test_a_cpu_starts_none() -> None:
    assert start_compiler("cpu") is None


@pytest.mark.parametrize(("name", "layers"), [("tiny-llama", 2), ("tiny-mistral", 2)])
def test_equal_layers_are_shown_by_one_and_the_last(name: str, layers: int) -> None:
    spec = resolve_spec(name)
    cache = make_cache(spec, 3, 16, torch.device("cpu"), torch.float32)
    runner = Runner(Decoder(spec), cache, 32, 2)
    assert runner.program is not None
    short = runner.shortened().program
    assert short is not None
    assert len(short.layers) == layers < len(runner.program.layers) == spec.layers
