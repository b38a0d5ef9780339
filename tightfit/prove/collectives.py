"""Collectives of a running process group: are their results right, and how long do they take?

Inputs are made from the ranks' numbers, in integers that float32 holds exactly: a sum that misses a rank, a wrong order
of ranks, or a message that went to another rank is off by at least one. Times are the slowest rank's median of several
calls in a row, after warm-up calls.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.conjugate import ALL_GATHER, REDUCE_SCATTER
from tightfit.hardware.collective_rates import OPERATIONS, CollectivePoint, CollectiveRates
from tightfit.prove.timing import wait

Operation = Callable[[], object]
SIZES = {"cuda": tuple(2**power for power in (10, 14, 18, 22, 26, 28)), "cpu": (2**10, 2**14, 2**18, 2**20)}
"""Bytes of payload."""
PAIR_BYTES = {"cuda": 2**26, "cpu": 2**20}
REPEATS, CALLS = 3, 5
NUMBERS = 24
"""Elements that each rank sends to each other rank in the test of results."""


def wrong_collectives(device: torch.device) -> list[str]:
    """A sentence for each operation and rank with a wrong result; all ranks return the same list."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = []
    for name, (found, wanted) in _results(rank, world, device).items():
        if found.shape != wanted.shape or not bool((found == wanted).all()):
            own.append(f"{name} gave rank {rank} a wrong result: {_first_wrong(found, wanted)}")
    by_rank: list[list[str]] = [[]] * world
    dist.all_gather_object(by_rank, own)
    return [sentence for sentences in by_rank for sentence in sentences]


def _results(rank: int, world: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """By operation: its result on this rank, and the right one."""

    def of(sender: int) -> Tensor:
        """The input of rank `sender`: NUMBERS elements for each rank, all different."""
        return 1000.0 * sender + torch.arange(NUMBERS * world, device=device, dtype=torch.float32)

    own, everybody = of(rank), torch.stack([of(each) for each in range(world)])
    part = slice(rank * NUMBERS, (rank + 1) * NUMBERS)
    results = {name: run_once(name, own) for name in OPERATIONS}
    wanted = {
        "all-reduce": everybody.sum(0),
        "all-gather": everybody.flatten(),
        "reduce-scatter": everybody[:, part].sum(0),
        "all-to-all": everybody[:, part].flatten(),
        "send": of((rank - 1) % world),
    }
    return {name: (results[name], wanted[name]) for name in OPERATIONS}


def _first_wrong(found: Tensor, wanted: Tensor) -> str:
    place = int((found != wanted).nonzero()[0]) if found.shape == wanted.shape else 0
    return f"number {place} is {float(found.flatten()[place]):g} and should be {float(wanted[place]):g}"


def run_once(name: str, own: Tensor) -> Tensor:
    """The result of operation `name` with this rank's input `own`."""
    run, result = _operation(name, own)
    run()
    wait(own.device)
    return result


def _operation(name: str, own: Tensor) -> tuple[Operation, Tensor]:
    """The call of operation `name`, and the tensor it writes to."""
    world = dist.get_world_size()
    if name == "all-reduce":
        result = own.clone()
        return partial(dist.all_reduce, result), result
    if name == "all-gather":
        result = own.new_empty(world * own.numel())
        return partial(ALL_GATHER, result, own), result
    if name == "reduce-scatter":
        result = own.new_empty(own.numel() // world)
        return partial(REDUCE_SCATTER, result, own), result
    result = torch.empty_like(own)
    if name == "all-to-all":
        return partial(dist.all_to_all_single, result, own), result
    return partial(_send_round, own, result), result


def _send_round(own: Tensor, result: Tensor) -> None:
    """Send `own` to the next rank, and receive `result` from the previous one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    moves = [dist.P2POp(dist.isend, own, (rank + 1) % world), dist.P2POp(dist.irecv, result, (rank - 1) % world)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()


def measure_collectives(device: torch.device) -> CollectiveRates:
    """Times of every operation at all sizes; all ranks return the same rates."""
    world = dist.get_world_size()
    points = []
    for name in OPERATIONS:
        for payload_bytes in SIZES[device.type]:
            count = max(world, payload_bytes // 4 // world * world)
            held = count // world if name == "all-gather" else count
            run, _ = _operation(name, torch.zeros(held, device=device))
            points.append(CollectivePoint(operation=name, payload_bytes=4 * count, us=_slowest_us(run, device)))
    return CollectiveRates(ranks=world, backend=dist.get_backend(), points=tuple(points))


def pair_gb_s(device: torch.device) -> dict[tuple[int, int], float]:
    """GB/s of each pair of ranks alone, both sending at once; all ranks return the same rates."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.zeros(PAIR_BYTES[device.type] // 4, device=device)
    result, found = torch.empty_like(own), {}
    for pair in [(one, other) for one in range(world) for other in range(one + 1, world)]:
        other = pair[1] if rank == pair[0] else pair[0]

        def exchange(other: int = other) -> None:
            moves = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, result, other)]
            for work in dist.batch_isend_irecv(moves):
                work.wait()

        us = _slowest_us(exchange if rank in pair else lambda: None, device)
        found[pair] = 4 * own.numel() / us / 1e3
    return found


def _slowest_us(run: Operation, device: torch.device) -> float:
    """Microseconds of a call on the rank where it takes longest."""
    run()
    times_us = []
    for _ in range(REPEATS):
        wait(device)
        dist.barrier()
        wait(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        wait(device)
        times_us.append((time.perf_counter() - began) * 1e6 / CALLS)
    slowest = torch.tensor([statistics.median(times_us)], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
