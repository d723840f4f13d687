"""The projector over rows in memory and in PostgreSQL: exactly once, loud at what it cannot fold, patient otherwise."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from actors.errors import RowRejected, RowsUnavailable, StaleProjector
from actors.ports import Rows
from actors.projector import ProjectorStatus
from infra.postgres.memory import MemoryRows
from infra.verify import verify_tables
from projections.catalogue import FLEET, TIMELINE, VIEWS
from projections.fleet import AGENTS, PLACES
from projections.view import AnyTable, Changes, Key, View
from tests.contract.projector_rig import (
    QUICK,
    AnyRows,
    Start,
    any_rows,
    at,
    parked,
    projectors,
    scan,
    until,
)
from tests.fleet_log import ListLog, Story, unknown_fact


@pytest.fixture(params=["memory", "postgres"])
def rows(request: pytest.FixtureRequest) -> Iterator[AnyRows]:
    yield from any_rows(request)


@pytest.fixture
def start() -> Iterator[Start]:
    yield from projectors()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: str(view.name))
def test_a_projector_catches_up_and_then_follows(rows: AnyRows, start: Start, view: View) -> None:
    story = Story(1).run(300)
    log = ListLog(list(story.facts))
    projector = start(log, rows, view)
    until(projector, at(len(log.facts)))
    until(projector, lambda status: status.stage == "live")
    story.run(60)
    log.write(*story.facts[len(log.facts) :])
    status = until(projector, at(len(story.facts)))
    assert status.lag_facts == 0
    projector.stop()
    assert verify_tables(log, rows, view) == []


def test_rows_do_not_depend_on_how_facts_were_batched(rows: AnyRows, start: Start) -> None:
    log = ListLog(Story(2).run(300).facts)
    found = []
    for size in (1, 7, 1000):
        projector = start(log, rows, FLEET, msgspec.structs.replace(QUICK, batch_facts=size, keep_rows=size))
        until(projector, at(len(log.facts)))
        projector.stop()
        found.append(scan(rows, FLEET))
        rows.reset(FLEET)
    assert found[0] == found[1] == found[2]


def test_a_burst_larger_than_the_queue_is_replayed_and_nothing_is_skipped(
    rows: AnyRows, start: Start
) -> None:
    story = Story(3)
    log = ListLog(list(story.facts))
    projector = start(log, rows, TIMELINE, msgspec.structs.replace(QUICK, queue_facts=20))
    until(projector, lambda status: status.stage == "live")
    story.run(500)
    log.write(*story.facts[len(log.facts) :])
    until(projector, at(len(story.facts)))
    assert verify_tables(log, rows, TIMELINE) == []


def test_a_follow_that_went_silent_is_noticed(rows: AnyRows, start: Start) -> None:
    story = Story(3)
    log = ListLog(list(story.facts))
    projector = start(log, rows)
    until(projector, lambda status: status.stage == "live")
    story.run(20)
    log.facts.extend(story.facts[len(log.facts) :])  # stored, and nobody is told
    until(projector, at(len(story.facts)))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: str(view.name))
def test_an_unknown_tag_parks_the_view_right_before_it_and_says_so(
    rows: AnyRows, start: Start, view: View
) -> None:
    story = Story(4).run(120)
    heard: list[ProjectorStatus] = []
    place = len(story.facts) + 1
    log = ListLog([*story.facts, unknown_fact(place)])
    projector = start(log, rows, view, changed=heard.append)
    status = until(projector, parked)
    assert (status.sequence, status.parked_at) == (place - 1, place)
    assert "vm.teleported" in status.reason
    assert "install the version" in status.reason
    assert heard[-1].stage == "parked"
    assert rows.checkpoint(view) == place - 1
    log.facts.pop()
    assert verify_tables(log, rows, view) == []


def test_an_unknown_tag_parks_a_live_view_and_later_facts_do_not_move_it(rows: AnyRows, start: Start) -> None:
    story = Story(4).run(50)
    log = ListLog(list(story.facts))
    projector = start(log, rows)
    until(projector, lambda status: status.stage == "live")
    last = len(log.facts)
    after = msgspec.structs.replace(story.facts[0], sequence=last + 2)
    log.write(unknown_fact(last + 1), after)
    status = until(projector, parked)
    assert (status.sequence, status.parked_at, status.lag_facts) == (last, last + 1, 2)
    assert rows.checkpoint(FLEET) == last


def test_a_gap_parks_the_view(rows: AnyRows, start: Start) -> None:
    facts = Story(4).run(120).facts
    log = ListLog([*facts[:70], *facts[71:]])
    status = until(start(log, rows, TIMELINE), parked)
    assert (status.sequence, status.parked_at) == (70, 72)
    assert "follows 70" in status.reason


def test_a_fact_that_does_not_follow_its_aggregate_parks_the_fleet_and_leaves_no_half_of_it(
    rows: AnyRows, start: Start
) -> None:
    story = Story(4).run(120)
    place = next(i for i, fact in enumerate(story.facts) if fact.tag == "vm.spawned")
    bad = list(story.facts)
    bad[place] = msgspec.structs.replace(bad[place], version=40)
    status = until(start(ListLog(bad), rows), parked)
    assert (status.sequence, status.parked_at) == (place, place + 1)
    assert verify_tables(ListLog(story.facts[:place]), rows, FLEET) == []


def test_a_parked_view_does_not_stop_the_others(rows: AnyRows, start: Start) -> None:
    story = Story(4).run(120)
    place = next(i for i, fact in enumerate(story.facts) if fact.tag == "vm.spawned")
    story.facts[place] = msgspec.structs.replace(story.facts[place], version=40)
    log = ListLog(story.facts)
    fleet, timeline = start(log, rows, FLEET), start(log, rows, TIMELINE)
    until(fleet, parked)
    until(timeline, at(len(log.facts)))


def test_tables_ahead_of_the_log_park_the_view(rows: AnyRows, start: Start) -> None:
    log = ListLog(Story(4).run(50).facts)
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 10_000, {})
    assert "10000" in until(start(log, rows), parked).reason
    assert [found.kind for found in verify_tables(log, rows, FLEET)] == ["ahead"]


def test_a_second_projector_stands_by_and_takes_over(rows: AnyRows, start: Start) -> None:
    story = Story(6).run(100)
    log = ListLog(list(story.facts))
    first = start(log, rows)
    until(first, lambda status: status.stage == "live")
    second = start(log, rows)
    assert "held by another" in until(second, lambda status: status.stage == "standby").reason
    first.stop()
    story.run(50)
    log.write(*story.facts[len(log.facts) :])
    until(second, at(len(story.facts)))
    second.stop()
    assert verify_tables(log, rows, FLEET) == []


class Meddler:
    """Rows in which another projector, without the lock, is faster once."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.stale = 0
        self._done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def save(self, view: View, previous: int, sequence: int, changes: Changes) -> None:
        if not self._done:
            self._done = True
            self._rows.save(view, previous, sequence, changes)
        try:
            self._rows.save(view, previous, sequence, changes)
        except StaleProjector:
            self.stale += 1
            raise


def test_a_projector_that_was_overtaken_is_told_stale_and_counts_nothing_twice(
    rows: AnyRows, start: Start
) -> None:
    log = ListLog(Story(6).run(300).facts)
    meddler = Meddler(rows)
    projector = start(log, meddler)
    until(projector, at(len(log.facts)))
    projector.stop()
    assert meddler.stale == 1
    assert verify_tables(log, rows, FLEET) == []


class Refusing:
    """Rows that will never take one machine's row."""

    def __init__(self, rows: Rows, key: Key) -> None:
        self._rows = rows
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def save(self, view: View, previous: int, sequence: int, changes: Changes) -> None:
        if self._key in changes.get(AGENTS, {}):
            raise RowRejected(f"no {self._key} here")
        self._rows.save(view, previous, sequence, changes)


def test_a_row_the_database_refuses_parks_the_view_at_its_very_fact(rows: AnyRows, start: Start) -> None:
    story = Story(6).run(200)
    place = next(i for i, fact in enumerate(story.facts) if fact.aggregate == "vm.vm-0000007")
    projector = start(ListLog(story.facts), Refusing(rows, "vm-0000007"))
    status = until(projector, parked)
    assert (status.sequence, status.parked_at) == (place, place + 1)
    assert "no vm-0000007 here" in status.reason
    assert verify_tables(ListLog(story.facts[:place]), rows, FLEET) == []


def test_lost_answers_and_an_absent_database_delay_rows_and_change_none(start: Start) -> None:
    rows, story = MemoryRows(), Story(7).run(100)
    log = ListLog(list(story.facts))
    rows.unavailable()
    projector = start(log, rows)
    assert until(projector, lambda status: status.stage == "waiting").reason == "the tables do not answer"
    rows.unavailable(down=False)
    until(projector, at(len(log.facts)))
    for _ in range(5):
        rows.lose_next_answer()
        story.run(10)
        log.write(*story.facts[len(log.facts) :])
        until(projector, at(len(story.facts)))
    projector.stop()
    assert verify_tables(log, rows, FLEET) == []


def test_an_absent_log_is_waited_for(start: Start) -> None:
    log, rows = ListLog(Story(7).run(100).facts), MemoryRows()
    log.down = True
    projector = start(log, rows)
    until(projector, lambda status: status.stage == "waiting")
    log.down = False
    until(projector, at(len(log.facts)))


class Buggy(MemoryRows):
    """Rows with a bug of ours in them."""

    def load(self, table: AnyTable, keys: object) -> Mapping[Any, msgspec.Struct]:
        raise ZeroDivisionError


def test_our_own_bug_parks_as_loudly_as_a_poisoned_log(start: Start) -> None:
    status = until(start(ListLog(Story(7).run(100).facts), Buggy()), parked)
    assert "ZeroDivisionError" in status.reason


def test_stopping_wakes_an_idle_projector(start: Start) -> None:
    log = ListLog(Story(8).facts)
    projector = start(log, MemoryRows(), FLEET, msgspec.structs.replace(QUICK, check_s=30))
    until(projector, lambda status: status.stage == "live")
    began = time.monotonic()
    assert projector.stop()
    assert time.monotonic() - began < 5
    assert projector.status().stage == "stopped"


def test_rows_unavailable_in_the_middle_of_a_fold_is_no_poison(start: Start) -> None:
    calls = threading.Semaphore(3)

    class Flaky(MemoryRows):
        def load(self, table: AnyTable, keys: Any) -> Mapping[Any, msgspec.Struct]:
            if table is PLACES and calls.acquire(blocking=False):
                raise RowsUnavailable("not now")
            return super().load(table, keys)

    log, rows = ListLog(Story(8).run(100).facts), Flaky()
    projector = start(log, rows)
    until(projector, at(len(log.facts)))
    projector.stop()
    assert verify_tables(log, rows, FLEET) == []
