"""Public layouts: what we write in one comes back from it, and other programs' own code reads the same weights."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.compress.test_compression import logits, run
from tests.covering import sampled
from tightfit.compress.conversion import convert
from tightfit.compress.recipe import recipe_of
from tightfit.errors import UserError
from tightfit.models.loading import load_model
from tightfit.models.quantized.described import INT8_SCHEME, NF4_SCHEME
from tightfit.models.quantized.formats.awq import Awq
from tightfit.models.quantized.formats.bitsandbytes import BitsAndBytes
from tightfit.models.quantized.formats.compressed_tensors import CompressedTensors
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.gptq import Gptq
from tightfit.models.quantized.formats.own import Own
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer

PAIRS: list[tuple[FileFormat, Scheme]] = [
    (Gptq(), Scheme(bits=4, group=32, symmetric=False)),
    (Gptq(), Scheme(bits=3, group=0)),
    (Gptq(zeros_minus_one=False), Scheme(bits=2, group=32, symmetric=False)),
    (Awq(), Scheme(bits=4, group=32, symmetric=False)),
    (CompressedTensors(), Scheme(bits=4, group=32, symmetric=False)),
    (CompressedTensors(), Scheme(bits=5, group=0)),
    (CompressedTensors(), Scheme(bits=8, group=0, activations="int8")),
    (CompressedTensors(), Scheme(kind="fp8", bits=8, group=0)),
    (CompressedTensors(), Scheme(kind="mxfp4", group=32)),
    (CompressedTensors(), Scheme(kind="nvfp4", group=16)),
    (BitsAndBytes(), NF4_SCHEME),
    (BitsAndBytes(), INT8_SCHEME),
    (Own(), Scheme(kind="binary", bits=1, group=32)),
]


def weight() -> Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize(("form", "scheme"), PAIRS, ids=lambda x: x.name if isinstance(x, FileFormat) else x.describe())
def test_what_is_written_comes_back(form: FileFormat, scheme: Scheme) -> None:
    coded = fit_grid(weight(), scheme).code(weight())
    config = json.loads(json.dumps(form.config({"model.layers.0.mlp.up_proj": scheme}, ["lm_head"])))
    assert form.scheme(config, "model.layers.0.mlp.up_proj") == scheme
    tensors = form.encode(coded)
    assert set(tensors) <= set(form.suffixes)
    assert any(mark in tensors for mark in form.marks)
    back = form.decode(tensors, scheme, "m")
    assert torch.equal(back.codes.float(), coded.codes.float())
    torch.testing.assert_close(back.dequantize(), coded.dequantize(), rtol=1e-3, atol=1e-6)


def test_gptq_words_by_hand() -> None:
    """Eight 4-bit codes of one output in one word, lowest first; the zero point minus one likewise."""
    w = torch.arange(8.0).repeat(8, 4)
    coded = fit_grid(w, Scheme(bits=4, group=32, symmetric=False)).code(w)
    tensors = Gptq().encode(coded)
    column = coded.codes[0, :8].tolist()
    assert int(tensors["qweight"][0, 0]) & 0xFFFFFFFF == sum(int(code) << (4 * i) for i, code in enumerate(column))
    assert coded.zero is not None
    assert int(tensors["qzeros"][0, 0]) & 15 == (int(coded.zero[0, 0]) - 1) % 16
    assert tensors["g_idx"].tolist() == [0] * 32


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_small_floats_of_compressed_tensors(kind: str) -> None:
    """Their own code reads our bytes as the same weights."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = Scheme(kind=kind, group=32 if kind == "mxfp4" else 16)  # type: ignore[arg-type]
    coded = fit_grid(weight(), scheme).code(weight())
    config = CompressedTensors().config({"m": scheme}, [])["config_groups"]["group_0"]
    theirs = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**config["weights"])
    )
    reader = compressors.BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
    made = reader.decompress(CompressedTensors().encode(coded), theirs)["weight"]
    torch.testing.assert_close(made.float(), coded.dequantize(), rtol=2e-2, atol=1e-4)  # theirs is bfloat16


def test_one_scale_for_the_tensor_in_compressed_tensors() -> None:
    """As that package writes it, which makes room for nothing else: a vector of one scale, a signed byte."""
    form, scheme = CompressedTensors(), Scheme(bits=4, group=-1, symmetric=False)
    coded = fit_grid(weight(), scheme).code(weight())
    assert coded.zero is not None
    made = form.encode(coded)
    assert made["weight_scale"].shape == (1,)
    assert (made["weight_zero_point"].dtype, made["weight_zero_point"].tolist()) == (torch.int8, [int(coded.zero) - 8])
    assert torch.equal(form.decode(made, scheme, "m").dequantize(), coded.dequantize())
    for kind in ("int", "fp8"):
        one = Scheme(kind=kind, bits=8, group=-1)
        assert form.encode(fit_grid(weight(), one).code(weight()))["weight_scale"].shape == (1,)


def test_transformers_expands_what_compressed_tensors_cannot_load_packed() -> None:
    """Only zero points by group or row, and not where inputs are rounded, which it would forget."""
    form, rounded = CompressedTensors(), Scheme(bits=8, group=0, activations="int8")
    uneven, even = Scheme(bits=4, group=32, symmetric=False), Scheme(bits=4, group=32)
    whole = Scheme(bits=4, group=-1, symmetric=False)
    for scheme, told in ((uneven, True), (even, False), (whole, False), (rounded, False)):
        assert ("dequantize" in form.config({"m": scheme}, [])) is told
    assert "dequantize" not in form.config({"m": uneven, "n": rounded}, [])


def test_groups_with_zero_points_are_blocks_beside_other_codes() -> None:
    """With a byte a zero point, as compressed-tensors writes and loads blocks; alone they are groups."""
    uneven, wide = Scheme(bits=4, group=32, symmetric=False), Scheme(bits=8, group=0)
    coded = fit_grid(weight(), uneven).code(weight())
    assert coded.zero is not None
    form = CompressedTensors().arranged_for([uneven, wide])
    config = json.loads(json.dumps(form.config({"m": uneven, "n": wide}, [])))
    described = config["config_groups"]["group_0"]["weights"]
    assert (described["strategy"], described["block_structure"], described["group_size"]) == ("block", [1, 32], None)
    assert "dequantize" not in config
    assert (form.scheme(config, "m"), form.scheme(config, "n")) == (uneven, wide)
    made = form.encode(coded)
    assert torch.equal(made["weight_zero_point"], (coded.zero - 8).to(torch.int8))
    assert torch.equal(form.read(made, uneven, "m").dequantize(), coded.dequantize())
    with pytest.raises(UserError, match="1, 1"):
        form.read(made | {"weight_zero_point": made["weight_zero_point"][:1, :1]}, uneven, "m")
    described["block_structure"] = [2, 32]
    with pytest.raises(UserError, match=r"'block' \[2, 32\]; group, channel, tensor and blocks of one row are read"):
        form.scheme(config, "m")
    for others in ([uneven], [uneven, Scheme(bits=4, group=0, symmetric=False)], [wide, Scheme(bits=4, group=32)]):
        assert not CompressedTensors().arranged_for(others).blocks


def test_what_transformers_does_not_load_is_known() -> None:
    form, even, fp8 = CompressedTensors(), Scheme(bits=4, group=32), Scheme(kind="fp8", bits=8, group=0)
    uneven, rows = Scheme(bits=4, group=32, symmetric=False), Scheme(bits=4, group=0, symmetric=False)
    some, more = "layers.0.mlp.experts.0.up_proj", "layers.0.mlp.experts.1.up_proj"
    assert not form.transformers_limit({"m": rows, "n": rows}, ["o"])
    assert not form.transformers_limit({"m": uneven, "n": even}, [])
    assert not form.transformers_limit({"m": uneven, some: even, more: even}, [])
    assert not form.transformers_limit({"m": fp8}, [some, more])
    assert "rows with a zero point" in form.transformers_limit({"m": rows, "n": uneven}, [])
    assert "experts have zero points" in form.transformers_limit({some: uneven, more: uneven}, [])
    rounded = Scheme(bits=8, group=0, activations="int8")
    assert "experts round their inputs" in form.transformers_limit({"m": rounded, some: rounded, more: rounded}, [])
    assert not form.transformers_limit({"m": rounded}, [])
    small = Scheme(kind="nvfp4", bits=4, group=16)
    assert "experts in nvfp4" in form.transformers_limit({"m": small, some: small, more: small}, [])
    assert not form.transformers_limit({"m": small}, [])
    for schemes, plain in (({some: even, more: fp8}, []), ({some: even}, [more]), ({"m": even}, [some, more])):
        assert "experts are not all coded" in form.transformers_limit(schemes, plain)


def test_nf4_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(weight(), blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs = {"weight": packed, **{f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}}
    decoded = BitsAndBytes().decode(theirs, NF4_SCHEME, "m")
    torch.testing.assert_close(decoded.dequantize(), functional.dequantize_4bit(packed, state), rtol=1e-5, atol=1e-6)
    ours = BitsAndBytes().encode(fit_grid(weight(), NF4_SCHEME).code(weight()))
    assert torch.equal(ours["weight"], packed)
    apart = (ours["weight.absmax"].int() - theirs["weight.absmax"].int()).abs()
    assert apart.max() <= 1  # bitsandbytes' search on the CPU takes a neighbour near the middle between two
    assert apart.float().mean() < 0.01
    states = {name.removeprefix("weight."): t for name, t in ours.items() if name != "weight"}
    read = functional.QuantState.from_dict(states, torch.device("cpu"))
    back = functional.dequantize_4bit(ours["weight"], read)
    torch.testing.assert_close(back, BitsAndBytes().decode(ours, NF4_SCHEME, "m").dequantize(), rtol=1e-5, atol=1e-6)


@sampled(3)
@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_codes_move_between_layouts(form: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32), text, token_cache)
    convert(str(tmp_path / "small"), tmp_path / "other", form)
    torch.testing.assert_close(logits(tmp_path / "other"), logits(tmp_path / "small"), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "other/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == form
    with pytest.raises(UserError, match="exists already"):
        convert(str(tmp_path / "small"), tmp_path / "other", form)


DAMAGES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "scales that are no numbers": ("weight_scale", lambda t: t * float("nan")),
    "scales as whole numbers": ("weight_scale", lambda t: t.to(torch.int32)),
    "words as floats": ("weight_packed", lambda t: t.to(torch.float32)),
    "zero points as floats": ("weight_zero_point", lambda t: t.to(torch.float32)),
    "zero points cut off": ("weight_zero_point", lambda t: t[:1]),
    "zero points of other groups": ("weight_zero_point", lambda t: t[:, :1]),
    "a shape of three": ("weight_shape", lambda t: torch.tensor([1, 2, 3])),
    "a shape of floats": ("weight_shape", lambda t: t * float("nan")),
    "a shape of nothing": ("weight_shape", lambda t: t * 0),
}


@sampled(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_tensors_that_do_not_belong_together_are_a_sentence(
    name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """A file that somebody else wrote, or a disk: never a traceback, and never other weights."""
    small = tmp_path / "small"
    run(tiny, small, recipe_of("rtn", bits=4, group=32), text, token_cache)
    (small / "checksums.json").unlink()
    suffix, change = DAMAGES[name]
    shard = next(path for path in sorted(small.glob("*.safetensors")) if any(suffix in n for n in load_file(path)))
    tensors = load_file(shard)
    one = next(each for each in tensors if each.endswith(suffix))
    save_file(tensors | {one: change(tensors[one]).contiguous()}, shard)
    with pytest.raises(UserError, match=one.removesuffix(f".{suffix}")):
        load_model(str(small))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": float("nan")}, "group = nan"),
        ({"bits": "3"}, "bits = '3'"),
        ({"outliers": 1}, "outliers = 1"),
        ({"outliers": False}, "has plain scales and no outliers by config.json, and others in its files"),
        ({"activations": ["int8"]}, "unknown"),
        ({"kind": {}}, "kind = {}"),
        ({"shape": 3}, "by shape; a newer tightfit may read it"),
    ],
)
def test_descriptions_of_our_own_layout_are_checked(change: dict[str, object], said: str) -> None:
    form, scheme = Own(), Scheme(bits=3, group=16, symmetric=False, outliers=True)
    described = {"modules": {"m": {**asdict(scheme), **change}}}
    tensors = {"weight_packed": torch.zeros(16, 3, dtype=torch.int32), "weight_shape": torch.tensor([16, 32])}
    tensors |= {"weight_scale_codes": torch.zeros(1, 2, dtype=torch.int32), "outlier_starts": torch.zeros(17).int()}
    with pytest.raises(UserError, match=re.escape(said)):
        form.read(tensors, form.scheme(described, "m"), "m")


def test_codes_that_are_no_matrix_are_a_sentence() -> None:
    form, scheme = CompressedTensors(), Scheme(kind="fp8", bits=8, group=0)
    made = form.encode(fit_grid(weight(), scheme).code(weight()))
    with pytest.raises(UserError, match=r"m has codes of shape \[8192\] and scales of shape \[64, 1\]"):
        form.read(made | {"weight": made["weight"].flatten()}, scheme, "m")
    config = form.config({"m": scheme}, [])
    config["config_groups"]["group_0"]["weights"]["strategy"] = ["channel"]
    with pytest.raises(UserError, match="scales weights by \\['channel'\\]; group, channel"):
        form.scheme(config, "m")


def test_zero_points_of_our_own_layout_are_missed() -> None:
    scheme = Scheme(bits=5, group=32, symmetric=False)
    made = Own().encode(fit_grid(weight(), scheme).code(weight()))
    with pytest.raises(UserError, match="m has no weight_zero"):
        Own().read({name: tensor for name, tensor in made.items() if name != "weight_zero"}, scheme, "m")


def test_models_that_are_rotated_at_run_time_are_refused(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """As QuIP's of llm-compressor are; rotations that are in the weights already change nothing."""
    run(tiny, tmp_path / "small", recipe_of("rtn", group=32), text, token_cache)
    path = tmp_path / "small/config.json"
    config = json.loads(path.read_text())

    def rotated(*places: str) -> None:
        apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
        groups = {"v": {"type": "hadamard", "apply": apply}}
        config["quantization_config"]["transform_config"] = {"config_groups": groups}
        path.write_text(json.dumps(config))

    rotated("weight_input", "weight_output")
    load_model(str(tmp_path / "small"))
    rotated("input", "weight_input")
    with pytest.raises(UserError, match="transforms input at run time"):
        load_model(str(tmp_path / "small"))


def test_conversions_that_cannot_be(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no codes to write as gptq; quantize it first"):
        convert(str(tiny), tmp_path / "other", "gptq")
    run(tiny, tmp_path / "small", recipe_of("nf4"), text, token_cache)
    with pytest.raises(UserError, match="cannot hold"):
        convert(str(tmp_path / "small"), tmp_path / "other", "awq")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_conversion_makes_no_weight_infinite(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """Norms and embeddings of other programs' directories may be bf16; those of conversions are float16."""
    small = tmp_path / "small"
    run(tiny, small, recipe_of("rtn", bits=4, group=32), text, token_cache)
    (small / "checksums.json").unlink()
    shard = next(path for path in sorted(small.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    tensors = load_file(shard)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.bfloat16) * 1e5}, shard)
    with pytest.raises(UserError, match=r"model\.norm\.weight of .*small has a weight of .*, which no float16 can be"):
        convert(str(small), tmp_path / "other", "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_conversion_names_the_matrix_that_does_not_fit(
    text: Path, tokenizer: Tokenizer, token_cache: Path, tmp_path: Path
) -> None:
    """Before anything is written, as compressing into that layout does."""
    uneven = replace(SPEC, head_dim=10, heads=2, kv_heads=2)  # 20 outputs
    (tmp_path / "uneven").mkdir()
    write_model(tmp_path / "uneven", random_model(uneven), tokenizer)
    run(tmp_path / "uneven", tmp_path / "small", recipe_of("rtn", bits=4, group=4), text, token_cache)
    for form in ("gptq", "awq"):
        with pytest.raises(UserError, match=r"layers\.0\.self_attn\.[qkv]_proj cannot be written in the .* format"):
            convert(str(tmp_path / "small"), tmp_path / "other", form)


@pytest.mark.parametrize("scheme", [NF4_SCHEME, INT8_SCHEME], ids=Scheme.describe)
def test_experts_that_transformers_cannot_use(scheme: Scheme) -> None:
    """It stacks experts as it loads them: NF4's codes fail there, and those of LLM.int8 lose their scales."""
    with pytest.raises(UserError, match=r"experts.0.up_proj .*cannot use the codes of experts; keep those"):
        BitsAndBytes().check({"model.layers.0.mlp.experts.0.up_proj": scheme})
