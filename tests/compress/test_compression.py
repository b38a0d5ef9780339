"""A model compressed end to end: every method, killed and resumed, rotated, refused; what is loaded is the same."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.compress.held import assert_held_as_said
from tests.covering import sampled, thorough
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.conversion import convert
from tightfit.compress.cost import CompressionCost
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.compress.report import CompressionReport
from tightfit.compress.rounding.rotation import rotation
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.loading import load_into, load_model
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.saving import write_model
from tightfit.models.spec import Experts, Latent, ModelSpec, Rope
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.report.compression_report import write_report
from tightfit.serve.weights.joint import can_join
from tightfit.writer_lock import locked_beside

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 8},
    "gptq": {"bits": 4, "group": 32},
    "round": {"bits": 4, "group": 32, "steps": 5},
    "awq": {"bits": 4, "group": 32},
    "smoothquant": {},
    "spqr": {"bits": 3},
    "nf4": {},
    "llm.int8": {},
    "fp8": {"activations": "fp8"},
    "mxfp4": {},
    "nvfp4": {},
    "binary": {"group": 32},
    "rotate+gptq": {"bits": 4, "group": 32},
    "gptq-groups": {"bits": 4, "group": 32},
}
TOKENS = torch.arange(40)[None] % 250


def run(model: Path, out: Path, recipe: Recipe, text: Path, cache: Path, **more: Any) -> CompressionReport:
    job = CompressionJob(
        model=str(model), out=out, recipe=recipe, data=(str(text),), samples=8, length=64, cache=cache, **more
    )
    return compress(job, lambda cost: None, lambda done, total, layer: None)


def logits(source: Path, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found = load_model(str(source)).model(tokens).logits
    assert found is not None
    return found


def recipe_for(name: str) -> Recipe:
    if name == "gptq-groups":
        return recipe_of("gptq", act_order="groups", **METHODS[name])
    return recipe_of(name, **METHODS[name])


@sampled(5)
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    report = run(tiny, tmp_path / "small", recipe_for(name), text, token_cache)
    model = load_model(str(tmp_path / "small")).model
    assert isinstance(model.layers[0].attention.q, QuantizedLinear)
    assert report.measured.result_bytes < report.predicted.original_bytes * (1 if name.startswith("rotate") else 0.9)
    assert report.measured.result_bytes == pytest.approx(report.predicted.result_bytes, abs=40_000)  # headers
    assert_held_as_said(tmp_path / "small")
    wanted, made = logits(tiny), logits(tmp_path / "small")
    error = float((made - wanted).square().mean() / wanted.square().mean())
    assert error < {"binary": 1.5, "spqr": 0.1}.get(name, 0.05), error
    assert [layer.index for layer in report.layers] == [0, 1]
    assert all(layer.layer_error is not None and layer.layer_error < 1 for layer in report.layers)
    # a dense decoder filled from the codes computes the same, but for rounded activations
    dense = Decoder(model.spec)
    load_into(dense, str(tmp_path / "small"))
    if name not in ("smoothquant", "llm.int8", "fp8"):
        torch.testing.assert_close(dense(TOKENS).logits, made, rtol=1e-4, atol=1e-4)


def test_methods_with_data_beat_rounding(
    tiny: Path, text: Path, tokenizer: Tokenizer, token_cache: Path, tmp_path: Path
) -> None:
    tokens = torch.tensor(tokenizer.encode(text.read_text()[500:1500]))[None, :128]
    wanted = logits(tiny, tokens)
    errors = {}
    for name in ("rtn", "awq", "gptq"):
        run(tiny, tmp_path / name, recipe_of(name, bits=3, group=32), text, token_cache)
        errors[name] = float((logits(tmp_path / name, tokens) - wanted).square().mean())
    assert errors["awq"] < errors["rtn"]
    assert errors["gptq"] < errors["rtn"]


@sampled(2)
@pytest.mark.parametrize("recipe", [recipe_of(name, **METHODS[name]) for name in ("gptq", "round")], ids=str)
def test_killed_and_run_again(
    recipe: Recipe, tiny: Path, text: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny, tmp_path / "whole", recipe, text, token_cache)

    def killed(model: Decoder, index: int, *rest: Any, **more: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return compress_layer(model, index, *rest, **more)

    monkeypatch.setattr("tightfit.compress.compression.compress_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "small", recipe, text, token_cache)
    assert not (tmp_path / "small").exists()
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"unfinished work .* differs in its recipe"):
        run(tiny, tmp_path / "small", recipe_of("gptq", bits=3, group=32), text, token_cache)
    resumed = run(tiny, tmp_path / "small", recipe, text, token_cache)
    assert resumed.resumed_layers == 1
    assert [layer.errors for layer in resumed.layers] == [layer.errors for layer in whole.layers]
    for file in sorted((tmp_path / "whole").glob("*.safetensors")):
        ours, theirs = (load_tensors(folder / file.name) for folder in (tmp_path / "whole", tmp_path / "small"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        path.name for path in (tmp_path / "small").iterdir()
    }
    assert not list(tmp_path.glob(".*"))


def test_what_lies_beside_comes_before_the_name(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """Killed while the report is written, nothing is lost: the next run has all layers, and writes it."""

    def killed(report: CompressionReport, folder: Path) -> None:
        (folder / "report.json").write_text("half of a report")
        raise KeyboardInterrupt

    job = CompressionJob(model=str(tiny), out=tmp_path / "small", recipe=recipe_of("rtn", bits=8), cache=token_cache)
    with pytest.raises(KeyboardInterrupt):
        compress(job, lambda cost: None, lambda *_: None, killed)
    assert not job.out.exists()
    resumed = compress(job, lambda cost: None, lambda *_: None, write_report)
    assert resumed.resumed_layers == SPEC.layers
    assert len(json.loads((job.out / "report.json").read_text())["layers"]) == SPEC.layers


def load_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_nothing_is_written_over(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="exists already"):
        run(tiny, tmp_path / "mine", recipe_of("rtn", bits=8), text, token_cache)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists already"):
        run(tiny, tmp_path / "link", recipe_of("rtn", bits=8), text, token_cache)


def test_an_output_has_one_writer_at_a_time(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """Two at once would sweep each other's unfinished files away."""
    out = tmp_path / "small"
    with locked_beside(out), pytest.raises(UserError, match=rf"small is being written by process {os.getpid()} on"):
        run(tiny, out, recipe_of("rtn", bits=8), text, token_cache)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00003-of-00004.safetensors"])
def test_a_full_disk_is_a_sentence_and_what_is_done_stays(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe, out = recipe_of("rtn", bits=8), tmp_path / "small"

    def full(real: Any) -> Any:
        def write(*given: Any, **options: Any) -> Any:
            if any(name in str(each) for each in given if isinstance(each, Path)):
                raise OSError(28, "No space left on device")
            return real(*given, **options)

        return write

    monkeypatch.setattr(Path, "write_text", full(Path.write_text))
    monkeypatch.setattr("tightfit.compress.working_directory.save_tensors", full(save_tensors))
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device; make room and run the same again"):
        run(tiny, out, recipe, text, token_cache)
    assert not out.exists()
    monkeypatch.undo()
    assert run(tiny, out, recipe, text, token_cache).resumed_layers >= 1 - name.endswith(".safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_flipped_bit_in_a_compressed_model_is_found(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Every file of it is in the list of checksums, which loading and converting compare."""
    run(tiny, tmp_path / "small", recipe_of("rtn", bits=8), text, token_cache)
    listed = json.loads((tmp_path / "small" / "checksums.json").read_text())
    weights = sorted((tmp_path / "small").glob("*.safetensors"))
    assert {path.name for path in weights} <= set(map(str, _names(listed)))
    content = bytearray(weights[-1].read_bytes())
    content[-5] ^= 4
    weights[-1].write_bytes(content)
    with pytest.raises(UserError, match=rf"{weights[-1].name}.*(checksum|damaged)"):
        load_model(str(tmp_path / "small"))
    with pytest.raises(UserError, match=r"checksum|damaged"):
        convert(str(tmp_path / "small"), tmp_path / "other", "compressed-tensors")
    assert not (tmp_path / "other").exists()


def _names(listed: Any) -> list[Any]:
    """Whatever is a key of the list, at any depth."""
    if not isinstance(listed, dict):
        return []
    return [*listed, *(name for value in listed.values() for name in _names(value))]


def test_a_recipe_of_several_schemes(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        (
            Step(method="gptq", bits=4, group=32),
            Step(method="rtn", bits=8, layers=("*.mlp.down",)),
            Step(method="keep", layers=("layers.0.*",)),
        )
    )
    run(tiny, tmp_path / "small", recipe, text, token_cache)
    model = load_model(str(tmp_path / "small")).model
    assert not isinstance(model.layers[0].mlp.down, QuantizedLinear)
    assert (model.layers[1].mlp.down.scheme.bits, model.layers[1].mlp.up.scheme.bits) == (8, 4)
    assert can_join(model)  # plain and packed layers beside one another, each set of one input coded alike


@sampled(2)
@pytest.mark.parametrize(
    ("method", "options", "group"),
    [
        ("rtn", {}, 64),
        thorough("gptq", {"bits": 3}, 64),
        ("binary", {}, 64),
        ("rtn", {"bits": 4, "group": 32}, 32),
        ("rtn", {"bits": 8}, 0),
        thorough("spqr", {}, 16),
        ("nvfp4", {}, 16),
    ],
)
def test_groups_that_are_left_open_are_the_largest_that_cut_rows_whole(
    method: str, options: dict[str, Any], group: int, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Rows of 64 inputs have no groups of 128, the usual ones; what is said is done, and what has its own keeps it."""
    run(tiny, tmp_path / "small", recipe_of(method, **options), text, token_cache)
    layer = load_model(str(tmp_path / "small")).model.layers[0]
    assert isinstance(layer.mlp.up, QuantizedLinear)
    assert layer.mlp.up.scheme.group == group


def test_rotation_changes_nothing_but_rounding(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """With 8 bits the rotated model is the same function; R is orthogonal for widths that are no power of two."""
    run(tiny, tmp_path / "turned", recipe_of("rotate+rtn", bits=8, group=16, symmetric=False), text, token_cache)
    torch.testing.assert_close(logits(tmp_path / "turned"), logits(tiny), rtol=0.05, atol=0.05)
    for size in (48, 64, 9):
        torch.testing.assert_close(rotation(size) @ rotation(size).T, torch.eye(size, dtype=torch.float64))


FAMILIES = {
    "phi3": replace(SPEC, family="phi3", tied=False),
    "gpt2": replace(
        SPEC,
        family="gpt2",
        kv_heads=4,
        norm="layer",
        gated=False,
        activation="gelu_tanh",
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
    "qwen3_moe": replace(
        SPEC, family="qwen3_moe", qk_norm=True, tied=False, experts=Experts(count=4, per_token=2, mlp_size=64)
    ),
    "deepseek_v3": replace(
        SPEC,
        family="deepseek_v3",
        kv_heads=4,
        tied=False,
        latent=Latent(kv_rank=32, rope_dim=8, value_dim=8, query_rank=32),
        experts=Experts(
            count=4,
            per_token=2,
            mlp_size=64,
            score="sigmoid",
            corrected=True,
            shared_size=64,
            shared_gated=False,
            dense_layers=(0,),
        ),
    ),
    "gemma2": replace(
        SPEC,
        family="gemma2",
        norm="rms_plus_one",
        sandwich_norms=True,
        activation="gelu_tanh",
        embedding_scale=8.0,
        attention_softcap=50.0,
        logit_softcap=30.0,
        rope=Rope(),
    ),
}


@sampled(4)
@pytest.mark.parametrize(
    ("method", "name"),
    [("awq", name) for name in FAMILIES]
    + [("gptq", name) if "_" in name else thorough("gptq", name) for name in FAMILIES],
)
def test_families(name: str, method: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path) -> None:
    spec: ModelSpec = FAMILIES[name]
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(spec), tokenizer)
    run(tmp_path / "model", tmp_path / "small", recipe_of(method, bits=8, group=32), text, token_cache)
    assert_held_as_said(tmp_path / "small")
    wanted, made = logits(tmp_path / "model"), logits(tmp_path / "small")
    assert float((made - wanted).square().mean() / wanted.square().mean()) < 1e-3


@pytest.mark.parametrize(
    ("name", "method"),
    [("phi3", "mxfp4"), ("gpt2", "gptq-groups"), thorough("phi3", "gptq-groups"), thorough("gpt2", "mxfp4")],
)
def test_parts_that_files_stack(
    name: str, method: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Query, key and value are one tensor there: coded row by row, or with inputs in one order, they can be."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES[name]), tokenizer)
    run(tmp_path / "model", tmp_path / "small", recipe_for(method), text, token_cache)
    assert_held_as_said(tmp_path / "small")
    wanted, made = logits(tmp_path / "model"), logits(tmp_path / "small")
    assert float((made - wanted).square().mean() / wanted.square().mean()) < 0.05


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_that_transformers_leaves_out_codes_of_gpt2_is_said(form: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It draws those weights at random, and says so in a warning."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES["gpt2"]), tokenizer)
    recipe, said = recipe_of("rtn", bits=4, group=32), list[CompressionCost]()
    job = CompressionJob(model=str(tmp_path / "model"), out=tmp_path / "small", recipe=recipe, format=form)
    compress(job, said.append, lambda done, total, layer: None)
    assert said[0].transformers_limit.startswith("it has no linear layers in gpt2 models") is (form != "gptq")
    for other in ("compressed-tensors", "gptq"):
        exported = convert(str(tmp_path / "small"), tmp_path / other, other)
        assert exported.transformers_limit.startswith("it has no linear layers in gpt2 models") is (other != "gptq")


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (recipe_of("nf4"), "and nf4 of its parts cannot be made one"),
        (recipe_of("spqr", bits=3), "of its parts cannot be made one"),
        (Recipe((Step(method="rtn", bits=8, layers=("*.q",)),)), "but only some of its parts are quantized"),
    ],
    ids=("nf4", "spqr", "queries alone"),
)
def test_parts_that_are_no_tensor_are_refused_before_work(
    name: str,
    recipe: Recipe,
    said: str,
    tokenizer: Tokenizer,
    text: Path,
    token_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(FAMILIES[name]), tokenizer)
    monkeypatch.delattr("tightfit.compress.compression.compress_layer")
    with pytest.raises(UserError, match=f"is one tensor in files .*{said}"):
        run(tmp_path / "model", tmp_path / "other", recipe, text, token_cache)
    assert not (tmp_path / "other").exists()


def test_a_damaged_result_is_a_sentence(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("gptq", bits=4, group=32), text, token_cache)
    config = json.loads((tmp_path / "small/config.json").read_text())
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    for change, said in (
        ({"quant_method": "aqlm"}, "aqlm.*not read"),
        ({"quant_method": ["gptq"]}, "not read"),
        ({"config_groups": {}}, "no config group"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": eight}}}, "words"),
    ):
        bad = tmp_path / "bad"
        shutil.copytree(tmp_path / "small", bad)
        made = config | {"quantization_config": config["quantization_config"] | change}
        (bad / "config.json").write_text(json.dumps(made))
        with pytest.raises(UserError, match=said):
            load_model(str(bad))
        shutil.rmtree(bad)


@pytest.mark.parametrize(("form", "said"), [("awq", "20 outputs fill no whole words"), ("gptq", "a matrix of 20 × 64")])
def test_shapes_that_a_layout_cannot_hold_are_refused_before_work(
    form: str, said: str, tokenizer: Tokenizer, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Nothing is left behind that the same command would go on with."""
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", random_model(replace(SPEC, kv_heads=2, head_dim=10)), tokenizer)
    recipe = recipe_of("rtn", bits=4, group=8)
    with pytest.raises(UserError, match=f"cannot be written in the {form} format: {said}"):
        run(tmp_path / "model", tmp_path / "small", recipe, text, token_cache, format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_refused_before_work(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    for recipe, more, said in (
        (recipe_of("gptq", bits=4, group=48), {}, "no whole groups of 48"),
        (recipe_of("gptq", bits=4, layers=("nothing*",)), {}, "matrices, such as layers.0.attention.q"),
        (recipe_of("nf4"), {"format": "gptq"}, "cannot hold"),
        (recipe_of("rtn", bits=4, group=32), {"format": "foo"}, "unknown"),
        (recipe_for("gptq-groups"), {"format": "awq"}, "awq has no groups out of order"),
    ):
        with pytest.raises(UserError, match=said):
            run(tiny, tmp_path / "small", recipe, text, token_cache, **more)
    assert list(tmp_path.iterdir()) == []
