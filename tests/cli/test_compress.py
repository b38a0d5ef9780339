"""Compressing as a user does it: compress, evaluate against the original, sample, export; mistakes in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compress.conftest import SPEC, text, tiny, tokenizer
from tests.compress.test_fitting import sized
from tests.covering import sampled, thorough
from tightfit.compress.cost import CompressionCost
from tightfit.compress.fit.fitting import fit_ledger
from tightfit.compress.report import CompressionReport, LayerReport
from tightfit.models.loading import load_model
from tightfit.report.compression import print_compression

__all__ = ["text", "tiny", "tokenizer"]


def test_from_a_model_to_a_file_for_others(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path, tightfit: Any
) -> None:
    small, cache = tmp_path / "small", ("--cache", token_cache)
    options = ("--method", "gptq", "--bits", 4, "--group", 32, "--data", text, "--samples", 4, "--seq", 64, *cache)
    made = tightfit("compress", tiny, *options, "--out", small)
    assert made.code == 0, made.err
    assert "will write" in made.err
    assert "layer 2/2" in made.err
    for word in ("predicted", "measured", "gptq int4 g32 asym", "compressed-tensors", ["mlp", "down"][1]):
        assert word in made.out
    assert "…" not in made.out, "numbers are cut off"
    compared = tightfit("evaluate", small, "--data", text, "--against", tiny, "--seq", 64, *cache, "--json").json
    assert compared["kl"]["mean"] > 0
    assert compared["loss"]["mean"] - compared["original_loss"]["mean"] == pytest.approx(
        compared["loss_difference"]["mean"]
    )
    assert 0.3 < compared["agreement"]["mean"] <= 1
    alone = tightfit("evaluate", small, "--data", text, "--seq", 64, *cache, "--json").json
    assert alone["loss"] == pytest.approx(compared["loss"]["mean"], rel=1e-4)
    itself = tightfit("evaluate", tiny, "--data", text, "--against", tiny, "--seq", 64, *cache)
    assert "1.0000 ± 0.0000" in itself.out
    assert len(tightfit("sample", small, "-p", "the ", "-n", 4, "--json").json["continuations"]) == 1
    assert tightfit("export", small, tmp_path / "other", "--format", "gptq").code == 0
    assert tightfit("export", small, tmp_path / "dense").code == 0
    assert tightfit("sample", tmp_path / "dense", "-p", "the ", "-n", 2, "--json").code == 0
    assert tightfit("export", tiny, tmp_path / "x.gguf", "--format", "gguf", "--dtype", "q4_0").code == 0


def test_files_of_all_types_are_planned_as_they_are_stored(tiny: Path, tmp_path: Path, tightfit: Any) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "x.gguf"
    assert tightfit("export", tiny, file, "--dtype", "q4_k_m").code == 0
    planned = tightfit("plan", file, "--on", "T4", "--serve", "--json")
    assert planned.code == 0, planned.err
    assert planned.json["quantize"] == "q5_0"
    weights = {line["bytes"] for line in planned.json["ledger"] if line["component"] == "weights"}
    assert weights == {sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)}


@pytest.mark.parametrize(("device", "whose"), [("cpu", "(whole process)"), ("cuda", "(GPU)")])
def test_whose_memory_was_measured_is_told(
    device: str, whose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = CompressionCost(result_bytes=2**30, original_bytes=2**31, memory_bytes=2**30, bits_per_weight=8, seconds=1.0)
    report = CompressionReport(
        path=tmp_path,
        recipe="rtn",
        format="gptq",
        layers=[LayerReport(0, {}, None, 1.0)],
        predicted=cost,
        measured=cost,
        resumed_layers=0,
        device=device,
    )
    print_compression(report, as_json=False)
    assert f"1.00 GiB {whose}" in capsys.readouterr().out


def test_errors_without_text_are_told_as_those_of_weights(tiny: Path, tmp_path: Path, tightfit: Any) -> None:
    """No outputs were seen; and a recipe that names every matrix is not printed whole."""
    names = ", ".join(f'"layers.{i}.{name}"' for i in range(2) for name in ("attention.?", "mlp.*") for _ in range(40))
    (tmp_path / "steps.yaml").write_text(f"- {{method: rtn, layers: [{names}]}}")
    made = tightfit("compress", tiny, "--recipe", tmp_path / "steps.yaml", "--out", tmp_path / "small")
    assert made.code == 0, made.err
    assert "relative squared error of weights" in made.out
    told = next(line for line in made.out.splitlines() if line.startswith("wrote "))
    assert len(told) < 400 + len(str(tmp_path))
    assert told.endswith("…; compressed-tensors)")


@sampled(4)
@pytest.mark.parametrize(
    "method",
    [
        ("--method", "wanda", "--pattern", "2:4"),
        ("--method", "structured", "--keep-layers", 1, "--keep-mlp", 96),
        ("--method", "whitened-svd", "--keep", 0.6),
        ("--fit", "T4", "--context", 100),
    ],
    ids=lambda method: str(method[1]),
)
def test_other_ways_to_shrink(
    method: tuple[Any, ...],
    tiny: Path,
    text: Path,
    token_cache: Path,
    tmp_path: Path,
    tightfit: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_card = sized(fit_ledger(SPEC, SPEC.params(), 100).peak_bytes())  # for 8 bits a weight
    monkeypatch.setattr("tightfit.hardware.machine.parse_machine", lambda text: small_card)
    small, cache = tmp_path / "small", ("--cache", token_cache)
    made = tightfit("compress", tiny, *method, "--data", text, "--samples", 4, "--seq", 64, *cache, "--out", small)
    assert made.code == 0, made.err
    assert "will write" in made.err
    assert ("expected perplexity" in made.err) == (method[0] == "--fit")
    record = json.loads((small / "report.json").read_text())
    assert record["measured"]["kl"] > 0
    [row] = [line.split() for line in made.out.splitlines() if "KL to the original" in line]
    expected = record["predicted"]["kl"]
    assert row[4:] == [*(["no", "estimate"] if expected is None else [f"{expected:.4f}"]), *row[-3:]]
    assert (expected is not None) == (method[0] == "--fit")
    assert row[-3:] == [f"{record['measured']['kl']:.4f}", "(calibration", "rows)"]
    compared = tightfit("evaluate", small, "--data", text, "--against", tiny, "--seq", 64, *cache, "--json").json
    assert compared["kl"]["mean"] > 0
    assert len(tightfit("sample", small, "-p", "the ", "-n", 4, "--json").json["continuations"]) == 1
    assert tightfit("export", small, tmp_path / "dense").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "gtpq"), "unknown"),
        (("--bits", "11"), "2 to 8"),
        (("--recipe", "missing.yaml"), "cannot read recipe missing.yaml: No such file"),
        (("--recipe", "missing.yaml", "--bits", "4"), "belong to --method"),
        (("--recipe", "missing.yaml", "--method", "svd"), "--method is svd, but a recipe has methods in its steps"),
        (("--fit", "T4", "--method", "structured"), "structured quantizes nothing"),
        (("--method", "rtn", "--group", "48"), "whole groups"),
        (("--keep-mlp", "48"), "--method structured"),
        (("--method", "structured", "--bits", "4"), "other methods than structured"),
        (("--method", "svd", "--format", "gptq"), "drop it"),
        (("--keep", "0.5"), "whitened-svd"),
        (("--fit", "T4", "--bits", "4"), "chooses bits itself"),
        (("--context", "100"), "name a card"),
        (("--field", "body"), "--field is body, which is about --data"),
        (("--samples", "64"), "--samples is 64, but a model writes 32 at most"),
        (("--seq", "2048"), "longer than the model's"),
        (("--method", "rtn", "--samples", "8"), "--samples is 8, but rtn"),
        (("--method", "rtn", "--seq", "8"), "--seq is 8, but rtn"),
        (("--fit", "T4", "--context", "100"), "in 16 bits already"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str, tiny: Path, tmp_path: Path, tightfit: Any) -> None:
    result = tightfit("compress", tiny, *arguments, "--out", tmp_path / "small")
    assert result.code == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["small.gguf", "small.safetensors"])
def test_an_output_named_as_a_file_is_refused(name: str, tiny: Path, tmp_path: Path, tightfit: Any) -> None:
    result = tightfit("compress", tiny, "--method", "rtn", "--group", 32, "--out", tmp_path / name)
    assert result.code == 2
    assert f"{name}, named as a file of weights, but a directory is written" in result.err
    assert list(tmp_path.iterdir()) == []


def test_what_transformers_does_not_load_is_said(tiny: Path, tmp_path: Path, tightfit: Any) -> None:
    """Rows with a zero point beside a projection in 8 bits; in groups the same load."""
    for group, is_said in ((0, True), (32, False)):
        made = tightfit(
            "compress", tiny, "--method", "rtn", "--group", group, "--head", 8, "--out", tmp_path / f"{group}"
        )
        assert made.code == 0
        assert ("transformers 5.23 not: rows with a zero point" in made.err) is is_said
        cost = json.loads((tmp_path / f"{group}/report.json").read_text())["predicted"]
        assert bool(cost["transformers_limit"]) is is_said
        other = (tmp_path / f"{group}", tmp_path / f"other{group}", "--format", "compressed-tensors")
        assert ("transformers 5.23 not: rows with a zero point" in tightfit("export", *other).out) is is_said
    told = tightfit("compress", tiny, "--method", "binary", "--group", 32, "--out", tmp_path / "signs").err
    assert "tightfit will load it, transformers 5.23 not: this layout is tightfit's own" in told


def test_a_report_beside_the_model_and_sizes_against_perplexity(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path, tightfit: Any
) -> None:
    cache, data = ("--cache", token_cache), ("--data", text, "--seq", 64)
    made = {}
    for bits in (3, 8):
        made[bits] = tmp_path / f"{bits}bit"
        options = ("--method", "gptq", "--bits", bits, "--group", 32, "--samples", 4, *data, *cache)
        assert tightfit("compress", tiny, *options, "--out", made[bits]).code == 0
    report = json.loads((made[3] / "report.json").read_text())
    assert [layer["index"] for layer in report["layers"]] == [0, 1]
    assert set(report["layers"][0]["errors"]) >= {"attention.q", "mlp.down"}
    assert report["comparisons"] == []
    assert str(text) in report["predicted"]["calibration"]
    before = (made[3] / "report.png").read_bytes()
    assert b"whole layer" in before
    load_model(str(made[3]))
    sizes = tmp_path / "sizes.png"
    table = tightfit("evaluate", made[3], made[8], *data, "--against", tiny, *cache, "--picture", sizes).out
    found = {}
    for bits, folder in made.items():
        [found[bits]] = json.loads((folder / "report.json").read_text())["comparisons"]
        assert f"{found[bits]['kl']['mean']:.4f}" in table
        assert found[bits]["weight_bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found[3]["kl"]["mean"] > abs(found[8]["kl"]["mean"]), "which rounding of sums may put below zero"
    assert b"3bit" in sizes.read_bytes()
    assert b"perplexity" in (made[3] / "report.png").read_bytes() != before
    again = tightfit("evaluate", made[3], *data, "--against", tiny, *cache, "--json").json
    assert again["kl"] == found[3]["kl"]
    assert len(json.loads((made[3] / "report.json").read_text())["comparisons"]) == 1
    assert "say with --against" in tightfit("evaluate", made[3], made[8], *data).err
    assert "with --against" in tightfit("evaluate", tiny, *data, "--picture", sizes).err
    (tmp_path / "mine.png").write_text("a picture of mine")
    refused = tightfit("evaluate", tiny, *data, "--against", tiny, "--picture", tmp_path / "mine.png")
    assert "not a picture that tightfit wrote" in refused.err


@sampled(2)
@pytest.mark.parametrize(
    "method",
    [
        ("--method", "gptq", "--bits", 4, "--group", 32),
        thorough(("--fit", "T4", "--context", 100)),
        ("--method", "structured", "--keep-mlp", 96),
        ("--method", "whitened-svd"),
        ("--method", "rtn", "--group", 32),
    ],
    ids=lambda method: str(method[1]),
)
def test_without_text_of_ones_own(
    method: tuple[Any, ...], tiny: Path, tmp_path: Path, tightfit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people type it first: layers are looked at with what the model writes, which is said; rounding needs none."""
    small_card = sized(fit_ledger(SPEC, SPEC.params(), 100).peak_bytes())  # for 8 bits a weight
    monkeypatch.setattr("tightfit.hardware.machine.parse_machine", lambda text: small_card)
    needs_text = method[1] != "rtn"
    rows = ("--samples", 4, "--seq", 64, "--cache", tmp_path / "cache") if needs_text else ()
    made = tightfit("compress", tiny, *method, *rows, "--out", tmp_path / "small")
    assert made.code == 0, made.err
    assert ("the model's own text, as no --data is given" in made.err) == needs_text
    said = json.loads((tmp_path / "small" / "report.json").read_text())["predicted"]["calibration"]
    assert said.startswith("4 × 64 tokens of the model's own text") == needs_text
    assert len(list((tmp_path / "cache").glob("own-text-*-4x64.npy"))) == needs_text
    if method[1] == "structured":  # a directory that transformers loads by itself, with the report in it
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").config.intermediate_size == 96
