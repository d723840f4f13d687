"""A projector in a process of its own, to be killed: seed, steps and DSN come as arguments."""

import sys
import time
from datetime import datetime

from actors.projector import Projector, ProjectorOptions
from infra.postgres.database import Database
from infra.postgres.rows import PostgresRows
from projections.catalogue import VIEWS
from tests.fleet_log import BEGIN, ListLog, Story


class StillClock:
    """Time, stopped."""

    def now(self) -> datetime:
        """Return the beginning."""
        return BEGIN

    def monotonic_s(self) -> float:
        """Return nothing of interest."""
        return 0.0


def main() -> None:
    """Project until everything is in the tables."""
    seed, steps, dsn = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    log = ListLog(Story(seed).run(steps).facts)
    rows = PostgresRows(Database(dsn, "killed"))
    options = ProjectorOptions(batch_facts=100, retry_min_s=0.02, retry_max_s=0.1)
    projectors = [Projector(log, rows, view, StillClock(), options=options) for view in VIEWS]
    for projector in projectors:
        projector.start()
    while any(projector.status().sequence < len(log.facts) for projector in projectors):
        time.sleep(0.01)
    print("done", flush=True)


if __name__ == "__main__":
    main()
