"""`fleetlog replay`: the fleet as it was at a moment, or after a sequence, from the log alone."""

import click

from infra.cli.agent import show_agents
from infra.cli.command import with_session
from infra.cli.events import last_sequence
from infra.cli.exits import CliError, ExitCode
from infra.cli.kinds import WHEN, WHEN_FORM
from infra.cli.reading import Agents, Provenance, agents_of_log
from infra.cli.session import Session
from infra.cli.text import When, moment


@click.command(epilog=f"WHEN: {WHEN_FORM}. Replaying reads and never acts.")
@click.option("--at", "when", metavar="WHEN", type=WHEN, required=True, help="As of then.")
@click.option("--all", "everything", is_flag=True, help="The reaped too.")
@click.option("--wide", "-w", is_flag=True, help="More columns.")
@with_session
def replay(session: Session, *, when: When, everything: bool, wide: bool) -> None:
    """Show the fleet as it was: the same table as `agent list`, as of a time or a sequence."""
    journal, now = session.journal, session.clock.now()
    end = journal.headroom().last_sequence
    if when.sequence is not None and when.sequence > end:
        raise CliError(
            ExitCode.USAGE,
            "usage",
            f"the log ends at sequence {end}, so {when.sequence} has not happened yet",
        )
    if when.time is not None and when.time > now:
        raise CliError(
            ExitCode.USAGE,
            "usage",
            f"{moment(when.time)} has not happened yet; the log ends at sequence {end}",
        )
    sequence = last_sequence(session, when)
    rows = agents_of_log(session, sequence, live=not everything) if sequence else []
    as_of = when.time
    if as_of is None:
        fact = next(iter(journal.replay(after=sequence - 1, until=sequence)), None) if sequence else None
        as_of = now if fact is None else fact.at
    source = Provenance(kind="log", sequence=sequence, behind=end - sequence)
    session.out.note(f"the fleet as of {moment(as_of)}, {end - sequence} facts before the end of the log")
    show_agents(session.out, Agents(rows=rows, source=source), as_of, wide=wide)
