"""`fleetlog config`: checks a fleet file, and prints its schema and what routing makes of it."""

from pathlib import Path

import click
import msgspec

from infra.cli.command import LateGroup, with_session
from infra.cli.exits import ExitCode
from infra.cli.session import Session
from infra.config.backends import BACKENDS, WITH_SCRIPTED
from infra.config.fleet import digest, json_schema
from infra.config.load import check


@click.group(cls=LateGroup)
def config() -> None:
    """Check a fleet file."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--config-dir", type=click.Path(path_type=Path), help="A directory of drop-in files.")
@click.option("--scripted", is_flag=True, help="Allow the backend that only pretends.")
@with_session
def validate(session: Session, *, file: Path, config_dir: Path | None, scripted: bool) -> int:
    """Check a fleet file: every problem with its line and the way out. Starts and changes nothing."""
    report = check(file, config_dir, WITH_SCRIPTED if scripted else BACKENDS)
    out = session.out
    good = report.config is not None
    if out.as_json:
        out.document(
            {
                "valid": good,
                "digest": None if report.config is None else digest(report.config),
                "files": report.files,
                "problems": [msgspec.to_builtins(each) for each in report.problems],
                "warnings": [msgspec.to_builtins(each) for each in report.warnings],
            }
        )
        return ExitCode.OK if good else ExitCode.FOUND
    for problem in report.problems:
        out.line(str(problem), style="red")
    for warning in report.warnings:
        out.line(f"warning: {warning}", style="yellow")
    if report.config is None:
        count = len(report.problems)
        out.note(f"refused: {count} problem{'' if count == 1 else 's'}; nothing of it would be loaded")
        return ExitCode.FOUND
    scalers = report.config.scalers
    names = ", ".join(each.name for each in scalers) or "none"
    counted = "1 scaler" if len(scalers) == 1 else f"{len(scalers)} scalers"
    out.line(f"valid: {counted} ({names}), digest {digest(report.config)[:12]}")
    return ExitCode.OK


@config.command()
def schema() -> None:
    """Print the JSON schema of the fleet file, for editors."""
    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())
