"""Real weights: SmolLM2-135M-Instruct out of its GGUF file, against transformers and llama.cpp."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.covering import sampled
from tests.models.gguf.llama_cpp import LlamaCpp, llama_cpp
from tests.models.gguf.test_tokenizer import TEXTS
from tightfit.kernels.quantized.int4_linear import code_order
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.gguf.model import smollm2_path
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.huggingface.weights import to_hf_state
from tightfit.models.loading import SMOLLM2, LoadedModel, load_model
from tightfit.serve.weights.cpu_codes import pack_for_cpu

DECLARATION = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have \
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the \
Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should \
declare the causes which impel them to the separation.

We hold these truths to be self-evident, that all men are created equal, that they are endowed by their Creator with \
certain unalienable Rights, that among these are Life, Liberty and the pursuit of Happiness. That to secure these \
rights, Governments are instituted among Men, deriving their just powers from the consent of the governed, That \
whenever any Form of Government becomes destructive of these ends, it is the Right of the People to alter or to \
abolish it, and to institute new Government, laying its foundation on such principles and organizing its powers in \
such form, as to them shall seem most likely to effect their Safety and Happiness. Prudence, indeed, will dictate that \
Governments long established should not be changed for light and transient causes; and accordingly all experience \
hath shewn, that mankind are more disposed to suffer, while evils are sufferable, than to right themselves by \
abolishing the forms to which they are accustomed. But when a long train of abuses and usurpations, pursuing \
invariably the same Object evinces a design to reduce them under absolute Despotism, it is their right, it is their \
duty, to throw off such Government, and to provide new Guards for their future security. Such has been the patient \
sufferance of these Colonies; and such is now the necessity which constrains them to alter their former Systems of \
Government. The history of the present King of Great Britain is a history of repeated injuries and usurpations, all \
having in direct object the establishment of an absolute Tyranny over these States. To prove this, let Facts be \
submitted to a candid world.

He has refused his Assent to Laws, the most wholesome and necessary for the public good. He has forbidden his \
Governors to pass Laws of immediate and pressing importance, unless suspended in their operation till his Assent \
should be obtained; and when so suspended, he has utterly neglected to attend to them."""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42."},
]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(SMOLLM2)


@pytest.fixture(scope="module")
def reference() -> Iterator[LlamaCpp]:
    with llama_cpp(smollm2_path()) as loaded:
        yield loaded


def test_it_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    greedy = Sampling(max_tokens=24, temperature=0)
    (answer,) = continue_text(smollm2, "What is the capital of France?", greedy, chat=True)
    assert "Paris" in "".join(answer)


@sampled(3)
@pytest.mark.parametrize(
    "prompt", ["The capital of France is", "Water boils at a temperature of 100 degrees", "1, 2, 3, 4,"]
)
def test_it_predicts_what_llama_cpp_does(prompt: str, smollm2: LoadedModel, reference: LlamaCpp) -> None:
    """As far as that goes: llama.cpp computes quantized models with activations rounded to eight bits."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(prompt)
    with torch.no_grad():
        found = model(torch.tensor([ids]), last_only=True).logits[0, -1].log_softmax(-1)
    expected = reference.likeliest(ids, 10)
    assert max(expected, key=expected.__getitem__) == found.argmax()
    assert max(abs(found[index].item() - value) for index, value in expected.items()) < 0.5


@pytest.mark.skipif(code_order() is None, reason="this CPU's torch has no fast product with 4-bit codes")
def test_multiplied_as_packed_it_predicts_what_float32_does(smollm2: LoadedModel) -> None:
    """What rounding inputs, scales and results to bfloat16 costs on real text, as docs/serving.md says it."""
    coded = load_model(SMOLLM2, coded_gguf=True).model
    pack_for_cpu(coded)
    assert smollm2.tokenizer is not None
    tokens = torch.tensor([smollm2.tokenizer.encode(DECLARATION)[:64]])
    with torch.inference_mode():
        expected, found = (model(tokens).logits[0].log_softmax(-1) for model in (smollm2.model, coded))
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 1e-5 < divergence < 0.005  # 0.0018 where this was written; coding in 4 bits itself costs some 0.1
    assert (expected.argmax(-1) == found.argmax(-1)).float().mean() > 0.95


@pytest.mark.thorough
def test_perplexity_is_that_of_transformers(smollm2: LoadedModel) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert tokenizer is not None
    tokens = torch.tensor([tokenizer.encode(DECLARATION)[:160]])
    with torch.no_grad():
        ours = model(tokens[:, :-1], tokens[:, 1:]).loss.item() / (tokens.shape[1] - 1)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**config_from_spec(model.spec, dtype="float32")))
    theirs.load_state_dict(to_hf_state(model, model.spec), strict=False, assign=True)
    theirs.tie_weights()
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    with torch.no_grad():
        expected = theirs.eval()(tokens, labels=tokens).loss.item()
    assert tokens.shape[1] == 160
    assert math.exp(ours) == pytest.approx(math.exp(expected), rel=5e-5)
    assert 2 < math.exp(ours) < 40


@pytest.mark.parametrize("text", [*TEXTS, DECLARATION, "<|im_start|>user\nhi<|im_end|>", "Wörter" * 200, "😀" * 50])
def test_ids_are_those_of_llama_cpp(text: str, smollm2: LoadedModel, reference: LlamaCpp) -> None:
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode(text) == reference.tokenize(text)
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
    parsed = smollm2.tokenizer.encode(text, parse_special=True)
    assert parsed == reference.tokenize(text, parse_special=True)


def test_its_tokenizer_saved_gives_the_same_ids_in_transformers(smollm2: LoadedModel, tmp_path: Path) -> None:
    assert smollm2.tokenizer is not None
    smollm2.tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in TEXTS:
        expected = smollm2.tokenizer.encode(text, parse_special=True)
        assert theirs.encode(text, add_special_tokens=False) == expected, repr(text)
    assert theirs.apply_chat_template(CHAT)["input_ids"] == smollm2.tokenizer.encode_chat(CHAT)[0]


def test_a_chat_is_encoded_as_llama_cpp_would_and_only_the_answer_counts(
    smollm2: LoadedModel, reference: LlamaCpp
) -> None:
    assert smollm2.tokenizer is not None
    ids, mask = smollm2.tokenizer.encode_chat(CHAT)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
    text += "<|im_start|>assistant\n42.<|im_end|>\n"
    assert ids == reference.tokenize(text, parse_special=True)
    assert smollm2.tokenizer.decode([i for i, said in zip(ids, mask, strict=True) if said]) == "42.<|im_end|>"
    assert smollm2.tokenizer.stop_ids == {2}
