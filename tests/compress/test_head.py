"""A coded output projection: its codes against rounding by hand and GPTQ of the whole model, its bytes, what is written
for others, what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.conftest import Run
from tests.compress.conftest import SPEC, random_model
from tests.compress.held import assert_held_as_said, counted_bytes
from tests.compress.test_compression import TOKENS, logits, run
from tests.covering import sampled
from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.conversion import convert
from tightfit.compress.cost import predict
from tightfit.compress.fit.bit_choice import settled_for
from tightfit.compress.head_compression import code_head
from tightfit.compress.layer_compression import code_weight, compress_layer
from tightfit.compress.recipe import Recipe, Step, read_recipe, recipe_of
from tightfit.compress.rounding.gptq import gptq, inverse_factor
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_into, load_model
from tightfit.models.quantized.described import described_scheme
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.matrices import HEAD
from tightfit.models.saving import export_model, write_model
from tightfit.models.text.tokenizer import Tokenizer

APART = replace(SPEC, tied=False)
LAYERS: dict[str, Any] = {"bits": 4, "group": 32}


@pytest.fixture(scope="module")
def apart(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output projection is a matrix of its own."""
    folder = tmp_path_factory.mktemp("apart")
    write_model(folder, random_model(APART), tokenizer)
    return folder


def coded_head(folder: Path) -> QuantizedLinear:
    head: Any = load_model(str(folder)).model.head
    assert isinstance(head, QuantizedLinear)
    return head


def with_plain_head(folder: Path) -> Decoder:
    """The model in `folder` with the matrix that its output projection's codes stand for."""
    model = load_model(str(folder)).model
    head = torch.nn.Linear(SPEC.hidden_size, SPEC.vocab_size, bias=False)
    head.weight = torch.nn.Parameter(coded_head(folder).dequantize(torch.float32), requires_grad=False)
    model.head = head
    return model


def by_hand(weight: Tensor, bits: int) -> Tensor:
    """8 bits: symmetric, a float32 scale a row. 4 bits: asymmetric, float16 scales of groups of 32, as the layers'."""
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        return (weight / scale).round().clamp(-128, 127) * scale
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    return (((groups / scale + zero).round().clamp(0, 15) - zero) * scale).flatten(1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "apart"])
def test_codes_are_the_nearest(
    is_tied: bool, bits: int, tiny: Path, apart: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Beside layers coded too; logits and losses are those of a plain projection with these numbers."""
    source = tiny if is_tied else apart
    report = run(source, tmp_path / "small", recipe_of("rtn", head=bits, **LAYERS), text, token_cache)
    assert report.recipe.endswith(f"then rtn int{bits} {'per channel' if bits == 8 else 'g32 asym'} for head")
    model, original = load_model(str(tmp_path / "small")).model, load_model(str(source)).model
    found = coded_head(tmp_path / "small").dequantize(torch.float32)
    torch.testing.assert_close(found, by_hand(original.head.weight, bits), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.embed.weight, original.embed.weight.half().float(), rtol=0, atol=0)
    made, wanted = logits(tmp_path / "small"), with_plain_head(tmp_path / "small")(TOKENS).logits
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    labels = TOKENS.roll(-1, 1)
    with torch.no_grad():
        loss = model(TOKENS, labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(wanted[0], labels[0], reduction="sum"), rtol=1e-5, atol=1e-4)
    dense = Decoder(model.spec)
    load_into(dense, str(tmp_path / "small"))
    torch.testing.assert_close(dense.head.weight, found, rtol=0, atol=0)


def test_gptq_codes_it_for_what_it_reads(apart: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """The projection of a model whose layers stay plain: its codes are GPTQ's for the final norm's outputs, which the
    whole model gives, and its outputs change by far less than with the nearest codes."""
    step, rounded = (Step(method=method, bits=4, group=32, layers=(HEAD,)) for method in ("gptq", "rtn"))
    job = CompressionJob(
        model=str(apart), out=tmp_path / "gptq", recipe=Recipe((step,)), data=(str(text),), samples=8, length=64
    )
    job = replace(job, cache=token_cache)
    told: list[tuple[int, int]] = []
    report = compress(job, lambda cost: None, lambda done, total, report: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]  # both layers, and the projection
    run_without_text(apart, tmp_path / "rtn", Recipe((rounded,)))
    model = load_model(str(apart)).model
    calibration = job.read_calibration(model.spec)
    assert calibration is not None
    read: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, given, made: read.append(made.flatten(0, 1).double()))
    with torch.no_grad():
        model(torch.as_tensor(calibration.tokens))
    x = torch.cat(read)
    scheme = step.scheme()
    assert scheme is not None
    wanted = gptq(model.head.weight.detach(), (x.T @ x / len(x)).float(), scheme).dequantize()
    found = coded_head(tmp_path / "gptq").dequantize(torch.float32)
    assert float((found - wanted).abs().gt(1e-3).float().mean()) < 0.02  # a code moves where two are as near
    errors = [
        float((x @ (codes.double() - model.head.weight.double()).T).square().mean())
        for codes in (found, coded_head(tmp_path / "rtn").dequantize(torch.float32))
    ]
    assert errors[0] < errors[1] / 2, errors
    whole = float((x @ model.head.weight.detach().double().T).square().mean())
    assert report.head_error == pytest.approx(errors[0] / whole, rel=1e-3)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bytes_are_those_predicted(bits: int, tiny: Path, apart: Path, tmp_path: Path) -> None:
    """Of the files, of memory and of the projection alone; an embedding that was tied stays whole beside it."""
    recipe = recipe_of("rtn", head=bits, **LAYERS)
    for spec, source in ((SPEC, tiny), (APART, apart)):
        small = tmp_path / source.name
        run_without_text(source, small, recipe)
        held = assert_held_as_said(small)
        assert held.head is not None
        assert held.head.bytes == sum(each.nbytes for each in coded_head(small).buffers())
        assert held.plain_bytes == 2 * (spec.vocabulary_params + spec.norm_params * (2 * spec.layers + 1))
        files = [load_file(path) for path in small.glob("*.safetensors")]
        stored = sum(tensor.nbytes for file in files for name, tensor in file.items() if not name.endswith("_shape"))
        assert stored == predict(spec, settled_for(recipe, spec), 1, 1).result_bytes


def run_without_text(source: Path, out: Path, recipe: Recipe, **more: Any) -> None:
    from tests.compress.test_held_weights import rounded

    rounded(source, out, recipe, **more)


def test_a_recipe_for_it_alone(apart: Path, tmp_path: Path) -> None:
    """Layers stay plain, and `*` does not mean it."""
    (tmp_path / "recipe.yaml").write_text("- {method: rtn, bits: 4, group: 32, layers: head}")
    run_without_text(apart, tmp_path / "small", read_recipe(tmp_path / "recipe.yaml"))
    held = assert_held_as_said(tmp_path / "small")
    assert held.head is not None
    assert (held.scheme, held.expanded_bytes, held.coded_bytes) == (None, 0, held.head.bytes)
    run_without_text(apart, tmp_path / "layers", recipe_of("rtn", bits=8))
    assert assert_held_as_said(tmp_path / "layers").head is None


def test_after_a_rotation(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("rotate+rtn", bits=8, head=8), text, token_cache)
    made, wanted = logits(tmp_path / "small"), logits(tiny)
    assert float((made - wanted).square().mean() / wanted.square().mean()) < 1e-3
    assert_held_as_said(tmp_path / "small")


@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_formats_that_hold_it(form: str, apart: Path, tmp_path: Path) -> None:
    """GPTQ's config says `lm_head: true`, compressed-tensors' names it; the same codes in both."""
    recipe = recipe_of("rtn", bits=4, group=64, head=4)
    run_without_text(apart, tmp_path / "small", recipe, format=form)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in config.get("ignore", [])
    assert form != "gptq" or config["lm_head"] is True
    other = "gptq" if form == "compressed-tensors" else "compressed-tensors"
    convert(str(tmp_path / "small"), tmp_path / "other", other)
    assert_held_as_said(tmp_path / "other")
    assert torch.equal(logits(tmp_path / "small"), logits(tmp_path / "other"))


def test_gguf_holds_what_the_codes_stand_for(apart: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run_without_text(apart, tmp_path / "small", recipe_of("rtn", bits=8, head=8))
    export_model(str(tmp_path / "small"), tmp_path / "small.gguf", form="gguf", dtype="fp32")
    found = load_model(str(tmp_path / "small.gguf")).model.head.weight
    torch.testing.assert_close(found, coded_head(tmp_path / "small").dequantize(torch.float32), rtol=0, atol=0)


def test_settings_of_one_module_are_read() -> None:
    """As GPTQModel writes a projection that has other bits than the layers."""
    dynamic = {"-:.*q_proj": {}, "+:lm_h": {"bits": 8, "group_size": 32}, "model": {"sym": False}}
    config = {"bits": 4, "group_size": 64, "sym": True, "dynamic": dynamic}
    found = [described_scheme("gptq", config, module).describe() for module in ("lm_head", "model.x", "other")]
    assert found == ["int8 g32", "int4 g64 asym", "int4 g64"]
    with pytest.raises(UserError, match="more than 32 regular expressions"):
        described_scheme("gptq", config | {"dynamic": dict.fromkeys(map(str, range(33)))}, "lm_head")


@pytest.mark.parametrize(
    ("options", "form", "said"),
    [
        ({"bits": 4, "group": 64, "head": 4}, "awq", "lm_head is int4 g64 asym, which the awq format cannot hold: its"),
        ({"bits": 4, "group": 64, "head": 8}, "gptq", "GPTQ has one scheme for all; use compressed-tensors"),
        ({"bits": 8, "head": 8}, "bitsandbytes", "which the bitsandbytes format cannot hold: it has NF4 and LLM.int8"),
    ],
)
def test_formats_that_do_not(options: dict[str, Any], form: str, said: str, apart: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run_without_text(apart, tmp_path / "small", recipe_of("rtn", **options), format=form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- {method: awq, layers: ['*', head]}", r"layers names head, but the method is awq; .* by rtn or gptq: give"),
        ("- {method: gptq, act_order: groups, layers: head}", "act_order is groups, but head is read in plain groups"),
        ("- {method: nf4, layers: head}", "layers names head, but the method is nf4"),
        ("- {method: wanda, layers: head}", "layers names head, but the method is wanda"),
        ("- {method: rtn, bits: 6, layers: head}", "head is to be int6 g128 asym; .* integers of 2, 4, 8 bits"),
        ("- {method: rtn, bits: 8, group: -1, layers: head}", "head is to be int8 per tensor; .* in groups or rows"),
        ("- {method: rtn, numbers: mxfp4, layers: head}", "head is to be mxfp4"),
        ("- {method: rtn, bits: 8, activations: int8, layers: head}", "beside unrounded inputs"),
    ],
)
def test_recipes_that_cannot_code_it(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(UserError, match=said):
        read_recipe(tmp_path / "recipe.yaml")


def test_a_pattern_does_not_mean_it(apart: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("- {method: rtn, bits: 4, group: 32, layers: 'hea?'}")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(UserError, match=r"layers 'hea\?' names none of .* the output projection is head\)"):
        run_without_text(apart, tmp_path / "small", recipe)


@sampled(2)
@pytest.mark.parametrize("moment", ["while it is coded", "after it"])
def test_killed_and_run_again(
    moment: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and measured loss are those of a run that nobody disturbed; other bits are another recipe."""
    recipe = recipe_of("gptq", head=4, **LAYERS)
    whole = run(tiny, tmp_path / "whole", recipe, text, token_cache)

    def killed(*given: Any, **more: Any) -> Any:
        if moment == "while it is coded" or given[1] == 1:
            raise KeyboardInterrupt
        return compress_layer(*given, **more)

    name = "code_head" if moment == "while it is coded" else "compress_layer"
    monkeypatch.setattr(f"tightfit.compress.compression.{name}", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "small", recipe, text, token_cache)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"unfinished work .* differs in its recipe"):
        run(tiny, tmp_path / "small", recipe_of("gptq", head=8, **LAYERS), text, token_cache)
    again = run(tiny, tmp_path / "small", recipe, text, token_cache)
    assert again.head_error == pytest.approx(whole.head_error, rel=1e-3)
    assert again.measured.kl == pytest.approx(whole.measured.kl, rel=1e-3)
    for file in sorted((tmp_path / "whole").glob("*.safetensors")):
        ours, theirs = load_file(file), load_file(tmp_path / "small" / file.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[each], theirs[each]) for each in ours)


def test_the_measured_loss_is_that_of_both_ends(apart: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    """With layers in 8 bits, nearly all of it comes from the projection."""
    with_head, without = (
        run(apart, tmp_path / str(head), recipe_of("rtn", bits=8, head=head), text, token_cache) for head in (2, None)
    )
    assert with_head.measured.kl is not None
    assert without.measured.kl is not None
    assert with_head.measured.kl > 10 * without.measured.kl


@pytest.mark.parametrize("bits", [8, None], ids=["coded", "plain"])
def test_a_projection_of_its_own_is_not_ignored_where_the_config_ties_it(
    bits: int | None, apart: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers computes with it, where it can."""
    small = tmp_path / "small"
    run_without_text(apart, small, recipe_of("rtn", head=bits, **LAYERS))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    told = "has codes of lm_head, which config" if bits else "lm_head.weight in .* is not model.embed_tokens.weight"
    for load in (load_model, lambda path: load_into(random_model(SPEC), path)):
        with pytest.raises(UserError, match=f"{told}.* ties.*set tie_word_embeddings to false"):
            load(str(small))
    with pytest.raises(UserError, match=told):
        convert(str(small), tmp_path / "other", "gptq")
    if bits is not None:
        planned = Run(capfd, monkeypatch, "plan", str(small), "--on", "T4", "--serve", "--context", "64")
        assert (planned.code, "has codes of lm_head" in planned.err) == (2, True)


@pytest.mark.parametrize(
    "step",
    [
        Step(method="gptq", bits=4, group=32, layers=(HEAD,)),
        Step(method="gptq", bits=8, act_order="none", layers=(HEAD,)),
    ],
    ids=["by importance", "in order"],
)
def test_inputs_are_inverted_once_for_all_rows(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the codes of pieces that are coded by themselves."""
    rows, model, inversions = 100, random_model(APART), list[int]()
    stream = [torch.randn(2, 40, SPEC.hidden_size)]
    seen = InputStatistics(SPEC.hidden_size, torch.device("cpu"))
    seen.add(model.norm(stream[0]))
    pieces = [code_weight(HEAD, piece.detach(), seen, step) for piece in model.head.weight.split(rows)]

    def counted(hessian: Tensor, damping: float) -> Tensor:
        inversions.append(len(hessian))
        return inverse_factor(hessian, damping)

    monkeypatch.setattr("tightfit.compress.rounding.gptq.inverse_factor", counted)
    monkeypatch.setattr("tightfit.compress.head_compression.HEAD_ROWS", rows)
    coded, _ = code_head(model, stream, step)
    assert inversions == [SPEC.hidden_size]
    assert len(pieces) > 2
    assert torch.equal(coded.codes, torch.cat([piece.codes for piece in pieces]))
    assert torch.equal(coded.dequantize(), torch.cat([piece.dequantize() for piece in pieces]))


def test_planned_as_it_is_held(
    apart: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte; beyond the requests for which kernels read it packed, also expanded."""
    small = tmp_path / "small"
    run_without_text(apart, small, Recipe((Step(method="rtn", bits=8, layers=("head",)),)))
    arguments = ("plan", str(small), "--on", "T4", "--serve", "--context", "64", "--json")
    few, many = (Run(capfd, monkeypatch, *arguments, "--batch", str(count)).json for count in (128, 129))
    for planned in (few, many):
        weights = [line for line in planned["ledger"] if line["component"] == "weights"]
        assert [line["bytes"] for line in weights] == [counted_bytes(small)] * 2
    assert few["quantize"] == "int8 per channel"
    expanded = [
        [line["bytes"] for line in planned["ledger"] if line["detail"] == "an expanded matrix"]
        for planned in (few, many)
    ]
    assert expanded == [[], [2 * SPEC.vocabulary_params]]


def test_on_the_command_line(
    apart: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tightfit(*words: object) -> Run:
        return Run(capfd, monkeypatch, *map(str, words))

    given = ("compress", apart, "--method", "rtn", "--bits", 4)
    made = tightfit(*given, "--head", 8, "--out", tmp_path / "small", "--json")
    assert made.json["recipe"] == "rtn int4 g64 asym, then rtn int8 per channel for head"
    weight = load_model(str(apart)).model.head.weight.detach()
    lost = coded_head(tmp_path / "small").dequantize(torch.float32) - weight
    assert made.json["head_error"] == pytest.approx(float(lost.square().sum() / weight.square().sum()), rel=1e-3)
    told = tightfit(*given, "--head", 8, "--out", tmp_path / "told")
    assert f"output projection  error {made.json['head_error']:.2e}" in told.err
    assert re.search(rf"^ *head .* {made.json['head_error']:.1e} *$", told.out, re.MULTILINE)
    assert len(tightfit("sample", tmp_path / "small", "-p", "the ", "-n", 4, "--json").json["continuations"]) == 1
    for arguments, said in (
        (("--head", 6), "integers of 2, 4, 8 bits"),
        (("--fit", "T4", "--head", 8), "--fit chooses bits itself"),
        (("--method", "svd", "--head", 8), "belong to other methods than svd"),
    ):
        refused = tightfit("compress", apart, *arguments, "--out", tmp_path / "other")
        assert refused.code == 2
        assert said in refused.err
        assert len(refused.err.strip().splitlines()) == 1
        assert not (tmp_path / "other").exists()
