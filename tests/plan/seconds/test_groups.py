"""Collectives against what their bytes and hops come to by hand."""

import pytest

from tightfit.hardware.links import CALL_US, LINKS
from tightfit.hardware.machine import parse_machine
from tightfit.plan.seconds.groups import Group

GB = 1e9
NVLINK4 = 450 * GB * 0.8
NDR = 50 * GB * 0.8
HOP, FAR, CALL = 3.4e-6, 14e-6, CALL_US * 1e-6
TWO_NODES, FOUR_NODES = 0.95, 0.90
"""What is left of a network's bandwidth: a twentieth less for each doubling."""


def test_a_group_inside_a_node_uses_its_links() -> None:
    group = Group(parse_machine("8xH100-80GB"), 1, 8)
    assert group.all_gather_s(8 * GB) == pytest.approx(CALL + 7 * HOP + 7 * GB / NVLINK4)
    assert group.all_reduce_s(8 * GB) == pytest.approx(CALL + 14 * HOP + 14 * GB / NVLINK4)


def test_a_group_across_nodes_uses_the_cards_of_its_members() -> None:
    machine = parse_machine("4x8xH100-80GB")
    all_ranks = Group(machine, 1, 32)
    assert all_ranks.ring_bytes_s == pytest.approx(8 * FOUR_NODES * NDR)  # eight cards a node, less than NVLink
    one_per_node = Group(machine, 8, 4)
    assert one_per_node.ring_bytes_s == pytest.approx(FOUR_NODES * NDR)
    two_per_node = Group(machine, 4, 8)
    assert two_per_node.ring_bytes_s == pytest.approx(2 * FOUR_NODES * NDR)
    assert all_ranks.hop_s == pytest.approx(4 * FAR + 28 * HOP)


def test_fast_networks_are_held_back_by_slow_links_inside() -> None:
    group = Group(parse_machine("2x8xA100-80GB:pcie:xdr"), 1, 16)
    assert group.ring_bytes_s == pytest.approx(LINKS["pcie4"].collective_bytes_s)


def test_a_port_per_node_is_shared_by_its_cards() -> None:
    machine = parse_machine("2x8xL4:ethernet-100")
    port = 12.5 * GB * 0.8 * TWO_NODES
    assert Group(machine, 1, 16).ring_bytes_s == pytest.approx(port)
    assert Group(machine, 8, 2).ring_bytes_s == pytest.approx(port / 8)


def test_trees_win_where_there_is_little_to_send() -> None:
    group = Group(parse_machine("128x8xH100-80GB"), 1, 1024)
    assert group.all_reduce_s(1024) == pytest.approx(CALL + 20 * FAR, rel=1e-3)
    ring = CALL + 2 * group.hop_s + 2 * 1e12 * 1023 / 1024 / group.ring_bytes_s
    assert group.all_reduce_s(1e12) <= ring


def test_half_of_the_bandwidth_is_left_on_any_number_of_nodes() -> None:
    assert Group(parse_machine("100000x8xH100-80GB"), 8, 100_000).ring_bytes_s == pytest.approx(0.5 * NDR)


def test_one_rank_talks_to_nobody() -> None:
    group = Group(parse_machine("8xH100-80GB"), 1, 1)
    for time in (group.all_gather_s, group.all_reduce_s, group.all_to_all_s, group.send_s):
        assert time(1e9) == 0


def test_all_to_all_sends_what_stays_inside_over_the_inside() -> None:
    group = Group(parse_machine("2x8xH100-80GB"), 1, 16)
    expected = CALL + FAR + 16 * GB * 7 / 16 / NVLINK4 + 16 * GB * 8 / 16 / (TWO_NODES * NDR)
    assert group.all_to_all_s(16 * GB) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_reduce_is_reduce_scatter_and_all_gather(size: int) -> None:
    group = Group(parse_machine("8xA100-80GB"), 1, size)
    assert group.all_reduce_s(1e9) == pytest.approx(2 * group.all_gather_s(1e9) - CALL)
