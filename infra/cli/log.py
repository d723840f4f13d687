"""`fleetlog log`: how full the log is, a new limit for it, and closed lives taken to a file."""

from pathlib import Path

import click
import msgspec

from infra.cli.command import LateGroup, with_session
from infra.cli.kinds import SIZE
from infra.cli.session import Session
from infra.cli.text import size
from infra.journal.archive import archive as write_archive
from infra.journal.archive import verify_archive


@click.group(cls=LateGroup)
def log() -> None:
    """Show, resize and archive the log."""


@log.command()
@with_session
def show(session: Session) -> None:
    """Show how full the log is, and where new demand is refused."""
    _show(session)


@log.command()
@click.argument("limit", metavar="SIZE", type=SIZE)
@with_session
def resize(session: Session, *, limit: int) -> None:
    """Set the log's limit, such as 8g, at once in force for every coordinator. Nothing is ever dropped."""
    session.journal.resize(limit)
    _show(session)


@log.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--verify", "verify_only", is_flag=True, help="Only prove that this archive is whole.")
@with_session
def archive(session: Session, *, file: Path, verify_only: bool) -> None:
    """Copy every life that has ended to FILE, and prove the copy against the log. The log keeps everything."""
    if verify_only:
        done = verify_archive(file)
    else:
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(
                f"{file.absolute().parent} is not a folder: make it first", param_hint="FILE"
            )
        with session.out.counting("archiving") as told:
            done = write_archive(session.journal, file, told)
    if session.out.as_json:
        session.out.document({"file": str(file)} | msgspec.to_builtins(done))
        return
    what = "is whole" if verify_only else "written and proved"
    session.out.line(f"{file} {what}: {done.lives} lives, {done.facts} facts, sha256 {done.digest[:12]}")


def _show(session: Session) -> None:
    room = session.journal.headroom()
    if session.out.as_json:
        session.out.document(room)
        return
    used = 100 * room.used_bytes / room.limit_bytes if room.limit_bytes else 0.0
    session.out.fields(
        [
            ("facts", room.facts),
            ("last sequence", room.last_sequence),
            ("used", f"{size(room.used_bytes)} of {size(room.limit_bytes)} ({used:.1f} %)"),
            ("new demand", f"refused above {size(room.demand_limit_bytes)}; the rest is for ending lives"),
        ]
    )
