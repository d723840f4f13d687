"""What people and a boot ask the tables. Every answer lags the log; admission never asks here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, LiteralString, cast

import msgspec
from psycopg import sql

from infra.postgres.columns import codec_of
from infra.postgres.database import Connection, Database, literal
from projections import failures
from projections.allocator import AllocatorState
from projections.boot import FleetState
from projections.catalogue import FLEET
from projections.failures import FailureRow, ScalerFailures
from projections.fleet import (
    AGENTS,
    COORDINATORS,
    DEMANDS,
    FAILURES,
    HEADROOM,
    NETWORKS,
    PLACES,
    AgentRow,
    CoordinatorRow,
    DemandRow,
    coordinator_state,
)
from projections.headroom import HeadroomRow, own_state, slot_of
from projections.timeline import TIMELINE_TABLE, TimelineRow
from projections.view import AnyTable
from projections.vm import VmState


class AgentFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which agents to list: every given field must match; `live` False lists the reaped too.

    The newest come first; `before` is the id after which the previous page ended.
    """

    scaler: str | None = None
    backend: str | None = None
    phase: str | None = None
    owner: str | None = None
    host: str | None = None
    job: str | None = None
    run: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    live: bool = True
    since: datetime | None = None
    before: str | None = None
    limit: int = 100


class TimelineFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which facts to list, oldest first, from `after` on; `aggregate` exactly, every given field must match."""

    aggregate: str | None = None
    tag: str | None = None
    correlation: str | None = None
    writer: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    after: int = 0
    limit: int = 1000


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How far a view is, and when that was saved."""

    view: str
    view_version: int
    sequence: int
    saved_at: datetime


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """One agent with its facts."""

    agent: AgentRow
    timeline: tuple[TimelineRow, ...]


class Queries:
    """Reads. Each raises RowsUnavailable or RowsRefused as `Database` does."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def agents(self, chosen: AgentFilter) -> list[AgentRow]:
        """Return the chosen agents, newest first."""
        where = _equal(
            chosen, "scaler", "backend", "phase", "owner", "host", "job", "run", "reason", "exit_code"
        )
        if chosen.live:
            where.append((sql.SQL("phase <> 'reaped'"), None))
        if chosen.since is not None:
            where.append((sql.SQL("requested_at >= %s"), chosen.since))
        if chosen.before is not None:
            where.append((sql.SQL("id < %s"), chosen.before))
        return cast("list[AgentRow]", self._rows(AGENTS, where, "id desc", chosen.limit))

    def agent(self, vm: str) -> Described | None:
        """Return one agent and all its facts, or None: the tables do not know it (yet)."""
        found = self._rows(AGENTS, [(sql.SQL("id = %s"), vm)], "id", 1)
        if not found:
            return None
        facts = self.timeline(TimelineFilter(aggregate=f"vm.{vm}"))
        return Described(agent=cast("AgentRow", found[0]), timeline=tuple(facts))

    def timeline(self, chosen: TimelineFilter) -> list[TimelineRow]:
        """Return the chosen facts, oldest first."""
        where = _equal(chosen, "aggregate", "tag", "correlation", "writer")
        if chosen.since is not None:
            where.append((sql.SQL("at >= %s"), chosen.since))
        if chosen.until is not None:
            where.append((sql.SQL("at <= %s"), chosen.until))
        where.append((sql.SQL("sequence > %s"), chosen.after))
        return cast("list[TimelineRow]", self._rows(TIMELINE_TABLE, where, "sequence", chosen.limit))

    def headroom(self) -> list[HeadroomRow]:
        """Return every scaler."""
        return cast("list[HeadroomRow]", self._rows(HEADROOM, [], "slot", None))

    def coordinators(self) -> list[CoordinatorRow]:
        """Return every coordinator there ever was."""
        return cast("list[CoordinatorRow]", self._rows(COORDINATORS, [], "id", None))

    def demands_of(self, job: str) -> list[DemandRow]:
        """Return the demands of a job."""
        return cast("list[DemandRow]", self._rows(DEMANDS, [(sql.SQL("job = %s"), job)], "sequence", 100))

    def failures(self, now: datetime, length: timedelta) -> dict[str, ScalerFailures]:
        """Return the failures of the last `length` by scaler, out of the newest 256."""
        latest = self._rows(FAILURES, [], "sequence desc", failures.RING_RECORDS)
        return failures.window(reversed(cast("list[FailureRow]", latest)), now, length)

    def checkpoints(self) -> list[Checkpoint]:
        """Return how far each view is."""
        with self._database.connection() as connection:
            found = connection.execute(
                "select view, view_version, sequence, saved_at from checkpoints order by view"
            ).fetchall()
        return [
            Checkpoint(view=view, view_version=version, sequence=sequence, saved_at=saved_at)
            for view, version, sequence, saved_at in found
        ]

    def boot_state(self) -> FleetState | None:
        """Return the live fleet as of one checkpoint; None: the tables are empty or of another version.

        It reads the living alone, by an index that has no dead in it.
        """
        with self._database.connection() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            # Before the first ANALYZE the planner knows nothing of the dead and would read every one of them.
            connection.execute("set local enable_seqscan = off")
            connection.execute("set local enable_bitmapscan = off")
            row = connection.execute(
                "select sequence from checkpoints where view = %s and view_version = %s",
                [FLEET.name, FLEET.version],
            ).fetchone()
            if row is None or row[0] == 0:
                return None
            return _fleet_state(connection, int(row[0]))

    def _rows(
        self,
        table: AnyTable,
        where: Sequence[tuple[sql.Composable, object]],
        order: LiteralString,
        limit: int | None,
    ) -> list[msgspec.Struct]:
        codec = codec_of(table)
        query = literal(
            "select {columns} from {table}",
            columns=sql.SQL(", ").join(map(sql.Identifier, table.columns)),
            table=sql.Identifier(table.name),
        )
        if where:
            query += sql.SQL(" where ") + sql.SQL(" and ").join(condition for condition, _ in where)
        query += sql.SQL(" order by ") + sql.SQL(order) + sql.SQL(" limit %s")
        values = [value for _, value in where if value is not None]
        with self._database.connection() as connection:
            found = connection.execute(query, [*values, limit]).fetchall()
        return [codec.decode(row) for row in found]


def _equal(chosen: msgspec.Struct, *names: str) -> list[tuple[sql.Composable, Any]]:
    return [
        (literal("{name} = %s", name=sql.Identifier(name)), value)
        for name in names
        if (value := getattr(chosen, name)) is not None
    ]


def _fleet_state(connection: Connection, sequence: int) -> FleetState:
    decode = msgspec.json.Decoder(VmState).decode
    vms: dict[str, VmState] = {}
    slots: dict[str, dict[str, Any]] = {}
    for (text,) in connection.execute("select state from agents where phase <> 'reaped' order by sequence"):
        state = decode(text)
        vms[state.id] = state
        slots.setdefault(state.slot, {})[state.id] = slot_of(state)
    places: dict[str, set[str]] = {}
    for place in _all(connection, PLACES):
        places.setdefault(place.coordinator, set()).add(place.vm)
    return FleetState(
        vms=vms,
        backends={row.slot: own_state(row, slots.get(row.slot, {})) for row in _all(connection, HEADROOM)},
        coordinators={
            row.id: coordinator_state(row, frozenset(places.get(row.id, ())))
            for row in _all(connection, COORDINATORS)
        },
        allocators={
            row.aggregate: AllocatorState(version=row.version, sequence=row.sequence, leases=row.leases)
            for row in _all(connection, NETWORKS)
        },
        last_sequence=sequence,
    )


def _all(connection: Connection, table: AnyTable) -> list[Any]:
    codec = codec_of(table)
    query = literal(
        "select {columns} from {table}",
        columns=sql.SQL(", ").join(map(sql.Identifier, table.columns)),
        table=sql.Identifier(table.name),
    )
    return [codec.decode(row) for row in connection.execute(query)]
