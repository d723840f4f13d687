"""The log on a real server that is killed, cut off, filled and lied to: what is acknowledged stands, once, in order."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from actors.ports import Appended, Decision, NotAppended, Outcome
from events import subjects
from infra.journal.jetstream import call
from infra.journal.wire import Wire, publication
from tests.conftest import NatsServer
from tests.contract.journal_rigs import (
    NatsRig,
    Told,
    append,
    append_all,
    appended,
    conflicted,
    decide,
    fact,
    first,
    refused,
)
from tests.contract.nats_tools import eventually


@pytest.fixture
def rig(own_nats_server: NatsServer) -> Iterator[NatsRig]:
    made = NatsRig(own_nats_server)
    yield made
    made.close()


def publish(wire: Wire, subject: str, payload: bytes, **headers: str) -> None:
    """Store a message past all journals."""
    lines = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    wire.send(publication(subject, f"{wire.inbox}.raw", payload, f"NATS/1.0\r\n{lines}\r\n".encode()), 5)
    assert wire.receive(5) is not None


class Chain:
    """Writes one aggregate version by version, as an actor does: the next after the last is through."""

    def __init__(self, rig: NatsRig, name: str, stop: threading.Event) -> None:
        self.name = name
        self.acknowledged: dict[int, str] = {}
        self.wrong: list[Outcome] = []
        self._journal = rig.another(deadline_s=30.0)
        self._stop = stop
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the last append."""
        self._thread.join(40)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        sequence = 0
        for version in itertools.count(1):
            if self._stop.is_set():
                return
            own = fact(self.name, version, sequence)
            pair = fact(f"{self.name}-{version}", 1, 0)
            decision = decide(own, pair) if version % 3 == 0 else decide(own)
            outcome = append(self._journal, decision, 40)
            if not isinstance(outcome, Appended):
                self.wrong.append(outcome)
                return
            sequence = outcome.facts[0].sequence
            self.acknowledged[version] = decision.attempt


def test_through_kills_of_the_server_every_acknowledged_fact_stands_once_and_in_order(rig: NatsRig) -> None:
    stop = threading.Event()
    chains = [Chain(rig, f"vm.chain-{number}", stop) for number in range(3)]
    followed: list[int] = []
    follow = rig.journal.follow(0, lambda one: followed.append(one.sequence))
    for kill in range(5):
        enough = 10 * (kill + 1)
        eventually(
            lambda enough=enough: all(len(c.acknowledged) >= enough or c.wrong for c in chains),  # type: ignore[misc]
            "writers go on",
            20,
        )
        rig.server.kill()
        rig.server.start()
    eventually(lambda: all(len(c.acknowledged) >= 60 or c.wrong for c in chains), "writers go on", 20)
    stop.set()
    for chain in chains:
        chain.join()
        assert not chain.wrong
        stored = rig.journal.read(chain.name)
        assert [one.version for one in stored] == list(range(1, len(stored) + 1))
        assert {one.version: one.attempt for one in stored} == chain.acknowledged
    whole = list(rig.journal.replay())
    assert len({one.id for one in whole}) == len(whole)
    eventually(lambda: len(followed) == len(whole), "the follow has all")
    assert followed == list(range(1, len(whole) + 1))
    follow.stop()


def test_what_was_queued_in_an_outage_is_stored_when_the_server_is_back_in_time(rig: NatsRig) -> None:
    appended(rig.journal, first("vm.before"))
    rig.down()
    told = Told()
    decisions = [first(f"vm.{number}") for number in range(100)]
    for decision in decisions:
        rig.journal.append(decision, told.of(decision))
    assert not told.outcomes
    rig.up()
    assert all(isinstance(outcome, Appended) for outcome in told.all(decisions))
    assert rig.journal.headroom().facts == 101


def test_what_was_given_up_in_an_outage_never_arrives_later(rig: NatsRig) -> None:
    journal = rig.another(deadline_s=0.5, ack_timeout_s=0.3)
    appended(journal, first("vm.before"))
    rig.down()
    outcomes = append_all(journal, [first(f"vm.phantom-{number}") for number in range(20)])
    assert {refused(outcome).code for outcome in outcomes} == {"unavailable"}
    rig.up()
    eventually(lambda: isinstance(append(journal, first("vm.after")), Appended), "it works again")
    assert [one.aggregate for one in journal.replay()] == ["vm.before", "vm.after"]


def test_all_of_a_long_outages_appends_are_told_near_their_deadline(rig: NatsRig) -> None:
    journal = rig.another(deadline_s=1.0, ack_timeout_s=0.3)
    rig.down()
    started = time.monotonic()
    decisions = [first(f"vm.{number}") for number in range(3000)]
    assert all(isinstance(outcome, NotAppended) for outcome in append_all(journal, decisions))
    assert time.monotonic() - started < 6


def test_without_any_acknowledgement_the_writer_is_told_unknown_and_finds_it_by_asking_again(
    rig: NatsRig,
) -> None:
    journal = rig.another(deadline_s=1.0, ack_timeout_s=0.3)
    for decision in (first("vm.one"), decide(fact("vm.two", 1, 0), fact("vm.three", 1, 0))):
        # As many facts: one and several travel on wires of their own, and this one has to be open.
        appended(journal, decide(*(fact(f"{one.aggregate}-before", 1, 0) for one in decision.facts)))
        rig.proxy.swallowing.set()
        unknown = refused(append(journal, decision))
        assert (unknown.code, unknown.stored) == ("unavailable", None)
        rig.proxy.swallowing.clear()
        eventually(rig.journal.headroom, "reads work again")
        found = appended(journal, decision)
        assert rig.journal.read(decision.facts[0].aggregate) == found.facts[:1]
    assert rig.journal.headroom().facts == 6


def test_past_the_dedup_window_a_retry_is_found_by_reading_back(rig: NatsRig) -> None:
    name = subjects.stream(rig.cluster)
    journal = rig.another(deadline_s=10.0, ack_timeout_s=0.6)
    appended(journal, first("vm.before"))
    with rig.wire() as wire:
        call(wire, f"STREAM.UPDATE.{name}", rig.stream_config() | {"duplicate_window": 10**8}, 5)
    for decision in (first("vm.one"), decide(fact("vm.two", 1, 0), fact("vm.three", 1, 0))):
        rig.lose_next_ack()
        found = appended(journal, decision)
        assert tuple(rig.journal.replay(after=found.facts[0].sequence - 1)) == found.facts
    assert rig.journal.headroom().facts == 4


def test_a_retry_past_the_dedup_window_that_lost_to_another_writer_conflicts(rig: NatsRig) -> None:
    rig.down()
    told = Told()
    mine = first("vm.a", "mine")
    rig.journal.append(mine, told.of(mine))
    rig.up()
    theirs = append(rig.another(), first("vm.a", "theirs"))
    outcomes = [told.all([mine])[0], theirs]
    assert sum(isinstance(outcome, Appended) for outcome in outcomes) == 1
    assert len(rig.journal.read("vm.a")) == 1


@pytest.mark.parametrize("facts", [1, 2])
def test_a_duplicate_that_is_not_our_fact_does_not_count_as_stored(rig: NatsRig, facts: int) -> None:
    decision = decide(*(fact(f"vm.{number}", 1, 0) for number in range(facts)))
    with rig.wire() as wire:
        publish(
            wire,
            subjects.log(rig.cluster, "vm.elsewhere"),
            b"{}",
            Nats_Msg_Id=f"vm.0:1:{decision.attempt}",
        )
    stored = appended(rig.journal, decision)
    assert [one.sequence for one in stored.facts] == list(range(2, 2 + facts))
    assert rig.journal.read("vm.0") == stored.facts[:1]


def test_a_decision_of_several_facts_travels_as_one_atomic_batch_and_a_single_one_does_not(
    rig: NatsRig,
) -> None:
    appended(rig.journal, first("vm.single"))
    appended(rig.journal, decide(fact("vm.a", 1, 0), fact("vm.b", 1, 0)))
    with rig.wire() as wire:
        headers = [_headers(wire, rig, sequence) for sequence in (1, 2, 3)]
    assert b"Nats-Batch" not in headers[0]
    assert b"Nats-Batch-Sequence: 1" in headers[1]
    assert b"Nats-Batch-Commit: 1" in headers[2]
    assert b"Fleetlog-Tag: vm.requested" in headers[0]
    assert b"Nats-Msg-Id: vm.single:1:" in headers[0]


def test_a_crowd_travels_in_batches_without_splitting_a_decision(rig: NatsRig) -> None:
    decisions = [
        decide(*(fact(f"vm.{number}-{part}", 1, 0) for part in range(1 + number % 7)))
        for number in range(400)
    ]
    outcomes = append_all(rig.journal, decisions)
    for outcome in outcomes:
        assert isinstance(outcome, Appended)
        sequences = [one.sequence for one in outcome.facts]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    with rig.wire() as wire:
        batches = {_headers(wire, rig, n).partition(b"Nats-Batch-Id: ")[2][:12] for n in range(500, 1500, 10)}
    assert len(batches) < 40


def _headers(wire: Wire, rig: NatsRig, sequence: int) -> bytes:
    import base64  # noqa: PLC0415

    answer = call(wire, f"STREAM.MSG.GET.{subjects.stream(rig.cluster)}", {"seq": sequence}, 5)
    return base64.b64decode(answer["message"].get("hdrs", ""))


def test_a_batch_of_which_half_conflicts_stores_the_other_half(rig: NatsRig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(0, 200, 2)])
    outcomes = append_all(rig.journal, [first(f"vm.{number}", "late") for number in range(200)])
    for number, outcome in enumerate(outcomes):
        if number % 2:
            assert isinstance(outcome, Appended)
        else:
            assert conflicted(outcome).aggregate == f"vm.{number}"
    assert rig.journal.headroom().facts == 200


def test_two_journals_crowding_the_same_aggregates_store_each_version_once(rig: NatsRig) -> None:
    other = rig.another()
    told = Told()
    rounds: list[tuple[Decision, Decision]] = []
    for number in range(300):
        mine, theirs = first(f"vm.{number}", "mine"), first(f"vm.{number}", "theirs")
        rig.journal.append(mine, told.of(mine))
        other.append(theirs, told.of(theirs))
        rounds.append((mine, theirs))
    for mine, theirs in rounds:
        outcomes = told.all([mine, theirs])
        winners = [o for o in outcomes if isinstance(o, Appended)]
        assert len(winners) == 1, outcomes
        assert rig.journal.read(mine.facts[0].aggregate) == winners[0].facts
    assert rig.journal.headroom().facts == 300


def test_a_full_queue_is_answered_at_once(rig: NatsRig) -> None:
    rig.journal._lanes.single._queued_facts_max = 5
    rig.down()
    told = Told()
    decisions = [first(f"vm.{number}") for number in range(20)]
    for decision in decisions:
        rig.journal.append(decision, told.of(decision))
    early = [outcome for outcome in list(told.outcomes.values()) if isinstance(outcome, NotAppended)]
    assert len(early) >= 10
    assert all((outcome.code, outcome.stored) == ("unavailable", False) for outcome in early)
    assert "wait to be appended" in early[0].detail
    rig.up()
    told.all(decisions)


def test_a_single_fact_does_not_wait_behind_a_decision_of_several(rig: NatsRig) -> None:
    journal = rig.another(ack_timeout_s=2.0, deadline_s=20.0)
    appended(journal, decide(fact("vm.one", 1, 0), fact("vm.two", 1, 0)))
    rig.lose_next_ack()
    told, several = Told(), decide(fact("vm.three", 1, 0), fact("vm.four", 1, 0))
    journal.append(several, told.of(several))
    appended(journal, first("vm.quick"))
    assert not told.outcomes, "it is answered while the other still waits for its acknowledgement"
    assert isinstance(told.all([several])[0], Appended)


def test_closing_waits_for_both_kinds_of_decisions_and_takes_no_more(rig: NatsRig) -> None:
    journal = rig.another()
    told = Told()
    decisions = [first(f"vm.{number}") for number in range(200)]
    decisions += [decide(fact(f"vm.a{n}", 1, 0), fact(f"vm.b{n}", 1, 0)) for n in range(200)]
    for decision in decisions:
        journal.append(decision, told.of(decision))
    journal.close()
    assert all(isinstance(outcome, Appended) for outcome in told.all(decisions))
    for late in (first("vm.late"), decide(fact("vm.later", 1, 0), fact("vm.latest", 1, 0))):
        assert refused(append(journal, late)).detail == "the journal is closed"


def test_a_stream_filled_by_batches_holds_whole_decisions_only(rig: NatsRig) -> None:
    rig.journal.resize(200_000)
    decisions = [
        decide(*(fact(f"vm.{number}-{part}", 1, 0) for part in range(5)), teardown=True)
        for number in range(120)
    ]
    outcomes = append_all(rig.journal, decisions)
    full = [outcome for outcome in outcomes if isinstance(outcome, NotAppended)]
    assert {(outcome.code, outcome.stored) for outcome in full} == {("full", False)}
    stored = [one.aggregate for one in rig.journal.replay()]
    whole = [d for d, outcome in zip(decisions, outcomes, strict=True) if isinstance(outcome, Appended)]
    assert whole
    assert sorted(stored) == sorted(one.aggregate for d in whole for one in d.facts)


def test_room_is_kept_for_every_live_machine(rig: NatsRig) -> None:
    journal = rig.another()
    journal.resize(1_000_000)
    assert journal.headroom().demand_limit_bytes == 900_000
    journal._live_machines = lambda: 20
    assert journal.headroom().demand_limit_bytes == 1_000_000 - 20 * 16 * 1024


def test_a_follow_notices_a_server_that_fell_silent_and_goes_on_soon_after(rig: NatsRig) -> None:
    got: list[int] = []
    follow = rig.journal.follow(0, lambda one: got.append(one.sequence))
    appended(rig.journal, first("vm.before"))
    eventually(lambda: got == [1], "it follows")
    rig.proxy.swallow_until_reconnect()
    rig.another()
    appended(rig.another(), first("vm.after"))
    eventually(lambda: got == [1, 2], "silence is noticed by missing heartbeats", 5)
    follow.stop()


def test_a_replay_goes_on_where_its_connection_broke(rig: NatsRig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(3000)])
    got = []
    for one in rig.journal.replay():
        got.append(one.sequence)
        if one.sequence in (700, 1500):
            rig.proxy.cut()
        if one.sequence == 2000:
            rig.server.kill()
            rig.server.start()
    assert got == list(range(1, 3001))


def test_closing_ends_every_thread(rig: NatsRig) -> None:
    before = set(threading.enumerate())
    journal = rig.another()
    follow = journal.follow(0, lambda _: None)
    appended(journal, first("vm.a"))
    journal.close()
    eventually(
        lambda: {t for t in set(threading.enumerate()) - before if "journal" in t.name} == set(),
        "none is left",
    )
    assert follow.failure is None
