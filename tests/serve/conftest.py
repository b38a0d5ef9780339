"""A tiny model with a tokenizer, for tests of what surrounds it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.conftest import SENTENCES
from tests.serve.running import CONFIG, Running, client_of, serving
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import LoadedModel
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import CHATML_TEMPLATE, Tokenizer, train_tokenizer

SHAPE = ModelSpec(
    family="llama",
    vocab_size=300,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_size=48,
    max_positions=512,
)


TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """With a chat template that knows tools."""
    made = train_tokenizer(SENTENCES, SHAPE.vocab_size)
    made._wrapped.chat_template = TOOLS + CHATML_TEMPLATE
    return made


@pytest.fixture(scope="session")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(SHAPE)
    init_weights(made, gain=2.0)
    return made.eval()


@pytest.fixture(scope="session")
def smaller() -> Decoder:
    """Of the same vocabulary, and of another opinion."""
    from dataclasses import replace

    torch.manual_seed(1)
    made = Decoder(replace(SHAPE, layers=1, hidden_size=16))
    init_weights(made, gain=2.0)
    return made.eval()


@pytest.fixture(scope="session")
def loaded(model: Decoder, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(model, tokenizer, "tiny")


@pytest.fixture(scope="session")
def directory(model: Decoder, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model on disk, for programs that are given one."""
    folder = tmp_path_factory.mktemp("tiny-model")
    write_model(folder, model, tokenizer)
    return folder


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    """One for a file, unless that has its own."""
    with serving(loaded, CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)
