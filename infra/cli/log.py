"""`fleetlog log`: how full the log is, a new limit for it, and closed lives taken to a file."""

import click

from infra.cli.command import LateGroup, with_session
from infra.cli.kinds import SIZE
from infra.cli.session import Session
from infra.cli.text import size


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
