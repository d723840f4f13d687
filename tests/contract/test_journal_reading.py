"""The contract of the log for readers: replays, single aggregates, follows, holes and tags of other times."""

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest

from actors.ports import Appended
from events import codec
from events.codec import Form, encode, recorded_as_form
from events.envelope import Recorded, Unknown
from projections.vm import BrokenLog
from tests.conftest import wall_time
from tests.contract.journal_rigs import (
    AT,
    Rig,
    append,
    append_all,
    appended,
    decide,
    fact,
    first,
    requested,
)
from tests.contract.nats_tools import eventually


def aggregates_of(facts: Iterator[Recorded] | tuple[Recorded, ...]) -> list[str]:
    return [one.aggregate for one in facts]


# What is read


def test_replay_yields_after_and_until_and_no_more_than_there_was(rig: Rig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(50)])
    assert [one.sequence for one in rig.journal.replay()] == list(range(1, 51))
    assert [one.sequence for one in rig.journal.replay(after=10, until=13)] == [11, 12, 13]
    assert [one.sequence for one in rig.journal.replay(after=48, until=99)] == [49, 50]
    assert list(rig.journal.replay(after=50)) == []
    assert list(rig.journal.replay(until=0)) == []
    running = rig.journal.replay()
    next(running)
    appended(rig.journal, first("vm.later"))
    assert len(list(running)) == 49


def test_replay_by_wildcard_yields_those_aggregates_in_order(rig: Rig) -> None:
    appended(
        rig.journal, decide(*(fact(name, 1, 0) for name in ("vm.a", "backend.x", "backend.one.x", "vm.b")))
    )
    assert aggregates_of(rig.journal.replay(aggregates="vm.>")) == ["vm.a", "vm.b"]
    assert aggregates_of(rig.journal.replay(aggregates="backend.*")) == ["backend.x"]
    assert aggregates_of(rig.journal.replay(aggregates="backend.one.x")) == ["backend.one.x"]
    assert aggregates_of(rig.journal.replay(aggregates="vm.>", after=1, until=3)) == []
    assert aggregates_of(rig.journal.replay(aggregates="vm.>", until=2)) == ["vm.a"]
    assert aggregates_of(rig.journal.replay(aggregates="nothing.>")) == []


def test_one_aggregate_is_read_from_a_version_on(rig: Rig) -> None:
    appended(rig.journal, decide(fact("vm.a", 1, 0), *(fact("vm.a", n, None) for n in range(2, 6))))
    appended(rig.journal, first("vm.ab"))
    assert [one.version for one in rig.journal.read("vm.a")] == [1, 2, 3, 4, 5]
    assert [one.version for one in rig.journal.read("vm.a", after_version=3)] == [4, 5]
    assert rig.journal.read("vm.a", after_version=5) == ()
    assert rig.journal.read("vm.none") == ()


def test_the_sequence_at_a_time_is_that_of_the_last_fact_stored_by_then(rig: Rig) -> None:
    before = wall_time()
    assert rig.journal.sequence_at(before) == 0
    append_all(rig.journal, [first("vm.a"), first("vm.b")])
    middle = wall_time()
    eventually(lambda: wall_time() > middle, "the clock goes on")
    appended(rig.journal, first("vm.c"))
    assert rig.journal.sequence_at(before) == 0
    assert rig.journal.sequence_at(middle) == 2
    assert rig.journal.sequence_at(wall_time() + timedelta(days=1)) == 3


def test_a_hole_is_found_by_replay_and_by_follow(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.make_hole()
    replay = rig.journal.replay()
    assert [next(replay).sequence, next(replay).sequence] == [1, 2]
    with pytest.raises(BrokenLog, match="missing"):
        next(replay)
    got: list[int] = []
    with caplog.at_level(logging.CRITICAL):
        follow = rig.journal.follow(0, lambda one: got.append(one.sequence))
        eventually(lambda: follow.failure is not None, "the follow stops")
    assert isinstance(follow.failure, BrokenLog)
    assert got == [1, 2]
    assert "stopped after sequence 2" in caplog.text


def test_a_log_that_lost_its_tail_is_found_by_whoever_had_read_it(rig: Rig) -> None:
    appended(rig.journal, first("vm.a"))
    with pytest.raises(BrokenLog, match="lost its tail"):
        next(rig.journal.replay(after=2))
    follow = rig.journal.follow(2, lambda _: None)
    eventually(lambda: follow.failure is not None, "the follow stops")
    assert isinstance(follow.failure, BrokenLog)


def test_an_unknown_tag_is_kept_whole_and_skipped_by_nobody(rig: Rig) -> None:
    form = Form(
        aggregate="vm.a",
        version=1,
        at=AT,
        writer="w",
        cause="c",
        correlation="d",
        attempt="e",
        event=requested(),
    )
    payload = (
        encode(form).replace(b'"vm.requested"', b'"vm.dreamt"').replace(b'"job":null', b'"job":null,"of":"x"')
    )
    rig.put_raw("vm.a", payload)
    appended(rig.journal, first("vm.b"))
    got: list[Recorded] = []
    follow = rig.journal.follow(0, got.append)
    eventually(lambda: len(got) == 2, "both are followed")
    follow.stop()
    for one in (rig.journal.read("vm.a")[0], next(rig.journal.replay()), got[0]):
        assert isinstance(one.event, Unknown)
        assert one.tag == "vm.dreamt"
        assert msgspec.json.decode(recorded_as_form(one)) == msgspec.json.decode(payload)


def test_an_older_tag_is_read_as_the_newer_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def upcast(fields: dict[str, object]) -> dict[str, object]:
        return {"tag": "vm.spared", "evidence": f"was {fields['why']}"}

    monkeypatch.setitem(codec.UPCASTS, "vm.pardoned", upcast)
    form = {
        "aggregate": "vm.a",
        "version": 1,
        "at": AT,
        "writer": "w",
        "cause": "c",
        "correlation": "d",
        "attempt": "e",
        "event": {"tag": "vm.pardoned", "why": "mercy"},
    }
    rig.put_raw("vm.a", msgspec.json.encode(form))
    assert rig.journal.read("vm.a")[0].event.evidence == "was mercy"


# Following


def test_a_follow_delivers_what_was_and_what_comes_in_order_until_stopped(rig: Rig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(20)])
    got: list[int] = []
    follow = rig.journal.follow(5, lambda one: got.append(one.sequence))
    eventually(lambda: len(got) == 15, "what was")
    append_all(rig.journal, [first(f"vm.new-{number}") for number in range(20)])
    eventually(lambda: len(got) == 35, "what comes")
    follow.stop()
    follow.stop()
    appended(rig.journal, first("vm.late"))
    assert got == list(range(6, 41))
    assert follow.failure is None


def test_a_callback_that_raises_stops_its_follow_loudly_and_no_other(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[int] = []
    other: list[int] = []

    def poisoned(one: Recorded) -> None:
        if one.sequence == 3:
            raise ValueError("poison")
        got.append(one.sequence)

    with caplog.at_level(logging.CRITICAL):
        follow = rig.journal.follow(0, poisoned)
        second = rig.journal.follow(0, lambda one: other.append(one.sequence))
        append_all(rig.journal, [first(f"vm.{number}") for number in range(6)])
        eventually(lambda: follow.failure is not None and len(other) == 6, "one stops, one goes on")
    assert got == [1, 2]
    assert str(follow.failure) == "poison"
    assert "stopped after sequence 2" in caplog.text
    second.stop()


def test_a_slow_callback_misses_nothing(rig: Rig) -> None:
    got: list[int] = []
    hold = threading.Event()

    def slow(one: Recorded) -> None:
        hold.wait(0.0002)
        got.append(one.sequence)

    follow = rig.journal.follow(0, slow)
    decisions = [first(f"vm.{number}") for number in range(5000)]
    assert all(isinstance(outcome, Appended) for outcome in append_all(rig.journal, decisions))
    eventually(lambda: len(got) >= 5000, "every fact comes", 30)
    assert got == list(range(1, 5001))
    follow.stop()


def test_a_follow_goes_on_through_an_outage_without_gap_or_repeat(rig: Rig) -> None:
    got: list[int] = []
    follow = rig.journal.follow(0, lambda one: got.append(one.sequence))
    append_all(rig.journal, [first(f"vm.{number}") for number in range(10)])
    eventually(lambda: len(got) == 10, "before")
    for turn in range(2):
        rig.down()
        rig.up()
        eventually(
            lambda turn=turn: isinstance(append(rig.journal, first(f"vm.after-{turn}")), Appended),  # type: ignore[misc]
            "the log works again",
        )
        eventually(lambda turn=turn: len(got) == 11 + turn, "the follow goes on soon", 3)  # type: ignore[misc]
    assert got == list(range(1, 13))
    follow.stop()


def test_a_callback_may_stop_its_own_follow(rig: Rig) -> None:
    got: list[int] = []
    running: list[object] = []
    known = threading.Event()

    def once(one: Recorded) -> None:
        known.wait(10)
        got.append(one.sequence)
        running[0].stop()  # type: ignore[attr-defined]

    append_all(rig.journal, [first(f"vm.{number}") for number in range(3)])
    running.append(rig.journal.follow(0, once))
    known.set()
    eventually(lambda: got, "the first comes")
    appended(rig.journal, first("vm.later"))
    assert got == [1]
