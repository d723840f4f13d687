"""The contract of the log, held by every journal: who wins, what counts, what is read, and what faults do."""

import logging
import threading
from collections.abc import Iterator

import pytest

from actors.errors import LogUnavailable
from actors.ports import Appended, Conflicted, NotAppended
from events import subjects
from events.envelope import Recorded
from tests.conftest import wall_time
from tests.contract.journal_rigs import (
    AT,
    Rig,
    append,
    append_all,
    appended,
    conflicted,
    decide,
    fact,
    first,
    refused,
    requested,
)
from tests.contract.nats_tools import eventually


def aggregates_of(facts: Iterator[Recorded] | tuple[Recorded, ...]) -> list[str]:
    return [one.aggregate for one in facts]


# Who wins


def test_of_two_writers_racing_for_a_version_with_different_content_one_wins_and_one_is_told(
    rig: Rig,
) -> None:
    other = rig.another()
    for turn in range(30):
        aggregate = f"vm.race-{turn}"
        mine, theirs = first(aggregate, "mine"), first(aggregate, "theirs")
        start = threading.Barrier(2)
        outcomes: dict[str, object] = {}

        def write(name: str, journal: object, decision: object) -> None:
            start.wait(10)  # noqa: B023
            outcomes[name] = append(journal, decision)  # type: ignore[arg-type]  # noqa: B023

        threads = [
            threading.Thread(target=write, args=("mine", rig.journal, mine)),
            threading.Thread(target=write, args=("theirs", other, theirs)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        won = [name for name, outcome in outcomes.items() if isinstance(outcome, Appended)]
        lost = [outcome for outcome in outcomes.values() if isinstance(outcome, Conflicted)]
        assert (len(won), len(lost)) == (1, 1), outcomes
        assert lost[0].aggregate == aggregate
        assert [one.event.job for one in rig.journal.read(aggregate)] == won


def test_an_append_returns_the_facts_as_every_reader_sees_them(rig: Rig) -> None:
    decision = decide(
        fact("vm.a", 1, 0), fact("backend.one.small", 1, 0, requested("slot")), fact("vm.a", 2, None)
    )
    outcome = appended(rig.journal, decision)
    assert [(one.sequence, one.id) for one in outcome.facts] == [
        (1, "vm.a:1"),
        (2, "backend.one.small:1"),
        (3, "vm.a:2"),
    ]
    assert tuple(rig.journal.replay()) == outcome.facts
    assert rig.journal.read("vm.a") == (outcome.facts[0], outcome.facts[2])
    assert outcome.facts[0].at == AT
    assert outcome.facts[0].attempt == decision.attempt


def test_an_aggregate_goes_on_from_the_sequence_it_stands_at(rig: Rig) -> None:
    begun = appended(rig.journal, first("vm.a"))
    appended(rig.journal, first("vm.b"))
    gone_on = appended(rig.journal, decide(fact("vm.a", 2, begun.facts[0].sequence)))
    assert gone_on.facts[0].sequence == 3
    stale = conflicted(append(rig.journal, decide(fact("vm.a", 2, begun.facts[0].sequence))))
    assert stale.aggregate == "vm.a"


def test_a_writer_that_thinks_nothing_is_there_conflicts_with_what_is(rig: Rig) -> None:
    appended(rig.journal, first("vm.a", "one"))
    assert conflicted(append(rig.journal, first("vm.a", "two"))).aggregate == "vm.a"


def test_a_writer_that_expects_what_is_not_there_conflicts(rig: Rig) -> None:
    assert conflicted(append(rig.journal, decide(fact("vm.a", 2, 7)))).aggregate == "vm.a"


def test_a_decision_over_several_aggregates_is_stored_whole_or_not_at_all(rig: Rig) -> None:
    appended(rig.journal, first("backend.one.small"))
    torn = decide(fact("vm.a", 1, 0), fact("backend.one.small", 2, 0), fact("vm.b", 1, 0))
    assert conflicted(append(rig.journal, torn)).aggregate == "backend.one.small"
    assert aggregates_of(rig.journal.replay()) == ["backend.one.small"]


def test_of_many_decisions_at_once_only_the_guilty_fail(rig: Rig) -> None:
    append_all(rig.journal, [first(f"vm.taken-{n}") for n in range(10)])
    decisions, guilty = [], set()
    for number in range(100):
        own = fact(f"vm.new-{number}", 1, 0)
        if number % 10 == 3:
            decisions.append(decide(own, fact(f"vm.taken-{number // 10}", 2, 9999)))
            guilty.add(number)
        else:
            decisions.append(decide(own, fact(f"vm.pair-{number}", 1, 0)))
    outcomes = append_all(rig.journal, decisions)
    assert {n for n, outcome in enumerate(outcomes) if not isinstance(outcome, Appended)} == guilty
    assert all(isinstance(outcomes[number], Conflicted) for number in guilty)
    assert rig.journal.headroom().facts == 10 + 2 * 90
    for number in guilty:
        assert rig.journal.read(f"vm.new-{number}") == ()


def test_decisions_on_one_aggregate_in_a_row_conflict_except_the_first(rig: Rig) -> None:
    outcomes = append_all(rig.journal, [first("vm.a", str(number)) for number in range(20)])
    assert [type(outcome) for outcome in outcomes] == [Appended] + [Conflicted] * 19
    assert [one.event.job for one in rig.journal.read("vm.a")] == ["0"]


def test_a_leaders_decision_holds_only_while_its_epoch_does(rig: Rig) -> None:
    elected = appended(rig.journal, first(subjects.leader()))
    epoch = elected.facts[0].sequence
    verdict = decide(fact("reaper", 1, 0), fact("vm.a", 1, 0), epoch=epoch)
    assert appended(rig.journal, verdict).facts[0].epoch == epoch
    appended(rig.journal, decide(fact(subjects.leader(), 2, epoch)))
    late = decide(fact("reaper", 2, verdict.facts[0].version), fact("vm.b", 1, 0), epoch=epoch)
    assert conflicted(append(rig.journal, late)).aggregate == subjects.leader()
    assert rig.journal.read("vm.b") == ()


def test_a_leader_whose_evidence_was_overtaken_conflicts_on_the_machine(rig: Rig) -> None:
    epoch = appended(rig.journal, first(subjects.leader())).facts[0].sequence
    appended(rig.journal, first("vm.a"))
    overtaken = decide(fact("reaper", 1, 0), fact("vm.a", 1, 0), epoch=epoch)
    assert conflicted(append(rig.journal, overtaken)).aggregate == "vm.a"


# What counts


def test_the_same_decision_again_counts_once_and_is_told_its_first_place(rig: Rig) -> None:
    for decision in (
        first("vm.one"),
        decide(fact("vm.two", 1, 0), fact("vm.three", 1, 0), fact("vm.two", 2, None)),
    ):
        stored = appended(rig.journal, decision)
        appended(rig.journal, first(f"{decision.facts[0].aggregate}-between"))
        assert appended(rig.another(), decision) == stored
    assert rig.journal.headroom().facts == 6


def test_a_lost_acknowledgement_of_one_fact_is_found_stored_once(rig: Rig) -> None:
    appended(rig.journal, first("vm.before"))
    rig.lose_next_ack()
    outcome = appended(rig.journal, first("vm.a"))
    assert rig.journal.read("vm.a") == outcome.facts
    assert rig.journal.headroom().facts == 2


def test_a_lost_acknowledgement_of_a_batch_is_found_stored_once(rig: Rig) -> None:
    appended(rig.journal, first("vm.before"))
    rig.lose_next_ack()
    outcome = appended(rig.journal, decide(fact("vm.a", 1, 0), fact("vm.b", 1, 0), fact("vm.a", 2, None)))
    assert tuple(rig.journal.replay(after=1)) == outcome.facts
    assert rig.journal.headroom().facts == 4


def test_a_lost_acknowledgement_of_a_whole_group_counts_each_once(rig: Rig) -> None:
    appended(rig.journal, first("vm.before"))
    rig.lose_next_ack()
    decisions = [first(f"vm.{number}") for number in range(200)]
    outcomes = append_all(rig.journal, decisions)
    assert all(isinstance(outcome, Appended) for outcome in outcomes)
    assert sorted(aggregates_of(rig.journal.replay(after=1))) == sorted(
        d.facts[0].aggregate for d in decisions
    )


def test_a_log_that_does_not_answer_takes_nothing_and_says_so_to_readers(rig: Rig) -> None:
    appended(rig.journal, first("vm.before"))
    rig.down()
    outcome = refused(append(rig.journal, first("vm.a")))
    assert outcome.code == "unavailable"
    with pytest.raises(LogUnavailable):
        rig.journal.read("vm.before")
    with pytest.raises(LogUnavailable):
        next(rig.journal.replay())
    with pytest.raises(LogUnavailable):
        rig.journal.headroom()
    with pytest.raises(LogUnavailable):
        rig.journal.sequence_at(wall_time())
    rig.up()
    eventually(lambda: isinstance(append(rig.journal, first("vm.after")), Appended), "it works again")
    assert rig.journal.read("vm.a") == ()


def test_a_malformed_decision_is_our_own_bug(rig: Rig) -> None:
    for wrong in (
        decide(),
        decide(fact("vm.a", 1, None)),
        decide(fact("vm.a", 1, 0), fact("vm.a", 2, 1)),
        decide(fact("vm.a", 1, 0), fact("vm.a", 3, None)),
        decide(fact("reaper", 1, 0), epoch=1),
    ):
        with pytest.raises(AssertionError):
            rig.journal.append(wrong, lambda _: None)


def test_whoever_cannot_take_an_outcome_harms_nobody_else(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> None:
        raise ValueError("cannot take it")

    with caplog.at_level(logging.ERROR):
        rig.journal.append(first("vm.a"), broken)
        appended(rig.journal, first("vm.b"))
        eventually(lambda: "cannot take it" in caplog.text, "it is said")


# Room


def test_the_last_room_is_kept_for_ending_lives_and_a_larger_limit_opens_the_log_again(rig: Rig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(200)])
    rig.limit(bytes_left_for_demand=3000)
    taken = 0
    while isinstance(demand := append(rig.journal, first(f"vm.demand-{taken}")), Appended):
        taken += 1
    demand = refused(demand)
    assert taken < 10
    assert (demand.code, demand.stored) == ("full", False)
    assert "fleetlog log resize" in demand.detail
    ending = decide(fact("vm.ending", 1, 0), teardown=True)
    assert isinstance(append(rig.journal, ending), Appended)

    spent = None
    for number in range(2000):
        outcome = append(rig.journal, decide(fact(f"vm.end-{number}", 1, 0), teardown=True))
        if isinstance(outcome, NotAppended):
            spent = outcome
            break
    assert spent is not None
    assert (spent.code, spent.stored) == ("full", False)
    headroom = rig.journal.headroom()
    assert headroom.demand_limit_bytes < headroom.used_bytes <= headroom.limit_bytes
    assert headroom.facts == len(list(rig.journal.replay()))

    rig.limit(bytes_left_for_demand=1_000_000)
    eventually(
        lambda: isinstance(append(rig.journal, first("vm.again")), Appended | Conflicted), "demand is taken"
    )


def test_headroom_says_where_the_log_ends(rig: Rig) -> None:
    empty = rig.journal.headroom()
    assert (empty.facts, empty.last_sequence) == (0, 0)
    append_all(rig.journal, [first("vm.a"), first("vm.b")])
    used = rig.journal.headroom()
    assert (used.facts, used.last_sequence) == (2, 2)
    assert 0 < used.used_bytes < used.demand_limit_bytes < used.limit_bytes


# The end


def test_a_closed_journal_has_finished_what_was_queued_and_takes_no_more(rig: Rig) -> None:
    told: list[object] = []
    for number in range(300):
        rig.journal.append(first(f"vm.{number}"), told.append)
    rig.journal.close()
    rig.journal.close()
    eventually(lambda: len(told) == 300, "all are told")
    assert all(isinstance(outcome, Appended) for outcome in told)
    late = refused(append(rig.journal, first("vm.late")))
    assert (late.code, late.stored) == ("unavailable", False)


def test_facts_of_all_types_survive_the_log(rig: Rig) -> None:
    stored = appended(rig.journal, first("vm.a", "é\n\x00\u2028"))
    read = rig.journal.read("vm.a")[0]
    assert read == stored.facts[0]
    assert type(read.event.labels) is tuple
    assert read.event.placement == requested().placement
