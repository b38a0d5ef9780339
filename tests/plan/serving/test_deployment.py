"""How a served model is spread over cards: as few as hold it, copies with the rest, or a sentence."""

from typing import Any

import pytest

from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.models.presets import preset
from tightfit.plan.serving.deployment import Deployment, make_deployment


def deployment(model: str, on: str, **asked: Any) -> Deployment:
    return make_deployment(model, preset(model), parse_machine(on), **asked)


def test_a_model_that_fits_a_card_gets_a_copy_on_each() -> None:
    made = deployment("llama-3.1-8b", "2x4xL4", requests=4)
    assert (made.tensor, made.pipeline, made.replicas) == (1, 1, 8)
    assert made.fits


def test_a_copy_takes_as_few_cards_as_hold_it() -> None:
    made = deployment("llama-3.1-70b", "8xH100-80GB", requests=1)
    assert made.cards == 2  # 141 GB of weights, 76 GB of each card
    assert made.replicas == 4
    assert 2 * made.weight_bytes == pytest.approx(2 * preset("llama-3.1-70b").params(), rel=1e-6)


def test_more_requests_take_more_cards() -> None:
    made = deployment("llama-3.1-70b", "8xH100-80GB", requests=64)
    assert (made.tensor, made.pipeline, made.requests) == (4, 1, 64)


def test_stages_over_nodes_where_one_node_is_too_small() -> None:
    made = deployment("llama-3.1-405b", "4x8xA100-80GB", requests=1)
    assert made.spans_nodes
    assert made.cards % 8 == 0
    assert made.fits


def test_fewer_requests_at_a_time_where_that_many_do_not_fit() -> None:
    made = deployment("llama-3.1-8b", "L4", length=8192, requests=64)
    assert 1 <= made.requests < 64
    assert made.peak_bytes <= made.room_bytes


def test_one_cards_bytes_are_those_of_the_one_card_plan() -> None:
    """The same model, length and requests as `tightfit plan --serve` tells them."""
    from tightfit.plan.serving.plan import make_serving

    one = deployment("llama-3.2-1b", "L4", length=2048, requests=16)
    other = make_serving("llama-3.2-1b", preset("llama-3.2-1b"), parse_machine("L4"), "bf16", 2048, 16)
    lines = [line for line in other.ledger.lines if line.phase == "forward"]
    slack_bytes = sum(line.bytes for line in lines if line.component == "allocator slack")
    assert one.peak_bytes == pytest.approx(other.gpu_peak_bytes - slack_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"tensor": 3}, ["--tensor is 3", "32 attention heads"]),
        ({"tensor": 16}, ["--tensor is 16", "8 cards"]),
        ({"pipeline": 9}, ["--pipeline is 9", "8 cards"]),
        ({"tensor": 4, "replicas": 3}, ["--replicas is 3", "holds 2"]),
        ({"replicas": 0}, ["--replicas is 0"]),
        ({"length": 10**9}, ["--max-length is 1000000000", "131072"]),
        ({"tensor": 4, "pipeline": 4}, ["--tensor"]),
    ],
)
def test_refusals_name_the_value_and_the_fix(asked: dict[str, int], named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        deployment("llama-3.1-8b", "8xL4", **asked)
    assert all(word in str(refused.value) for word in named), refused.value


def test_a_model_too_large_for_all_cards_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs [\d.]+ GiB on each of 2 cards .*--on"):
        deployment("llama-3.1-70b", "2xL4")
