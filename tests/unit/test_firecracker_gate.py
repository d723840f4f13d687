"""How many come up at once, in which order, and who works on a machine meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from actors.errors import DriverError
from infra.drivers.firecracker.gate import Gate
from infra.drivers.firecracker.turns import CalledOff, Turns

NEVER = threading.Event()


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("width", [1, 3])
def test_never_more_than_the_width_are_inside(width: int) -> None:
    gate = Gate(width)
    inside, most = [0], [0]
    go_on = threading.Event()
    lock = threading.Lock()

    def work() -> None:
        with gate.passed(NEVER):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            assert go_on.wait(10)
            with lock:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: inside[0] == width and len(gate._waiting) == 8 - width)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert most[0] == width
    assert inside[0] == 0


def test_the_oldest_waiter_comes_first() -> None:
    gate = Gate(1)
    order: list[int] = []

    def work(n: int) -> None:
        with gate.passed(NEVER):
            order.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    with gate.passed(NEVER):
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            eventually(partial(lambda count: len(gate._waiting) == count, waiting))
    for thread in threads:
        thread.join(10)
    assert order == list(range(6))


def test_a_place_is_given_back_on_failure_and_a_waiter_can_be_called_off() -> None:
    gate = Gate(1)

    def failing_work() -> None:
        with gate.passed(NEVER):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_work()
    abort = threading.Event()
    errors: list[str] = []

    def wait() -> None:
        try:
            with gate.passed(abort):
                pass
        except DriverError as error:
            errors.append(error.kind)

    with gate.passed(NEVER):
        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: len(gate._waiting) == 1)
        abort.set()
        waiter.join(10)
        assert errors == ["aborted"]
        assert not gate._waiting
    with gate.passed(NEVER):
        pass


def test_a_teardown_calls_the_spawn_off_and_comes_after_it() -> None:
    turns = Turns()
    order: list[str] = []
    begun = threading.Event()

    def spawn() -> None:
        with turns.spawning("vm", NEVER) as called_off:
            begun.set()
            assert called_off.wait(10)
            order.append("spawn")

    thread = threading.Thread(target=spawn)
    thread.start()
    assert begun.wait(10)
    with turns.ending("other"):
        order.append("other machines do not wait")
    with turns.ending("vm"):
        order.append("teardown")
    thread.join(10)
    assert order == ["other machines do not wait", "spawn", "teardown"]
    assert turns._turns == {}


def test_a_teardown_does_not_wait_for_ever() -> None:
    turns = Turns()
    with turns.ending("vm"):
        errors: list[str] = []

        def second() -> None:
            try:
                with turns.ending("vm", timeout_s=0.05):
                    pass
            except DriverError as error:
                errors.append(error.kind)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
    assert errors == ["still-there"]


def test_either_abort_is_heard() -> None:
    outer = threading.Event()
    either = CalledOff(outer)
    assert not either.wait(0.01)
    outer.set()
    assert either.wait(10)
    own = CalledOff(NEVER)
    own.set()
    assert own.is_set()
    assert own.wait()
