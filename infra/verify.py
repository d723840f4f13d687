"""`fleetlog verify`: folds the log afresh and compares it with the tables and with the host, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from actors.driver import Resource
from actors.errors import DriverError
from actors.ports import Journal
from events.envelope import Recorded
from infra.postgres.columns import codec_of
from projections.catalogue import FLEET
from projections.fleet import AGENTS, AgentRow
from projections.view import AnyTable, Key, RowSet, View
from projections.vm import VmState

Progress = Callable[[str, int, int], None]
"""View, facts done, facts there are."""

Survey = Callable[[], tuple[Resource, ...]]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as the log says. `where` is a table or a backend of this host, `key` the row or resource."""

    kind: Literal[
        "missing-row",
        "extra-row",
        "different-row",
        "no-table",  # the tables are not of this fleetlog's version, or never were made
        "ahead",  # the tables know of facts the log does not have
        "absent",  # alive in the log, not on the host
        "leftover",  # reaped in the log, still on the host
        "not-in-log",  # on the host with our mark, and the log never heard of it
        "unowned",  # on the host with our mark, nobody can say whose
        "not-surveyed",  # the host could not be asked
    ]
    where: str
    key: str
    detail: str


class Snapshot(Protocol):
    """A view's tables at one moment."""

    sequence: int | None

    def scan(self, table: AnyTable) -> Iterator[msgspec.Struct]:
        """Yield every row, in the order of the key."""
        ...


class Tables(Protocol):
    """Where the rows are."""

    def snapshot(self, view: View) -> AbstractContextManager[Snapshot]:
        """Look at the view's tables as they are now."""
        ...


def verify_tables(
    journal: Journal,
    tables: Tables,
    view: View,
    *,
    progress: Progress = lambda _view, _done, _all: None,
    most: int = 1000,
) -> list[Difference]:
    """Fold the log up to the view's checkpoint and compare every row; return at most `most` differences.

    Raises:
        BrokenLog, LogUnavailable, RowsUnavailable: as the ports say.
    """
    with tables.snapshot(view) as snapshot:
        sequence = snapshot.sequence
        if sequence is None:
            detail = "no rows of this version: `fleetlog rebuild` makes them"
            return [Difference(kind="no-table", where=view.name, key="", detail=detail)]
        end = journal.headroom().last_sequence
        if sequence > end:
            detail = f"the tables are at sequence {sequence}, the log ends at {end}"
            return [Difference(kind="ahead", where=view.name, key="", detail=detail)]
        comparison = _Comparison(snapshot, view, most)
        for fact in journal.replay(after=0, until=sequence):
            comparison.apply(view, fact)
            if fact.sequence % 10_000 == 0:
                progress(view.name, fact.sequence, sequence)
        found = comparison.finish(view)
        progress(view.name, sequence, sequence)
        return found[:most]


class _Comparison:
    """History is compared while it is folded, one row beside the other; all other rows when the fold is done."""

    def __init__(self, snapshot: Snapshot, view: View, most: int) -> None:
        self._snapshot = snapshot
        self._most = most
        self._expected: dict[AnyTable, dict[Key, msgspec.Struct]] = {table: {} for table in view.tables}
        self._rows = RowSet(lambda _table, _keys: {})
        self._histories = {table: _scan(snapshot, table) for table in view.tables if table.insert_only}
        self._ahead: dict[AnyTable, tuple[Key, msgspec.Struct] | None] = {
            table: next(history, None) for table, history in self._histories.items()
        }
        self._found: list[Difference] = []

    def apply(self, view: View, fact: Recorded) -> None:
        view.apply(self._rows, fact)
        changes = self._rows.changes()
        for table, rows in changes.items():
            if table.insert_only:
                for key, row in rows.items():
                    assert row is not None
                    self._compare_history(table, key, row)
        self._rows.settle(keep=1 << 62)
        for table, rows in changes.items():
            if not table.insert_only:
                expected = self._expected[table]
                for key, row in rows.items():
                    if row is None:
                        expected.pop(key, None)
                    else:
                        expected[key] = row

    def finish(self, view: View) -> list[Difference]:
        for table, history in self._histories.items():
            ahead = self._ahead[table]
            while ahead is not None:
                self._report("extra-row", table, ahead[0], "the log has no such fact")
                ahead = next(history, None)
        for table in view.tables:
            if not table.insert_only:
                self._compare_table(table)
        return self._found

    def _compare_history(self, table: AnyTable, key: Key, row: msgspec.Struct) -> None:
        ahead = self._ahead[table]
        while ahead is not None and ahead[0] < key:  # type: ignore[operator]
            self._report("extra-row", table, ahead[0], "the log has no such fact")
            ahead = next(self._histories[table], None)
        if ahead is None or ahead[0] != key:
            self._report("missing-row", table, key, "in the log, not in the table")
        else:
            self._compare_row(table, key, row, ahead[1])
            ahead = next(self._histories[table], None)
        self._ahead[table] = ahead

    def _compare_table(self, table: AnyTable) -> None:
        expected = self._expected[table]
        for key, row in _scan(self._snapshot, table):
            wanted = expected.pop(key, None)
            if wanted is None:
                self._report("extra-row", table, key, "in the table, not in the log")
            else:
                self._compare_row(table, key, wanted, row)
        for key in expected:
            self._report("missing-row", table, key, "in the log, not in the table")

    def _compare_row(self, table: AnyTable, key: Key, expected: msgspec.Struct, row: msgspec.Struct) -> None:
        if expected == row:
            return
        expected = codec_of(table).stored(expected)
        if expected == row:
            return
        fields = [
            f"{name}: log {getattr(expected, name)!r}, table {getattr(row, name)!r}"
            for name in table.columns
            if name != "state" and getattr(expected, name) != getattr(row, name)
        ]
        self._report("different-row", table, key, "; ".join(fields) or "state")

    def _report(
        self,
        kind: Literal["missing-row", "extra-row", "different-row"],
        table: AnyTable,
        key: Key,
        detail: str,
    ) -> None:
        if len(self._found) < self._most:
            self._found.append(Difference(kind=kind, where=table.name, key=str(key), detail=detail))


def _scan(snapshot: Snapshot, table: AnyTable) -> Iterator[tuple[Key, msgspec.Struct]]:
    for row in snapshot.scan(table):
        yield getattr(row, table.key), row


MUST_BE_THERE = frozenset({"spawned", "registered"})
"""Phases in which a machine runs. Before them it may not exist yet, after them it may be gone already."""


def verify_host(
    journal: Journal, host: str, surveys: Mapping[str, Survey], owner: str | None = None
) -> list[Difference]:
    """Compare what the log says of this host with what its drivers find; `surveys` by backend type.

    With `owner`, resources of other coordinators are left out: they may belong to another log.

    It looks twice and reports what is wrong both times: between a look at the host and one at the log a
    machine may come or go.

    Raises:
        BrokenLog, LogUnavailable: as the journal says.
    """
    first = _host_differences(journal, host, surveys, owner)
    if not first:
        return []
    again = {
        (found.kind, found.where, found.key) for found in _host_differences(journal, host, surveys, owner)
    }
    return [found for found in first if (found.kind, found.where, found.key) in again]


def _host_differences(
    journal: Journal, host: str, surveys: Mapping[str, Survey], owner: str | None
) -> list[Difference]:
    found: list[Difference] = []
    seen: dict[str, tuple[Resource, ...]] = {}
    for backend, survey in surveys.items():
        try:
            seen[backend] = tuple(each for each in survey() if owner is None or each.owner in (None, owner))
        except DriverError as error:
            found.append(Difference(kind="not-surveyed", where=backend, key="", detail=str(error)))
    vms = _all_vms(journal)
    for backend, resources in seen.items():
        for resource in resources:
            difference = _of_resource(backend, resource, vms)
            if difference is not None:
                found.append(difference)
        there = {resource.vm for resource in resources}
        found += [
            Difference(
                kind="absent", where=backend, key=vm.id, detail=f"{vm.phase} in the log, nothing on the host"
            )
            for vm in vms.values()
            if vm.host == host and vm.backend == backend and vm.phase in MUST_BE_THERE and vm.id not in there
        ]
    return found


def _of_resource(backend: str, resource: Resource, vms: Mapping[str, VmState]) -> Difference | None:
    what = f"{resource.kind} {resource.name}"
    if resource.vm is None:
        detail = f"has our mark and no machine's. {resource.detail}".strip()
        return Difference(kind="unowned", where=backend, key=what, detail=detail)
    vm = vms.get(resource.vm)
    if vm is None:
        return Difference(
            kind="not-in-log",
            where=backend,
            key=what,
            detail=f"of {resource.vm}, which the log does not know",
        )
    if not vm.live:
        return Difference(
            kind="leftover", where=backend, key=what, detail=f"of {vm.id}, reaped at {vm.reaped_at}"
        )
    return None


def _all_vms(journal: Journal) -> dict[str, VmState]:
    rows = RowSet(lambda _table, _keys: {})
    vms: dict[str, VmState] = {}
    for fact in journal.replay():
        FLEET.apply(rows, fact)
        for row in rows.changes().get(AGENTS, {}).values():
            assert isinstance(row, AgentRow)
            vms[row.id] = row.state
        rows.settle(keep=1 << 62)
    return vms
