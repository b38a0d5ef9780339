"""What goes to the host."""

from tightfit.levers.policy.offload import (
    IN_FLIGHT_BYTES,
    count_that_fit,
    deferred_bytes,
    offloaded_count,
    stored_bytes,
)


def test_nothing_is_taken_after_the_first_that_does_not_fit() -> None:
    assert count_that_fit([4, 3, 5, 1], 7) == 2
    assert count_that_fit([4, 3, 5, 1], 8) == 2
    assert count_that_fit([4, 3, 5, 1], 13) == 4
    assert count_that_fit([4], 3) == 0
    assert count_that_fit([4], -1) == 0
    assert count_that_fit([], 0) == 0


def test_what_is_on_its_way_counts_among_what_may_wait() -> None:
    assert deferred_bytes(IN_FLIGHT_BYTES + 5) == 5


def test_the_last_checkpoint_stays() -> None:
    assert offloaded_count(0, 10, None) == 0
    assert offloaded_count(5, 10, None) == 4
    assert offloaded_count(5, 10, 25) == 2
    assert offloaded_count(5, 10, 1000) == 4


def test_fp8_has_a_byte_each_and_a_scale_a_row() -> None:
    assert stored_bytes(3, 8, 2, "exact") == 48
    assert stored_bytes(3, 8, 2, "fp8") == 3 * (8 + 4)
