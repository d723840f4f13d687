"""What tests of projectors share: rows of either kind, projectors that end with the test, waiting for a status."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Protocol

import msgspec
import pytest

from actors.ports import Rows
from actors.projector import Projector, ProjectorOptions, ProjectorStatus
from infra.postgres.database import Database
from infra.postgres.memory import MemoryRows
from infra.postgres.rows import PostgresRows
from infra.verify import Tables, verify_tables
from projections.catalogue import FLEET, VIEWS
from projections.view import View
from tests.fleet_log import BEGIN, ListLog

QUICK = ProjectorOptions(
    batch_facts=50, linger_s=0.01, queue_facts=500, retry_min_s=0.02, retry_max_s=0.1, check_s=0.05
)


class AnyRows(Rows, Tables, Protocol):
    """What both adapters are."""


class StillClock:
    """Time, stopped."""

    def now(self) -> datetime:
        return BEGIN

    def monotonic_s(self) -> float:
        return 0.0


def any_rows(request: pytest.FixtureRequest) -> Iterator[AnyRows]:
    """Yield rows in memory or in PostgreSQL, as `request.param` says."""
    if request.param == "memory":
        yield MemoryRows()
        return
    database = Database(request.getfixturevalue("postgres_dsn"), "test", wait_s=2)
    yield PostgresRows(database)
    database.close()


Start = Callable[..., Projector]


def projectors() -> Iterator[Start]:
    """Start projectors that end with the test."""
    started: list[Projector] = []

    def begin(
        log: ListLog, rows: Rows, view: View = FLEET, options: ProjectorOptions = QUICK, **more: Any
    ) -> Projector:
        projector = Projector(log, rows, view, StillClock(), options=options, **more)
        projector.start()
        started.append(projector)
        return projector

    yield begin
    stopped = [projector.stop() for projector in started]  # every one, also after one that did not
    assert all(stopped)


def until(
    projector: Projector, done: Callable[[ProjectorStatus], bool], seconds: float = 20
) -> ProjectorStatus:
    """Wait for a status."""
    deadline = time.monotonic() + seconds
    while not done(status := projector.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.005)
    return status


def at(sequence: int) -> Callable[[ProjectorStatus], bool]:
    """Ask for a sequence."""
    return lambda status: status.sequence == sequence


def parked(status: ProjectorStatus) -> bool:
    """Ask for the end."""
    return status.stage == "parked"


def in_order(log: ListLog, rows: Tables) -> bool:
    """Tell whether every row is as a fresh fold has it."""
    return [verify_tables(log, rows, view) for view in VIEWS] == [[], []]


def scan(rows: Tables, view: View) -> dict[str, list[msgspec.Struct]]:
    """Return every row of a view."""
    with rows.snapshot(view) as snapshot:
        return {table.name: list(snapshot.scan(table)) for table in view.tables}
