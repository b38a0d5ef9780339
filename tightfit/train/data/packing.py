"""Packing pieces of different lengths into rows of one length with little padding.

Best fit decreasing: the longest piece first, each into the row it fills best. Never more than 11/9 of the fewest rows
possible plus a constant (Johnson 1973), and for conversations, most of them short, close to no padding.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths` that sum to at most `capacity`; equal lengths are taken in the order given."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        assert 0 < length <= capacity, f"a piece of {length} in rows of {capacity}"
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(index)
        _offer(row, room - length, with_room, rooms)
    return rows


def _offer(row: int, room: int, with_room: dict[int, list[int]], rooms: list[int]) -> None:
    """Record that `row` has `room` left in `with_room` (room → rows); `rooms` are its keys, sorted."""
    if room not in with_room:
        with_room[room] = []
        insort(rooms, room)
    with_room[room].append(row)
