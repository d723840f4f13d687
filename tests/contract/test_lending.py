"""Threads that would only wait do the work themselves: which work, on which thread, and where it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pykka import ActorRegistry

from actors.lending import lend, lent_thread, take_over, waiting_thread
from actors.pooled import ActorPool
from actors.ports import Appended, Outcome
from tests.conftest import NatsServer
from tests.contract.actor_probes import DEADLINE_S, PooledProbe, Probe, fail, wait_until
from tests.contract.journal_rigs import NatsRig, Told, decide, fact, first
from tests.contract.nats_tools import eventually


@pytest.fixture
def pool() -> Iterator[ActorPool]:
    pool = ActorPool(workers=1)
    yield pool
    ActorRegistry.stop_all(timeout=DEADLINE_S)
    assert pool.stop(timeout_s=DEADLINE_S)


@pytest.fixture
def rig(own_nats_server: NatsServer) -> Iterator[NatsRig]:
    made = NatsRig(own_nats_server)
    yield made
    made.close()


def on(threads: list[threading.Thread]) -> Callable[[Probe], None]:
    """Return a message that notes on which thread it is handled."""
    return lambda _: threads.append(threading.current_thread())


def started(pool: ActorPool) -> PooledProbe:
    """Return an actor whose first turn is over."""
    ref = pool.start(PooledProbe)
    assert ref.ask(lambda _: True, timeout=DEADLINE_S)
    actor = ref._actor_weakref()
    assert actor is not None
    wait_until(lambda: not actor.mailbox._scheduled, "it rests")
    return actor


def test_a_lent_thread_serves_whom_its_block_told_at_the_end_of_the_block(pool: ActorPool) -> None:
    actor = started(pool)
    threads: list[threading.Thread] = []
    with lent_thread():
        actor.actor_ref.tell(on(threads))
        actor.actor_ref.tell(on(threads))
        assert threads == [], "not while the block may still hold something"
    assert threads == [threading.current_thread()] * 2


def test_whom_a_lent_turn_tells_is_served_by_the_pool(pool: ActorPool) -> None:
    one, other = started(pool), started(pool)
    threads: list[threading.Thread] = []
    with waiting_thread():
        one.actor_ref.tell(lambda _: other.actor_ref.tell(on(threads)))
    wait_until(lambda: len(threads) == 1, "the other is served")
    assert threads[0] is not threading.current_thread()


def test_an_actor_that_is_at_work_is_left_to_the_thread_that_serves_it(pool: ActorPool) -> None:
    actor = started(pool)
    threads: list[threading.Thread] = []
    begun, gate = threading.Event(), threading.Event()

    def held(_: Probe) -> None:
        begun.set()
        gate.wait(DEADLINE_S)

    actor.actor_ref.tell(held)
    assert begun.wait(DEADLINE_S)
    with lent_thread():
        actor.actor_ref.tell(on(threads))
    assert threads == []
    gate.set()
    wait_until(lambda: len(threads) == 1, "its own thread goes on")
    assert threads[0] is not threading.current_thread()


def test_a_pool_without_threads_is_never_served_by_others() -> None:
    pool = ActorPool(workers=0)
    ref = pool.start(PooledProbe)
    threads: list[threading.Thread] = []
    with waiting_thread():
        ref.tell(on(threads))
    assert threads == [], "whoever calls run_turn decides"
    while pool.run_turn():
        pass
    assert len(threads) == 1
    pool.stop()


def test_an_actor_that_dies_in_a_lent_turn_is_reported_and_the_thread_goes_on(pool: ActorPool) -> None:
    actor = started(pool)
    deaths: list[BaseException] = []
    pool.on_death = lambda _, error: deaths.append(error)
    with lent_thread():
        actor.actor_ref.tell(fail)
    assert [type(error) for error in deaths] == [LookupError]
    assert not actor.actor_ref.is_alive()


def test_a_long_turn_goes_on_in_the_pool(pool: ActorPool) -> None:
    actor = started(pool)
    threads: list[threading.Thread] = []
    most = pool.messages_per_turn
    with lent_thread():
        for _ in range(most + 1):
            actor.actor_ref.tell(on(threads))
    wait_until(lambda: len(threads) == most + 1, "all are handled")
    assert threads[most - 1] is threading.current_thread()
    assert threads[most] is not threading.current_thread()


def test_work_is_taken_over_in_the_turns_of_a_waiting_thread_alone_and_only_the_first_step() -> None:
    told: list[str] = []

    def step(name: str, inner: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def work() -> None:
            told.append(name)
            inner()

        return work

    def nested() -> None:
        with lent_thread():
            lend(lambda: told.append(f"nested {take_over(step('never'))}"))

    def turn() -> None:
        assert take_over(step("first", nested))
        assert take_over(step("second"))
        told.append("turn")

    assert not take_over(step("never"))
    with lent_thread():
        lend(lambda: told.append(f"lent {take_over(step('never'))}"))
    with waiting_thread():
        assert not take_over(step("never")), "in the block itself nobody waits yet"
        lend(turn)
    assert told == ["lent False", "turn", "first", "nested False", "second"]


def test_work_that_raises_keeps_no_other_from_being_done() -> None:
    done: list[str] = []

    def breaks() -> None:
        raise LookupError("ours")

    def turn() -> None:
        take_over(breaks)
        take_over(lambda: done.append("second"))

    with pytest.raises(LookupError), waiting_thread():
        lend(turn)
    assert done == ["second"]
    assert not take_over(breaks), "nothing is left on the thread"


# The journal's appender takes a waiting thread up on it.


def test_a_waiting_thread_commits_what_it_waits_for_itself(rig: NatsRig) -> None:
    told: list[tuple[Outcome, threading.Thread]] = []
    pair = decide(fact("vm.c", 1, 0), fact("vm.d", 1, 0))
    for decision in (first("vm.a"), pair, first("vm.b")):
        with waiting_thread():
            lend(
                lambda decision=decision: rig.journal.append(  # type: ignore[misc]
                    decision, lambda outcome: told.append((outcome, threading.current_thread()))
                )
            )
    assert [type(outcome) for outcome, _ in told] == [Appended] * 3
    assert {thread for _, thread in told} == {threading.current_thread()}


def test_callers_and_the_appenders_own_threads_take_turns_and_lose_nothing(rig: NatsRig) -> None:
    told = Told()
    decisions = [[first(f"vm.{one}-{each}") for each in range(150)] for one in range(6)]

    def append_all(which: int) -> None:
        for decision in decisions[which]:
            if which % 2:
                rig.journal.append(decision, told.of(decision))
            else:
                with waiting_thread():
                    lend(lambda decision=decision: rig.journal.append(decision, told.of(decision)))  # type: ignore[misc]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(append_all, range(6)))
    eventually(lambda: len(told.outcomes) == 900, "all are told", 20)
    assert all(isinstance(outcome, Appended) for outcome in told.outcomes.values())
    assert told.repeated == []
    assert len(list(rig.journal.replay())) == 900


def test_an_outage_under_a_caller_ends_in_time_and_what_came_meanwhile_is_stored(rig: NatsRig) -> None:
    told = Told()
    begin, behind = first("vm.first"), first("vm.behind")
    with waiting_thread():
        lend(lambda: rig.journal.append(begin, told.of(begin)))
    rig.down()
    lost = first("vm.lost")

    def waits() -> None:
        with waiting_thread():
            lend(lambda: rig.journal.append(lost, told.of(lost)))

    caller = threading.Thread(target=waits)
    caller.start()
    wait_until(lambda: rig.journal._lanes.single._busy, "the caller is at it")
    rig.journal.append(behind, told.of(behind))
    rig.up()
    caller.join(DEADLINE_S)
    assert not caller.is_alive()
    eventually(lambda: len(told.outcomes) == 3, "all are told", 10)
    assert all(isinstance(outcome, Appended) for outcome in told.outcomes.values())


def test_a_journal_closed_under_a_caller_lets_it_finish(rig: NatsRig) -> None:
    told = Told()
    journal = rig.another(deadline_s=1.0)
    decision = first("vm.last")
    rig.down()

    def waits() -> None:
        with waiting_thread():
            lend(lambda: journal.append(decision, told.of(decision)))

    caller = threading.Thread(target=waits)
    caller.start()
    wait_until(lambda: journal._lanes.single._busy, "the caller is at it")
    journal.close()
    caller.join(DEADLINE_S)
    assert not caller.is_alive()
    assert list(told.outcomes) == [decision.attempt]
