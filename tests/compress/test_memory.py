"""The ledger of compressing against the tensors that were alive, phase by phase as each one is made the largest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.covering import sampled, thorough
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.cost import CompressionCost
from tightfit.compress.fit.bit_choice import group_of, uniform_bytes
from tightfit.compress.fit.fitting import best_mix
from tightfit.compress.fit.measuring_memory import measuring_ledger
from tightfit.compress.fit.sensitivity import measure_sensitivities
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.loss_probe import LossProbe
from tightfit.compress.memory import compression_ledger
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import recipe_of
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.compress.structure.narrowing import NarrowingJob, narrow
from tightfit.compress.structure.structured import KeptShape
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.memory.ledger import Phase
from tightfit.memory.tracing import Tracer
from tightfit.models.loading import load_into
from tightfit.models.saving import write_model
from tightfit.models.spec import Experts, Latent, ModelSpec
from tightfit.models.text.tokenizer import Tokenizer

ONE = replace(SPEC, layers=1, vocab_size=32, max_positions=512)
WIDE = replace(ONE, hidden_size=64, mlp_size=384)
SQUARE = replace(ONE, hidden_size=192, heads=3, kv_heads=3, head_dim=64, mlp_size=192)
TALL = replace(ONE, hidden_size=128, heads=2, kv_heads=1, head_dim=64, mlp_size=448)
LONG = replace(ONE, mlp_size=64)
LATENT = replace(
    ONE,
    family="deepseek_v3",
    hidden_size=128,
    heads=4,
    kv_heads=4,
    head_dim=48,
    mlp_size=256,
    latent=Latent(kv_rank=64, rope_dim=16, value_dim=32, query_rank=64),
)
SHARED = replace(ONE, family="qwen2_moe", experts=Experts(count=4, per_token=2, mlp_size=64, shared_size=512))
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 4, "group": 64},
    "gptq": {"bits": 4, "group": 64},
    "round": {"bits": 4, "group": 64, "steps": 2},
    "awq": {"bits": 4, "group": 64},
    "smoothquant": {},
    "spqr": {},
    "nf4": {},
    "sparsegpt": {},
    "wanda": {},
}


SLOW = ("gptq", "spqr", "round")
"""Column by column, which a tracer follows slowly: where their own moments are the fullest."""
CASES = [
    (method, *case)
    for case in ((WIDE, 1, 64, "coding"), (SQUARE, 1, 64, "coding"), (TALL, 2, 256, None), (WIDE, 4, 512, "forward"))
    for method in METHODS
    if method not in SLOW or (case[0] is WIDE and case[1] == 1) or (method in ("gptq", "round") and case[0] is SQUARE)
]


def is_quick(method: str, spec: ModelSpec, rows: int, length: int, phase: Phase | None) -> bool:
    """Each method where coding is the fullest, and other shapes with some of them: their moments are the same."""
    return (
        (phase == "coding" and spec is WIDE)
        or method == {SQUARE: "awq", WIDE: "sparsegpt"}.get(spec)
        or method == "rtn"
    )


@sampled(5)
@pytest.mark.parametrize(
    ("method", "spec", "rows", "length", "phase"), [case if is_quick(*case) else thorough(*case) for case in CASES]
)
def test_a_layer(method: str, spec: ModelSpec, rows: int, length: int, phase: Phase | None) -> None:
    """Nothing is fitted: what is left of the difference are calibration rows that are kept, and scales' own codes."""
    model = random_model(spec)
    recipe = recipe_of(method, **METHODS[method])
    with Tracer() as tracer:
        inputs = list(torch.randn(rows, length, spec.hidden_size).split(max(8192 // length, 1)))
        tracer.claim(model.layers.parameters(), "weights")
        original = [x.clone() for x in inputs] if recipe.learns else []
        probe = LossProbe([x.clone() for x in inputs])
        compress_layer(model, 0, recipe, inputs, original=original)
    assert probe.original
    ledger = compression_ledger(spec, recipe, rows, length)
    assert phase is None or ledger.fullest() == (phase, 0)
    assert ledger.peak_allocated_bytes() == pytest.approx(tracer.trace.replay().peak_allocated_bytes, rel=0.07)


@sampled(2)
@pytest.mark.parametrize("spec", [LATENT, SHARED], ids=lambda spec: spec.family)
@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_layers_of_other_shapes(spec: ModelSpec, method: str) -> None:
    test_a_layer(method, spec, 2, 256, None)


@contextmanager
def files_aside(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are mapped, which is no allocation though tensors are views of it; parameters are copies of them."""
    read_shard = WorkingDirectory.tensors

    def read(*given: Any, **options: Any) -> None:
        with tracer.pause():
            load_into(*given, **options)

    def shard(self: WorkingDirectory, number: int) -> Any:
        with tracer.pause():
            return {name: tensor.clone() for name, tensor in read_shard(self, number).items()}

    monkeypatch.setattr("tightfit.compress.model_parts.load_into", read)
    monkeypatch.setattr(WorkingDirectory, "tensors", shard)
    yield
    monkeypatch.undo()


def run(method: str, spec: ModelSpec, given: dict[str, Any]) -> CompressionCost:
    said: list[CompressionCost] = []
    if method in ("svd", "whitened"):
        factorise(FactoringJob(**given, method=method, keep=0.6), said.append, lambda *done: None)  # type: ignore[arg-type]
    elif method == "structured":
        narrow(NarrowingJob(**given, kept=KeptShape(mlp=spec.mlp_size // 2)), said.append, lambda *done: None)
    else:
        recipe = recipe_of(method, **METHODS[method])
        compress(CompressionJob(**given, recipe=recipe), said.append, lambda *done: None)
    return said[0]


@pytest.mark.parametrize(
    ("spec", "method", "rows", "phase"),
    [
        (replace(LONG, vocab_size=4000), "rtn", 2, "load"),
        (replace(WIDE, vocab_size=272), "gptq", 2, "coding"),
        (replace(WIDE, vocab_size=272, layers=2), "svd", 2, "coding"),
        (replace(TALL, vocab_size=272), "whitened", 2, "coding"),
        (replace(WIDE, vocab_size=272), "structured", 2, "coding"),
        (replace(LONG, vocab_size=272, layers=2), "rtn", 24, "forward"),
    ],
    ids=["ends", "gptq", "svd", "whitened", "structured", "rows"],
)
def test_a_whole_model(
    spec: ModelSpec,
    method: str,
    rows: int,
    phase: Phase,
    tokenizer: Tokenizer,
    text: Path,
    token_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is announced before, against all tensors of the run; singular vectors are counted as of square matrices."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(spec), tokenizer)
    given = {"model": str(tmp_path / "model"), "out": tmp_path / "small", "data": (str(text),)}
    with Tracer() as tracer, files_aside(tracer, monkeypatch):
        cost = run(method, spec, {**given, "samples": rows, "length": 64, "cache": token_cache})
    alive_bytes = tracer.trace.replay().peak_allocated_bytes
    assert cost.ledger is not None
    assert cost.ledger.fullest() == (phase, 0)
    assert 0.9 * alive_bytes < cost.memory_bytes < 1.3 * alive_bytes, cost.memory_bytes / alive_bytes


@pytest.mark.parametrize(
    ("method", "bits", "shape"),
    [
        ("rtn", 4, replace(LONG, vocab_size=3000, tied=False)),
        ("rtn", 8, replace(LONG, vocab_size=24_000, tied=False)),
        ("rtn", 4, replace(LONG, vocab_size=24_000)),
        ("gptq", 4, replace(SQUARE, vocab_size=3000, tied=False)),
        pytest.param("gptq", 8, replace(SQUARE, vocab_size=6000), marks=pytest.mark.thorough),
    ],
)
def test_a_coded_projection(
    method: str,
    bits: int,
    shape: ModelSpec,
    tokenizer: Tokenizer,
    text: Path,
    token_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its rows are coded, all at once where they are few, or while the loss is measured with it."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(shape), tokenizer)
    said: list[CompressionCost] = []
    job = CompressionJob(
        model=str(tmp_path / "model"),
        out=tmp_path / "small",
        recipe=recipe_of(method, bits=4, group=64, head=bits),
        data=(str(text),),
        samples=1,
        length=32,
        cache=token_cache,
    )
    with Tracer() as tracer, files_aside(tracer, monkeypatch):
        compress(job, said.append, lambda *done: None)
    alive_bytes = tracer.trace.replay().peak_allocated_bytes
    assert said[0].ledger is not None
    assert said[0].ledger.fullest() == ("load", 0)
    assert said[0].memory_bytes == pytest.approx(alive_bytes, rel=0.1)


def test_a_model_that_writes_its_own_text(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is there then, with what it keeps of the rows; that is told before it writes."""
    spec = replace(SQUARE, vocab_size=272, layers=4)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(spec), tokenizer)
    given = {"model": str(tmp_path / "model"), "out": tmp_path / "small", "samples": 4, "length": 32}
    with Tracer() as tracer, files_aside(tracer, monkeypatch):
        cost = run("wanda", spec, {**given, "cache": tmp_path / "cache"})  # which holds little beside a layer
    alive_bytes = tracer.trace.replay().peak_allocated_bytes
    assert cost.ledger is not None
    assert cost.ledger.fullest() == ("init", 0)
    assert 0.9 * alive_bytes < cost.memory_bytes < 1.3 * alive_bytes, cost.memory_bytes / alive_bytes


@sampled(4)
@pytest.mark.parametrize(
    ("spec", "rows", "length", "phase"),
    [
        (replace(WIDE, layers=8, tied=False), 1, 16, "evaluation"),
        (replace(TALL, layers=6, tied=False), 2, 256, "backward"),
        (replace(LONG, layers=2, vocab_size=6000, tied=False), 2, 64, "loss"),
    ],
    ids=["weights", "rows", "ends"],
)
def test_measuring_holds_one_layer(
    spec: ModelSpec, rows: int, length: int, phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `--fit` says before it measures, against all tensors that were alive; of eight layers that is no four."""
    write_model(tmp_path, random_model(spec), None)
    parts = ModelParts(str(tmp_path), torch.device("cpu"))
    tokens = [torch.randint(0, spec.vocab_size, (1, length)) for _ in range(rows)]
    group = group_of(spec)
    with Tracer() as tracer, files_aside(tracer, monkeypatch):
        found = measure_sensitivities(parts, tokens, group, widths=(3, 4))
        best_mix(parts, tokens, found, group, uniform_bytes(spec, 4, group))
    alive_bytes = tracer.trace.replay().peak_allocated_bytes
    ledger = measuring_ledger(spec, rows, length, 2)
    assert ledger.fullest() == (phase, 0)
    assert ledger.peak_allocated_bytes() == pytest.approx(alive_bytes, rel=0.1)
    assert phase != "evaluation" or alive_bytes < 4 * 4 * spec.layer_params(0)
