"""`fleetlog reap`: takes away what dead machines left on a host, through a coordinator or without any."""

import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from events import subjects
from infra.api.host_messages import SweepFinding, SweepRequest, sweep_findings
from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import NAME
from infra.cli.orphans import chosen_coordinator, coordinator_option, timeout_option
from infra.cli.out import Column
from infra.cli.session import Session
from infra.cli.text import safe
from infra.config.backends import WITH_SCRIPTED
from infra.config.firecracker import FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.config.load import load
from infra.host import host_name
from infra.network.host import HostNetwork
from infra.reclaiming import HostCare, sweep_without_log

_HEALTH_S = 2.0
_path = click.Path(path_type=Path)
_DONE = ("reaped", "would-reap")


@click.command()
@click.option(
    "--offline", is_flag=True, help="Without a coordinator and its servers: by this host and --config."
)
@click.option(
    "--config",
    "config_path",
    type=_path,
    envvar=["FLEETLOG_REAP_CONFIG", "FLEETLOG_UP_CONFIG"],
    help="With --offline: the fleet file of the coordinator that ran here.",
)
@click.option(
    "--config-dir",
    type=_path,
    envvar=["FLEETLOG_REAP_CONFIG_DIR", "FLEETLOG_UP_CONFIG_DIR"],
    help="With --offline: its directory of drop-in files.",
)
@click.option("--id", "name", type=NAME, help="With --offline: the coordinator's id, as given to `up`.")
@click.option("--force", is_flag=True, help="With --offline: also while a coordinator answers here.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@coordinator_option
@timeout_option
@with_session
def reap(
    session: Session,
    *,
    offline: bool,
    config_path: Path | None,
    config_dir: Path | None,
    name: str | None,
    force: bool,
    dry_run: bool,
    coordinator: str | None,
    timeout_s: float,
) -> int:
    """Take away what dead machines left on a host: directories, cgroups, TAPs, rules. The living are spared.

    A coordinator does this by itself every 15 minutes and knows the log; --offline goes by what the host alone
    shows, for a host whose coordinator or disk is in no state to start. Ends with 1 when something could not go.
    """
    if not offline:
        if config_dir is not None or name is not None or force:
            raise click.UsageError("--config-dir, --id and --force go with --offline")
        asked = chosen_coordinator(session, coordinator)
        answer = session.api.sweep(asked, SweepRequest(dry_run=dry_run, timeout_s=timeout_s))
        return _report(session, answer.findings, answer.unlisted)
    if config_path is None:
        raise click.UsageError("--offline needs --config: the fleet file says where machines are")
    if coordinator is not None:
        raise click.UsageError("--coordinator is asked over NATS: with --offline give --id")
    answering = "" if force else _answering(session)
    if answering:
        return _skip(session, answering)
    return _offline(session, load(config_path, config_dir, WITH_SCRIPTED), name, dry_run=dry_run)


def _answering(session: Session) -> str:
    """Return where a coordinator of the data directory answers, empty when none does within 2 s."""
    runtime = session.runtime
    if runtime is None or runtime.http_address is None:
        return ""
    url = f"http://{runtime.http_address}/health"
    with suppress(OSError):
        try:
            with urllib.request.urlopen(url, timeout=_HEALTH_S):
                return url
        except urllib.error.HTTPError:
            return url  # not well, and it answers all the same
    return ""


def _skip(session: Session, answering: str) -> int:
    if session.out.as_json:
        session.out.document(
            {"skipped": True, "answering": answering, "counts": {}, "total": 0, "findings": []}
        )
    else:
        session.out.line(
            f"skipped: a coordinator answers at {answering}, and sweeps by itself; `fleetlog reap` asks it to do so now"
        )
    return ExitCode.OK


def _offline(session: Session, config: FleetConfig, name: str | None, *, dry_run: bool) -> int:
    try:
        owner = subjects.checked(name or config.coordinator or host_name(config.host), "coordinator")
    except ValueError as error:
        raise CliError(ExitCode.USAGE, "usage", str(error)) from error
    microvms = [scaler for scaler in config.scalers if isinstance(scaler, FirecrackerScaler)]
    with ExitStack() as opened:
        network = None
        if microvms:
            sudo = any(scaler.use_sudo for scaler in microvms)
            network = opened.enter_context(HostNetwork(config.microvm_network, sudo=sudo))
        care = HostCare(config, owner, session.settings.data_directory / "machines", network=network)
        report = sweep_without_log(care, "without a coordinator", dry_run=dry_run)
    return _report(session, sweep_findings(report), report.unlisted)


def _report(session: Session, findings: Iterable[SweepFinding], unlisted: tuple[str, ...]) -> int:
    found, out = list(findings), session.out
    gone = Counter(each.kind for each in found if each.outcome in _DONE)
    code = ExitCode.FOUND if unlisted or any(each.outcome == "failed" for each in found) else ExitCode.OK
    if out.as_json:
        out.document(
            {
                "skipped": False,
                "counts": gone,
                "total": gone.total(),
                "findings": found,
                "unlisted": unlisted,
            }
        )
        return code
    if found:
        columns = [Column(title="OUTCOME", styled=True, whole=True), Column(title="KIND")]
        columns += [Column(title="NAME"), Column(title="WHY")]
        out.table(columns, [(each.outcome, each.kind, safe(each.name), safe(each.why)) for each in found])
    for failed in unlisted:
        out.line(f"not looked at: {safe(failed)}", style="yellow")
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(gone.items()))
    out.line(f"taken away: {counted}" if counted else "nothing to take away")
    return code
