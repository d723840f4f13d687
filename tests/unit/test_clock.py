"""Wake-ups: once, in order, replaced or cancelled in time, and never the end of the thread."""

import logging
import queue
import threading
from collections.abc import Iterator
from datetime import UTC

import pytest

from infra.clock import SystemClock, ThreadTimers

WAIT_S = 10.0
FAR_S = 3600.0


@pytest.fixture
def timers() -> Iterator[ThreadTimers]:
    timers = ThreadTimers()
    yield timers
    timers.stop()


def test_the_wall_clock_is_utc_and_the_monotonic_one_never_goes_back() -> None:
    clock = SystemClock()
    assert clock.now().tzinfo is UTC
    readings = [clock.monotonic_s() for _ in range(1000)]
    assert readings == sorted(readings)


def test_wake_ups_come_in_the_order_they_are_due_not_in_that_they_were_set(timers: ThreadTimers) -> None:
    came: queue.Queue[str] = queue.Queue()
    for name, delay_s in (("third", 0.15), ("first", 0.05), ("second", 0.10)):
        timers.set(name, delay_s, lambda name=name: came.put(name))  # type: ignore[misc]
    assert [came.get(timeout=WAIT_S) for _ in range(3)] == ["first", "second", "third"]


def test_wake_ups_due_at_once_keep_their_order(timers: ThreadTimers) -> None:
    came: queue.Queue[int] = queue.Queue()
    for number in range(200):
        timers.set(f"key-{number}", -1.0, lambda number=number: came.put(number))  # type: ignore[misc]
    assert [came.get(timeout=WAIT_S) for _ in range(200)] == list(range(200))


def test_a_new_wake_up_of_the_same_key_replaces_the_old_one(timers: ThreadTimers) -> None:
    came: queue.Queue[str] = queue.Queue()
    timers.set("key", 0.05, lambda: came.put("old"))
    timers.set("key", 0.30, lambda: came.put("new"))
    timers.set("between", 0.15, lambda: came.put("between"))
    timers.set("last", 0.40, lambda: came.put("last"))
    assert [came.get(timeout=WAIT_S) for _ in range(3)] == ["between", "new", "last"]


def test_a_wake_up_can_be_brought_forward(timers: ThreadTimers) -> None:
    came = threading.Event()
    timers.set("key", FAR_S, came.set)
    timers.set("key", 0.0, came.set)
    assert came.wait(WAIT_S)


def test_a_cancelled_wake_up_never_comes_and_cancelling_an_unknown_one_is_no_error(
    timers: ThreadTimers,
) -> None:
    came: queue.Queue[str] = queue.Queue()
    timers.set("key", 0.02, lambda: came.put("cancelled"))
    timers.cancel("key")
    timers.cancel("nobody's")
    timers.set("other", 0.10, lambda: came.put("other"))
    assert came.get(timeout=WAIT_S) == "other"
    assert came.empty()


def test_a_wake_up_may_set_itself_again(timers: ThreadTimers) -> None:
    came: queue.Queue[int] = queue.Queue()

    def again(number: int) -> None:
        came.put(number)
        if number < 3:
            timers.set("key", 0.0, lambda: again(number + 1))

    timers.set("key", 0.0, lambda: again(1))
    assert [came.get(timeout=WAIT_S) for _ in range(3)] == [1, 2, 3]


def test_a_wake_up_that_raises_is_logged_and_the_next_one_comes(
    timers: ThreadTimers, caplog: pytest.LogCaptureFixture
) -> None:
    came = threading.Event()

    def broken() -> None:
        raise RuntimeError("a bug, injected")

    with caplog.at_level(logging.ERROR):
        timers.set("broken", 0.0, broken)
        timers.set("next", 0.01, came.set)
        assert came.wait(WAIT_S)
    assert "a wake-up raised" in caplog.text


def test_wake_ups_that_are_replaced_again_and_again_leave_no_heap_behind(timers: ThreadTimers) -> None:
    """Every beat replaces one: a fleet that beats for a year must not fill the memory."""
    for number in range(20_000):
        timers.set(f"key-{number % 10}", FAR_S, lambda: None)
    assert len(timers._due) == 10
    assert len(timers._heap) <= 1025


def test_after_stop_nothing_comes_and_stop_may_be_said_twice() -> None:
    timers = ThreadTimers()
    came = threading.Event()
    timers.set("key", 0.2, came.set)
    timers.stop()
    timers.stop()
    assert not timers._thread.is_alive()
    assert not came.is_set()
