"""PostgreSQL: reachable, new enough, its tables of this version, and how far they are behind the log."""

from collections.abc import Iterator

from actors.errors import RowsRefused, RowsUnavailable
from infra.doctor.check import Check, fail, good, warn
from infra.postgres.database import Database
from infra.postgres.queries import Queries
from projections.catalogue import VIEWS

_BEHIND_WARN_FACTS = 1000


def check_tables(database: Database, log_end: int | None) -> Iterator[Check]:
    """Yield the checks; `log_end` None: the log does not answer."""
    try:
        with database.connection() as connection:
            row = connection.execute("select current_setting('server_version')").fetchone()
        checkpoints = {each.view: each for each in Queries(database).checkpoints()}
    except RowsRefused as error:
        yield fail("postgres", str(error), "the fleet works on without it; the tables cannot be used")
        return
    except RowsUnavailable as error:
        yield fail("postgres", str(error), "start it; the fleet works on, and the tables catch up")
        return
    version = "?" if row is None else str(row[0]).split(" ")[0]
    yield good("postgres", f"{database.place}, version {version}, schema {database.schema}")
    for view in VIEWS:
        name = f"table {view.name}"
        checkpoint = checkpoints.get(view.name)
        if checkpoint is None or checkpoint.view_version < view.version:
            yield warn(name, "empty, or of an older version", "`fleetlog rebuild`, or start a coordinator")
        elif checkpoint.view_version > view.version:
            yield fail(name, "made by a newer fleetlog", "install that version here too")
        elif log_end is None:
            yield warn(name, f"at sequence {checkpoint.sequence}; the log does not answer", "see nats")
        elif checkpoint.sequence > log_end:
            yield fail(
                name,
                f"at sequence {checkpoint.sequence}, and the log ends at {log_end}",
                "the log lost its tail, or these are another log's tables: restore the log, or `fleetlog rebuild`",
            )
        elif (behind := log_end - checkpoint.sequence) > _BEHIND_WARN_FACTS:
            yield warn(
                name, f"{behind} facts behind the log", "is a coordinator running, and its view not parked?"
            )
        else:
            yield good(name, f"at sequence {checkpoint.sequence}, {behind} facts behind the log")
