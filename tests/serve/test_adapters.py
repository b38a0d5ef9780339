"""LoRA adapters: as PEFT computes them, mixed in one batch, asked for by name, and what is refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.huggingface.reference import pair
from tests.serve.running import running
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter, load_adapter
from tightfit.models.loading import LoadedModel
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

CONFIG = EngineConfig(max_sequences=8, step_tokens=16, block_size=4, cache_bytes=2**20)
PROMPT = [5, 17, 3, 42, 8, 99, 120, 7, 250, 31]
GREEDY = Sampling(max_tokens=12, temperature=0)
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.down_proj")


def write_adapter(directory: Path, model: Decoder, modules: tuple[str, ...], seed: int, **changes: Any) -> Path:
    """An adapter of random matrices, large enough to change what is said."""
    made = torch.Generator().manual_seed(seed)
    hidden, mlp, spec = model.spec.hidden_size, model.spec.mlp_size, model.spec
    out = {"q_proj": spec.query_size, "v_proj": spec.kv_size, "gate_proj": mlp}
    inside = {"o_proj": spec.query_size, "down_proj": mlp}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(modules)} | changes
    tensors = {}
    for layer in range(spec.layers):
        for module in modules:
            name, last = f"base_model.model.model.layers.{layer}.{module}", module.rpartition(".")[2]
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, inside.get(last, hidden), generator=made) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(out.get(last, hidden), 4, generator=made) * 0.3
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="module")
def adapters(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    first = write_adapter(folder / "first", model, ATTENTION, seed=1)
    second = write_adapter(folder / "second", model, MLP + ATTENTION[:1], seed=2, use_rslora=True)
    return {path.name: load_adapter(path, model) for path in (first, second)}


def merged(model: Decoder, adapter: Adapter) -> Decoder:
    made: Any = deepcopy(model)
    with torch.no_grad():
        for name, change in adapter.changes.items():
            made.get_submodule(name).weight += change.up @ change.down
    return made


def request(index: int, adapter: str | None, prompt: list[int] = PROMPT) -> Request:
    return Request(id=str(index), prompt=prompt, sampling=GREEDY, adapter=adapter)


@pytest.mark.parametrize("async_steps", [False, True])
def test_adapters_in_one_batch_answer_as_each_merged_alone(
    model: Decoder, adapters: dict[str, Adapter], async_steps: bool
) -> None:
    alone = {
        name: Engine(merged(model, each), None, CONFIG).generate([request(0, None)]) for name, each in adapters.items()
    }
    plain = Engine(model, None, CONFIG).generate([request(0, None)])
    config = EngineConfig(**{**vars(CONFIG), "async_steps": async_steps})
    engine = Engine(model, None, config, adapters=adapters)
    asked = [None, "first", "second", "first", None, "second"]
    found = engine.generate([request(index, adapter) for index, adapter in enumerate(asked)])
    wanted = [(alone[adapter] if adapter else plain)["0"][0].tokens for adapter in asked]
    assert [found[str(index)][0].tokens for index in range(len(asked))] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == 3
    again = engine.generate([request(9, "second")])["9"][0]
    assert (again.tokens, again.cached) == (wanted[2], 8)  # prefixes are found, but only one's own adapter's
    assert engine.pool.free == engine.pool.size


def packed(model: Decoder) -> tuple[Decoder, Decoder]:
    """The model with every projection of its layers in 4 bits, and with what those codes stand for."""
    coded, plain = deepcopy(model), deepcopy(model)
    scheme = Scheme(kind="int", bits=4, group=16, symmetric=False)
    for name, linear in list(model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            codes = fit_grid(linear.weight.detach(), scheme).code(linear.weight.detach())
            replace_module(coded, f"layers.{name}.weight", QuantizedLinear(codes))
            same: Any = plain.get_submodule(f"layers.{name}")
            same.weight.data.copy_(codes.dequantize())
    return coded, plain


def test_adapters_are_added_to_packed_weights(model: Decoder, adapters: dict[str, Adapter]) -> None:
    coded, plain = packed(model)
    engine = Engine(coded, None, CONFIG, adapters=adapters)
    found = engine.generate([request(index, name) for index, name in enumerate([None, *adapters])])
    wanted = [plain, *(merged(plain, adapter) for adapter in adapters.values())]
    for index, each in enumerate(wanted):
        alone = Engine(each, None, CONFIG).generate([request(0, None)])["0"][0].tokens
        assert found[str(index)][0].tokens == alone
    assert len({tuple(each[0].tokens) for each in found.values()}) == 3


def test_adapters_leave_nothing_behind(model: Decoder, adapters: dict[str, Adapter]) -> None:
    before = Engine(model, None, CONFIG).generate([request(0, None)])["0"][0].tokens
    Engine(model, None, CONFIG, adapters=adapters).generate([request(0, "first")])
    assert Engine(model, None, CONFIG).generate([request(0, None)])["0"][0].tokens == before
    assert not any(module._forward_hooks for module in model.modules())


def test_the_ledger_counts_adapters(model: Decoder, adapters: dict[str, Adapter]) -> None:
    extra = (
        Engine(model, None, CONFIG, adapters=adapters).budget.weight_bytes
        - Engine(model, None, CONFIG).budget.weight_bytes
    )
    assert extra == sum(adapter.bytes for adapter in adapters.values()) > 0


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gemma2"])
def test_adapters_of_peft_are_computed_as_peft_computes_them(name: str, tmp_path: Path) -> None:
    """Also where their modules hold several of ours: Phi-3's and GPT-2's joint projections."""
    import peft

    both = pair(name)
    theirs = deepcopy(both.theirs)
    modules = {"phi3": ["qkv_proj", "gate_up_proj", "o_proj"], "gpt2": ["c_attn", "c_fc"]}
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=modules.get(name, ["q_proj", "k_proj", "up_proj", "down_proj"]),
        fan_in_fan_out=name == "gpt2",
        alpha_pattern={} if name != "llama" else {"up_proj": 11},
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(theirs, config).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    adapter = load_adapter(tmp_path / "adapter", both.ours)
    tokens = both.tokens[:1, :12]
    with torch.no_grad():
        wanted = wrapped(tokens).logits[0, -1]
        assert not torch.allclose(wanted, both.theirs(tokens).logits[0, -1], atol=1e-2)
    sampling = Sampling(max_tokens=1, temperature=0, logprobs=20)
    engine = Engine(both.ours, None, CONFIG, adapters={"mine": adapter})
    asked = Request(id="x", prompt=tokens[0].tolist(), sampling=sampling, adapter="mine")
    top = engine.generate([asked])["x"][0].logprobs[0].top
    expected = wanted.float().log_softmax(-1)
    for token, logprob in top:
        assert logprob == pytest.approx(expected[token].item(), abs=2e-4)


def test_clients_ask_for_an_adapter_as_a_model(loaded: LoadedModel, adapters: dict[str, Adapter]) -> None:
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG, adapters=adapters)
    with running(loaded, engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        listed = {each.id: each for each in client.models.list().data}
        assert list(listed) == ["tiny", "first", "second"]
        assert (listed["first"].model_extra or {})["parent"] == "tiny"
        said = {
            name: client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0) for name in listed
        }
        assert {name: each.model for name, each in said.items()} == {name: name for name in listed}
        assert len({each.choices[0].text for each in said.values()}) == 3
        with pytest.raises(openai.NotFoundError, match="there are tiny, first, second"):
            client.completions.create(model="third", prompt="x")
        with pytest.raises(openai.BadRequestError, match="adapter"):
            client.embeddings.create(model="first", input="x")
        server.wait_until_idle()


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return write


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (with_config(peft_type="IA3"), "peft_type.*IA3"),
        (with_config(use_dora=True), "use_dora.*True"),
        (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (with_config(lora_alpha="much"), "lora_alpha.*much"),
        (with_config(alpha_pattern={"(a+)+$": 1}), "alpha_pattern"),
        (with_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "no lora_B"),
        (with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 31)})), r"\[4, 31\]"),
        (with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(0, 32)})), r"\[0, 32\]"),
        (with_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int8)})), "I8"),
        (with_tensors(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)})), "lm_head"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"short"), "cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "does not exist"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    ],
)
def test_other_adapters_are_refused(model: Decoder, tmp_path: Path, damage: Callable[[Path], Any], named: str) -> None:
    folder = write_adapter(tmp_path / "adapter", model, ATTENTION, seed=1)
    damage(folder)
    with pytest.raises(UserError, match=named):
        load_adapter(folder, model)


def test_an_adapter_that_is_not_there_is_named(model: Decoder) -> None:
    with pytest.raises(UserError, match="no adapter 'x'; there are none"):
        Engine(model, None, CONFIG).submit(request(0, "x"))
