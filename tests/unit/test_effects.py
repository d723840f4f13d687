"""Slow work: bounded in width and in what may wait, refused beyond, and one piece's bug is not the next one's."""

import logging
import queue
import threading
from collections.abc import Iterator

import pytest

from actors.errors import Refused
from infra.effects import ThreadEffects

WAIT_S = 10.0


class Gate:
    """Work that says it has begun and waits to be let go."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.open = threading.Event()
        self.ended = threading.Semaphore(0)

    def __call__(self) -> None:
        self.began.release()
        assert self.open.wait(WAIT_S)
        self.ended.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_work_runs_on_as_many_threads_as_the_width_and_no_more(gate: Gate) -> None:
    effects = ThreadEffects("spawns", width=3)
    for _ in range(5):
        effects.submit(gate)
    assert all(gate.began.acquire(timeout=WAIT_S) for _ in range(3))
    assert not gate.began.acquire(timeout=0.1), "a fourth began beside three"
    gate.open.set()
    assert all(gate.ended.acquire(timeout=WAIT_S) for _ in range(5))
    effects.stop()


def test_work_waits_in_its_order() -> None:
    effects = ThreadEffects("reads", width=1)
    done: queue.Queue[int] = queue.Queue()
    for number in range(100):
        effects.submit(lambda number=number: done.put(number))  # type: ignore[misc]
    assert [done.get(timeout=WAIT_S) for _ in range(100)] == list(range(100))
    effects.stop()


def test_a_full_queue_refuses_at_once_and_says_what_is_full(gate: Gate) -> None:
    effects = ThreadEffects("spawns", width=1, waiting=2)
    effects.submit(gate)
    assert gate.began.acquire(timeout=WAIT_S)
    effects.submit(gate)
    effects.submit(gate)
    with pytest.raises(Refused, match="2 pieces of work wait for the spawns threads") as refusal:
        effects.submit(gate)
    assert refusal.value.code == "overloaded"
    gate.open.set()
    assert all(gate.ended.acquire(timeout=WAIT_S) for _ in range(3))
    effects.stop()


def test_work_that_raises_is_logged_and_the_thread_takes_the_next(caplog: pytest.LogCaptureFixture) -> None:
    effects = ThreadEffects("reads", width=1)
    done = threading.Event()

    def broken() -> None:
        raise RuntimeError("a bug, injected")

    with caplog.at_level(logging.ERROR):
        effects.submit(broken)
        effects.submit(done.set)
        assert done.wait(WAIT_S)
    assert "work in the reads pool raised" in caplog.text
    effects.stop()


def test_stop_drops_what_waits_and_ends_the_threads() -> None:
    effects = ThreadEffects("spawns", width=2)
    ran: list[int] = []
    gate = Gate()
    for _ in range(2):
        effects.submit(gate)
    assert all(gate.began.acquire(timeout=WAIT_S) for _ in range(2))
    effects.submit(lambda: ran.append(1))
    stopper = threading.Thread(target=effects.stop)
    stopper.start()
    gate.open.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert not any(thread.is_alive() for thread in effects._threads)
    assert ran in ([], [1])  # it may have begun between the gate and the stop


def test_stop_leaves_a_busy_thread_behind_after_its_time(gate: Gate) -> None:
    effects = ThreadEffects("spawns", width=1)
    effects.submit(gate)
    assert gate.began.acquire(timeout=WAIT_S)
    effects.stop(timeout_s=0.05)
    assert effects._threads[0].is_alive()
    assert effects._threads[0].daemon
