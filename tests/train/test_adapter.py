"""Runs of adapters: they lower the loss, leave their model alone, resume to the bit, and are models everywhere."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.serve.test_cpu_weights import assert_held_as_planned
from tests.train.jobs import checkpoint_files, tiny_job
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.recipe import recipe_of
from tightfit.errors import UserError
from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.job import Job
from tightfit.jobs.served_weights import served_weights
from tightfit.jobs.workload import Workload
from tightfit.models.base_model import read_base
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import load_adapter
from tightfit.models.loading import load_model, source_spec, weights_path
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.resolve import checkpoints_of
from tightfit.models.saving import export_adapter, export_model
from tightfit.plan.plan import _from_json
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.runner import Runner
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.train.loop import run_job
from tightfit.train.preparation import prepare

TOKENS = torch.arange(4, 40)[None]
NEW_TEXT = "\n".join(f"the {n} ships left port {n % 7} at dawn and none of the {n} came back" for n in range(400))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """A small trained model in a directory of its own."""
    folder = tmp_path_factory.mktemp("base")
    small = {"steps": 8, "evaluation": {"max_rows": 2}}
    run = run_job(tiny_job(folder / "run", corpus, token_cache, **small), quiet=True)
    export_model(str(run.run), folder / "model", form="hf", dtype="fp32")
    return folder / "model"


@pytest.fixture(scope="module")
def packed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in 4 bits."""
    return in_four_bits(base, tmp_path_factory.mktemp("packed") / "model")


def in_four_bits(source: Path, out: Path, group: int = 32) -> Path:
    job = CompressionJob(model=str(source), out=out, recipe=recipe_of("rtn", bits=4, group=group))
    compress(job, lambda cost: None, lambda done, total, layer: None)
    return out


Make = Callable[..., Job]


@pytest.fixture(scope="module")
def make(base: Path, tmp_path_factory: pytest.TempPathFactory, token_cache: Path) -> Make:
    folder = tmp_path_factory.mktemp("adapters")
    text = folder / "new.txt"
    text.write_text(NEW_TEXT)

    def made(name: str, source: Path = base, **changes: Any) -> Job:
        fields = {"model": {"source": str(source)}, "tokenizer": {"source": "model"}, "steps": 6}
        fields |= {
            "adapter": {"rank": 4},
            "evaluation": {"max_rows": 2},
            "saving": {"every": 3, "keep": 3},
            "optimizer": {"lr": 3e-2},
        }
        return tiny_job(folder / name, text, token_cache, **{**fields, **changes})

    return made


@pytest.fixture(scope="module")
def trained(make: Make) -> Path:
    return run_job(make("trained"), quiet=True).run


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@sampled(3)
@pytest.mark.parametrize("bits", [None, 4, "packed"])
def test_a_new_text_is_learned_and_the_model_stays_as_it_was(bits: Any, make: Make, base: Path, packed: Path) -> None:
    source = packed if bits == "packed" else base
    before = files_of(source)
    settings = {"rank": 4} | ({"bits": 4} if bits == 4 else {})
    job = make(f"learned-{bits}", source, adapter=settings, steps=15)
    result = run_job(job, quiet=True)
    assert result.start is not None
    assert result.end is not None
    assert result.end.loss < result.start.loss - 0.5
    assert files_of(source) == before
    saved = {path.name for path in result.checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "base.json", "config.json"} <= saved
    assert "model.safetensors" not in saved
    loaded = load_model(str(job.output))
    given: dict[str, Any] = {"show_bars": False, "device": torch.device("cpu"), "mesh": None, "saves": True}
    prepared = prepare(job, result.checkpoint, lambda _: None, **given)
    with torch.no_grad():
        wanted = prepared.model(TOKENS).logits
        torch.testing.assert_close(loaded.model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)
    quantized = [module for module in prepared.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantized) == (0 if bits is None else 7 * prepared.model.spec.layers)


def held_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def answers(model: Decoder) -> tuple[list[int], bool]:
    """What an engine says to a prompt, and whether it multiplies by joint weights."""
    config = EngineConfig(max_sequences=4, step_tokens=8, block_size=4, cache_bytes=2**20, packed_products=False)
    engine = Engine(model, None, config)
    prompt, sampling = TOKENS[0, :12].tolist(), Sampling(max_tokens=8, temperature=0)
    said = engine.generate([Request(id="0", prompt=prompt, sampling=sampling)])["0"][0].tokens
    assert isinstance(engine.runner, Runner)
    return said, engine.runner.program is not None


@sampled(4)
@pytest.mark.parametrize(
    ("settings", "is_packed"),
    [
        ({"rank": 4}, True),
        ({"rank": 4, "targets": ["q", "v", "down"]}, True),
        ({"rank": 2, "bits": 4}, False),
        ({"rank": 2, "bits": 4}, True),  # which are no more rounded again than they were in training
    ],
)
def test_a_packed_model_stays_packed_under_its_adapters(
    settings: dict[str, Any], is_packed: bool, make: Make, base: Path, packed: Path, tmp_path: Path
) -> None:
    source = packed if is_packed else base
    name = f"stays-{settings['rank']}-{len(settings)}-{is_packed}"
    job = make(name, source, adapter=settings, steps=3, saving={"every": 3})
    run = str(run_job(job, quiet=True).run)
    model, expanded = load_model(run).model, load_model(run, packed=False).model
    coded = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    assert len(coded) == 7 * model.spec.layers
    assert not any(isinstance(layer, QuantizedLinear) for layer in expanded.modules())
    with torch.no_grad():
        wanted = expanded(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)
        frozen = load_model(str(packed if is_packed else in_four_bits(base, tmp_path / "held", group=64))).model
        assert (wanted - frozen(TOKENS).logits).abs().max() > 1e-2, "the adapters have learned nothing"
    narrow = load_model(run, dtype=torch.bfloat16).model
    held = served_weights(weights_path(run), narrow.spec)
    assert held is not None
    assert held.total_bytes == held_bytes(narrow)
    assert_held_as_planned(weights_path(run))
    said, is_joint = answers(model)
    assert is_joint
    assert said == answers(expanded)[0]
    assert sum(each.nbytes() for each in storages(model)) == held_bytes(model)  # joined, and nothing held twice


def storages(model: Decoder) -> list[torch.UntypedStorage]:
    found = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return list({each.data_ptr(): each for each in found}.values())


@sampled(2)
@pytest.mark.parametrize(
    ("adapter", "precision"),
    [({"rank": 4}, "fp32"), ({"rank": 2, "dropout": 0.2, "bits": 4, "targets": ["q", "down"]}, "bf16")],
)
def test_a_run_resumes_bit_for_bit(adapter: dict[str, Any], precision: str, make: Make) -> None:
    name = f"{adapter['rank']}-{precision}"
    changes = {"adapter": adapter, "precision": precision}
    whole = run_job(make(f"whole-{name}", **changes), quiet=True)
    parts = make(f"parts-{name}", **changes)
    run_job(parts, stop_after=3, quiet=True)
    run_job(parts, resume=True, quiet=True)
    one, other = (checkpoint_files(checkpoints_of(run)[-1]) for run in (whole.run, parts.output))
    assert one == other


def test_targets_in_another_order_resume(make: Make) -> None:
    for steps, targets in ((1, ["q", "v"]), (2, ["v", "q"])):
        run_job(make("order", adapter={"rank": 2, "targets": targets}, steps=steps), resume="auto", quiet=True)


def test_what_resumes_otherwise_is_refused(make: Make, trained: Path) -> None:
    for changes, said in (
        ({"adapter": {"rank": 8}}, r"adapter.rank is 8, but .* was made with 4"),
        ({"adapter": {}}, "adapter.rank is None"),
        ({"adapter": {"rank": 4, "alpha": 3}}, "adapter.alpha is 3"),
    ):
        with pytest.raises(UserError, match=said):
            run_job(make("trained", **changes), resume=True, quiet=True)


def test_it_is_a_model_everywhere(trained: Path, base: Path, tmp_path: Path) -> None:
    wanted = load_model(str(trained)).model
    assert not torch.equal(wanted(TOKENS).logits, load_model(str(base)).model(TOKENS).logits)
    assert source_spec(str(trained)) == wanted.spec
    export_model(str(trained), tmp_path / "merged", form="hf", dtype="fp32")
    merged = load_model(str(tmp_path / "merged"))
    assert merged.tokenizer is not None
    assert torch.equal(merged.model(TOKENS).logits, wanted(TOKENS).logits)
    sources = {"of-run": trained, "of-merged": tmp_path / "merged"}
    small = [load_model(str(in_four_bits(source, tmp_path / name))).model for name, source in sources.items()]
    assert torch.equal(*(model(TOKENS).logits for model in small))


def test_peft_and_the_server_load_its_adapter(trained: Path, base: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    wanted, adapter = load_model(str(trained)).model, tmp_path / "adapter"
    made = export_adapter(str(trained), adapter)
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "checksums.json",
    }
    assert made.params == AdapterTraining(rank=4).adapted().params(wanted.spec)
    with pytest.raises(UserError, match="is a model and no adapter"):
        export_adapter(str(base), tmp_path / "other")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, str(adapter))
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, wanted(TOKENS).logits, rtol=1e-4, atol=1e-4)
    model = load_model(str(base)).model
    config = EngineConfig(max_sequences=4, step_tokens=64, block_size=4, cache_bytes=2**20)
    sampling = Sampling(max_tokens=8, temperature=0)
    prompt = TOKENS[0, :12].tolist()
    one = Engine(model, None, config, adapters={"new": load_adapter(adapter, model)})
    other = Engine(deepcopy(wanted), None, config)
    said = one.generate([Request(id="0", prompt=prompt, sampling=sampling, adapter="new")])
    assert said == other.generate([Request(id="0", prompt=prompt, sampling=sampling)])


def test_a_model_that_has_changed_is_found_out(make: Make, base: Path, tmp_path: Path) -> None:
    own = tmp_path / "base"
    shutil.copytree(base, own)
    job = make("moved", own)
    run_job(job, quiet=True)
    base_file = checkpoints_of(job.output)[-1] / "base.json"
    assert read_base(base_file.parent).source == str(own)
    load_model(str(job.output))
    weights, listed = own / "model.safetensors", own / "checksums.json"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    listed.unlink()
    with pytest.raises(UserError, match="has changed since"):
        load_model(str(job.output))
    with pytest.raises(UserError, match="was made with base"):
        run_job(make("moved", own, steps=7), resume=True, quiet=True)
    base_file.write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        load_model(str(job.output))


def test_a_coded_projection_is_refused(make: Make, base: Path, tmp_path: Path) -> None:
    """By the run and by its plan, before anything is written."""
    coding = CompressionJob(model=str(base), out=tmp_path / "coded", recipe=recipe_of("rtn", bits=4, group=32, head=8))
    compress(coding, lambda cost: None, lambda done, total, layer: None)
    job = make("refused", tmp_path / "coded")
    with pytest.raises(UserError, match=r"has a coded output projection, .*; train adapters on a model that was"):
        run_job(job, quiet=True)
    assert not job.output.exists()


def test_adapters_need_a_model_with_weights(make: Make) -> None:
    random = make("random", tokenizer={"source": "train", "vocab_size": 320}, model={"source": "tiny-llama"})
    with pytest.raises(UserError, match="at random"):
        run_job(random, quiet=True)
    assert not random.output.exists()


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"alpha": 2}, "no rank"),
        ({"rank": 4, "targets": []}, "nothing would be trained"),
        ({"rank": 4, "targets": ["qkv"]}, "adapter.targets has 'qkv', which no family calls a projection"),
        ({"rank": 4, "targets": "q_proj" * 40}, "a name of 240 characters"),
        ({"rank": 0}, "rank"),
    ],
)
def test_settings_that_mean_nothing_are_refused(adapter: dict[str, Any], said: str, make: Make) -> None:
    with pytest.raises(ValueError, match=said):
        make("refused", adapter=adapter)


def test_what_a_plan_knows_of_it_survives_json(make: Make, packed: Path) -> None:
    job = make("asked", packed, adapter={"rank": 4, "targets": ["v_proj", "q_proj"]})
    workload = Workload.of_job(job, source_spec(str(packed)), "bf16")
    assert workload.adapted is not None
    assert workload.adapted.projections == ("q", "v")
    assert _from_json(Workload, json.loads(json.dumps(asdict(workload)))) == workload
    held = load_model(str(packed), dtype=torch.bfloat16).model
    tensors = [*held.parameters(), *held.buffers()]
    assert workload.adapted.frozen_bytes(held.spec, 2) == sum(each.nbytes for each in tensors)
