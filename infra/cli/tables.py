"""`fleetlog rebuild` and `fleetlog verify`: the tables made again from the log, and compared with it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
import msgspec
from rich.console import Console

from infra.api.client import ApiRefused, NoCoordinator
from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.out import Column, progress_bar
from infra.cli.reading import running_coordinators
from infra.cli.session import Session
from infra.rebuild import RebuildFailed
from infra.rebuild import rebuild as rebuild_views
from infra.verify import Difference, verify_tables
from projections.catalogue import VIEWS
from projections.view import View

_MOST = 1000
_HOST_S = 120.0
_view = click.option(
    "--view",
    "names",
    type=click.Choice([view.name for view in VIEWS]),
    multiple=True,
    help="Only this one; else all of them.",
)


@click.command()
@_view
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_session
def rebuild(session: Session, *, names: tuple[str, ...], yes: bool) -> None:
    """Drop the read models and make them again from the log. The fleet works on meanwhile."""
    place = session.database.place
    if not yes:
        if session.out.as_json or not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here: give --yes")
        click.confirm(f"Empty the tables at {place} and make them again?", abort=True, err=True)
    with _progress(session) as told:
        try:
            done = rebuild_views(session.journal, session.rows, session.clock, _views(names), progress=told)
        except RebuildFailed as error:
            raise CliError(ExitCode.FOUND, "rebuild-failed", str(error)) from error
    if session.out.as_json:
        session.out.document({"place": place, "views": done})
        return
    for each in done:
        session.out.line(f"view {each.view}: at sequence {each.sequence} after {each.took_s:.1f} s")


class HostResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one coordinator found on its host; `asked` False: it did not answer, `why` says more."""

    coordinator: str
    asked: bool
    host: str = ""
    why: str = ""


@dataclass(frozen=True)
class _Found:
    differences: list[Difference]
    compared: list[str]
    hosts: list[HostResult]


@click.command()
@_view
@click.option("--no-hosts", is_flag=True, help="Compare the tables alone.")
@click.option("--no-tables", is_flag=True, help="Compare the hosts alone.")
@with_session
def verify(session: Session, *, names: tuple[str, ...], no_hosts: bool, no_tables: bool) -> int:
    """Fold the log afresh and compare it with the tables, row by row, and with every coordinator's host.

    Exit code 1 when anything differs or a host could not be looked at; nothing is changed.
    """
    if no_hosts and no_tables:
        raise click.UsageError("--no-hosts with --no-tables leaves nothing to compare: give one of them")
    found = _Found([], [], [])
    if not no_tables and (session.dsn is not None or no_hosts):
        _compare_tables(session, _views(names), found)
    elif not no_tables:
        session.out.note("tables not compared: no PostgreSQL is known here, give --postgres")
    if not no_hosts:
        _compare_hosts(session, found)
    good = not found.differences and all(each.asked for each in found.hosts)
    if session.out.as_json:
        session.out.document(
            {
                "same": good,
                "views": found.compared,
                "hosts": found.hosts,
                "differences": found.differences,
                "cut": len(found.differences) >= _MOST,
            }
        )
    else:
        _show(session, found, good=good)
    return ExitCode.OK if good else ExitCode.FOUND


def _compare_tables(session: Session, views: list[View], found: _Found) -> None:
    with _progress(session) as told:
        for view in views:
            left = _MOST - len(found.differences)
            found.differences.extend(
                verify_tables(session.journal, session.rows, view, progress=told, most=left)
            )
            found.compared.append(view.name)


def _compare_hosts(session: Session, found: _Found) -> None:
    for coordinator in running_coordinators(session):
        try:
            answer = session.api.verify_host(coordinator, timeout_s=_HOST_S)
        except (NoCoordinator, ApiRefused, TimeoutError) as error:
            found.hosts.append(HostResult(coordinator=coordinator, asked=False, why=str(error)))
            continue
        found.hosts.append(HostResult(coordinator=coordinator, asked=True, host=answer.host))
        found.differences.extend(
            msgspec.convert(msgspec.to_builtins(each), Difference) for each in answer.differences
        )


def _show(session: Session, found: _Found, *, good: bool) -> None:
    out = session.out
    if found.differences:
        columns = [Column(title="WHERE"), Column(title="KIND"), Column(title="KEY"), Column(title="DETAIL")]
        out.table(
            columns, [(each.where, each.kind, each.key or "-", each.detail) for each in found.differences]
        )
    for view in found.compared:
        out.note(f"compared view {view}, every row")
    for host in found.hosts:
        if host.asked:
            out.note(f"compared host {host.host} of coordinator {host.coordinator}")
        else:
            out.line(f"host of coordinator {host.coordinator} not compared: {host.why}", style="yellow")
    if len(found.differences) >= _MOST:
        out.note(f"only the first {_MOST} differences are shown")
    if good and (found.compared or found.hosts):
        out.line("as the log says", style="green")
    elif good:
        out.line("nothing was compared: no tables are known here and no coordinator runs", style="yellow")
    else:
        out.note("tables: `fleetlog rebuild` makes them again; hosts: `fleetlog doctor` says what to do")


def _views(names: tuple[str, ...]) -> list[View]:
    return [view for view in VIEWS if not names or view.name in names]


@contextmanager
def _progress(session: Session) -> Iterator[Callable[[str, int, int], None]]:
    console = Console(stderr=True)
    if session.out.as_json or not console.is_terminal:
        yield lambda _view, _done, _all: None
        return
    with progress_bar(console) as bar:
        tasks = {view.name: bar.add_task(f"view {view.name}", total=None, visible=False) for view in VIEWS}

        def told(view: str, done: int, everything: int) -> None:
            bar.update(tasks[view], completed=done, total=everything, visible=True)

        yield told
