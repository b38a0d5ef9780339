"""Measured exchanges: split into latency and rate, kept, and what plans of this machine then count with."""

import json
from dataclasses import replace

import pytest

from tests.hardware.test_calibration import MEASURED
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.collective_rates import OPERATIONS, CollectivePoint, CollectiveRates, wire_share
from tightfit.hardware.machine import parse_machine
from tightfit.hardware.topology import read_topology
from tightfit.plan.seconds.groups import Group

SMALL, LARGE = 2**10, 2**28


def measured(gb_s: float, latency_us: float, ranks: int = 4) -> CollectiveRates:
    """As a machine would show it whose ranks each send so much."""
    points = [
        CollectivePoint(
            operation=name,
            payload_bytes=size,
            us=latency_us + wire_share(name, ranks) * (size - SMALL) / gb_s / 1e3,
        )
        for name in OPERATIONS
        for size in (SMALL, LARGE)
    ]
    return CollectiveRates(ranks=ranks, backend="nccl", points=tuple(points))


def test_rates_are_found_again_and_survive_a_file() -> None:
    rates = measured(gb_s=20.0, latency_us=38.4)
    for name in OPERATIONS:
        assert rates.wire_bytes_s(name) == pytest.approx(20e9)
    assert rates.peer_rates().hop_s == pytest.approx(10e-6)  # (38.4 − 8.4) µs over three hops
    entry = replace(MEASURED, collectives=rates)
    assert Calibration.from_json(json.loads(json.dumps(entry.to_json()))) == entry


@pytest.mark.parametrize("disturbed", [SMALL, LARGE])
def test_one_disturbed_time_does_not_make_links_faster_than_they_are(disturbed: int) -> None:
    rates = measured(gb_s=20.0, latency_us=38.4)
    between = replace(rates.points[0], payload_bytes=2**14, us=40.0)
    longest_us = max(point.us for point in rates.of("all-reduce"))
    points = [
        replace(point, us=point.us + longest_us) if point.payload_bytes == disturbed else point
        for point in rates.points
    ]
    found = replace(rates, points=(*points, between)).wire_bytes_s("all-reduce")
    assert 5e9 < found < 21e9


def test_a_group_takes_what_was_measured() -> None:
    machine = parse_machine("4xA100-80GB")
    payload_bytes = 1e9
    named = Group(machine, 1, 4).all_reduce_s(payload_bytes)
    assert named == pytest.approx(1.5e9 / machine.intra.collective_bytes_s, rel=0.05)
    slower = replace(machine, calibration=replace(MEASURED, collectives=measured(gb_s=10.0, latency_us=38.4)))
    group = Group(slower, 1, 4)
    assert group.all_reduce_s(payload_bytes) == pytest.approx(0.15, rel=0.01)
    assert group.all_to_all_s(payload_bytes) == pytest.approx(0.075, rel=0.01)
    assert group.all_gather_s(0) == pytest.approx(38.4e-6)
    uncalibrated = Group(replace(machine, calibration=MEASURED), 1, 4)
    assert vars(uncalibrated) == vars(Group(machine, 1, 4))


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tNODE\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tPIX\t48-95\t1
NIC0\tNODE\tNODE\tPIX\t X

Legend:
  X    = Self
"""


def test_links_of_pairs_are_read() -> None:
    found = read_topology(TOPOLOGY)
    assert found is not None
    assert found.links[1, 2] == "SYS"
    assert found.kinds() == {"NV18": 1, "SYS": 2}
    assert "1 pairs over NV18 (NVLink)" in found.sentence()
    assert read_topology("No devices were found") is None
