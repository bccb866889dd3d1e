"""The time of a queue: it never goes back, and notices when its clock does."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.clock import STEP_BACK_US, ManualClock, QueueTime, SystemClock

SECOND = 1_000_000


def test_the_system_clock_is_wall_time_in_microseconds() -> None:
    assert abs(SystemClock().now_us() - time.time() * SECOND) < SECOND


def test_manual_clock_moves_only_on_advance() -> None:
    clock = ManualClock(at=5)
    clock.advance(1.5)
    clock.advance(-0.5)
    assert clock.now_us() == 6 * SECOND


def test_stamps_follow_the_clock_and_never_repeat() -> None:
    time = QueueTime()
    time.tick(1000)
    assert [time.stamp(), time.stamp()] == [1000, 1001]
    time.tick(5000)
    assert time.stamp() == 5000


def test_a_burst_of_stamps_does_not_move_the_time() -> None:
    time = QueueTime()
    time.tick(1000)
    for _ in range(10):
        time.stamp()
    assert time.tick(1000) == 1000


def test_clock_that_falls_back_by_a_second_is_held() -> None:
    time = QueueTime()
    time.tick(10 * SECOND)
    assert time.tick(10 * SECOND - STEP_BACK_US) == 10 * SECOND
    assert time.skew == 0
    assert time.tick(10 * SECOND + 5) == 10 * SECOND + 5


def test_clock_that_falls_back_by_more_is_a_step_and_time_continues() -> None:
    time = QueueTime()
    time.tick(10 * SECOND)
    assert time.tick(8 * SECOND) == 10 * SECOND
    assert time.tick(9 * SECOND) == 11 * SECOND
    assert time.skew == 2 * SECOND


def test_absolute_time_moves_with_a_step_unless_the_clock_showed_it_before() -> None:
    time = QueueTime()
    time.tick(10 * SECOND)
    before = time.stamp()
    time.tick(2 * SECOND)
    after = time.stamp()
    assert time.place(9 * SECOND, 9 * SECOND, before) == 9 * SECOND
    assert time.place(11 * SECOND, 11 * SECOND, before) == 19 * SECOND
    assert time.place(9 * SECOND, 9 * SECOND, after) == 17 * SECOND
    assert time.place(9 * SECOND, 0, before) == 9 * SECOND


def test_a_step_is_remembered_until_a_higher_one_or_for_eight_steps() -> None:
    time = QueueTime()
    for wall in (30, 5, 10, 2, 20, 1):
        time.tick(wall * SECOND)
    assert [peak for _, peak in time.steps] == [30 * SECOND, 20 * SECOND]
    for wall in (40, 0):
        time.tick(wall * SECOND)
    assert [peak for _, peak in time.steps] == [40 * SECOND]
    for _ in range(20):
        time.tick(time.last_at - time.skew - 2 * SECOND)
    assert len(time.steps) == 8


@given(st.lists(st.integers(0, 100 * SECOND), min_size=1))
def test_neither_time_nor_stamps_ever_go_back(readings: list[int]) -> None:
    queue = QueueTime()
    now = stamp = -1
    for wall in readings:
        later, newer = queue.tick(wall), queue.stamp()
        assert later >= now
        assert newer > stamp
        now, stamp = later, newer
