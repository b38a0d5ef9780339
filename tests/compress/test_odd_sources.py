"""Models that cannot be compressed and outputs that cannot be written: one sentence each, and nothing is lost."""

import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tests.compress.conftest import SPEC
from tests.compress.test_compression import load_tensors, run
from tests.compress.test_fitting import sized
from tests.covering import sampled
from tests.speed import within_turns
from tightfit.compress.compression import LAYER_SHARDS, CompressionJob, compress
from tightfit.compress.conversion import convert
from tightfit.compress.fit.fitting import fit_bits, fit_ledger
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.recipe import Recipe, Step, recipe_of
from tightfit.compress.rounding.gptq import gptq
from tightfit.compress.working_directory import WorkingDirectory
from tightfit.errors import UserError
from tightfit.models.loading import load_model
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.saving import export_model


def changed_weight(source: Path, target: Path, number: float) -> Path:
    """A copy of a model without checksums, one of whose weights is `number`."""
    shutil.copytree(source, target)
    (target / "checksums.json").unlink(missing_ok=True)
    tensors = load_tensors(target / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = number
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e30], ids=str)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_that_cannot_be_stored_are_refused(
    method: str, number: float, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """Scales and what stays plain are float16: a model of infinite ones would be written without a word."""
    broken = changed_weight(tiny, tmp_path / "broken", number)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down\.weight of .*broken has a weight of (nan|inf|-1e\+30)"):
        run(broken, tmp_path / "small", recipe_of(method, bits=4, group=32), text, token_cache)
    assert not (tmp_path / "small").exists()


def test_a_directory_of_somebody_is_not_worked_in(tiny: Path, tmp_path: Path) -> None:
    """Its files went into the result, or away with what had failed."""
    theirs = tmp_path / ".compressing-small" / "model.safetensors"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    job = CompressionJob(model=str(tiny), out=tmp_path / "small", recipe=recipe_of("rtn", bits=4, group=32))
    with pytest.raises(UserError, match=r"\.compressing-small is there and is no work of tightfit; remove it"):
        compress(job, lambda cost: None, lambda done, total, layer: None)
    assert theirs.read_text() == "mine"
    assert not (tmp_path / "small").exists()


def test_a_damaged_tokenizer_is_not_left_out_silently(tiny: Path, tmp_path: Path) -> None:
    """What came out was a model that nobody could give text to; one without a tokenizer stays so."""
    shutil.copytree(tiny, tmp_path / "broken")
    recipe = recipe_of("rtn", bits=4, group=32)
    job = CompressionJob(model=str(tmp_path / "broken"), out=tmp_path / "small", recipe=recipe)
    tokenizer = tmp_path / "broken" / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        compress(job, lambda cost: None, lambda done, total, layer: None)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    tokenizer.write_bytes(whole)
    compress(job, lambda cost: None, lambda done, total, layer: None)
    (tmp_path / "small" / "tokenizer.json").write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        convert(str(tmp_path / "small"), tmp_path / "other", "tightfit")
    for folder in ("broken", "small"):
        for file in [*(tmp_path / folder).glob("tokenizer*"), *(tmp_path / folder).glob("*.jinja")]:
            file.unlink()
    compress(replace(job, out=tmp_path / "bare"), lambda cost: None, lambda done, total, layer: None)
    convert(str(tmp_path / "small"), tmp_path / "other", "tightfit")
    assert load_model(str(tmp_path / "bare")).tokenizer is load_model(str(tmp_path / "other")).tokenizer is None


@pytest.mark.parametrize("words", [{"form": "hf", "dtype": "fp16"}, {"form": "gguf", "dtype": "q8_0"}], ids=str)
def test_weights_that_a_narrow_export_would_make_infinite_are_refused(
    words: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    large = changed_weight(tiny, tmp_path / "large", 1e6)
    with pytest.raises(UserError, match=r"a weight of 1e\+06, which no float16 can be; choose --dtype bf16 or fp32"):
        export_model(str(large), tmp_path / "small", **words)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    export_model(str(large), tmp_path / "small", form="hf", dtype="bf16")


def test_bits_are_not_chosen_for_weights_that_are_no_numbers(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    broken = changed_weight(tiny, tmp_path / "broken", float("nan"))
    card = sized(fit_ledger(SPEC, SPEC.params(), 100).peak_bytes())  # for 8 bits a weight
    job = CompressionJob(
        model=str(broken), out=tmp_path / "small", recipe=Recipe(()), data=(str(text),), length=64, cache=token_cache
    )
    with pytest.raises(UserError, match=r"broken has a weight of nan"):
        fit_bits(job, card, 100, "gptq")


def test_inputs_that_are_no_numbers_are_a_sentence() -> None:
    with pytest.raises(UserError, match="no finite numbers"):
        gptq(torch.ones(4, 8), torch.full((8, 8), torch.nan), Scheme(bits=4, group=8))


def test_other_weights_in_the_same_place_are_not_mixed_in(
    tiny: Path, text: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was trained on between a killed run and the next is another one, and so is a newer checkpoint."""
    model, recipe = changed_weight(tiny, tmp_path / "model", 0.5), recipe_of("rtn", bits=4, group=32)
    monkeypatch.setattr(WorkingDirectory, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "small", recipe, text, token_cache)
    monkeypatch.undo()
    shutil.rmtree(model)
    changed_weight(tiny, model, 0.25)
    with pytest.raises(UserError, match="differs in its weights"):
        run(model, tmp_path / "small", recipe, text, token_cache)


def interrupted(self: WorkingDirectory, write_extras: object) -> None:
    raise KeyboardInterrupt


def test_a_directory_named_like_a_preset(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    job = CompressionJob(model="./gpt2", out=Path("small"), recipe=recipe_of("rtn", bits=8))
    compress(job, lambda cost: None, lambda done, total, layer: None)
    assert load_model("small").model.spec == SPEC


def test_a_run_that_goes_on_is_read_from_one_checkpoint(tiny: Path, tmp_path: Path) -> None:
    first = tmp_path / "run" / "checkpoints" / "step-1"
    shutil.copytree(tiny, first)
    parts = ModelParts(str(tmp_path / "run"), torch.device("cpu"))
    changed_weight(tiny, first.with_name("step-2"), 0.5)
    assert parts.layer(1).layers._modules["1"].mlp.down.weight[2, 3] != 0.5  # type: ignore[index]
    newer = ModelParts(str(tmp_path / "run"), torch.device("cpu"))
    assert newer.layer(1).layers._modules["1"].mlp.down.weight[2, 3] == 0.5  # type: ignore[index]


def test_checksums_are_compared_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a model's layers is read apart, and comparing reads all of it."""
    compared: list[Path] = []
    monkeypatch.setattr("tightfit.models.loading.verify_weights", compared.append)
    parts = ModelParts(str(tiny), torch.device("cpu"))
    for part in (parts.embedding, parts.head, lambda: parts.layer(0), lambda: parts.layer(1)):
        part()
    assert compared == [tiny]


def test_work_that_finished_nothing_leaves_nothing(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny, broken)
    (broken / "checksums.json").unlink(missing_ok=True)
    (broken / "model.safetensors").rename(broken / "model-00001-of-00002.safetensors")
    names = load_tensors(broken / "model-00001-of-00002.safetensors")
    where = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in names}
    for bad, said in (
        (where, "model-00002-of-00002.safetensors does not exist"),
        (where | {"model.norm.weight": "../elsewhere.safetensors"}, "must be a .safetensors file beside the index"),
    ):
        (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(UserError, match=said):
            run(broken, tmp_path / "small", recipe_of("rtn", bits=4, group=32), text, token_cache)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / ".compressing-small").mkdir()  # of a run that was killed before its first shard
    (tmp_path / ".compressing-small" / "work.json").write_text("{}")
    run(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32), text, token_cache)


def test_a_kill_at_the_last_instant_leaves_work_that_goes_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers done, the rename outstanding: it was called somebody's, to be removed."""
    job = CompressionJob(model=str(tiny), out=tmp_path / "small", recipe=recipe_of("rtn", bits=4, group=32))
    real, renamed = os.rename, list[Path]()

    def killed(source: Path, target: Path) -> None:
        if target == job.out and not renamed:
            renamed.append(target)
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr("os.rename", killed)
    with pytest.raises(KeyboardInterrupt):
        compress(job, lambda cost: None, lambda done, total, layer: None)
    assert compress(job, lambda cost: None, lambda done, total, layer: None).resumed_layers == SPEC.layers
    assert not (job.out / "work.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@sampled(3)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("left", [0, 7, 2000])
def test_a_finished_layer_that_was_damaged_is_done_again(
    number: int, left: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end or a layer, cut short since: it was a traceback, and again at every attempt."""
    job = CompressionJob(model=str(tiny), out=tmp_path / "small", recipe=recipe_of("rtn", bits=4, group=32))
    monkeypatch.setattr(WorkingDirectory, "finish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compress(job, lambda cost: None, lambda done, total, layer: None)
    monkeypatch.undo()
    shard = tmp_path / ".compressing-small" / f"model-{number + 1:05}-of-00004.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_tensors(shard).items()}
    os.truncate(shard, min(left, shard.stat().st_size - 1))
    report = compress(job, lambda cost: None, lambda done, total, layer: None)
    assert report.resumed_layers == SPEC.layers - (number >= LAYER_SHARDS)
    made = load_tensors(job.out / shard.name)
    assert all(torch.equal(made[name], whole[name]) for name in whole)


def test_a_file_where_a_directory_should_be(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"cannot write .*file is not a directory; choose a writable directory"):
        run(tiny, tmp_path / "file" / "small", recipe_of("rtn", bits=8), text, token_cache)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_limit_on_the_size_of_files_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    """The kernel's own refusal, which safetensors meets inside its own code."""
    recipe, out = recipe_of("rtn", bits=8), tmp_path / "small"
    job = CompressionJob(model=str(tiny), out=out, recipe=recipe)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*File too large.*; make room and run the same again"):
            compress(job, lambda cost: None, lambda done, total, layer: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    compress(job, lambda cost: None, lambda done, total, layer: None)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_full_disk_during_an_export_to_gguf_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    """numpy counts there what it could not write, and has no reason."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"x\.gguf: (the disk took only a part|File too large).*room"):
            export_model(str(tiny), tmp_path / "x.gguf", form="gguf", dtype="bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_layer_of_one_step_is_refused(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    steps = (Step(method="rtn", bits=4, group=32), Step(method="keep", layers=("layers.0.*", "*.mlp.dwon")))
    with pytest.raises(UserError, match=r"'\*\.mlp\.dwon' names none of the model's matrices"):
        run(tiny, tmp_path / "small", Recipe(steps), text, token_cache)
    kept = (Step(method="rtn", bits=4, group=32), Step(method="keep"))
    with pytest.raises(UserError, match="keeps every layer as it is"):
        run(tiny, tmp_path / "small", Recipe(kept), text, token_cache)


@sampled(2)
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["re:(.+)+$x"], "no config group"),
        (["re:(?:(?:.?){99}){99}x"], "more than 10000 steps"),
        ([f"re:{'(.*)*' * 20}x"] * 32, "no config group"),
        (["re:a"] * 33, "more than 32 regular expressions"),
        (["re:("], r"re:\(, which is no regular expression"),
        (None, "no config group"),
        ("re:.*", "no config group"),
    ],
)
def test_targets_of_a_stranger_take_no_time(
    targets: object, said: str, tiny: Path, text: Path, token_cache: Path, tmp_path: Path
) -> None:
    """`re` alone would look for the first until the sun is cold."""
    run(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32), text, token_cache)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    with within_turns(60), pytest.raises(UserError, match=said):
        load_model(str(tmp_path / "small"))


def test_targets_may_be_regular_expressions(tiny: Path, text: Path, token_cache: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path / "small", recipe_of("rtn", bits=4, group=32), text, token_cache)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    wanted = load_model(str(tmp_path / "small")).model.state_dict()
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [
        r"re:.*self_attn\.\w_proj$",
        r"re:.*\.mlp.*",
    ]
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    found = load_model(str(tmp_path / "small")).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
