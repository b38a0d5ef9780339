"""Machines as people write them, and this machine as nvidia-smi lists it."""

from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.hardware.driver import DriverFacts, accelerator_of_driver
from tightfit.hardware.local import local_machine
from tightfit.hardware.machine import Machine, machine_of_json, parse_machine
from tightfit.hardware.own_card import own_card


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "card", "form", "intra", "inter"),
    [
        ("H100-80GB", 1, 1, "H100-80GB", "sxm", "nvlink4", "ndr"),
        ("8xV100-32GB", 1, 8, "V100-32GB", "sxm", "nvlink2", "edr"),
        ("2x8xH100-80GB", 2, 8, "H100-80GB", "sxm", "nvlink4", "ndr"),
        ("4xA100-40GB:pcie", 1, 4, "A100-40GB", "pcie", "pcie4", "ethernet-100"),
        ("4x8xL4:ethernet-25", 4, 8, "L4-24GB", "pcie", "pcie4", "ethernet-25"),
        ("2x8xA100-80GB:pcie:hdr", 2, 8, "A100-80GB", "pcie", "pcie4", "hdr"),
        ("2xRTX3090:nvlink", 1, 2, "RTX3090-24GB", "pcie", "nvlink-bridge-56", "ethernet-100"),
        ("8xRTX4090", 1, 8, "RTX4090-24GB", "pcie", "pcie4", "ethernet-100"),
        ("2xH100-94GB", 1, 2, "H100-94GB", "nvl", "pcie5", "ethernet-100"),
    ],
)
def test_parse(text: str, nodes: int, per_node: int, card: str, form: str, intra: str, inter: str) -> None:
    machine = parse_machine(text)
    found = (machine.nodes, machine.per_node, machine.accelerator.name, machine.accelerator.form)
    assert found == (nodes, per_node, card, form)
    assert (machine.intra.name, machine.inter.name, machine.ranks) == (intra, inter, nodes * per_node)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512GB", 512 * 10**9), ("64 GiB", 64 * 2**30), ("64G", 64 * 10**9), ("1.5TB", 1_500_000_000_000)],
)
def test_host_memory(text: str, size: int) -> None:
    assert parse_machine("T4", text).host_bytes == size
    assert parse_machine("T4").host_bytes is None


@pytest.mark.parametrize("card", ["M3-24GB", "M4Max-128GB", "MI300A-128GB"])
def test_chips_that_share_their_memory_have_no_other(card: str) -> None:
    machine = parse_machine(card)
    assert machine.host_bytes == 0
    assert machine_of_json(machine.to_json()).host_bytes == 0


@pytest.mark.parametrize(
    ("text", "host", "words"),
    [
        ("0xH100-80GB", None, ["0 GPUs", "at least 1"]),
        ("0x8xH100-80GB", None, ["0 nodes"]),
        ("-2xH100-80GB", None, ["-2 GPUs"]),
        ("", None, ["8xV100-32GB"]),
        ("8", None, ["'8'"]),
        ("3060", None, ["'3060'", "did you mean RTX3060-12GB"]),
        ("2x4090", None, ["'2x4090'", "did you mean RTX4090-24GB"]),
        ("8xx8xT4", None, ["x8xT4", "T4-16GB"]),
        ("9999999xT4", None, ["at most"]),
        ("8xT4:token-ring", None, ["token-ring", "ethernet-100"]),
        ("4xRTX3090:nvlink", None, ["nvlink", "pairs"]),
        ("2xRTX4090:nvlink", None, ["nvlink", "none"]),
        ("H100-80GB:sxm:pcie", None, ["sxm", "pcie", "one of them"]),
        ("2x8xH100-80GB:hdr:sxm:ndr", None, ["hdr", "ndr", "one of them"]),
        ("T4", "lots", ["--host-memory", "lots", "512GB"]),
        ("T4", "512", ["--host-memory", "unit"]),
        ("T4", "0GB", ["--host-memory"]),
        ("M3-24GB", "64GB", ["64GB", "M3-24GB", "one memory", "leave it out"]),
    ],
)
def test_nonsense_is_one_sentence(text: str, host: str | None, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_machine(text, host)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_machine_goes_through_json() -> None:
    machine = parse_machine("2x8xA100-80GB:pcie:hdr", "512GB")
    data = machine.to_json()
    assert parse_machine(data["text"], data["host_bytes"]) == machine


def test_other_counts_of_the_same_parts() -> None:
    for text in ("4xA100-80GB:pcie:hdr", "A100-80GB:pcie:hdr", "2x4xA100-80GB:pcie:hdr"):
        more = parse_machine(text).with_counts(3, 8)
        assert more == parse_machine("3x8xA100-80GB:pcie:hdr")
    assert parse_machine("T4").with_counts(1, 4).text == "4xT4"


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (2, 8)])
def test_a_bridge_is_left_out_where_it_has_no_pair_to_join(nodes: int, per_node: int) -> None:
    """The text of such a machine would be refused, and its cards be said to talk faster than they do."""
    found = parse_machine("2xRTX3090:NVLink:hdr").with_counts(nodes, per_node)
    assert found == parse_machine(found.text)
    assert found.intra.name == "pcie4"
    assert parse_machine("2xRTX3090:nvlink").with_counts(3, 2).text == "3x2xRTX3090:nvlink"
    assert parse_machine("2xH100-80GB:nvlink").with_counts(1, 4) == parse_machine("4xH100-80GB:nvlink")


def from_listing(listing: str) -> Machine:
    return local_machine("64GB", listing)


@pytest.mark.parametrize(
    ("listing", "text"),
    [
        ("Tesla V100-SXM2-32GB, 32768\n" * 8, "8xV100-32GB:sxm"),
        ("Tesla V100-PCIE-16GB, 16160\n", "1xV100-16GB:pcie"),
        ("NVIDIA H200, 143771\n", "1xH200-141GB:sxm"),
        ("NVIDIA H100 80GB HBM3, 81559\n" * 2, "2xH100-80GB:sxm"),
        ("NVIDIA H100 PCIe, 81559\n", "1xH100-80GB:pcie"),
        ("NVIDIA H100 NVL, 95830\n", "1xH100-94GB:nvl"),
        ("NVIDIA A100-SXM4-80GB, 81920\n" * 4, "4xA100-80GB:sxm"),
        ("NVIDIA GeForce RTX 4090, 24564\n", "1xRTX4090-24GB:pcie"),
        ("Tesla T4, 15360\n", "1xT4-16GB:pcie"),
        ("NVIDIA L40S, 46068\n", "1xL40S-48GB:pcie"),
        ("NVIDIA A10G, 23028\n", "1xA10G-24GB:pcie"),
        ("NVIDIA A10, 23028\n", "1xA10-24GB:pcie"),
        ("NVIDIA GeForce RTX 3060, 12288\n", "1xRTX3060-12GB:pcie"),
        ("NVIDIA GeForce RTX 4060 Ti, 16380\n", "1xRTX4060Ti-16GB:pcie"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER, 16376\n", "1xRTX4070TiSuper-16GB:pcie"),
        ("NVIDIA RTX A6000, 49140\n" * 2, "2xRTXA6000-48GB:pcie"),
        ("NVIDIA RTX 6000 Ada Generation, 49140\n", "1xRTX6000Ada-48GB:pcie"),
        ("Quadro RTX 6000, 24576\n", "1xQuadroRTX6000-24GB:pcie"),
        ("NVIDIA H20, 97871\n" * 8, "8xH20-96GB:sxm"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887\n", "1xRTXPRO6000-96GB:pcie"),
    ],
)
def test_local_from_what_nvidia_smi_prints(listing: str, text: str) -> None:
    assert from_listing(listing) == parse_machine(text, "64GB")


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ("", ["no GPU"]),
        ("Quadro P620, 2048\n", ["Quadro P620", "catalog", "card.yaml"]),
        ("Tesla T4, 15360\nNVIDIA L4, 23034\n", ["mixes", "L4-24GB", "T4-16GB"]),
    ],
)
def test_local_says_what_it_cannot_use(listing: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_listing(listing)
    for word in words:
        assert word in str(error.value)


def test_a_machine_without_a_gpu_that_nobody_measured_names_both_ways_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no GPU that nvidia-smi can list; run tightfit calibrate .* --on 8xH100-80GB"):
        local_machine("64GB")


def facts(multiprocessors: int, mhz: int, memory_mhz: int, bus_bits: int, major: int, minor: int) -> DriverFacts:
    return DriverFacts(
        multiprocessors=multiprocessors,
        clock_khz=mhz * 1000,
        memory_clock_khz=memory_mhz * 1000,
        bus_bits=bus_bits,
        capability=(major, minor),
    )


@pytest.mark.parametrize(
    ("name", "said", "fp16", "gb_s"),
    [
        ("Tesla V100-SXM2-32GB", facts(80, 1530, 877, 4096, 7, 0), 125.0, 900),
        ("Tesla T4", facts(40, 1590, 5001, 256, 7, 5), 65.0, 320),
        ("NVIDIA A100-SXM4-80GB", facts(108, 1410, 1593, 5120, 8, 0), 312.0, 2039),
        ("NVIDIA GeForce RTX 3090", facts(82, 1695, 9751, 384, 8, 6), 71.0, 936),
        ("NVIDIA RTX A6000", facts(84, 1800, 8001, 384, 8, 6), 154.8, 768),
        ("NVIDIA GeForce RTX 4090", facts(128, 2520, 10501, 384, 8, 9), 165.2, 1008),
        ("NVIDIA L40S", facts(142, 2520, 9001, 384, 8, 9), 362.0, 864),
        ("NVIDIA H100 80GB HBM3", facts(132, 1830, 2619, 5120, 9, 0), 989.4, 3350),
        ("NVIDIA GeForce RTX 5090", facts(170, 2407, 14001, 512, 12, 0), 209.5, 1792),
    ],
)
def test_what_the_driver_says_gives_the_data_sheets_peaks(name: str, said: DriverFacts, fp16: float, gb_s: int) -> None:
    card = accelerator_of_driver(name, 24576, said)
    assert card is not None
    assert card.rates.fp16 == pytest.approx(fp16, rel=0.03)
    assert card.bandwidth_gb_s == pytest.approx(gb_s, rel=0.03)


def test_a_card_the_catalog_does_not_have_is_read_from_the_driver_and_goes_through_json() -> None:
    said = facts(64, 2000, 9000, 256, 8, 9)
    machine = local_machine("64GB", "NVIDIA Something 9000, 20480\n" * 2, said)
    assert (machine.per_node, machine.accelerator.memory_bytes) == (2, 20 * 2**30)
    assert machine.accelerator.rates.bf16 == pytest.approx(64 * 2e9 * 1024 / 1e12)
    assert machine_of_json(machine.to_json()) == machine
    with pytest.raises(UserError, match="driver does not describe"):
        local_machine("64GB", "Quadro P6000, 24576\n", facts(30, 1500, 4500, 384, 6, 1))


CARD = "family: MyCard\nmemory_gb: 40\nbandwidth_gb_s: 900\nfp32: 30\nbf16: 120\nfp16: 120\n"
LINES = "host_link: pcie4\npeer_link: nvlink3\n"


def test_an_endless_card_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is a character device"):
        own_card(Path("/dev/zero"))


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(CARD + LINES, encoding="utf-8")
    machine = parse_machine(f"2x4x{path}:hdr", "256GB")
    assert (machine.ranks, machine.accelerator.name, machine.inter.name) == (8, "MyCard-40GB", "hdr")
    assert (machine.accelerator.rates.bf16, machine.accelerator.rates.fp8) == (120, None)
    assert machine_of_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CARD, ["host_link"]),
        (CARD + LINES + "colour: red\n", ["colour"]),
        (CARD + LINES.replace("pcie4", "string"), ["string", "pcie4"]),
        (CARD.replace("fp32: 30", "fp32: fast") + LINES, ["fp32", "fast"]),
        (CARD.replace("memory_gb: 40", "memory_gb: -1") + LINES, ["memory_gb", "-1"]),
        (CARD.replace("memory_gb: 40", "memory_gb: 0.5") + LINES, ["memory_gb", "0.5", "whole"]),
        (CARD + LINES + "usable_gib: 400\n", ["usable_gib", "400", "40"]),
        (CARD + LINES + "power_w: -5\n", ["power_w", "-5"]),
        (CARD + LINES + "power_w: much\n", ["power_w", "much"]),
        (CARD + LINES + "form: odd\n", ["form", "odd", "pcie"]),
        (CARD + LINES + "network: pcie4\n", ["network", "pcie4", "ndr"]),
        (CARD + LINES.replace("pcie4", "[pcie4]"), ["['pcie4']", "nvlink4"]),
        (CARD.replace("MyCard", "''") + LINES, ["family", "''"]),
        (CARD.replace("MyCard", "[1]") + LINES, ["family", "[1]"]),
        ("[1, 2]\n", ["not a card"]),
        ("a: b: c\n", ["line 1", "not valid YAML"]),
        ("\0", ["card"]),
        ("family: !!timestamp x\n", ["'x' is no timestamp"]),
        (f"family: {'7' * 5000}\n", ["5,000 characters"]),
        ("a: &a [*a]\n", ["aliases"]),
        ("[" * 1500, ["not valid YAML"]),
    ],
)
def test_a_card_with_a_mistake_is_one_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        parse_machine(str(path))
    assert "\n" not in str(error.value)
    for word in [*words, "card.yaml"]:
        assert word in str(error.value)
    with pytest.raises(UserError, match=r"cannot read card .*none.yaml: No such file.*; give a YAML file"):
        parse_machine(str(tmp_path / "none.yaml"))
