"""`fleetlog doctor`: looks at servers, log, tables, coordinators and host, and says what to do."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from actors.errors import LogUnavailable
from infra.cli.command import with_session
from infra.cli.exits import CliError, ExitCode
from infra.cli.failures import expected
from infra.cli.out import Column
from infra.cli.reading import running_coordinators
from infra.cli.session import Session
from infra.config.load import check as check_config
from infra.doctor.check import Check, fail, good, warn
from infra.doctor.coordinators import check_coordinators
from infra.doctor.host import check_cgroups, check_disk, check_programs
from infra.doctor.log import check_log
from infra.doctor.tables import check_tables
from infra.host_process.cgroup import mounts, own_path

_file = click.Path(path_type=Path)


@click.command()
@click.option("--config", "config_file", type=_file, help="Also look for the programs this fleet file names.")
@click.option("--config-dir", type=_file, help="Its directory of drop-in files.")
@with_session
def doctor(session: Session, *, config_file: Path | None, config_dir: Path | None) -> int:
    """Look at everything and say what to do; changes nothing. Exit code 1 when something fails."""
    checks = list(_checks(session, config_file, config_dir))
    failed = any(each.status == "fail" for each in checks)
    out = session.out
    if out.as_json:
        out.document({"healthy": not failed, "checks": checks})
        return ExitCode.FOUND if failed else ExitCode.OK
    columns = [
        Column(title="STATUS", styled=True, whole=True),
        Column(title="CHECK"),
        Column(title="FOUND"),
    ]
    out.table(columns, [(each.status, each.name, each.detail) for each in checks])
    todo = [each for each in checks if each.status != "pass" and each.todo]
    if todo:
        out.line()
        out.line("What to do:", style="bold")
        for each in todo:
            out.line(f"  {each.name}: {each.todo}")
    return ExitCode.FOUND if failed else ExitCode.OK


def _checks(session: Session, config_file: Path | None, config_dir: Path | None) -> Iterator[Check]:
    end: int | None = None
    try:
        _ = session.address
    except CliError as error:
        yield fail("nats", str(error), "start a coordinator, or give --nats")
    else:
        found = list(check_log(session.wire, session.cluster, session.clock))
        yield from found
        if _usable(found):
            yield from _of_coordinators(session)
            with suppress(LogUnavailable):
                end = session.journal.headroom().last_sequence
    if session.dsn is None:
        yield good("postgres", "not looked at: none is known here (--postgres)")
    else:
        yield from check_tables(session.database, end)
    yield check_disk(session.settings.data_directory)
    yield check_cgroups(mounts("cgroup2"), own_path(), root=os.geteuid() == 0)
    if config_file is not None:
        report = check_config(config_file, config_dir)
        yield from (
            fail("config", str(problem), "correct it: nothing of the file would be loaded")
            for problem in report.problems
        )
        yield from (warn("config", str(problem), "") for problem in report.warnings)
        if report.config is not None:
            yield from check_programs(report.config)


def _usable(found: list[Check]) -> bool:
    vital = ("nats", "log", "log settings", "log integrity")
    return all(each.status != "fail" for each in found if each.name in vital)


def _of_coordinators(session: Session) -> Iterator[Check]:
    try:
        ids = running_coordinators(session)
        api = session.api
    except Exception as error:
        known = expected(error)
        if known is None:
            raise
        yield fail("log", str(known), "the log cannot be read as it is")
        return
    yield from check_coordinators(ids, api.status)
