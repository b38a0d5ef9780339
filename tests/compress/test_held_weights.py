"""What a compressed model takes: read from headers, computed from the scheme, and counted when it is loaded."""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Run
from tests.compress.conftest import SPEC
from tests.compress.held import assert_held_as_said, counted_bytes
from tests.covering import sampled
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.conversion import convert
from tightfit.compress.cost import predict, schemes
from tightfit.compress.fit.bit_choice import settled_for
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.errors import UserError
from tightfit.kernels.quantized.quantized_linear import can_be_fused
from tightfit.kernels.quantized.spqr_layout import can_be_arranged
from tightfit.memory.tracing import Tracer
from tightfit.models.loading import load_model
from tightfit.models.quantized.formats.registry import FORMATS
from tightfit.models.quantized.held_weights import HELD, expanded_bytes, held_weights
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.matrices import matrices
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import KINDS, Scheme
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine


def rounded(tiny: Path, out: Path, recipe: Recipe, **more: Any) -> Path:
    compress(
        CompressionJob(model=str(tiny), out=out, recipe=recipe, **more),
        lambda cost: None,
        lambda done, total, layer: None,
    )
    return out


WIDTHS: list[dict[str, Any]] = [
    {"bits": 2, "group": 32},
    {"bits": 3, "group": 16},
    {"bits": 5, "group": 64, "symmetric": True},
    {"bits": 6, "group": 0},
    {"bits": 7, "group": -1, "symmetric": True},
    {"bits": 4, "group": -1},
    {"bits": 8},
]


@sampled(3)
@pytest.mark.parametrize("options", WIDTHS, ids=str)
def test_every_width(options: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    """From headers as when loaded, and the scheme knows it too."""
    recipe = recipe_of("rtn", **options)
    held = assert_held_as_said(rounded(tiny, tmp_path / "small", recipe))
    shapes = matrices(SPEC)
    known = {name: scheme.held_bytes(*shapes[name][1:]) for name, scheme in schemes(SPEC, recipe).items()}
    assert held.coded_bytes == sum(known.values())
    assert held.plain_bytes == 2 * (SPEC.params() - sum(outputs * inputs for _, outputs, inputs in shapes.values()))
    files = [load_file(path) for path in (tmp_path / "small").glob("*.safetensors")]
    stored = sum(tensor.nbytes for file in files for name, tensor in file.items() if not name.endswith("_shape"))
    assert stored == predict(SPEC, recipe, 1, 1).result_bytes


@sampled(2)
@pytest.mark.parametrize("method", ["nf4", "llm.int8", "fp8", "mxfp4", "nvfp4", "binary", "spqr"])
def test_bytes_of_files_are_those_predicted(
    method: Any, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Tables beside NF4's matrices and the beginnings of SpQR's rows included; what says shapes and kinds is not."""
    recipe = Recipe((Step(method=method, outlier_share=0.0),))
    given: dict[str, Any] = {"data": (str(text),), "samples": 2, "length": 32, "cache": token_cache}
    small = rounded(tiny, tmp_path / "small", recipe, **(given if method == "spqr" else {}))
    files = [load_file(path) for path in small.glob("*.safetensors")]
    said = ("_shape", "_format", "quant_state.bitsandbytes__nf4", "outlier_columns", "outlier_values")
    stored = sum(tensor.nbytes for file in files for name, tensor in file.items() if not name.endswith(said))
    assert stored == predict(SPEC, settled_for(recipe, SPEC), 1, 1).result_bytes


def test_every_layout(tiny: Path, tmp_path: Path) -> None:
    """The same codes in three layouts take the same; ones whose groups are out of order a number an input more."""
    small = rounded(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32))
    assert {small.name: assert_held_as_said(small).description} == {"small": "int4 g32 asym"}
    for form in ("gptq", "awq"):
        convert(str(small), tmp_path / form, form)
        assert assert_held_as_said(tmp_path / form).total_bytes == counted_bytes(small)
    assert assert_held_as_said(rounded(tiny, tmp_path / "signs", recipe_of("binary", group=32))).expanded_bytes > 0
    for method in ("nf4", "llm.int8"):
        assert_held_as_said(rounded(tiny, tmp_path / method, recipe_of(method)))


def test_parts_left_alone(tiny: Path, tmp_path: Path) -> None:
    steps = (Step(method="rtn", bits=4, group=32), Step(method="keep", layers=("layers.0.*",)))
    held = assert_held_as_said(rounded(tiny, tmp_path / "small", Recipe(steps)))
    assert held.plain_bytes > 2 * SPEC.vocab_size * SPEC.hidden_size + 2 * SPEC.layer_params(0)


def test_layouts_have_the_tensors_that_are_read() -> None:
    assert {name: set(rules) for name, rules in HELD.items()} == {
        name: set(form.suffixes) for name, form in FORMATS.items()
    }


def test_the_engine_counts_the_same(tiny: Path, tmp_path: Path) -> None:
    """Its budget, and what it holds once projections of one input are joined."""
    small = rounded(tiny, tmp_path / "small", recipe_of("fp8"))
    held = assert_held_as_said(small)
    loaded = load_model(str(small), dtype=torch.bfloat16)
    engine = Engine(loaded.model, None, EngineConfig(max_sequences=2, max_length=64))
    assert engine.budget.weight_bytes == held.total_bytes
    storages = [tensor.untyped_storage() for tensor in loaded.model.state_dict().values()]
    assert sum({each.data_ptr(): each.nbytes() for each in storages}.values()) == held.total_bytes


def coded_linear(scheme: Scheme, outputs: int, inputs: int) -> QuantizedLinear:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    return QuantizedLinear(fit_grid(weight, scheme).code(weight))


def expanding_schemes() -> list[Scheme]:
    integers = [Scheme(bits=bits, group=56, symmetric=bits % 2 == 0) for bits in range(2, 9)]
    others = [Scheme(kind=kind, bits=1 if kind == "binary" else 4, group=group) for kind, group in SMALL.items()]
    return [*integers, *others, Scheme(kind="fp8", bits=8, group=0), Scheme(bits=8, group=0, activations="llm.int8")]


SMALL: dict[Any, int] = {"nf4": 64, "mxfp4": 32, "nvfp4": 16, "binary": 64}


@pytest.mark.parametrize("scheme", expanding_schemes(), ids=lambda scheme: scheme.describe())
def test_what_a_product_takes_beside_its_weight(scheme: Scheme) -> None:
    """Counted on the path that every device has; kernels that read packed codes need only the matrix in 16 bits."""
    outputs, inputs = 256, 448  # neither tiles nor groups are those kernels'
    layer = coded_linear(scheme, outputs, inputs)
    x = torch.zeros(1, inputs, dtype=torch.bfloat16)
    with torch.no_grad(), Tracer() as tracer:
        layer(x)
    counted = tracer.trace.replay().peak_allocated_bytes
    said = scheme.expanded_bytes(outputs, inputs)
    assert 0.75 * said < counted <= 1.03 * said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 130])
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("scheme", [Scheme(bits=4, group=32, symmetric=False), Scheme(bits=8, group=0)], ids=str)
def test_what_a_product_takes_in_the_dtype_of_its_rows(
    scheme: Scheme, impl: Any, rows: int, dtype: torch.dtype
) -> None:
    """Kernels expand into it, float32 at every number of rows; rows and their results may be alive beside it."""
    outputs, inputs = 640, 512
    layer = coded_linear(scheme, outputs, inputs)
    layer.impl = impl
    x = torch.zeros(rows, inputs, dtype=dtype)
    with torch.no_grad(), Tracer() as tracer:
        beside = x.nbytes + layer(x).nbytes
    counted = tracer.trace.replay().peak_allocated_bytes
    said = layer.expanding_bytes(rows, dtype)
    assert 0.75 * said <= counted <= 1.03 * said + 1.1 * beside + 4096


def test_which_codes_kernels_read() -> None:
    for bits, group, inputs in product(range(2, 9), (0, 16, 32, 64, 96, 128, 256), (64, 128, 448, 512, 4096)):
        scheme = Scheme(bits=bits, group=group)
        assert scheme.is_read_packed(inputs) == can_be_fused(inputs, bits, group), (bits, group, inputs)
    for bits, outputs, inputs in product(range(2, 9), (32, 48, 4096), (128, 256, 4096, 2**16, 2**16 + 256)):
        outlying = Scheme(bits=bits, group=16, outliers=True, symmetric=False)
        assert outlying.is_read_with_outliers(outputs, inputs) == can_be_arranged(outputs, inputs, bits)
        assert not outlying.is_read_packed(inputs)
    assert len(KINDS) == len(SMALL) + 2
    joint = Scheme(bits=4, group=64).expanded_bytes(2 * SPEC.mlp_size, SPEC.hidden_size)
    assert expanded_bytes(SPEC, Scheme(bits=4, group=64)) == joint  # gate over up


def test_plan_of_a_compressed_directory(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = rounded(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32))
    arguments = ("plan", str(small), "--on", "T4", "--serve", "--context", "64", "--json")
    planned = Run(capfd, monkeypatch, *arguments).json
    weights = [line for line in planned["ledger"] if line["component"] == "weights" and line["phase"] == "forward"]
    assert [line["bytes"] for line in weights] == [counted_bytes(small)]
    assert planned["quantize"] == "int4 g32 asym"
    wide = Run(capfd, monkeypatch, *arguments, "--quantize", "bf16").json
    assert [line["bytes"] for line in wide["ledger"] if line["component"] == "weights"] == [2 * SPEC.params()] * 2
    assert wide["tokens_per_second"] < planned["tokens_per_second"]


def test_plan_of_training_a_compressed_directory(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training expands the weights, so its plan is that of the original, and says why."""
    small = rounded(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32))
    options = ("--on", "T4", "--seq", "64", "--global-batch", "8", "--json")
    wide, few = (Run(capfd, monkeypatch, "plan", str(folder), *options).json for folder in (tiny, small))
    assert few["ledger"] == wide["ledger"]
    assert few["expanded"] == "int4 g32 asym"
    assert "expanded" not in wide
    assert "training expands it" in Run(capfd, monkeypatch, "plan", str(small), *options[:-1]).out


def test_damaged_files_are_a_sentence(tiny: Path, tmp_path: Path) -> None:
    small = rounded(tiny, tmp_path / "small", recipe_of("rtn", bits=8))
    shard = sorted(small.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    header = json.dumps({"a": {"dtype": "F16"}}).encode()
    for content in ((2**60).to_bytes(8, "little"), len(header).to_bytes(8, "little") + header, b"\x02\0\0\0\0\0\0\0{]"):
        shard.write_bytes(content)
        with pytest.raises(UserError, match=r"header.*download it again"):
            held_weights(small, SPEC)
    for offsets, shape in (([-8, 0], [4]), ([0, 2**50], [2**49]), ([0, 0], [2**40, 2**40]), ([0, 8], [-4, -1])):
        header = json.dumps({"a": {"dtype": "F16", "shape": shape, "data_offsets": offsets}}).encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        with pytest.raises(UserError, match=r"header.*download it again"):
            held_weights(small, SPEC)
    shard.write_bytes(whole)
    assert_held_as_said(small)
    assert held_weights(tiny, SPEC) is None


@pytest.mark.parametrize(("made", "said"), [("pipe", "is a pipe"), ("loop", "cannot read"), ("folder", "cannot read")])
def test_what_is_no_file_is_a_sentence(made: str, said: str, tiny: Path, tmp_path: Path) -> None:
    """A pipe is not waited for."""
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    weights = tmp_path / "model.safetensors"
    if made == "pipe":
        os.mkfifo(weights)
    elif made == "loop":
        weights.symlink_to(weights)
    else:
        weights.mkdir()
    with pytest.raises(UserError, match=said):
        held_weights(tmp_path, SPEC)
