"""What pooled actors promise beyond pykka: parking, the guard against waiting, limits, an answer to every ask."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pykka
import pytest
from pykka import ActorDeadError, ActorRegistry
from pykka._envelope import Envelope

from actors.blocking import BlockingInsideActor
from actors.mailbox import MailboxFull
from actors.pooled import ActorPool, PooledActor, tell_first, unpark
from tests.contract.actor_probes import (
    DEADLINE_S,
    PooledProbe,
    Probe,
    ThreadingProbe,
    fail,
    hold,
    seen,
    wait_until,
)


class SmallMailbox(PooledProbe):
    """Takes three messages."""

    mailbox_limit = 3


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for ref in ActorRegistry.get_by_class(PooledActor):
        unpark(ref)
    ActorRegistry.stop_all(timeout=DEADLINE_S)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def park(actor: Probe) -> None:
    assert isinstance(actor, PooledActor)
    actor.park()


def unpark_self(actor: Probe) -> None:
    assert isinstance(actor, PooledActor)
    actor.unpark()


def ask_first(ref: pykka.ActorRef[Any], question: Callable[[Probe], Any]) -> Any:
    reply: pykka.ThreadingFuture[Any] = pykka.ThreadingFuture()
    tell_first(ref, lambda actor: reply.set(question(actor)))
    return reply.get(timeout=DEADLINE_S)


def test_a_parked_actor_handles_front_messages_and_nothing_else() -> None:
    ref = PooledProbe.start()
    ref.ask(park, block=True)
    waiting = ref.ask("ordinary", block=False)
    tell_first(ref, "first")
    tell_first(ref, "second")
    assert ask_first(ref, seen) == ["start", "first", "second"]
    with pytest.raises(pykka.Timeout):
        waiting.get(timeout=0.02)
    unpark(ref)
    assert waiting.get(timeout=DEADLINE_S) == 4


def test_front_messages_go_ahead_of_ordinary_ones() -> None:
    ref = PooledProbe.start()
    latch = hold(ref)
    ref.tell("ordinary")
    tell_first(ref, "front")
    latch.release()
    assert ref.ask(seen, block=True) == ["start", "front", "ordinary"]


def test_the_outcome_of_an_append_can_unpark_its_actor_and_other_actors_run_meanwhile() -> None:
    pool = ActorPool(workers=1)
    ref, other = pool.start(PooledProbe), pool.start(PooledProbe)
    ref.ask(park, block=True)
    ref.tell("next command")
    assert other.ask("free", block=True, timeout=DEADLINE_S) == 2
    tell_first(ref, unpark_self)
    assert ref.ask(seen, block=True, timeout=DEADLINE_S) == ["start", "next command"]
    assert pool.stop()


def test_parking_and_unparking_twice_is_doing_it_once() -> None:
    ref = PooledProbe.start()
    unpark(ref)
    latch = hold(ref)
    tell_first(ref, park)
    tell_first(ref, park)
    latch.release()
    ask_first(ref, seen)
    unpark(ref)
    unpark(ref)
    assert ref.ask(seen, block=True, timeout=DEADLINE_S) == ["start"]


def test_a_stop_waits_for_a_parked_actor_and_unparking_the_dead_does_nothing() -> None:
    ref = PooledProbe.start()
    ref.ask(park, block=True)
    stop = ref.stop(block=False)
    with pytest.raises(pykka.Timeout):
        stop.get(timeout=0.02)
    unpark(ref)
    assert stop.get(timeout=DEADLINE_S) is True
    unpark(ref)
    with pytest.raises(ActorDeadError):
        tell_first(ref, "late")


def test_an_actor_that_dies_parked_answers_what_it_held_back() -> None:
    ref = PooledProbe.start()
    ref.ask(park, block=True)
    held = ref.ask("held back", block=False)
    tell_first(ref, fail)
    with pytest.raises(ActorDeadError):
        held.get(timeout=DEADLINE_S)


def test_closing_a_parked_actor_from_outside_answers_what_it_held_back_and_unregisters_it() -> None:
    ref = PooledProbe.start()
    ref.ask(park, block=True)
    held = ref.ask("held back", block=False)
    ref.actor_stopped.set()
    with pytest.raises(ActorDeadError):
        held.get(timeout=DEADLINE_S)
    assert ref not in ActorRegistry.get_all()


@pytest.mark.usefixtures("eager_switches")
def test_no_message_is_lost_or_handled_while_parked_when_unpark_races_with_everything() -> None:
    """Each command parks; another thread reports its outcome; a third unparks nothing in particular, all the time."""
    ref = PooledProbe.start()
    outcomes: list[int] = []
    broken: list[str] = []
    jobs = ThreadPoolExecutor(2)
    pending: list[int] = []
    rounds = 3000

    def outcome(number: int) -> Callable[[Probe], None]:
        def apply(actor: Probe) -> None:
            pending.remove(number)
            outcomes.append(number)
            unpark_self(actor)

        return apply

    def command(number: int) -> Callable[[Probe], None]:
        def start_append(actor: Probe) -> None:
            if pending:
                broken.append(f"{number} was handled while {pending} was parked")
            pending.append(number)
            park(actor)
            jobs.submit(tell_first, ref, outcome(number))

        return start_append

    for number in range(rounds):
        ref.tell(command(number))
    wait_until(lambda: len(outcomes) == rounds or bool(broken), "every append to come back")
    jobs.shutdown()
    assert not broken
    assert outcomes == list(range(rounds))


@pytest.mark.usefixtures("eager_switches")
def test_an_unpark_from_another_thread_is_never_missed() -> None:
    ref = PooledProbe.start()
    with ThreadPoolExecutor(2) as threads:

        def park_and_hand_out(actor: Probe) -> None:
            park(actor)
            threads.submit(unpark, ref)
            threads.submit(unpark, ref)

        for number in range(2000):
            ref.tell(park_and_hand_out)
            ref.tell(number)
        assert ref.ask(seen, block=True, timeout=DEADLINE_S) == ["start", *range(2000)]


@pytest.mark.usefixtures("eager_switches")
def test_an_ask_that_races_with_stop_is_always_answered() -> None:
    """One of pykka's own thread actors leaves such a caller waiting now and then."""
    answered = dead = 0
    for _ in range(100):
        ref = PooledProbe.start()
        barrier = threading.Barrier(3)

        def ask(ref: pykka.ActorRef[PooledProbe], barrier: threading.Barrier) -> list[pykka.Future[Any]]:
            barrier.wait(DEADLINE_S)
            return [ref.ask("question", block=False) for _ in range(20)]

        with ThreadPoolExecutor(2) as askers:
            jobs = [askers.submit(ask, ref, barrier) for _ in range(2)]
            barrier.wait(DEADLINE_S)
            ref.stop(block=True, timeout=DEADLINE_S)
            futures = [future for job in jobs for future in job.result(DEADLINE_S)]
        for future in futures:
            try:
                future.get(timeout=DEADLINE_S)
                answered += 1
            except ActorDeadError:
                dead += 1
    assert answered + dead == 100 * 40


def test_an_ask_that_passed_the_alive_check_just_before_the_end_is_answered() -> None:
    ref = PooledProbe.start()
    ref.stop(block=True, timeout=DEADLINE_S)
    reply: pykka.ThreadingFuture[Any] = pykka.ThreadingFuture()
    ref.actor_inbox.put(Envelope("late", reply_to=reply))
    with pytest.raises(ActorDeadError):
        reply.get(timeout=DEADLINE_S)
    with pytest.raises(ActorDeadError):
        ref.actor_inbox.put(Envelope("late"))
    assert ref.actor_inbox.empty()


def test_a_thread_actor_has_no_front_queue_and_says_so() -> None:
    ref = ThreadingProbe.start()
    with pytest.raises(TypeError, match="no PooledActor"):
        tell_first(ref, "x")
    with pytest.raises(TypeError, match="no PooledActor"):
        unpark(ref)


@pytest.mark.parametrize("other", [PooledProbe, ThreadingProbe])
def test_a_blocking_ask_inside_an_actor_is_refused_before_anything_is_sent(other: type[Probe]) -> None:
    asked, ref = other.start(), PooledProbe.start()
    with pytest.raises(BlockingInsideActor, match=r"PooledProbe .* called ask\(block=True\)"):
        ref.ask(lambda _: asked.ask("question", block=True), block=True, timeout=DEADLINE_S)
    assert asked.ask(seen, block=True) == ["start"]


@pytest.mark.parametrize("other", [PooledProbe, ThreadingProbe])
def test_reading_a_future_inside_an_actor_is_refused_even_when_it_is_settled(other: type[Probe]) -> None:
    asked, ref = other.start(), PooledProbe.start()
    settled = asked.ask("question", block=False)
    settled.get(timeout=DEADLINE_S)
    waits: list[Callable[[], Any]] = [
        settled.get,
        settled.map(str).get,
        lambda: pykka.get_all([settled]),
        lambda: asked.ask("waited for otherwise", block=False).get(),
        lambda: asked.stop(block=True),
    ]
    for wait in waits:
        with pytest.raises(BlockingInsideActor):
            ref.ask(lambda _, wait=wait: wait(), block=True, timeout=DEADLINE_S)
    assert settled.get() == 2


def test_waiting_for_another_actors_end_inside_an_actor_is_refused() -> None:
    ended, ref = PooledProbe.start(), PooledProbe.start()
    with pytest.raises(BlockingInsideActor):
        ref.ask(lambda _: ended.actor_stopped.wait(), block=True, timeout=DEADLINE_S)


def test_an_ask_without_waiting_inside_an_actor_is_fine() -> None:
    asked, ref = PooledProbe.start(), PooledProbe.start()
    future = ref.ask(lambda _: asked.ask("question", block=False), block=True, timeout=DEADLINE_S)
    assert future.get(timeout=DEADLINE_S) == 2


def test_a_full_mailbox_refuses_tells_and_asks_but_never_a_stop() -> None:
    ref = SmallMailbox.start()
    latch = hold(ref)
    for number in range(3):
        ref.tell(number)
    with pytest.raises(MailboxFull, match=r"SmallMailbox .* holds 3 messages"):
        ref.tell("one too many")
    with pytest.raises(MailboxFull):
        ref.ask("one too many", block=False)
    for number in range(3):
        tell_first(ref, f"front {number}")
    with pytest.raises(MailboxFull):
        tell_first(ref, "one too many")
    stop = ref.stop(block=False)
    actor = ref._actor_weakref()
    assert actor is not None
    latch.release()
    assert stop.get(timeout=DEADLINE_S) is True
    assert actor.seen == ["start", "front 0", "front 1", "front 2", 0, 1, 2, "stop"]


def test_a_reply_that_somebody_else_settled_harms_nobody() -> None:
    ref = PooledProbe.start()
    latch = hold(ref)
    future = ref.ask("question", block=False)
    future.set("I answer myself")
    latch.release()
    assert ref.ask(seen, block=True, timeout=DEADLINE_S) == ["start", "question"]
    assert future.get() == "I answer myself"


def test_an_ended_actor_is_freed_while_references_to_it_remain() -> None:
    ref = PooledProbe.start()
    ref.stop(block=True, timeout=DEADLINE_S)
    wait_until(lambda: gc.collect() >= 0 and ref._actor_weakref() is None, "the actor to be freed")
