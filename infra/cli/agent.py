"""`fleetlog agent`: list, describe, events, logs, rm."""

import getpass
from datetime import datetime

import click
import msgspec

from events.envelope import Recorded
from infra.api.messages import LogsRequest, RemoveRequest
from infra.cli.command import LateGroup, with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import AGENT_ID, NAME, WHEN
from infra.cli.out import Column, Output
from infra.cli.reading import Agents, read_agents, read_life
from infra.cli.session import Session
from infra.cli.story import fact_json, said
from infra.cli.text import When, age, clock_time, labels_text, moment, safe_line, since, size
from infra.postgres.queries import AgentFilter
from projections.fleet import AgentRow
from projections.vm import VmState, deadline, fold

PHASES = ("requested", "starting", "spawned", "registered", "draining", "failed", "reaped")


@click.group(cls=LateGroup)
def agent() -> None:
    """List, describe and end agents."""


@agent.command(name="list")
@click.option("--scaler", type=NAME, help="Only this scaler's.")
@click.option("--phase", type=click.Choice(PHASES), help="Only those in this phase.")
@click.option("--coordinator", type=NAME, help="Only those this coordinator has the duty for.")
@click.option("--host", type=NAME, help="Only those on this host.")
@click.option("--job", help="Only those started for this job.")
@click.option("--run", help="Only those of this run.")
@click.option("--since", "begun", type=WHEN, help="Only those requested since then: 2h, or a time.")
@click.option("--all", "everything", is_flag=True, help="The reaped too.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=500, show_default=True)
@click.option("--wide", "-w", is_flag=True, help="More columns.")
@with_session
def list_agents(
    session: Session,
    *,
    scaler: str | None,
    phase: str | None,
    coordinator: str | None,
    host: str | None,
    job: str | None,
    run: str | None,
    begun: When | None,
    everything: bool,
    limit: int,
    wide: bool,
) -> None:
    """List agents, the newest first."""
    if begun is not None and begun.time is None:
        raise click.BadParameter("give a time here, such as 2h or 2026-01-31T14:00Z", param_hint="--since")
    found = read_agents(
        session,
        AgentFilter(
            scaler=scaler,
            phase=phase,
            owner=coordinator,
            host=host,
            job=job,
            run=run,
            since=None if begun is None else begun.time,
            live=not everything and phase != "reaped",
            limit=limit,
        ),
    )
    show_agents(session.out, found, session.clock.now(), wide=wide)
    if len(found.rows) == limit:
        session.out.note(f"the newest {limit}; --limit shows more")


def show_agents(out: Output, found: Agents, now: datetime, *, wide: bool = False) -> None:
    """Print agents; ages are as of `now`."""
    if out.as_json:
        out.document({"source": found.source, "agents": [agent_json(row) for row in found.rows]})
        return
    if found.rows:
        ended = any(row.reason for row in found.rows)
        columns = [
            Column(title="AGENT", whole=True),
            Column(title="PHASE", styled=True, whole=True),
            Column(title="SCALER"),
            Column(title="AGE", right=True, whole=True),
            Column(title="JOB"),
            *([Column(title="REASON", whole=True)] if ended else []),
            *([Column(title=title) for title in ("COORDINATOR", "HOST", "RUN", "LABELS")] if wide else []),
        ]
        out.table(columns, [_cells(row, now, ended=ended, wide=wide) for row in found.rows])
    else:
        out.line("no agents")
    out.note(found.source.sentence(now))


def _cells(row: AgentRow, now: datetime, *, ended: bool, wide: bool) -> list[str]:
    cells = [row.id, row.phase, row.scaler, since(row.requested_at, now), row.job or "-"]
    if ended:
        code = "" if row.exit_code is None else f" ({row.exit_code})"
        cells.append(f"{row.reason}{code}" if row.reason else "-")
    if wide:
        cells += [row.owner, row.host, row.run or "-", labels_text(row.state.labels)]
    return cells


def agent_json(row: AgentRow) -> dict[str, object]:
    """Return an agent as JSON: the row, its labels and resources."""
    body: dict[str, object] = msgspec.to_builtins(row)
    body.pop("state")
    state = row.state
    return body | {
        "labels": list(state.labels),
        "agent_labels": list(state.agent_labels),
        "requests": msgspec.to_builtins(state.requests),
        "limits": msgspec.to_builtins(state.limits),
        "live": state.live,
    }


@agent.command()
@click.argument("agent_id", metavar="AGENT", type=AGENT_ID)
@with_session
def describe(session: Session, *, agent_id: str) -> None:
    """Show one agent: state, owner, host, machine, and its whole timeline with causes."""
    facts = _facts(session, agent_id)
    state = fold(facts)
    assert state is not None, "an agent without facts was refused before"
    out, now = session.out, session.clock.now()
    if out.as_json:
        body = msgspec.to_builtins(state) | {"live": state.live, "deadline": deadline(state)}
        out.document({"agent": body, "timeline": [fact_json(fact) for fact in facts]})
        return
    out.fields(_fields(state, now))
    out.line()
    show_timeline(out, facts)


def show_timeline(out: Output, facts: tuple[Recorded, ...]) -> None:
    """Print a life, fact by fact: when, how long after the one before, what, and because of what."""
    columns = [
        Column(title="TIME (UTC)", whole=True),
        Column(title="AFTER", right=True, whole=True),
        Column(title="FACT", whole=True),
        Column(title="DETAIL"),
        Column(title="CAUSE"),
    ]
    names = {fact.id: _name(fact) for fact in facts}
    rows = []
    before: datetime | None = None
    for fact in facts:
        passed = "" if before is None else _passed((fact.at - before).total_seconds())
        rows.append(
            (
                clock_time(fact.at),
                passed,
                _name(fact),
                said(fact),
                names.get(fact.cause) or _short(fact.cause),
            )
        )
        before = fact.at
    out.table(columns, rows)


def _name(fact: Recorded) -> str:
    return fact.tag.partition(".")[2]


def _short(cause: str) -> str:
    kind, separator, name = cause.partition(":")
    digits = 12
    return f"{kind}:{name[:digits]}…" if separator and len(name) > digits + 1 else cause or "-"


def _passed(seconds: float) -> str:
    minute_s = 60
    return f"+{seconds:.3f}s" if 0 <= seconds < minute_s else f"+{age(seconds)}"


def _fields(state: VmState, now: datetime) -> list[tuple[str, object]]:
    limits = [f"{state.limits.cpus:g} cpus"] if state.limits.cpus else []
    limits += [size(state.limits.memory_bytes)] if state.limits.memory_bytes else []
    fields: list[tuple[str, object]] = [
        ("agent", state.id),
        ("phase", state.phase),
        ("age", since(state.requested_at, now)),
        ("scaler", f"{state.scaler} ({state.backend})"),
        ("coordinator", state.owner),
        ("host", f"{state.host} (boot {state.boot_id})"),
        ("labels", labels_text(state.labels)),
        ("gate", labels_text(state.gate)),
        ("job", state.job or "-"),
        ("run", state.run or "-"),
        ("demand", state.demand or "-"),
        ("limits", ", ".join(limits) or "none declared"),
        ("machine", _machine(state)),
        ("placement", msgspec.json.encode(state.placement).decode() if state.placement else "-"),
        ("requested", moment(state.requested_at)),
        ("registered", moment(state.registered_at)),
    ]
    if (ends := deadline(state)) is not None:
        left_s = (ends - now).total_seconds()
        fields.append(("deadline", f"{moment(ends)} ({f'in {age(left_s)}' if left_s > 0 else 'passed'})"))
    if state.reason is not None:
        code = "" if state.exit_code is None else f", exit code {state.exit_code}"
        fields.append(("ended", f"{state.reason}{code}{f': {state.detail}' if state.detail else ''}"))
    if state.condemned is not None and state.live:
        fields.append(("condemned", state.condemned))
    if state.teardown_tries and state.live:
        fields.append(("teardown", f"failed {state.teardown_tries} times: {state.detail}"))
    return fields


def _machine(state: VmState) -> str:
    if state.handle is None:
        return "-"
    return f"{state.handle.driver} {msgspec.json.encode(state.handle.data).decode()}"


@agent.command()
@click.argument("agent_id", metavar="AGENT", type=AGENT_ID)
@with_session
def events(session: Session, *, agent_id: str) -> None:
    """Show one agent's facts; with --json one object a line."""
    facts = _facts(session, agent_id)
    if session.out.as_json:
        for fact in facts:
            session.out.json_line(fact_json(fact))
        return
    show_timeline(session.out, facts)


@agent.command()
@click.argument("agent_id", metavar="AGENT", type=AGENT_ID)
@click.option("--lines", "-n", type=click.IntRange(1, 10_000), default=100, show_default=True)
@with_session
def logs(session: Session, *, agent_id: str, lines: int) -> None:
    """Print the last lines an agent's machine wrote."""
    owner = _owner(session, agent_id)
    answer = session.api.logs(owner, LogsRequest(agent=agent_id, lines=lines))
    if session.out.as_json:
        session.out.document({"agent": agent_id, "lines": answer.lines, "cut": answer.cut})
        return
    if not answer.lines:
        session.out.note("no lines: it wrote none, or its backend captures none")
    for line in answer.lines:
        click.echo(safe_line(line))
    if answer.cut:
        session.out.note(f"{answer.cut} older lines did not fit into one answer")


@agent.command()
@click.argument("agent_ids", metavar="AGENT...", type=AGENT_ID, nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also when it is busy: its job is lost.")
@with_session
def rm(session: Session, *, agent_ids: tuple[str, ...], force: bool) -> None:
    """End agents by name. Returns when the end has begun; `agent describe` shows how it goes."""
    for agent_id in dict.fromkeys(agent_ids):
        owner = _owner(session, agent_id)
        session.api.remove(owner, RemoveRequest(agent=agent_id, force=force, by=operator()))
        if session.out.as_json:
            session.out.json_line({"agent": agent_id, "coordinator": owner, "ending": True})
        else:
            session.out.line(f"{agent_id} is being ended by {owner}")


def operator() -> str:
    """Return who is at the command line, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _owner(session: Session, agent_id: str) -> str:
    state = fold(_facts(session, agent_id))
    assert state is not None, "an agent without facts was refused before"
    return state.owner


def _facts(session: Session, agent_id: str) -> tuple[Recorded, ...]:
    """Return the agent's facts.

    Raises:
        CliError: no machine of this id was ever requested.
    """
    facts = read_life(session, agent_id)
    if not facts:
        raise CliError(
            ExitCode.REFUSED,
            "unknown-agent",
            f"agent {agent_id} is unknown: no machine with this id was ever requested in cluster "
            f"{session.cluster}; `fleetlog agent list --all` shows those there were",
        )
    return facts
