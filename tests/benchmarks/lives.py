"""Logs with many lives: written through the journal in big batches, fact for fact as coordinators write them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from actors.ports import Appended, Decision, Journal, NewFact, Outcome
from actors.projector import Projector
from events import subjects
from events.backend import SlotTaken
from events.codec import AnyEvent
from events.coordinator import ConfigApplied, GlobalSlotTaken, Started, Stopped
from events.envelope import Resources
from events.vm import ConfigAcked, Draining, Handle, Reaped, Registered, Requested, Spawned, SpawnStarted
from infra.clock import SystemClock
from infra.host import boot_id, host_name
from infra.ids import SystemIds
from infra.journal.nats import NatsJournal
from infra.postgres.database import Database
from infra.postgres.rows import PostgresRows
from infra.servers import Servers
from projections.catalogue import VIEWS
from tests.benchmarks.stage import CLUSTER, COORDINATOR, LABELS, SCALER, servers, wait_until

WAVE = 48
"""Lives whose facts go in one batch: nine each stay below the 500 of a batch."""

IN_FLIGHT = 4
LIMIT_BYTES = 8 << 30
SLOT = subjects.local_backend(COORDINATOR, SCALER)

Fact = tuple[str, AnyEvent]


class Writer:
    """Appends decisions and knows, as the only writer, where each one will stand. A few are on their way at once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ids = SystemIds()
        self._places: dict[str, tuple[int, int]] = {}  # aggregate -> version and sequence of its last fact
        self._sequence = 0
        self._room = threading.Semaphore(IN_FLIGHT)
        self._failed: list[Outcome] = []

    @property
    def sequence(self) -> int:
        """Return where the log ends once all is stored."""
        return self._sequence

    def write(self, at: datetime, facts: list[Fact]) -> None:
        """Append the facts as one decision.

        Raises:
            RuntimeError: an earlier one was not stored.
        """
        self._room.acquire()
        self._check()
        attempt = self._ids.random()
        here: set[str] = set()
        new: list[NewFact] = []
        for aggregate, event in facts:
            version, sequence = self._places.get(aggregate, (0, 0))
            expected = None if aggregate in here else sequence
            here.add(aggregate)
            self._sequence += 1
            self._places[aggregate] = (version + 1, self._sequence)
            new.append(
                NewFact(aggregate=aggregate, version=version + 1, expected_sequence=expected, event=event)
            )
            if isinstance(event, Reaped):
                del self._places[aggregate]
        decision = Decision(
            attempt=attempt,
            at=at,
            writer=COORDINATOR,
            cause=f"command:{attempt}",
            correlation=attempt,
            facts=tuple(new),
            teardown=True,
        )
        self._journal.append(decision, self._stored)

    def finish(self) -> None:
        """Wait until everything is stored; raises as `write`."""
        for _ in range(IN_FLIGHT):
            self._room.acquire()
        for _ in range(IN_FLIGHT):
            self._room.release()
        self._check()

    def _stored(self, outcome: Outcome) -> None:
        if not isinstance(outcome, Appended):
            self._failed.append(outcome)
        self._room.release()

    def _check(self) -> None:
        if self._failed:
            raise RuntimeError(f"the log would not take the benchmark's lives: {self._failed[0]}")


def write_log(journal: Journal, dead: int, live: int) -> int:
    """Write a coordinator's history with so many reaped machines and so many registered ones; return its last sequence."""
    writer = Writer(journal)
    at = SystemClock().now() - timedelta(hours=1)
    own = subjects.coordinator(COORDINATOR)
    host, boot = host_name(), boot_id()
    started = Started(host=host, boot_id=boot, pid=1, version="bench")
    writer.write(at, [(own, started), (own, ConfigApplied(digest="none", global_max_agents=1, scalers={}))])
    for count, ends in ((dead, True), (live, False)):
        for first in range(0, count, WAVE):
            numbers = range(first, min(first + WAVE, count))
            lives = [_life(f"a-{'d' if ends else 'l'}{number:025d}", host, boot) for number in numbers]
            steps = 9 if ends else 7
            writer.write(at, [next(life) for _ in range(steps) for life in lives])
    writer.write(at, [(own, Stopped(reason="asked to"))])
    writer.finish()
    return writer.sequence


def _life(vm: str, host: str, boot: str) -> Iterator[Fact]:
    me = subjects.vm(vm)
    yield subjects.coordinator(COORDINATOR), GlobalSlotTaken(vm=vm)
    yield SLOT, SlotTaken(vm=vm, requests=Resources(cpus=1, memory_bytes=1 << 30))
    yield me, _request(vm, host, boot)
    yield me, SpawnStarted()
    yield me, Spawned(handle=handle(boot))
    yield (
        me,
        Registered(session=f"session-{vm}", agent_version="0.1.0", facts={"os": "linux", "arch": "x86_64"}),
    )
    yield me, ConfigAcked()
    yield me, Draining(reason="job-complete", exit_code=0)
    yield me, Reaped(reason="job-complete", slot=SLOT, evidence="no process, no cgroup, no directory of it")


def handle(boot: str) -> Handle:
    """Return a handle as large as those of host processes."""
    return Handle(driver="scripted", version=1, data={"pid": 4242, "start_ticks": 123456789, "boot_id": boot})


def _request(vm: str, host: str, boot: str) -> Requested:
    return Requested(
        scaler=SCALER,
        backend="scripted",
        slot=SLOT,
        owner=COORDINATOR,
        host=host,
        boot_id=boot,
        labels=LABELS,
        agent_labels=LABELS,
        demand=vm,
        job=f"job-{vm}",
        run="run-1",
        requests=Resources(cpus=1, memory_bytes=1 << 30),
        placement={
            "version": 1,
            "boot_id": boot,
            "run": f"/var/lib/fleetlog/machines/runs/{vm}",
            "log": f"/var/lib/fleetlog/machines/logs/{vm}.log",
            "cgroup": f"/fleetlog/bench/{vm}",
        },
    )


def journal_of(started: Servers) -> NatsJournal:
    """Return the log on running servers."""
    return NatsJournal(started.address, CLUSTER, limit_bytes=LIMIT_BYTES, deadline_s=60)


def prepare(directory: Path, *, dead: int, live: int, tables: bool) -> int:
    """Make a data directory as a coordinator would have left it; return the log's last sequence.

    The tables are caught up, vacuumed and analysed, as autovacuum leaves them within a minute.
    """
    with servers(directory, tables=tables) as started:
        journal = journal_of(started)
        try:
            last = write_log(journal, dead, live)
            if tables:
                assert started.dsn is not None, "PostgreSQL did not start"
                _fill(journal, started.dsn, last)
        finally:
            journal.close()
    return last


def _fill(journal: NatsJournal, dsn: str, last: int) -> None:
    database = Database(dsn, CLUSTER)
    rows = PostgresRows(database)
    projectors = [Projector(journal, rows, view, SystemClock()) for view in VIEWS]
    try:
        for projector in projectors:
            projector.start()
        wait_until(
            lambda: all(projector.status().sequence >= last for projector in projectors),
            "the tables have caught up",
            1200,
        )
        for projector in projectors:
            projector.stop()
        with database.connection() as connection:
            connection.autocommit = True
            connection.execute("vacuum analyze")
    finally:
        database.close()
