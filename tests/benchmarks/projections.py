"""How fast rows are applied, and how long a boot takes with many dead; a plain COPY is the baseline of the same run."""

from datetime import datetime
from time import monotonic, perf_counter, sleep

import psycopg

from actors.projector import Projector, ProjectorOptions
from infra.boot import boot
from infra.postgres.database import Database
from infra.postgres.queries import Queries
from infra.postgres.rows import PostgresRows
from projections.boot import fold_fleet
from projections.catalogue import FLEET, TIMELINE
from projections.view import View
from tests.fleet_log import BEGIN, ListLog, Story

TAIL_FACTS = 2000


class StillClock:
    """Time, stopped."""

    def now(self) -> datetime:
        """Return the beginning."""
        return BEGIN

    def monotonic_s(self) -> float:
        """Return real seconds."""
        return monotonic()


def fleet_log(dead: int, live: int) -> ListLog:
    """Write the log of a fleet with so many dead and so many living, a thousand lives interleaved at a time."""
    story = Story(1)
    for first in range(0, dead, 1000):
        machines = [story.begin(straight=True) for _ in range(min(1000, dead - first))]
        for _ in range(4):
            for machine in machines:
                story.finish(machine, 1)
        for machine in machines:
            story.finish(machine)
    for _ in range(live):
        story.finish(story.begin(straight=True), 3)
    return ListLog(story.facts)


def copy_baseline(dsn: str, rows: int = 100_000) -> float:
    """Return rows a second of one COPY of narrow rows."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create temporary table baseline (a bigint, b text, c text)")
        began = perf_counter()
        with connection.cursor() as cursor, cursor.copy("copy baseline from stdin") as copy:
            for number in range(rows):
                copy.write_row((number, "vm.vm-0000001", '{"tag":"vm.spawned"}'))
        return rows / (perf_counter() - began)


def apply_rate(log: ListLog, rows: PostgresRows, view: View) -> float:
    """Return facts a second of a projector that catches up, save and commit included."""
    projector = Projector(log, rows, view, StillClock(), options=ProjectorOptions())
    began = perf_counter()
    projector.start()
    while projector.status().sequence < len(log.facts):
        sleep(0.005)
    took = perf_counter() - began
    projector.stop()
    return len(log.facts) / took


def measure(dsn: str, dead: int = 100_000, live: int = 1000) -> dict[str, float]:
    """Measure on a fresh database."""
    figures = {"copy baseline, rows/s": copy_baseline(dsn)}
    database = Database(dsn, "bench")
    rows, queries = PostgresRows(database), Queries(database)
    log = fleet_log(dead, live)
    figures["facts in the log"] = len(log.facts)
    began = perf_counter()
    assert len(fold_fleet(log.facts).vms) == live
    figures["full fold, facts/s"] = len(log.facts) / (perf_counter() - began)
    for view in (FLEET, TIMELINE):
        figures[f"apply {view.name}, facts/s"] = apply_rate(log, rows, view)
    story_end = len(log.facts)
    longer = fleet_log(dead, live + TAIL_FACTS // 7)
    booted = boot(longer, queries)
    assert booted.source == "tables"
    figures["facts in the tail"] = len(longer.facts) - story_end
    figures[f"boot with {dead} dead, {live} live, s"] = booted.took_s
    with database.connection() as connection:
        connection.execute("vacuum agents")  # what autovacuum does within its minute
    figures[f"the same after a vacuum of {dead} dead, s"] = boot(longer, queries).took_s
    few = Database(dsn, "few")
    small = fleet_log(100, live)
    apply_rate(small, PostgresRows(few), FLEET)
    figures[f"boot with 100 dead, {live} live, s"] = boot(small, Queries(few)).took_s
    few.close()
    database.close()
    return figures
