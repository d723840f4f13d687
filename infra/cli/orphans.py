"""`fleetlog orphans`: the machines that run on a coordinator's host, whether anybody accounts for them, and their end."""

import sys

import click

from actors.decisions.reclaim import LiveMachine
from actors.sweep import Stopped
from infra.api.host_messages import StopRequest
from infra.cli.agent import operator
from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import NAME
from infra.cli.out import Column
from infra.cli.reading import running_coordinators
from infra.cli.session import Session
from infra.cli.text import age, safe

_LONGER_S = 5.0
_MOST = 100

coordinator_option = click.option(
    "--coordinator",
    type=NAME,
    help="Whose host; else the coordinator of the data directory, or the only one.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 240),
    default=30.0,
    show_default=True,
    help="Seconds to wait for the host.",
)


@click.command()
@coordinator_option
@click.option("--all", "everything", is_flag=True, help="Also those that somebody accounts for.")
@click.option("--stop", is_flag=True, help="End the orphaned ones, after asking.")
@click.option("--vm", "vms", multiple=True, help="With --stop: only this one; repeatable.")
@click.option("--yes", is_flag=True, help="With --stop: do not ask.")
@click.option("--dry-run", is_flag=True, help="With --stop: only say what would be stopped.")
@timeout_option
@with_session
def orphans(
    session: Session,
    *,
    coordinator: str | None,
    everything: bool,
    stop: bool,
    vms: tuple[str, ...],
    yes: bool,
    dry_run: bool,
    timeout_s: float,
) -> int:
    """List machines that run and that nobody accounts for; what is dead goes with `fleetlog reap`.

    Only what is provably a machine of this coordinator, and unknown to the log or over by it, is `orphaned` and can
    be stopped. Ends with 1 when a machine that was to be stopped was not.
    """
    if not stop and (vms or yes or dry_run):
        raise click.UsageError("--vm, --yes and --dry-run go with --stop")
    asked = chosen_coordinator(session, coordinator)
    answer = session.api.live_machines(asked, timeout_s=timeout_s + _LONGER_S)
    if not stop:
        shown = [each for each in answer.machines if everything or each.status != "tracked"]
        if session.out.as_json:
            session.out.document({"coordinator": asked, "host": answer.host, "machines": shown})
        else:
            _show(session, shown, f"nothing runs on {answer.host} that nobody accounts for")
        return ExitCode.OK
    wanted = dict.fromkeys(vms) or dict.fromkeys(
        each.vm for each in answer.machines if each.status == "orphaned"
    )
    shown = [each for each in answer.machines if each.vm in wanted]
    if not session.out.as_json:
        _show(session, shown, "none of these runs" if vms else "nothing to stop")
    if not wanted or dry_run:
        if session.out.as_json:
            session.out.document({"coordinator": asked, "would_stop": list(wanted), "results": []})
        return ExitCode.OK
    if len(wanted) > _MOST:
        raise CliError(
            ExitCode.USAGE, "usage", f"{len(wanted)} machines at once, at most {_MOST}: name them with --vm"
        )
    if not yes:
        _confirm(session, len(wanted))
    request = StopRequest(vms=tuple(wanted), timeout_s=timeout_s, by=operator())
    return _report(session, asked, session.api.stop_machines(asked, request).results)


def chosen_coordinator(session: Session, given: str | None) -> str:
    """Return the coordinator that is asked.

    Raises:
        CliError: there is none, or more than one and none is named.
    """
    if given is not None:
        return given
    if session.settings.nats is None and session.runtime is not None:
        return session.runtime.coordinator
    running = running_coordinators(session)
    if len(running) == 1:
        return running[0]
    if not running:
        raise CliError(
            ExitCode.UNREACHABLE,
            "no-coordinator",
            "no coordinator runs: start one with `fleetlog up`, or sweep without one: `fleetlog reap --offline`",
        )
    raise CliError(ExitCode.USAGE, "usage", f"give --coordinator, one of {', '.join(running)}")


def _confirm(session: Session, count: int) -> None:
    if session.out.as_json or not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes")
    click.confirm(f"End {count} machines? Jobs in them are lost", abort=True, err=True)


def _show(session: Session, machines: list[LiveMachine], none: str) -> None:
    out = session.out
    if not machines:
        out.line(none)
        return
    columns = [
        Column(title="VM", whole=True),
        Column(title="SCALER"),
        Column(title="PID"),
        Column(title="AGE"),
        Column(title="STATUS", styled=True, whole=True),
        Column(title="PLACE"),
        Column(title="WHY"),
    ]
    rows = [
        (
            safe(each.vm),
            safe(each.scaler or "-"),
            each.pid or "-",
            "-" if each.age_s is None else age(each.age_s),
            each.status,
            safe(each.place),
            safe(each.why),
        )
        for each in machines
    ]
    out.table(columns, rows)


def _report(session: Session, coordinator: str, results: tuple[Stopped, ...]) -> int:
    if session.out.as_json:
        session.out.document({"coordinator": coordinator, "results": results})
    else:
        for each in results:
            style = "green" if each.outcome == "stopped" else "red"
            session.out.line(f"{safe(each.vm)}: {each.outcome}: {safe(each.detail)}", style=style)
    return ExitCode.OK if all(each.outcome == "stopped" for each in results) else ExitCode.FOUND
