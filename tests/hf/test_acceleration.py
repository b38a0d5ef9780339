"""Acceleration is one instance's: nothing global, nothing twice, nothing left, and clear words where it cannot be."""

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.llama import modeling_llama

import tightfit.hf
from tests.covering import sampled
from tests.hf.models import gradients, make_batch, make_config, make_model, make_twins
from tightfit.errors import UserError
from tightfit.hf import accelerate, undo


def test_classes_and_modeling_files_are_not_touched() -> None:
    def contents() -> list[dict[str, Any]]:
        names = dict(vars(modeling_llama))
        return [names, *(dict(vars(value)) for value in names.values() if isinstance(value, type))]

    plain, batch = make_model("llama"), make_batch("llama")
    plain(**batch)  # transformers itself writes into its classes at first use
    before = contents()
    accelerate(plain)(**batch).loss.backward()
    assert contents() == before


def test_two_instances_do_not_meet() -> None:
    plain, ours = make_twins("llama")
    batch = make_batch("llama")
    assert ours(**batch).logits is None
    assert plain(**batch).logits is not None
    assert not any("forward" in vars(module) for module in plain.modules())


def test_accelerating_twice_changes_nothing() -> None:
    model = accelerate(make_model("llama"))
    bound = [dict(vars(module)).get("forward") for module in model.modules()]
    assert accelerate(model, parts=["norm"]) is model
    assert [dict(vars(module)).get("forward") for module in model.modules()] == bound
    undo(undo(model))
    assert model(**make_batch("llama")).logits is not None


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        (["norm"], {"LlamaRMSNorm"}),
        (["rope"], {"LlamaAttention"}),
        (["mlp"], {"LlamaMLP"}),
        (["loss"], {"LlamaForCausalLM", "Linear"}),
    ],
)
def test_parts(parts: list[str], changed: set[str]) -> None:
    plain, ours = make_twins("llama", parts=parts)
    assert {type(module).__name__ for module in ours.modules() if "forward" in vars(module)} == changed
    batch = make_batch("llama")
    for model in (plain, ours):
        model(**batch).loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-5)


def test_a_copy_of_an_accelerated_model_is_its_own() -> None:
    _, ours = make_twins("llama")
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    batch = make_batch("llama")
    assert not torch.equal(ours(**batch).loss, other(**batch).loss)
    undo(ours)
    assert ours(**batch).logits is not None
    assert other(**batch).logits is None
    undo(other)
    assert other(**batch).logits is not None


def test_state_dict_and_files_are_transformers_own(tmp_path: Path) -> None:
    plain, ours = make_twins("qwen3")
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.save_pretrained(tmp_path)
    again = tightfit.hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(plain.state_dict()))
    assert again(**make_batch("qwen3")).logits is None


def test_auto_class_of_image_models(tmp_path: Path) -> None:
    model = tightfit.hf.AutoModelForImageTextToText.from_config(make_config("paligemma"))
    batch = make_batch("paligemma")
    out = model.train()(**batch)
    assert out.logits is None
    assert out.image_hidden_states is not None
    model.save_pretrained(tmp_path)
    again = tightfit.hf.AutoModelForImageTextToText.from_pretrained(tmp_path).train()
    torch.testing.assert_close(again(**batch).loss, out.loss)


def test_auto_class_keeps_the_loading_report(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    model, report = tightfit.hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert model(**make_batch("llama")).logits is None


class OtherLlama(LlamaForCausalLM):
    """One that does something of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


SMALL = LlamaConfig(
    vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0
)


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "Linear": lambda: nn.Linear(2, 2),
    "LlamaForSequenceClassification": lambda: LlamaForSequenceClassification(SMALL),
    "OtherLlama": lambda: OtherLlama(SMALL),
    "LlamaModel": lambda: LlamaForCausalLM(SMALL).model,
    "OptimizedModule": lambda: torch.compile(LlamaForCausalLM(SMALL)),
}


@sampled(2)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_named(name: str) -> None:
    model = UNSUPPORTED[name]()
    assert type(model).__name__ == name
    with pytest.raises(UserError, match=rf"{type(model).__name__} is not a model .* Llama, Mistral, .* GPT-2"):
        accelerate(model)


def test_a_modeling_file_of_the_models_own_is_not_taken_for_transformers() -> None:
    remote = type("LlamaForCausalLM", (nn.Module,), {"__module__": "transformers_modules.somebody.modeling_llama"})
    with pytest.raises(UserError, match=r"transformers_modules\.somebody\.modeling_llama\.LlamaForCausalLM"):
        accelerate(remote())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "cuda"}, "impl is 'cuda'; give one of auto, triton, torch"),
        ({"parts": ["norms"]}, r"parts is \['norms'\]; give a list of some of norm, rope, mlp, loss"),
        ({"parts": "loss"}, "parts is 'loss'; give a list"),
        ({"parts": []}, r"parts is \[\]; give a list"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    model = LlamaForCausalLM(SMALL)
    with pytest.raises(UserError, match=message):
        accelerate(model, **options)
    assert not any("forward" in vars(module) for module in model.modules())


def test_undo_under_somebody_elses_wrapping_says_so() -> None:
    model = accelerate(LlamaForCausalLM(SMALL))
    ours = model.forward
    model.forward = types.MethodType(lambda self, **kwargs: ours(**kwargs), model)
    with pytest.raises(UserError, match=r"LlamaForCausalLM\.forward was wrapped after accelerate"):
        undo(model)
    model.forward = ours
    undo(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_whose_weight_is_wider_promotes_as_before() -> None:
    plain, ours = make_twins("llama")
    for model in (plain, ours):
        model.half()
        model.model.norm.float()
    x = torch.randn(2, 3, 32, dtype=torch.float16)
    assert ours.model.norm(x).dtype == plain.model.norm(x).dtype == torch.float32
    assert ours.model.layers[0].input_layernorm(x).dtype == torch.float16


@pytest.mark.thorough
def test_one_graph_with_our_rotary_inside() -> None:
    """torch.compile must see the rebound forward's own globals, not those of the file it came from."""
    plain, ours = make_twins("llama")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    batch = make_batch("llama")
    loss = torch.compile(ours, backend=backend, fullgraph=True)(**batch, use_cache=False).loss
    loss.backward()
    plain(**batch).loss.backward()
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-5)
    traced = " ".join(str(node.meta.get("stack_trace")) for graph in graphs for node in graph.graph.nodes)
    assert "tightfit/kernels/attention/rope.py" in traced or "tightfit/hf/rotary.py" in traced
    assert 'modeling_llama.py", line' in traced
    assert "rotate_half" not in traced
