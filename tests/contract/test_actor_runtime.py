"""What an actor runtime promises, kept by pykka's threads and by our pool alike."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pykka
import pytest
from pykka import ActorDeadError, ActorRegistry

from actors.pooled import PooledActor
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


@pytest.fixture(params=[PooledProbe, ThreadingProbe])
def probe(request: pytest.FixtureRequest) -> Iterator[type[Probe]]:
    yield cast("type[Probe]", request.param)
    ActorRegistry.stop_all(timeout=DEADLINE_S)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def actor_of(ref: pykka.ActorRef[Any]) -> Probe:
    actor = ref._actor_weakref()
    assert isinstance(actor, Probe)
    return actor


def test_messages_of_one_sender_are_handled_in_order(probe: type[Probe]) -> None:
    ref = probe.start()
    for number in range(1000):
        ref.tell(number)
    assert ref.ask(seen, block=True) == ["start", *range(1000)]


def test_on_start_runs_before_the_first_message_and_on_stop_after_the_last(probe: type[Probe]) -> None:
    ref = probe.start()
    actor = actor_of(ref)
    ref.tell("only")
    assert ref.stop(block=True, timeout=DEADLINE_S) is True
    assert actor.seen == ["start", "only", "stop"]


@pytest.mark.usefixtures("eager_switches")
def test_the_state_of_an_actor_is_never_touched_by_two_threads_at_once(probe: type[Probe]) -> None:
    ref = probe.start()
    inside: list[int] = []
    overlaps: list[int] = []

    def step(actor: Probe) -> None:
        inside.append(1)
        if len(inside) > 1:
            overlaps.append(1)
        actor.value = actor.value + 1
        inside.pop()

    def send() -> None:
        for _ in range(2000):
            ref.tell(step)

    with ThreadPoolExecutor(4) as senders:
        for job in [senders.submit(send) for _ in range(4)]:
            job.result(DEADLINE_S)
    assert ref.ask(lambda actor: actor.value, block=True) == 7 + 8000
    assert not overlaps


def test_a_failing_ask_returns_the_exception_and_the_actor_lives(probe: type[Probe]) -> None:
    ref = probe.start()
    with pytest.raises(LookupError, match="told to fail"):
        ref.ask(fail, block=True)
    assert ref.is_alive()
    assert ref.ask(seen, block=True) == ["start"]


def test_a_failing_tell_kills_the_actor_through_on_failure_and_not_on_stop(probe: type[Probe]) -> None:
    ref = probe.start()
    actor = actor_of(ref)
    ref.tell(fail)
    assert actor.failed.wait(DEADLINE_S)
    wait_until(lambda: not ref.is_alive() and "failure" in actor.seen, "the actor to die")
    assert [repr(item) for item in actor.seen] == ["'start'", "LookupError('told to fail')", "'failure'"]
    assert ref not in ActorRegistry.get_all()


def test_a_failing_tell_is_logged_with_its_traceback(
    probe: type[Probe], caplog: pytest.LogCaptureFixture
) -> None:
    ref = probe.start()
    with caplog.at_level(logging.ERROR, logger="pykka"):
        ref.tell(fail)
        wait_until(lambda: not ref.is_alive(), "the actor to die")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(ref) in record.getMessage()
    assert record.exc_info is not None


def test_an_actor_that_fails_in_on_start_is_dead_and_answers_so(probe: type[Probe]) -> None:
    ref = probe.start(on_start=fail)
    with pytest.raises(ActorDeadError):
        ref.ask("anything", block=True, timeout=DEADLINE_S)
    assert not ref.is_alive()


def test_an_actor_that_fails_in_on_stop_or_on_failure_is_dead_all_the_same(probe: type[Probe]) -> None:
    stopped = probe.start(on_stop=fail)
    assert stopped.stop(block=True, timeout=DEADLINE_S) is True
    failed = probe.start(on_failure=fail)
    failed.tell(fail)
    wait_until(lambda: not failed.is_alive(), "the actor to die")
    assert ActorRegistry.get_all() == []


def test_a_dead_actor_is_told_and_asked_in_vain(probe: type[Probe]) -> None:
    ref = probe.start()
    ref.stop(block=True, timeout=DEADLINE_S)
    assert not ref.is_alive()
    with pytest.raises(ActorDeadError):
        ref.tell("late")
    with pytest.raises(ActorDeadError):
        ref.ask("late", block=True)
    with pytest.raises(ActorDeadError):
        ref.ask("late", block=False).get(timeout=DEADLINE_S)
    with pytest.raises(ActorDeadError):
        ref.proxy()
    assert ref.stop(block=True) is False


def test_messages_left_in_the_mailbox_when_the_actor_stops_get_an_error(probe: type[Probe]) -> None:
    ref = probe.start()
    latch = hold(ref)
    before = ref.ask("before", block=False)
    stop = ref.stop(block=False)
    left = [ref.ask("after", block=False) for _ in range(3)]
    second_stop = ref.stop(block=False)
    latch.release()
    assert before.get(timeout=DEADLINE_S) == 2
    assert stop.get(timeout=DEADLINE_S) is True
    assert second_stop.get(timeout=DEADLINE_S) is True
    for future in left:
        with pytest.raises(ActorDeadError):
            future.get(timeout=DEADLINE_S)


def test_messages_left_in_the_mailbox_when_the_actor_dies_get_an_error(probe: type[Probe]) -> None:
    ref = probe.start()
    latch = hold(ref)
    ref.tell(fail)
    left = ref.ask("after", block=False)
    latch.release()
    with pytest.raises(ActorDeadError):
        left.get(timeout=DEADLINE_S)


def test_a_blocking_stop_returns_after_on_stop_has_finished(probe: type[Probe]) -> None:
    finished = threading.Event()
    ref = probe.start(on_stop=lambda _: finished.set())
    latch = hold(ref)
    stop = ref.stop(block=False)
    with pytest.raises(pykka.Timeout):
        stop.get(timeout=0.02)
    latch.release()
    assert stop.get(timeout=DEADLINE_S) is True
    assert finished.is_set()


def test_an_actor_can_stop_itself_and_handles_no_later_message(probe: type[Probe]) -> None:
    ref = probe.start()
    actor = actor_of(ref)
    latch = hold(ref)
    ref.tell(lambda actor: actor.stop())
    ref.tell("before the stop message is in the queue")
    latch.release()
    assert ref.actor_stopped.wait(DEADLINE_S)
    wait_until(lambda: "stop" in actor.seen, "on_stop to run")
    assert actor.seen == ["start", "before the stop message is in the queue", "stop"]


def test_a_proxy_calls_reads_and_writes(probe: type[Probe]) -> None:
    proxy = cast("Any", probe.start().proxy())
    assert proxy.double(21).get(timeout=DEADLINE_S) == 42
    assert proxy.value.get(timeout=DEADLINE_S) == 7
    proxy.value = 8
    assert proxy.value.get(timeout=DEADLINE_S) == 8
    assert proxy.nested.hello().get(timeout=DEADLINE_S) == "hello from within"
    with pytest.raises(LookupError, match="asked to fail"):
        proxy.fail().get(timeout=DEADLINE_S)
    with pytest.raises(AttributeError):
        _ = proxy.no_such_thing


def test_a_deferred_call_gives_no_future_and_its_failure_kills(probe: type[Probe]) -> None:
    ref = probe.start()
    proxy = cast("Any", ref.proxy())
    assert proxy.note.defer("noted") is None
    assert proxy.seen.get(timeout=DEADLINE_S) == ["start", "noted"]
    proxy.fail.defer()
    wait_until(lambda: not ref.is_alive(), "the deferred failure to kill the actor")


def test_futures_are_mapped_joined_reduced_and_collected(probe: type[Probe]) -> None:
    first, second = (cast("Any", probe.start().proxy()) for _ in range(2))
    assert first.double(2).map(str).get(timeout=DEADLINE_S) == "4"
    joined = first.double(1).join(second.double(2), second.double(3))
    assert joined.get(timeout=DEADLINE_S) == [2, 4, 6]
    assert joined.reduce(lambda a, b: a + b, 0).get(timeout=DEADLINE_S) == 12
    assert joined.filter(lambda number: number > 2).get(timeout=DEADLINE_S) == [4, 6]
    assert pykka.get_all([first.value, second.value], timeout=DEADLINE_S) == [7, 7]


def test_waiting_for_a_busy_actor_times_out_and_the_reply_can_be_had_later(probe: type[Probe]) -> None:
    ref = probe.start()
    latch = hold(ref)
    future = ref.ask("late", block=False)
    with pytest.raises(pykka.Timeout):
        future.get(timeout=0.01)
    with pytest.raises(pykka.Timeout):
        pykka.get_all([future], timeout=0.01)
    with pytest.raises(pykka.Timeout):
        ref.ask("later", block=True, timeout=0.01)
    latch.release()
    assert future.get(timeout=DEADLINE_S) == 2


def test_the_registry_finds_living_actors_by_class_name_and_urn(probe: type[Probe]) -> None:
    refs = [probe.start() for _ in range(3)]
    assert ActorRegistry.get_all() == refs
    assert ActorRegistry.get_by_class(probe) == refs
    assert (
        ActorRegistry.get_by_class(pykka.ThreadingActor if probe is ThreadingProbe else PooledActor) == refs
    )
    assert ActorRegistry.get_by_class_name(probe.__name__) == refs
    assert ActorRegistry.get_by_urn(refs[1].actor_urn) is refs[1]
    refs[1].stop(block=True, timeout=DEADLINE_S)
    assert ActorRegistry.get_all() == [refs[0], refs[2]]
    assert ActorRegistry.get_by_urn(refs[1].actor_urn) is None
    ActorRegistry.unregister(refs[1])  # once more: nothing happens


def test_an_actor_is_registered_when_on_start_runs(probe: type[Probe]) -> None:
    registered: list[bool] = []
    ref = probe.start(on_start=lambda actor: registered.append(actor.actor_ref in ActorRegistry.get_all()))
    ref.ask("started", block=True, timeout=DEADLINE_S)
    assert registered == [True]


def test_stop_all_stops_the_last_started_first(probe: type[Probe]) -> None:
    stopped: list[int] = []
    for number in range(5):
        probe.start(on_stop=lambda _, number=number: stopped.append(number))
    assert ActorRegistry.stop_all(block=True, timeout=DEADLINE_S) == [True] * 5
    assert stopped == [4, 3, 2, 1, 0]
    assert ActorRegistry.get_all() == []


def test_a_broadcast_reaches_every_actor_of_the_class(probe: type[Probe]) -> None:
    refs = [probe.start() for _ in range(3)]
    ActorRegistry.broadcast("to all")
    ActorRegistry.broadcast("to the class", target_class=probe)
    ActorRegistry.broadcast("to nobody", target_class="NoSuchActor")
    for ref in refs:
        assert ref.ask(seen, block=True) == ["start", "to all", "to the class"]


def test_an_actor_may_tell_itself_while_it_is_made(probe: type[Probe]) -> None:
    ref = probe.start(on_start=lambda actor: actor.actor_ref.tell("from on_start"))
    wait_until(lambda: "from on_start" in ref.ask(seen, block=True), "the message told in on_start")


def test_an_actor_without_references_lives_until_it_is_stopped(probe: type[Probe]) -> None:
    urn = probe.start().actor_urn
    found = ActorRegistry.get_by_urn(urn)
    assert found is not None
    assert found.ask("still there", block=True, timeout=DEADLINE_S) == 2
