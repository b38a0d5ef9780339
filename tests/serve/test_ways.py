"""The checks of every way of running an engine, on this CPU; `tests/gpu/test_serve.py` makes them on a card."""

from dataclasses import replace

import pytest
import torch

from tests.serve import ways
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.text.tokenizer import Tokenizer


@pytest.mark.thorough
def test_guesses_change_nothing(model: Decoder, smaller: Decoder) -> None:
    torch.manual_seed(0)
    deep = Decoder(replace(model.spec, layers=3))
    init_weights(deep, gain=2.0)
    ways.check_guesses(deep, smaller)


def test_giving_way_changes_nothing(model: Decoder) -> None:
    ways.check_giving_way(model)


def test_adapters_answer_as_if_merged(model: Decoder) -> None:
    ways.check_adapters(model)


def test_penalties_are_those_that_are_written_out(model: Decoder) -> None:
    ways.check_penalties(model)


def test_forms_hold_beside_plain_requests(model: Decoder, tokenizer: Tokenizer) -> None:
    ways.check_forms(model, tokenizer)
