"""What every `Rows` promises, held against PostgreSQL and against memory."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import pytest

from actors.errors import RowRejected, RowsRefused, StaleProjector, ViewHeld
from actors.ports import Rows
from events.envelope import Recorded
from infra.postgres.database import Database
from infra.postgres.memory import MemoryRows
from infra.postgres.rows import PostgresRows
from infra.verify import Tables
from projections.catalogue import FLEET, TIMELINE, VIEWS
from projections.fleet import AGENTS, FAILURES, PLACES, FleetView, PlaceRow
from projections.timeline import TIMELINE_TABLE
from projections.view import Changes, RowSet, View
from tests.fleet_log import Story


class AnyRows(Rows, Tables, Protocol):
    """What both adapters are."""


@pytest.fixture(params=["memory", "postgres"])
def rows(request: pytest.FixtureRequest) -> Iterator[AnyRows]:
    if request.param == "memory":
        yield MemoryRows()
        return
    database = Database(request.getfixturevalue("postgres_dsn"), "test")
    yield PostgresRows(database)
    database.close()


def fold(view: View, facts: Iterable[Recorded]) -> Changes:
    """Return the rows of a fold from nothing."""
    found = RowSet(lambda _table, _keys: {})
    for fact in facts:
        view.apply(found, fact)
    return found.changes()


def scan(rows: AnyRows, view: View) -> dict[str, list[msgspec.Struct]]:
    """Return every row of a view."""
    with rows.snapshot(view) as snapshot:
        return {table.name: list(snapshot.scan(table)) for table in view.tables}


def place(vm: str, coordinator: str = "alpha") -> PlaceRow:
    return PlaceRow(vm=vm, coordinator=coordinator)


def test_a_new_view_is_at_0(rows: AnyRows) -> None:
    assert [rows.checkpoint(view) for view in VIEWS] == [0, 0]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: str(view.name))
def test_rows_come_back_as_they_were_saved(rows: AnyRows, view: View) -> None:
    facts = Story(5).run(150).facts
    changes = fold(view, facts)
    rows.checkpoint(view)
    rows.save(view, 0, len(facts), changes)
    assert rows.checkpoint(view) == len(facts)
    for table, wanted in changes.items():
        found = rows.load(table, wanted.keys())
        expected = {key: row for key, row in wanted.items() if row is not None}
        assert len(expected) > 0 or table is PLACES
        assert {key: _plain(row) for key, row in found.items()} == {
            key: _plain(row) for key, row in expected.items()
        }


def _plain(row: msgspec.Struct) -> dict[str, object]:
    """Return the fields, NUL as it is stored; the whole state keeps its own."""
    fields = msgspec.structs.asdict(row)
    return {
        name: value.replace("\x00", "\ufffd") if isinstance(value, str) else value
        for name, value in fields.items()
    }


def test_a_repeat_is_told_stale_and_changes_nothing(rows: AnyRows) -> None:
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 5, {PLACES: {"a": place("a")}})
    before = scan(rows, FLEET)
    with pytest.raises(StaleProjector):
        rows.save(FLEET, 0, 5, {PLACES: {"a": place("a", "beta"), "b": place("b")}})
    assert scan(rows, FLEET) == before
    assert rows.checkpoint(FLEET) == 5


def test_none_deletes_a_row_and_the_rest_stays(rows: AnyRows) -> None:
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 1, {PLACES: {name: place(name) for name in "abcdefgh"}})
    rows.save(FLEET, 1, 2, {PLACES: {"a": None, "b": place("b", "beta"), "zz": None}})
    found = rows.load(PLACES, "abc")
    assert found == {"b": place("b", "beta"), "c": place("c")}


def test_a_key_without_a_row_is_simply_absent(rows: AnyRows) -> None:
    assert rows.load(AGENTS, ["nobody"]) == {}


def test_a_row_that_can_not_be_stored_is_rejected_and_nothing_of_its_batch_stays(rows: AnyRows) -> None:
    facts = Story(5).run(150).facts
    rows.checkpoint(TIMELINE)
    rows.save(TIMELINE, 0, len(facts), fold(TIMELINE, facts))
    again = fold(TIMELINE, facts[:1])
    more = fold(TIMELINE, [msgspec.structs.replace(facts[-1], sequence=len(facts) + 1)])
    merged = {TIMELINE_TABLE: {**more[TIMELINE_TABLE], **again[TIMELINE_TABLE]}}
    with pytest.raises(RowRejected):
        rows.save(TIMELINE, len(facts), len(facts) + 1, merged)
    assert rows.checkpoint(TIMELINE) == len(facts)
    assert len(scan(rows, TIMELINE)["timeline"]) == len(facts)


def test_reset_empties_one_view_and_leaves_the_others(rows: AnyRows) -> None:
    facts = Story(5).run(60).facts
    for view in VIEWS:
        rows.checkpoint(view)
        rows.save(view, 0, len(facts), fold(view, facts))
    rows.reset(FLEET)
    assert rows.checkpoint(FLEET) == 0
    assert not any(scan(rows, FLEET).values())
    assert rows.checkpoint(TIMELINE) == len(facts)
    assert len(scan(rows, TIMELINE)["timeline"]) == len(facts)


class NewerFleet(FleetView):
    """The same view, its fold changed."""

    version = FLEET.version + 1


def test_a_newer_fold_starts_its_view_afresh(rows: AnyRows) -> None:
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 5, {PLACES: {"a": place("a")}})
    assert rows.checkpoint(NewerFleet()) == 0
    assert rows.load(PLACES, ["a"]) == {}


def test_an_older_fold_is_refused_and_can_not_save_either(rows: AnyRows) -> None:
    rows.checkpoint(NewerFleet())
    with pytest.raises(RowsRefused, match="newer fleetlog"):
        rows.checkpoint(FLEET)
    with pytest.raises(StaleProjector):
        rows.save(FLEET, 0, 5, {PLACES: {"a": place("a")}})


def test_a_view_is_held_by_one_until_it_lets_go(rows: AnyRows) -> None:
    with rows.lock(FLEET):
        with rows.lock(TIMELINE):
            pass
        with pytest.raises(ViewHeld), rows.lock(FLEET):
            pass
    with rows.lock(FLEET):
        pass


def test_a_snapshot_does_not_see_what_is_saved_after_it(rows: AnyRows) -> None:
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 1, {PLACES: {"a": place("a")}})
    with rows.snapshot(FLEET) as snapshot:
        rows.save(FLEET, 1, 2, {PLACES: {"b": place("b")}})
        assert snapshot.sequence == 1
        assert list(snapshot.scan(PLACES)) == [place("a")]


def test_history_is_scanned_in_the_order_of_the_log(rows: AnyRows) -> None:
    facts = Story(9).run(400).facts
    for view, table in ((FLEET, FAILURES), (TIMELINE, TIMELINE_TABLE)):
        rows.checkpoint(view)
        changes = fold(view, facts)
        backwards = {table: dict(reversed(list(changes[table].items())))}
        rows.save(view, 0, len(facts), backwards)
        keys = [row.sequence for row in scan(rows, view)[table.name]]  # type: ignore[attr-defined]
        assert keys == sorted(keys)
        assert len(keys) > 5
