"""Projections on a real PostgreSQL: killed in the middle, restarted under them, and read back for a boot."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta

import msgspec
import psycopg
import pytest

from actors.errors import RowsUnavailable
from actors.projector import Projector, ProjectorOptions
from infra.boot import boot
from infra.embedded.postgres_server import EmbeddedPostgres
from infra.postgres.database import Database
from infra.postgres.queries import AgentFilter, Queries, TimelineFilter
from infra.postgres.rows import PostgresRows
from infra.rebuild import rebuild
from infra.verify import verify_tables
from projections.boot import FleetState, fold_fleet
from projections.catalogue import FLEET, TIMELINE, VIEWS
from projections.vm import BrokenLog
from tests.fleet_log import BEGIN, ListLog, Story

SEED, STEPS = 11, 4000


class StillClock:
    """Time, stopped."""

    def now(self) -> datetime:
        return BEGIN

    def monotonic_s(self) -> float:
        return 0.0


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def database(postgres_dsn: str) -> Iterator[Database]:
    database = Database(postgres_dsn, "test")
    yield database
    database.close()


def test_rows_are_exact_after_the_projector_was_killed_again_and_again(postgres_dsn: str) -> None:
    log = ListLog(Story(SEED).run(STEPS).facts)
    database = Database(postgres_dsn, "killed")
    rows = PostgresRows(database)
    rows.checkpoint(FLEET)
    rows.checkpoint(TIMELINE)
    command = [
        sys.executable,
        "-m",
        "tests.integration.projector_process",
        str(SEED),
        str(STEPS),
        postgres_dsn,
    ]
    kills = 0
    while min(rows.checkpoint(view) for view in VIEWS) < len(log.facts):
        before = [rows.checkpoint(view) for view in VIEWS]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            # Killed while it saves: each time a little later in the log.
            wait_until(
                lambda before=before, process=process: (  # type: ignore[misc]
                    process.poll() is not None
                    or min(rows.checkpoint(v) - b for v, b in zip(VIEWS, before, strict=True)) > 100
                )
            )
        finally:
            if process.poll() is None:
                process.kill()
                kills += 1
            process.wait()
    assert kills >= 3
    assert [verify_tables(log, rows, view) for view in VIEWS] == [[], []]
    database.close()


def test_a_restart_of_the_database_delays_rows_and_loses_none(own_postgres_server: EmbeddedPostgres) -> None:
    story = Story(5).run(200)
    log = ListLog(list(story.facts))
    database = Database(own_postgres_server.dsn, "test", wait_s=1)
    rows = PostgresRows(database)
    options = ProjectorOptions(retry_min_s=0.05, retry_max_s=0.3, check_s=0.1)
    projector = Projector(log, rows, FLEET, StillClock(), options=options)
    projector.start()
    wait_until(lambda: projector.status().stage == "live")
    for kill in (True, False):
        if kill:
            own_postgres_server.kill()
        else:
            own_postgres_server.stop()
        wait_until(lambda: projector.status().stage == "waiting")
        assert database.place in projector.status().reason
        story.run(50)
        log.write(*story.facts[len(log.facts) :])
        own_postgres_server.start()
        wait_until(lambda: projector.status().sequence == len(story.facts))
    projector.stop()
    assert verify_tables(log, rows, FLEET) == []
    database.close()


def saved(rows: PostgresRows) -> int:
    """Return the checkpoint, -1 while the database cannot be asked."""
    try:
        return rows.checkpoint(FLEET)
    except RowsUnavailable:
        return -1


def test_a_database_that_lost_its_last_rows_in_a_crash_gets_them_again_though_nothing_new_happens(
    own_postgres_server: EmbeddedPostgres,
) -> None:
    story = Story(6).run(100)
    log = ListLog(list(story.facts))
    database = Database(own_postgres_server.dsn, "test", wait_s=1)
    rows = PostgresRows(database)
    options = ProjectorOptions(retry_min_s=0.05, retry_max_s=0.3, check_s=0.1)
    projector = Projector(log, rows, FLEET, StillClock(), options=options)
    projector.start()
    lost = 0
    for _ in range(10):
        story.run(20)
        log.write(*story.facts[len(log.facts) :])
        wait_until(lambda: projector.status().sequence == len(story.facts))
        own_postgres_server.kill()
        own_postgres_server.start()
        with suppress(RowsUnavailable):  # the projector may be throwing the broken connections away
            lost += rows.checkpoint(FLEET) < len(story.facts)
        wait_until(lambda: saved(rows) == len(story.facts))
        assert verify_tables(log, rows, FLEET) == []
    projector.stop()
    database.close()
    assert lost, "it never lost a row: this shows nothing"


def test_connections_that_were_cut_are_replaced_at_once(database: Database, postgres_dsn: str) -> None:
    rows = PostgresRows(database)
    rows.checkpoint(FLEET)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'fleetlog' "
            "and datname = current_database()"
        )
    assert rows.checkpoint(FLEET) == 0


def test_a_busy_pool_says_so_within_its_bound(postgres_dsn: str) -> None:
    database = Database(postgres_dsn, "test", connections=1, wait_s=0.3)
    with database.connection(), pytest.raises(RowsUnavailable, match="all 1 connections are busy"):
        PostgresRows(database).checkpoint(FLEET)
    assert PostgresRows(database).checkpoint(FLEET) == 0
    database.close()


def _as_stored(state: FleetState) -> FleetState:
    """Return the state with NUL replaced in the one text of it that is a column: no PostgreSQL text can hold NUL."""
    backends = {
        key: msgspec.structs.replace(scaler, last_failure=scaler.last_failure.replace("\x00", "\ufffd"))
        for key, scaler in state.backends.items()
    }
    return msgspec.structs.replace(state, backends=backends)


def test_a_boot_from_tables_and_tail_equals_a_full_replay(database: Database) -> None:
    story = Story(21).run(1500)
    rows, queries = PostgresRows(database), Queries(database)
    full = fold_fleet(story.facts)
    for cut in (0, 1, 37, 700, 701, 702, 703, len(story.facts) - 1, len(story.facts)):
        rows.checkpoint(FLEET)
        rebuild(ListLog(story.facts[:cut]), rows, StillClock(), [FLEET])
        booted = boot(ListLog(story.facts), queries)
        assert _as_stored(booted.state) == _as_stored(full)
        assert (booted.source, booted.replayed) == (
            "tables" if cut else "log",
            len(story.facts) - cut,
        )


def test_a_boot_without_tables_replays_the_log_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(21).run(200)
    away = Database("postgresql://nobody@127.0.0.1:1/x", "test", wait_s=1)
    booted = boot(ListLog(story.facts), Queries(away))
    assert booted.state == fold_fleet(story.facts)
    assert booted.source == "log"
    assert "127.0.0.1:1/x" in booted.reason
    assert "boot replays the whole log" in caplog.text
    away.close()


def test_a_boot_refuses_a_log_that_ends_before_its_tables(database: Database) -> None:
    story = Story(21).run(200)
    rows = PostgresRows(database)
    rebuild(ListLog(story.facts), rows, StillClock(), [FLEET])
    with pytest.raises(BrokenLog, match="lost its tail"):
        boot(ListLog(story.facts[:-3]), Queries(database))


def test_agents_are_listed_by_what_people_ask_for(database: Database) -> None:
    story = Story(22).run(800)
    rows, queries = PostgresRows(database), Queries(database)
    rebuild(ListLog(story.facts), rows, StillClock(), VIEWS)
    live = fold_fleet(story.facts).vms
    assert {row.id for row in queries.agents(AgentFilter(limit=10_000))} == set(live)
    everyone = queries.agents(AgentFilter(live=False, limit=10_000))
    assert len(everyone) > len(live)
    small = queries.agents(AgentFilter(scaler="small", live=False, limit=10_000))
    assert {row.id for row in small} == {row.id for row in everyone if row.scaler == "small"}
    failed = queries.agents(AgentFilter(live=False, exit_code=3, limit=10_000))
    assert failed
    assert all(row.exit_code == 3 for row in failed)
    pages = [row.id for row in queries.agents(AgentFilter(live=False, limit=3))]
    pages += [row.id for row in queries.agents(AgentFilter(live=False, limit=3, before=pages[-1]))]
    assert pages == sorted((row.id for row in everyone), reverse=True)[:6]


def test_an_agent_is_described_with_all_its_facts(database: Database) -> None:
    story = Story(22).run(300)
    rebuild(ListLog(story.facts), PostgresRows(database), StillClock(), VIEWS)
    queries = Queries(database)
    described = queries.agent("vm-0000003")
    assert described is not None
    wanted = [(f.sequence, f.tag) for f in story.facts if f.aggregate == "vm.vm-0000003"]
    assert [(row.sequence, row.tag) for row in described.timeline] == wanted
    assert queries.agent("nobody") is None
    reaped = queries.timeline(TimelineFilter(tag="vm.reaped", after=20, limit=2))
    assert [row.sequence for row in reaped] == [
        f.sequence for f in story.facts if f.tag == "vm.reaped" and f.sequence > 20
    ][:2]
    assert [demand.vms for demand in queries.demands_of("job-vm-0000003")] in ([], [("vm-0000003",)])


def test_headroom_failures_and_lag_can_be_read(database: Database) -> None:
    story = Story(22).run(800)
    rebuild(ListLog(story.facts), PostgresRows(database), StillClock(), VIEWS)
    queries, state = Queries(database), fold_fleet(story.facts)
    assert {row.slot: row.taken for row in queries.headroom()} == {
        slot: len(scaler.slots) for slot, scaler in state.backends.items()
    }
    found = queries.failures(story.at, timedelta(days=1))
    wanted = sum(fact.tag == "vm.failed" for fact in story.facts)
    assert sum(entry.bound + entry.unbound for entry in found.values()) == min(wanted, 256)
    assert queries.failures(story.at + timedelta(days=2), timedelta(days=1)) == {}
    assert [(found.view, found.sequence) for found in queries.checkpoints()] == [
        ("fleet", len(story.facts)),
        ("timeline", len(story.facts)),
    ]
    assert {row.id for row in queries.coordinators()} == {"alpha", "beta"}


def test_a_boot_looks_at_no_dead_agent(database: Database) -> None:
    story = Story(23)
    for number in range(300):
        machine = story.begin(straight=True)
        if number % 50:
            story.finish(machine)
    rebuild(ListLog(story.facts), PostgresRows(database), StillClock(), [FLEET])
    with database.connection() as connection:
        connection.execute("analyze agents")
        connection.execute("set enable_seqscan = off")
        plan = connection.execute("explain select state from agents where phase <> 'reaped'").fetchall()
    assert "agents_live" in str(plan)


def test_the_boot_state_is_none_before_anything_was_projected(database: Database) -> None:
    assert Queries(database).boot_state() is None
    PostgresRows(database).checkpoint(FLEET)
    assert Queries(database).boot_state() is None
