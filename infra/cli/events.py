"""`fleetlog events`: the log fact by fact, chosen by agent, scaler and time, and live."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from events import subjects
from events.envelope import Recorded
from events.vm import Requested
from infra.cli.command import with_session
from infra.cli.kinds import AGENT_ID, NAME, WHEN, WHEN_FORM
from infra.cli.live import LiveFacts
from infra.cli.session import Session
from infra.cli.story import fact_json, said
from infra.cli.text import When, clock_time, moment, safe

_LAST = 100
_LOOK_S = 0.2

Wanted = Callable[[Recorded], bool]


class _Choice(NamedTuple):
    agent_id: str | None
    scaler: str | None
    last: int | None


@click.command(epilog=f"Times: {WHEN_FORM}.")
@click.option("--follow", "-f", is_flag=True, help="Go on with facts as they come, until Ctrl-C.")
@click.option("--agent", "agent_id", type=AGENT_ID, help="Only this agent's.")
@click.option("--scaler", type=NAME, help="Only this scaler's and its agents'.")
@click.option("--since", type=WHEN, help="Only facts from then on.")
@click.option("--until", type=WHEN, help="Only facts up to then.")
@click.option(
    "--last",
    "-n",
    type=click.IntRange(0, 1_000_000),
    help=f"At most so many of them, the last (else {_LAST}, or all with --since, --until or --agent).",
)
@with_session
def events(
    session: Session,
    *,
    follow: bool,
    agent_id: str | None,
    scaler: str | None,
    since: When | None,
    until: When | None,
    last: int | None,
) -> None:
    """Show the log: when, what, about whom, because of what. With --json one object a line."""
    if follow and until is not None:
        raise click.UsageError("--follow with --until: give one of them")
    if agent_id is not None and scaler is not None:
        raise click.UsageError("--agent with --scaler: give one of them, an agent has one scaler")
    if last is None and since is None and until is None and agent_id is None:
        last = _LAST
    journal = session.journal
    end = journal.headroom().last_sequence
    first = 0 if since is None else first_sequence(session, since) - 1
    stop = end if until is None else min(end, last_sequence(session, until))
    wanted = chosen(agent_id, scaler)
    facts = _history(session, first, stop, _Choice(agent_id, scaler, last), wanted)
    shown = 0
    for fact in facts:
        show(session, fact)
        shown += 1
    if follow:
        _live(session, end, wanted)
    elif not shown:
        session.out.note("no such facts")


def first_sequence(session: Session, when: When) -> int:
    """Return the first sequence at or after a place in the log."""
    if when.sequence is not None:
        return max(1, when.sequence)
    assert when.time is not None
    return session.journal.sequence_at(when.time) + 1


def last_sequence(session: Session, when: When) -> int:
    """Return the last sequence at or before a place in the log."""
    if when.sequence is not None:
        return when.sequence
    assert when.time is not None
    return session.journal.sequence_at(when.time)


def chosen(agent_id: str | None, scaler: str | None) -> Wanted:
    """Return what tells whether a fact is wanted; it must see all facts in order, to learn whose machines are whose."""
    if agent_id is not None:
        aggregate = subjects.vm(agent_id)
        return lambda fact: fact.aggregate == aggregate
    if scaler is None:
        return lambda _fact: True
    machines: set[str] = set()

    def of_scaler(fact: Recorded) -> bool:
        if isinstance(fact.event, Requested) and fact.event.scaler == scaler:
            machines.add(fact.aggregate)
        kind, _, rest = fact.aggregate.partition(".")
        return fact.aggregate in machines or (kind == "backend" and rest.rpartition(".")[2] == scaler)

    return of_scaler


def _history(session: Session, after: int, stop: int, choice: _Choice, wanted: Wanted) -> Iterator[Recorded]:
    first = after
    if choice.scaler is not None:
        after = 0  # its machines are known by facts before the window
    elif choice.agent_id is None and choice.last is not None:
        after = max(after, stop - choice.last)
    if after >= stop:
        return iter(())
    aggregates = None if choice.agent_id is None else subjects.vm(choice.agent_id)
    facts = session.journal.replay(after=after, until=stop, aggregates=aggregates)
    if choice.scaler is not None:
        facts = session.out.progressing(facts, stop, "reading the log")
    found = (fact for fact in facts if wanted(fact) and fact.sequence > first)
    return found if choice.last is None else iter(deque(found, maxlen=choice.last))


def _live(session: Session, after: int, wanted: Wanted) -> None:
    session.out.note("following; Ctrl-C ends it")
    with LiveFacts(session.journal.follow, after) as facts:
        while True:
            fact = facts.next(_LOOK_S)
            if fact is not None and wanted(fact):
                show(session, fact)


def show(session: Session, fact: Recorded) -> None:
    """Print one fact on a line of its own."""
    out = session.out
    if out.as_json:
        out.json_line(fact_json(fact))
        return
    cause = f"  ({fact.cause})" if fact.cause else ""
    about = fact.aggregate.partition(".")[2]
    # A person reads down the time of day, and line breaks cost more than dates; pipes get all of it.
    at = clock_time(fact.at) if out.terminal else moment(fact.at)
    text = f"{fact.sequence:>6}  {at}  {fact.tag:<20}  {about}  {said(fact)}{cause}"
    out.line(safe(text))
