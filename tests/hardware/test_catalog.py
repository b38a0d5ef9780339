"""The catalog: what data sheets say, and sentences for what it does not have."""

import pytest

from tightfit.errors import UserError
from tightfit.hardware.catalog import CATALOG, find_accelerator
from tightfit.hardware.links import LINKS

WANTED = """
T4 P100 V100 V100S A2 A10 A10G A16 A30 A40 A100 A800 L4 L20 L40 L40S H20 H100 H200 H800 GH200 B200 B300 GB200
RTX2060 RTX2070 RTX2080 RTX2080Ti TITANRTX QuadroRTX6000 QuadroRTX8000 RTX3060 RTX3060Ti RTX3070 RTX3070Ti RTX3080
RTX3080Ti RTX3090 RTX3090Ti RTX4060 RTX4060Ti RTX4070 RTX4070Super RTX4070Ti RTX4070TiSuper RTX4080 RTX4080Super
RTX4090 RTX5060 RTX5060Ti RTX5070 RTX5070Ti RTX5080 RTX5090 RTXA2000 RTXA4000 RTXA4500 RTXA5000 RTXA5500 RTXA6000
RTX4000Ada RTX4500Ada RTX5000Ada RTX6000Ada RTXPRO6000 MI210 MI250 MI250X MI300A MI300X MI325X MI350X MI355X M1
M1Pro M1Max M1Ultra M2 M2Pro M2Max M2Ultra M3 M3Pro M3Max M3Ultra M4 M4Pro M4Max TITANV QuadroGV100 RTX2060Super
RTX2070Super RTX2080Super QuadroRTX4000 QuadroRTX5000 RTX3050 RTX4090D RTX2000Ada RTX4000SFFAda RTX5880Ada RTX5050
RTXPRO4000 RTXPRO4500 RTXPRO5000 GB300
"""
NO_BF16 = ("T4", "P100", "V100", "V100S", "TITANV", "QuadroGV100", "TITANRTX")
NO_BF16_SERIES = ("RTX20", "QuadroRTX")


def test_every_card_people_ask_about_is_there_with_a_source() -> None:
    assert {row.family for row in CATALOG} == set(WANTED.split())
    assert all(row.source for row in CATALOG)
    assert len({(row.name, row.form) for row in CATALOG}) == len(CATALOG)
    forms = {(row.name, row.form) for row in CATALOG}
    for name in ("V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "H100-80GB"):
        assert {(name, "pcie"), (name, "sxm")} <= forms


def test_rows_are_consistent() -> None:
    for row in CATALOG:
        assert row.peer_link in LINKS
        assert row.host_link in LINKS
        assert row.bridge is None or LINKS[row.bridge].kind == "fabric"
        assert row.network is None or LINKS[row.network].kind == "network"
        least = 0.75 if row.form == "soc" else 0.85  # a chip whose memory the system shares
        assert least * row.memory_gb * 1e9 < row.memory_bytes <= row.memory_gb * 2**30
        rates = row.rates
        assert rates.fp16 is not None
        assert rates.fp16 > rates.fp32 or row.form == "soc"
        assert rates.fp8 is None or rates.fp8 == pytest.approx(2 * rates.fp16, rel=0.02)
        assert rates.int8 is None or rates.int8 >= rates.fp16
        is_old = row.family.startswith(NO_BF16_SERIES) and not row.family.endswith("Ada")
        if row.family in NO_BF16 or is_old:
            assert rates.bf16 is None
            assert rates.tf32 is None
        else:
            assert rates.bf16 == rates.fp16


@pytest.mark.parametrize(
    ("name", "form", "bf16_or_fp16", "gb_s", "peer_gb_s"),
    [
        ("V100-32GB", "sxm", 125.0, 900, 150),
        ("A100-80GB", "sxm", 312.0, 2039, 300),
        ("H100-80GB", "sxm", 989.4, 3350, 450),
        ("H200", "sxm", 989.4, 4800, 450),
        ("B200", "sxm", 2250.0, 8000, 900),
        ("T4", "pcie", 65.0, 320, 15.75),
        ("MI300X", "oam", 1307.4, 5300, 448),
    ],
)
def test_figures_of_the_data_sheets(name: str, form: str, bf16_or_fp16: float, gb_s: float, peer_gb_s: float) -> None:
    row = find_accelerator(name, form)
    assert (row.rates.fp16, row.bandwidth_gb_s, row.peer.gb_s) == (bf16_or_fp16, gb_s, peer_gb_s)


def test_what_cuda_reports_is_less_than_the_box_says() -> None:
    h200 = find_accelerator("H200")
    assert h200.memory_bytes == int(139.8 * 2**30)
    assert find_accelerator("T4").memory_bytes < 15 * 2**30
    assert find_accelerator("GH200-96GB").memory_bytes == 96 * 10**9


@pytest.mark.parametrize(
    "name", ["h100-80gb", "H100 80GB", "NVIDIA H100-80GB", "H10080GB", "H100-80GiB", "H100 80 gib"]
)
def test_spelling_does_not_matter(name: str) -> None:
    assert find_accelerator(name).name == "H100-80GB"


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("H101-80GB", None, ["H101-80GB", "H100-80GB"]),
        ("V100", None, ["V100-16GB or V100-32GB"]),
        ("V100-64GB", None, ["V100-64GB", "V100-32GB"]),
        ("TPUv5", None, ["TPUv5", "tightfit hardware", "card.yaml"]),
        ("T4", "sxm", ["T4-16GB", "sxm", "pcie"]),
    ],
)
def test_unknown_parts_are_one_sentence(name: str, form: str | None, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        find_accelerator(name, form)
    for word in words:
        assert word in str(error.value)
