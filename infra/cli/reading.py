"""Reads the fleet for people: from the tables while they keep up, else by folding the log; and says which, how stale."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, cast

import msgspec

from actors.errors import LogUnavailable, RowsRefused, RowsUnavailable
from events import subjects
from events.codec import AnyEvent
from events.envelope import Recorded
from infra.cli.exits import CliError, ExitCode
from infra.cli.session import Session
from infra.cli.text import age
from infra.journal.address import ConnectionRefusedByServer
from infra.postgres.queries import AgentFilter
from projections.boot import fold_fleet
from projections.catalogue import FLEET
from projections.fleet import AGENTS, COORDINATORS, HEADROOM, AgentRow, CoordinatorRow, agent_row
from projections.headroom import HeadroomRow
from projections.timeline import TimelineRow
from projections.view import AnyTable, RowSet

BEHIND_MOST = 1000
"""Tables further behind the log than this are not what somebody means who asks how the fleet is."""

_NO_LOG = (LogUnavailable, ConnectionRefusedByServer, CliError)


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows come from. `behind` counts facts of the log not in them; None: the log could not be asked."""

    kind: Literal["log", "tables"]
    sequence: int
    behind: int | None = 0
    saved_at: datetime | None = None
    why: str = ""  # why it is not the tables

    def sentence(self, now: datetime) -> str:
        """Say it."""
        because = f" ({self.why})" if self.why else ""
        if self.kind == "log":
            return f"from the log, up to sequence {self.sequence}{because}"
        saved = "" if self.saved_at is None else f", saved {age((now - self.saved_at).total_seconds())} ago"
        if self.behind is None:
            late = "; the log does not answer, so nobody knows how stale they are"
        elif self.behind:
            late = f"; {self.behind} facts behind the log"
        else:
            late = "; level with the log"
        return f"from the tables, at sequence {self.sequence}{saved}{late}"


class Agents(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen agents, newest first, and where they come from."""

    rows: list[AgentRow]
    source: Provenance


def read_agents(session: Session, chosen: AgentFilter) -> Agents:
    """Return the chosen agents.

    Raises:
        LogUnavailable, RowsUnavailable and the like: no source answers, or not the one that was asked for.
    """
    source = tables_if_fit(session)
    if source.kind == "tables":
        return Agents(rows=session.queries.agents(chosen), source=source)
    end = session.journal.headroom().last_sequence
    rows = agents_of_log(session, end, live=chosen.live)
    source = msgspec.structs.replace(source, sequence=end)
    return Agents(rows=choose(rows, chosen), source=source)


def agents_of_log(session: Session, until: int, *, live: bool) -> list[AgentRow]:
    """Return the agents as of a sequence, newest first; `live` leaves out the reaped."""
    facts = session.out.progressing(session.journal.replay(until=until), until, "folding the log")
    if live:
        rows = [agent_row(state) for state in fold_fleet(facts).vms.values()]
    else:
        rows = [cast("AgentRow", row) for row in fold_rows(facts, AGENTS)]
    return sorted(rows, key=lambda row: row.id, reverse=True)


def fold_rows(facts: Iterable[Recorded], table: AnyTable) -> list[msgspec.Struct]:
    """Return a table's rows after these facts."""
    rows = RowSet(lambda _table, _keys: {})
    for fact in facts:
        FLEET.apply(rows, fact)
    return [row for row in rows.changes().get(table, {}).values() if row is not None]


def choose(rows: list[AgentRow], chosen: AgentFilter) -> list[AgentRow]:
    """Return the chosen ones, as the tables would."""
    exact = ("scaler", "backend", "phase", "owner", "host", "job", "run", "reason", "exit_code")
    wanted = {name: value for name in exact if (value := getattr(chosen, name)) is not None}
    found = [
        row
        for row in rows
        if all(getattr(row, name) == value for name, value in wanted.items())
        and (not chosen.live or row.phase != "reaped")
        and (chosen.since is None or row.requested_at >= chosen.since)
        and (chosen.before is None or row.id < chosen.before)
    ]
    return found[: chosen.limit]


def tables_if_fit(session: Session) -> Provenance:
    """Decide where to read: the tables when they answer and keep up, else the log.

    Raises:
        RowsUnavailable, RowsRefused, CliError: `--source tables` was given and they cannot be used.
    """
    asked = session.settings.source
    if asked == "log":
        return Provenance(kind="log", sequence=0)
    if asked == "auto" and session.dsn is None:
        return Provenance(kind="log", sequence=0, why="no PostgreSQL is known here")
    try:
        checkpoint = next(
            (
                each
                for each in session.queries.checkpoints()
                if each.view == FLEET.name and each.view_version == FLEET.version
            ),
            None,
        )
    except (RowsUnavailable, RowsRefused) as error:
        if asked == "tables":
            raise
        return Provenance(kind="log", sequence=0, why=str(error))
    if checkpoint is None:
        if asked == "tables":
            raise CliError(
                ExitCode.UNREACHABLE,
                "no-tables",
                "the tables are empty or of another version: `fleetlog rebuild` makes them",
            )
        return Provenance(kind="log", sequence=0, why="the tables are empty or of another version")
    behind = _behind(session, checkpoint.sequence)
    if asked == "auto" and behind is not None and behind > BEHIND_MOST:
        return Provenance(kind="log", sequence=0, why=f"the tables are {behind} facts behind")
    return Provenance(
        kind="tables", sequence=checkpoint.sequence, behind=behind, saved_at=checkpoint.saved_at
    )


def _behind(session: Session, sequence: int) -> int | None:
    try:
        return max(0, session.journal.headroom().last_sequence - sequence)
    except _NO_LOG:
        return None


def read_scalers(session: Session) -> tuple[list[HeadroomRow], list[CoordinatorRow], Provenance]:
    """Return what the log says of every scaler and coordinator."""
    source = tables_if_fit(session)
    if source.kind == "tables":
        return session.queries.headroom(), session.queries.coordinators(), source
    end = session.journal.headroom().last_sequence
    facts = session.out.progressing(session.journal.replay(until=end), end, "folding the log")
    rows = RowSet(lambda _table, _keys: {})
    for fact in facts:
        FLEET.apply(rows, fact)
    scalers = [cast("HeadroomRow", row) for row in rows.changes().get(HEADROOM, {}).values() if row]
    coordinators = [
        cast("CoordinatorRow", row) for row in rows.changes().get(COORDINATORS, {}).values() if row
    ]
    return scalers, coordinators, msgspec.structs.replace(source, sequence=end)


def running_coordinators(session: Session) -> list[str]:
    """Return coordinators that the log has as running, the one of the data directory first. Some may be dead."""
    facts = session.journal.replay(aggregates="coordinator.*")
    rows = [cast("CoordinatorRow", row) for row in fold_rows(facts, COORDINATORS)]
    found = sorted(row.id for row in rows if row.running)
    own = None if session.runtime is None or session.settings.nats else session.runtime.coordinator
    if own is not None:
        found = [own, *(each for each in found if each != own)]
    return found


def read_life(session: Session, vm: str) -> tuple[Recorded, ...]:
    """Return a machine's facts: from the log, which has them first; from the tables when asked, or when it is away.

    Raises:
        LogUnavailable, RowsUnavailable and the like: no source answers, or not the one that was asked for.
    """
    if session.settings.source == "tables":
        return _life_of_tables(session, vm)
    try:
        return session.journal.read(subjects.vm(vm))
    except _NO_LOG as error:
        if session.settings.source == "log" or session.dsn is None:
            raise
        session.out.note(f"from the tables, which may lag: {error}")
        return _life_of_tables(session, vm)


def _life_of_tables(session: Session, vm: str) -> tuple[Recorded, ...]:
    found = session.queries.agent(vm)
    return () if found is None else tuple(_recorded(row) for row in found.timeline)


def _recorded(row: TimelineRow) -> Recorded:
    event: AnyEvent = msgspec.json.decode(row.details, type=AnyEvent)
    return Recorded(
        sequence=row.sequence,
        aggregate=row.aggregate,
        version=row.version,
        at=row.at,
        writer=row.writer,
        epoch=row.epoch,
        cause=row.cause,
        correlation=row.correlation,
        attempt="",
        event=event,
    )
