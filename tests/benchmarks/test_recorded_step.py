"""The timeline of a recorded step, from a history by hand."""

from benchmarks.recorded_step import Recorder, of_history

MIB = 2**20


def test_a_recorded_history_starts_from_what_was_there() -> None:
    recorder = Recorder(allocated_bytes=1024, reserved_bytes=2 * MIB)
    recorder.started_us, recorder.starts = 1000.0, [(0.0, "forward"), (2.0, "backward")]
    rows = [("segment_alloc", 20 * MIB), ("alloc", 3 * MIB), ("free_requested", 3 * MIB), ("free_completed", 3 * MIB)]
    history = [{"action": a, "size": s, "addr": 0, "time_us": 2000.0 + 1000 * i} for i, (a, s) in enumerate(rows)]
    found = of_history(history, recorder)
    assert found.positions == [1, 2, 3, 4]
    assert found.allocated_bytes == [1024, 1024 + 3 * MIB, 1024 + 3 * MIB, 1024]
    assert found.reserved_bytes == [22 * MIB] * 4
    assert found.phases() == [("forward", 0, 2), ("backward", 2, 4)]
