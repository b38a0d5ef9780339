"""Machines as people write them, and this machine as nvidia-smi lists it."""

import pytest

from tightfit.errors import UserError
from tightfit.hardware.local import local_machine
from tightfit.hardware.machine import Machine, parse_machine


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
    ("text", "size"), [("512GB", 512 * 10**9), ("64 GiB", 64 * 2**30), ("1.5TB", 1_500_000_000_000)]
)
def test_host_memory(text: str, size: int) -> None:
    assert parse_machine("T4", text).host_bytes == size
    assert parse_machine("T4").host_bytes is None


@pytest.mark.parametrize(
    ("text", "host", "words"),
    [
        ("0xH100-80GB", None, ["0 GPUs", "at least 1"]),
        ("0x8xH100-80GB", None, ["0 nodes"]),
        ("-2xH100-80GB", None, ["-2 GPUs"]),
        ("", None, ["8xV100-32GB"]),
        ("8", None, ["'8'"]),
        ("8xx8xT4", None, ["x8xT4", "T4-16GB"]),
        ("9999999xT4", None, ["at most"]),
        ("8xT4:token-ring", None, ["token-ring", "ethernet-100"]),
        ("4xRTX3090:nvlink", None, ["nvlink", "pairs"]),
        ("2xRTX4090:nvlink", None, ["nvlink", "none"]),
        ("T4", "lots", ["--host-memory", "lots", "512GB"]),
        ("T4", "512", ["--host-memory", "unit"]),
        ("T4", "0GB", ["--host-memory"]),
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
    ],
)
def test_local_from_what_nvidia_smi_prints(listing: str, text: str) -> None:
    assert from_listing(listing) == parse_machine(text, "64GB")


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ("", ["no GPU"]),
        ("Quadro P620, 2048\n", ["Quadro P620", "catalog"]),
        ("Tesla T4, 15360\nNVIDIA L4, 23034\n", ["mixes", "L4-24GB", "T4-16GB"]),
    ],
)
def test_local_says_what_it_cannot_use(listing: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        from_listing(listing)
    for word in words:
        assert word in str(error.value)
