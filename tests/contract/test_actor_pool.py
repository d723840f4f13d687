"""What the pool of pooled actors promises: deaths are reported, threads survive, turns are fair, actors are small."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pykka
import pytest
from pykka import ActorDeadError, ActorRegistry

from actors.pooled import ActorPool, PooledActor, PoolStopped
from tests.contract.actor_probes import (
    DEADLINE_S,
    PooledProbe,
    Probe,
    ThreadingProbe,
    fail,
    hold,
    wait_until,
)


class Unprintable(PooledProbe):
    """Raises when the runtime wants its name for the log."""

    def __str__(self) -> str:
        raise LookupError("no name")


class Unusual(BaseException):
    """Neither an Exception nor an exit."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    ActorRegistry.stop_all(timeout=DEADLINE_S)


@pytest.fixture
def pool() -> Iterator[ActorPool]:
    pool = ActorPool(workers=2)
    yield pool
    assert pool.stop(timeout_s=DEADLINE_S)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("error", [LookupError("ours"), Unusual()])
def test_a_supervisor_learns_of_every_death_once_everything_is_settled(
    pool: ActorPool, error: BaseException
) -> None:
    deaths: list[tuple[PooledActor, BaseException, bool, bool]] = []
    left: list[pykka.Future[Any]] = []

    def on_death(actor: PooledActor, reason: BaseException) -> None:
        settled = all(
            future._result is not None for future in left if isinstance(future, pykka.ThreadingFuture)
        )
        deaths.append((actor, reason, actor.actor_ref in ActorRegistry.get_all(), settled))

    def die(_: Probe) -> None:
        raise error

    pool.on_death = on_death
    ref = pool.start(PooledProbe)
    actor = ref._actor_weakref()
    latch = hold(ref)
    ref.tell(die)
    left.append(ref.ask("too late", block=False))
    latch.release()
    wait_until(lambda: bool(deaths), "on_death")
    assert deaths == [(actor, error, False, True)]
    assert actor is not None
    assert actor.seen == ["start", error, "failure"]


def test_a_death_in_the_last_message_of_a_turn_is_reported_too() -> None:
    pool = ActorPool(workers=0, messages_per_turn=1)
    deaths: list[BaseException] = []
    pool.on_death = lambda _, error: deaths.append(error)
    ref = pool.start(PooledProbe)
    ref.tell(fail)
    while pool.run_turn():
        pass
    assert [type(error) for error in deaths] == [LookupError]
    assert pool.stop()


def test_a_failing_on_start_is_a_death_and_a_failing_on_stop_is_not(pool: ActorPool) -> None:
    deaths: list[PooledActor] = []
    pool.on_death = lambda actor, _: deaths.append(actor)
    stopped = pool.start(PooledProbe, on_stop=fail)
    assert stopped.stop(block=True, timeout=DEADLINE_S) is True
    started = pool.start(PooledProbe, on_start=fail)
    wait_until(lambda: bool(deaths), "on_death")
    assert [actor.actor_ref for actor in deaths] == [started]


def test_a_base_exception_ends_its_own_actor_answers_the_ask_and_spares_the_others(pool: ActorPool) -> None:
    ref, other = pool.start(PooledProbe), pool.start(PooledProbe)

    def raise_unusual(_: Probe) -> None:
        raise Unusual

    with pytest.raises(Unusual):
        ref.ask(raise_unusual, block=True, timeout=DEADLINE_S)
    assert not ref.is_alive()
    assert other.ask("well", block=True, timeout=DEADLINE_S) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_in_one_actor_stops_all(pool: ActorPool, error: type[BaseException]) -> None:
    ref, pooled, threaded = pool.start(PooledProbe), pool.start(PooledProbe), ThreadingProbe.start()

    def leave(_: Probe) -> None:
        raise error

    ref.tell(leave)
    wait_until(lambda: not any(r.is_alive() for r in (ref, pooled, threaded)), "all actors to stop")


def test_neither_a_failing_on_death_nor_a_nameless_actor_ends_a_pool_thread() -> None:
    pool = ActorPool(workers=1)

    def raise_unusual(actor: PooledActor, _: BaseException) -> None:
        raised.append(actor)
        raise Unusual

    def die_unusually(_: Probe) -> None:
        raise Unusual

    raised: list[PooledActor] = []
    pool.on_death = raise_unusual
    for actor_class in (PooledProbe, Unprintable):
        ref = pool.start(actor_class)
        ref.tell(fail)
        assert ref.actor_stopped.wait(DEADLINE_S)
    with pytest.raises(Unusual):
        pool.start(Unprintable).ask(die_unusually, block=True, timeout=DEADLINE_S)
    assert pool.start(PooledProbe).ask("still served", block=True, timeout=DEADLINE_S) == 2
    assert [type(actor) for actor in raised] == [PooledProbe, Unprintable, Unprintable]
    assert pool.stop()


def test_a_stopped_pool_answers_what_waits_and_starts_nothing() -> None:
    pool = ActorPool(workers=1)
    ref = pool.start(PooledProbe)
    latch = hold(ref)
    future = ref.ask("never handled", block=False)
    waiting = pool.start(PooledProbe)
    actor = waiting._actor_weakref()

    def release_once_stopping() -> None:
        wait_until(lambda: pool.stopping, "the pool to be stopping")
        latch.release()

    threading.Thread(target=release_once_stopping).start()
    assert pool.stop(timeout_s=DEADLINE_S) is True
    with pytest.raises(ActorDeadError):
        future.get(timeout=DEADLINE_S)
    with pytest.raises(ActorDeadError):
        ref.tell("late")
    assert actor is not None
    assert actor.seen == []
    assert ActorRegistry.get_all() == []
    with pytest.raises(PoolStopped):
        pool.start(PooledProbe)
    assert pool.stop() is True


def test_stopping_a_pool_leaves_a_stuck_thread_behind_and_says_so() -> None:
    pool = ActorPool(workers=1)
    ref = pool.start(PooledProbe)
    latch = hold(ref)
    future = ref.ask("never handled", block=False)
    assert pool.stop(timeout_s=0.05) is False
    with pytest.raises(ActorDeadError):
        future.get(timeout=DEADLINE_S)
    latch.release()
    assert pool.stop(timeout_s=DEADLINE_S) is True


def test_the_threads_of_a_pool_are_daemons_and_start_with_the_first_actor() -> None:
    pool = ActorPool(workers=3, name="lazy")

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("lazy-")]

    assert threads() == []
    pool.start(PooledProbe)
    pool.start(PooledProbe)
    assert [thread.daemon for thread in threads()] == [True] * 3
    assert pool.stop()


def test_a_busy_actor_goes_to_the_back_of_the_queue_after_its_turn() -> None:
    pool = ActorPool(workers=0, messages_per_turn=2)
    order: list[str] = []
    busy, brief = pool.start(PooledProbe), pool.start(PooledProbe)
    for _ in range(4):
        busy.tell(lambda _: order.append("busy"))
    brief.tell(lambda _: order.append("brief"))
    while pool.run_turn():
        pass
    assert order == ["busy", "busy", "brief", "busy", "busy"]
    assert pool.stop()


@pytest.mark.usefixtures("eager_switches")
def test_under_stress_nothing_is_lost_reordered_or_handled_by_two_threads_at_once() -> None:
    producers, actors, rounds = 6, 100, 600
    pool = ActorPool(workers=4)

    class Checker(PooledActor):
        def __init__(self) -> None:
            super().__init__()
            self.next_number = [0] * producers
            self.reordered = self.overlapped = 0
            self.busy = False

        def on_receive(self, message: tuple[int, int]) -> None:
            self.overlapped += self.busy
            self.busy = True
            sender, number = message
            self.reordered += self.next_number[sender] != number
            self.next_number[sender] = number + 1
            self.busy = False

    refs = [pool.start(Checker) for _ in range(actors)]

    def produce(sender: int) -> None:
        for number, ref in itertools.product(range(rounds), refs):
            ref.tell((sender, number))

    with ThreadPoolExecutor(producers) as threads:
        for job in [threads.submit(produce, sender) for sender in range(producers)]:
            job.result(50)
    for ref in refs:
        checker: Any = ref.proxy()
        next_number, faults = checker.next_number, [checker.reordered, checker.overlapped]
        assert next_number.get(timeout=DEADLINE_S) == [rounds] * producers
        assert pykka.get_all(faults, timeout=DEADLINE_S) == [0, 0]
    assert pool.stop()


def test_ten_thousand_actors_are_small_and_answer() -> None:
    class Idle(PooledActor):
        def on_receive(self, message: str) -> str:
            return message

    pool = ActorPool()
    gc.collect()
    before_bytes = psutil.Process().memory_info().rss
    begun_s = time.perf_counter()
    refs = [pool.start(Idle) for _ in range(10_000)]
    created_s = time.perf_counter() - begun_s
    pykka.get_all([ref.ask("ping", block=False) for ref in refs], timeout=DEADLINE_S)
    gc.collect()
    each_bytes = (psutil.Process().memory_info().rss - before_bytes) / len(refs)
    begun_s = time.perf_counter()
    for ref in refs:
        ref.stop(block=False)
    wait_until(lambda: ActorRegistry.get_all() == [], "all to stop")
    stopped_s = time.perf_counter() - begun_s
    print(f"10,000 actors: {each_bytes:.0f} B each, made in {created_s:.2f} s, stopped in {stopped_s:.2f} s")
    assert each_bytes < 6_000  # a thread actor takes 22,000
    assert pool.stop()
