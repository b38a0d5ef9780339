"""What cards sustain: the reference as measured, the rest by their watts."""

import pytest

from tightfit.hardware.accelerator import Accelerator
from tightfit.hardware.catalog import CATALOG, find_accelerator
from tightfit.hardware.efficiency import MEASURED
from tightfit.hardware.sustained import LIMIT, attention_shares, generation_of, power_factor, product_share
from tightfit.plan.seconds.stragglers import straggler_share


def share(name: str, form: str | None = None) -> float:
    card = find_accelerator(name, form)
    return product_share(card, card.rates.bf16 or card.rates.fp16 or 1.0)


def test_the_measured_card_keeps_its_measurement() -> None:
    assert share("H200", "sxm") == pytest.approx(MEASURED.narrow.products, rel=1e-9)
    assert power_factor(find_accelerator("H200", "sxm"), 989.4) == pytest.approx(1.0)


def test_less_power_is_less_speed() -> None:
    """√(350 W / 756 TFLOP/s) against √(700 / 989.4)."""
    expected = share("H200", "sxm") * ((350 / 756) / (700 / 989.4)) ** 0.5
    assert share("H100-80GB", "pcie") == pytest.approx(expected)
    assert share("L4") < share("L40S") < share("RTX4090") == LIMIT


@pytest.mark.parametrize("card", CATALOG, ids=lambda card: f"{card.name} {card.form}")
def test_every_card_has_a_generation_and_a_power(card: Accelerator) -> None:
    assert card.power_w is not None
    assert 0.3 < product_share(card, card.rates.bf16 or card.rates.fp16 or card.rates.fp32) <= LIMIT


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("A100-80GB", "ampere"),
        ("RTX3090", "ampere"),
        ("RTX4000Ada", "ada"),
        ("L4", "ada"),
        ("T4", "turing"),
        ("H20-96GB", "hopper"),
        ("RTX5090", "blackwell"),
        ("RTXPRO6000", "blackwell"),
        ("MI300X", "cdna3"),
        ("V100S", "volta"),
        ("QuadroGV100", "volta"),
        ("RTX2000Ada", "ada"),
        ("RTX5880Ada", "ada"),
        ("RTX2080Super", "turing"),
    ],
)
def test_generations(name: str, generation: str) -> None:
    assert generation_of(find_accelerator(name)) == generation


def test_flash_attention_two_leaves_half_of_hopper() -> None:
    on_ampere = attention_shares(find_accelerator("A100-80GB", "sxm"), "flash2", 312.0, 128)
    on_hopper = attention_shares(find_accelerator("H100-80GB", "sxm"), "flash2", 989.4, 128)
    assert on_hopper[0] < 0.65 * on_ampere[0]


def test_the_slowest_of_many() -> None:
    assert straggler_share(1) == 0
    assert 0.03 < straggler_share(8) < straggler_share(64) < straggler_share(512) < 0.09
