"""`fleetlog scaler`: list, describe, match, pause, resume, drain."""

from collections.abc import Iterable
from pathlib import Path
from platform import uname

import click
import msgspec

from actors.commands import ScalerStatus
from actors.decisions.labels import Explanation, explain, host_of
from events import subjects
from infra.api.client import ApiRefused, NoCoordinator
from infra.api.messages import GateRequest, MatchRequest
from infra.cli.agent import operator, show_agents
from infra.cli.command import LateGroup, with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import LABELS, NAME
from infra.cli.out import Column
from infra.cli.reading import read_agents, read_scalers, running_coordinators
from infra.cli.session import Session
from infra.cli.text import labels_text, safe
from infra.config.load import load
from infra.postgres.queries import AgentFilter
from projections.backend import Gate
from projections.fleet import CoordinatorRow
from projections.headroom import HeadroomRow

_ASK_S = 5.0


class ScalerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler, as its coordinator says (`live`), or as the log has it when that one does not answer."""

    name: str
    coordinator: str
    backend: str
    gate: Gate
    max_agents: int | None
    taken: int
    starting: int
    waiting: int | None
    registered: int
    failures: int
    last_failure: str
    labels: tuple[tuple[str, ...], ...]
    live: bool


@click.group(cls=LateGroup)
def scaler() -> None:
    """List, describe, pause, resume and drain scalers."""


@scaler.command(name="list")
@with_session
def list_scalers(session: Session) -> None:
    """List scalers, how full they are, and how their last launches went."""
    lines = scaler_lines(session)
    out = session.out
    if out.as_json:
        out.document({"scalers": lines})
        return
    if not lines:
        out.line("no scalers: no coordinator runs that has one")
        return
    several = len({line.coordinator for line in lines}) > 1
    columns = [
        Column(title="SCALER"),
        *([Column(title="COORDINATOR")] if several else []),
        Column(title="BACKEND"),
        Column(title="GATE", styled=True, whole=True),
        Column(title="AGENTS", right=True, whole=True),
        Column(title="READY", right=True, whole=True),
        Column(title="FAILED", right=True, whole=True),
        Column(title="LABELS"),
    ]
    out.table(
        columns,
        [
            (
                line.name,
                *([line.coordinator] if several else []),
                line.backend,
                line.gate,
                f"{line.taken}/{'?' if line.max_agents is None else line.max_agents}",
                line.registered,
                line.failures,
                " ".join(labels_text(labels) for labels in line.labels),
            )
            for line in lines
        ],
    )
    _note_silent(session, lines)


def scaler_lines(session: Session) -> list[ScalerLine]:
    """Return every scaler of every running coordinator, asked now; as the log has it where nobody answers."""
    rows, coordinators, _ = read_scalers(session)
    lines: list[ScalerLine] = []
    for coordinator in sorted(coordinators, key=lambda row: row.id):
        if not coordinator.running:
            continue
        try:
            lines += [
                _live(coordinator.id, each) for each in session.api.scalers(coordinator.id, timeout_s=_ASK_S)
            ]
        except (NoCoordinator, ApiRefused, TimeoutError):
            lines += _of_log(coordinator, rows)
    return lines


def _live(coordinator: str, status: ScalerStatus) -> ScalerLine:
    return ScalerLine(
        name=status.name,
        coordinator=coordinator,
        backend=status.backend,
        gate=status.gate,
        max_agents=status.max_agents,
        taken=status.taken,
        starting=status.starting,
        waiting=status.waiting,
        registered=status.registered,
        failures=status.failures,
        last_failure=status.last_failure,
        labels=status.labels,
        live=True,
    )


def _of_log(coordinator: CoordinatorRow, rows: Iterable[HeadroomRow]) -> list[ScalerLine]:
    by_slot = {row.slot: row for row in rows}
    lines = []
    for name, rules in coordinator.scalers.items():
        row = by_slot.get(subjects.local_backend(coordinator.id, name)) or by_slot.get(
            subjects.event_backend(name)
        )
        row = row or HeadroomRow(slot="", scaler=name)
        sets = rules.get("label_sets", ())
        lines.append(
            ScalerLine(
                name=name,
                coordinator=coordinator.id,
                backend=rules.get("backend", "?"),
                gate=row.gate,
                max_agents=rules.get("max_agents"),
                taken=row.taken,
                starting=row.starting,
                waiting=None,
                registered=row.registered,
                failures=row.failures,
                last_failure=row.last_failure,
                labels=tuple(tuple(each.get("labels", ())) for each in sets if isinstance(each, dict)),
                live=False,
            )
        )
    return lines


def _note_silent(session: Session, lines: Iterable[ScalerLine]) -> None:
    silent = sorted({line.coordinator for line in lines if not line.live})
    if silent:
        session.out.note(f"as the log has it: {', '.join(silent)} does not answer")


@scaler.command()
@click.argument("name", metavar="SCALER", type=NAME)
@with_session
def describe(session: Session, *, name: str) -> None:
    """Show one scaler: caps, label sets, its last failure, and its agents."""
    lines = _named(session, name)
    agents = read_agents(session, AgentFilter(scaler=name))
    out = session.out
    if out.as_json:
        out.document({"scalers": lines, "agents": [row.id for row in agents.rows]})
        return
    for line in lines:
        most = "?" if line.max_agents is None else line.max_agents
        out.fields(
            [
                ("scaler", line.name),
                ("coordinator", line.coordinator),
                ("backend", line.backend),
                ("gate", line.gate),
                ("agents", f"{line.taken} of {most}"),
                ("waiting", "?" if line.waiting is None else line.waiting),
                ("starting", line.starting),
                ("registered", line.registered),
                ("failures in a row", line.failures),
                ("last failure", line.last_failure or "-"),
                *[(f"label set {n}", labels_text(labels)) for n, labels in enumerate(line.labels)],
            ]
        )
        out.line()
    show_agents(out, agents, session.clock.now())
    _note_silent(session, lines)


def _named(session: Session, name: str) -> list[ScalerLine]:
    every = scaler_lines(session)
    lines = [line for line in every if line.name == name]
    if not lines:
        there = ", ".join(dict.fromkeys(line.name for line in every)) or "none"
        raise CliError(ExitCode.REFUSED, "unknown-scaler", f"no scaler {name!r}; there are: {there}")
    return lines


def _set_gate(session: Session, name: str, coordinator: str | None, gate: Gate) -> None:
    lines = _named(session, name)
    chosen = [line.coordinator for line in lines if coordinator in (None, line.coordinator)]
    if not chosen:
        there = ", ".join(line.coordinator for line in lines)
        raise CliError(
            ExitCode.REFUSED,
            "unknown-scaler",
            f"coordinator {coordinator} has no scaler {name!r}; those that have one: {there}",
        )
    for each in chosen:
        session.api.set_gate(each, GateRequest(scaler=name, gate=gate, by=operator()))
        if session.out.as_json:
            session.out.json_line({"scaler": name, "coordinator": each, "gate": gate})
        else:
            session.out.line(f"{name} of {each} is {gate}")


_coordinator = click.option("--coordinator", type=NAME, help="Only this one's; else every one's that has it.")


@scaler.command()
@click.argument("name", metavar="SCALER", type=NAME)
@_coordinator
@with_session
def pause(session: Session, *, name: str, coordinator: str | None) -> None:
    """Take no new agents; those there are go on."""
    _set_gate(session, name, coordinator, "paused")


@scaler.command()
@click.argument("name", metavar="SCALER", type=NAME)
@_coordinator
@with_session
def resume(session: Session, *, name: str, coordinator: str | None) -> None:
    """Take agents again, after a pause or a drain."""
    _set_gate(session, name, coordinator, "open")


@scaler.command()
@click.argument("name", metavar="SCALER", type=NAME)
@_coordinator
@with_session
def drain(session: Session, *, name: str, coordinator: str | None) -> None:
    """Take no new agents and end idle ones; busy ones finish."""
    _set_gate(session, name, coordinator, "draining")


@scaler.command()
@click.option("--labels", "-l", type=LABELS, required=True, help="What the job asks for: linux,small.")
@click.option("--exclude", type=LABELS, default="", help="Labels it must not have.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Ask this fleet file, as this host would read it, and no coordinator.",
)
@click.option("--coordinator", type=NAME, help="Ask this one; else the first that answers.")
@with_session
def match(
    session: Session,
    *,
    labels: tuple[str, ...],
    exclude: tuple[str, ...],
    config_file: Path | None,
    coordinator: str | None,
) -> int:
    """Say which label set would take a job, and why the others would not. Starts nothing."""
    if config_file is not None:
        host = host_of(uname().system, uname().machine)
        scalers = tuple(each.routable(host) for each in load(config_file).scalers)
        found = explain(scalers, labels, exclude)
    else:
        found = _ask_match(session, coordinator, MatchRequest(labels=labels, exclude=exclude))
    if session.out.as_json:
        session.out.document({"explanations": found})
    else:
        _show_match(session, found)
    return ExitCode.OK if any(each.verdict == "chosen" for each in found) else ExitCode.FOUND


def _ask_match(session: Session, coordinator: str | None, request: MatchRequest) -> tuple[Explanation, ...]:
    chosen = [coordinator] if coordinator is not None else running_coordinators(session)
    for each in chosen:
        try:
            return session.api.match(each, request)
        except NoCoordinator:
            continue
    raise CliError(
        ExitCode.UNREACHABLE,
        "no-coordinator",
        f"no coordinator of cluster {session.cluster} answers: start one with `fleetlog up`, or ask a fleet file "
        "with --config",
    )


def _show_match(session: Session, found: tuple[Explanation, ...]) -> None:
    columns = [
        Column(title="SCALER"),
        Column(title="LABELS"),
        Column(title="VERDICT", whole=True),
        Column(title="WHY"),
    ]
    rows = [(each.scaler, labels_text(each.label_set), each.verdict, safe(each.reason)) for each in found]
    if rows:
        session.out.table(columns, rows)
    else:
        session.out.line("no label sets at all")
