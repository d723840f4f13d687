"""A decision as the log takes it: what must hold of it, its facts' wire form, and whether a stored fact is ours."""

from actors.ports import Decision, NewFact
from events.codec import Form
from events.envelope import Recorded

FACTS_MAX = 500
"""Facts in one atomic batch; the server takes 1000, and a smaller one holds the stream for less long."""


def check_decision(decision: Decision) -> None:
    """Assert what the port asks of a decision; a breach is our own bug.

    The first fact of each aggregate has an expected sequence, the following ones have none and count versions
    on. A leader's decision has two facts or more, the first on the reaper's aggregate (whose place in the
    guard its epoch takes).
    """
    assert 0 < len(decision.facts) <= FACTS_MAX, f"{len(decision.facts)} facts in one decision"
    versions: dict[str, int] = {}
    for fact in decision.facts:
        before = versions.get(fact.aggregate)
        if before is None:
            assert fact.expected_sequence is not None, f"no expected sequence for {fact.aggregate}"
            assert fact.version > 0, f"{fact.aggregate}: versions count from 1"
        else:
            assert fact.expected_sequence is None, f"{fact.aggregate}: one expected sequence per decision"
            assert fact.version == before + 1, f"{fact.aggregate}: version {fact.version} follows {before}"
        versions[fact.aggregate] = fact.version
    if decision.epoch:
        assert len(versions) > 1, "a leader's decision names another aggregate beside the reaper's"


def guarded(decision: Decision) -> tuple[tuple[int, NewFact], ...]:
    """Return place and fact of those whose own expected sequence travels with the write.

    That is the first fact of each aggregate, except a leader's first fact: its guard is the epoch.
    """
    return tuple(
        (place, fact)
        for place, fact in enumerate(decision.facts)
        if fact.expected_sequence is not None and not (decision.epoch and place == 0)
    )


def form_of(decision: Decision, fact: NewFact) -> Form:
    """Return the wire form of one fact of a decision."""
    return Form(
        aggregate=fact.aggregate,
        version=fact.version,
        at=decision.at,
        writer=decision.writer,
        cause=decision.cause,
        correlation=decision.correlation,
        attempt=decision.attempt,
        epoch=decision.epoch,
        event=fact.event,
    )


def matches(stored: Recorded, decision: Decision, fact: NewFact) -> bool:
    """Tell whether a stored fact is this one of this decision, written by an earlier try."""
    return (
        stored.attempt == decision.attempt
        and stored.aggregate == fact.aggregate
        and stored.version == fact.version
    )


def recorded(decision: Decision, fact: NewFact, sequence: int) -> Recorded:
    """Return the fact as it stands in the log after it was stored at `sequence`."""
    return Recorded(
        sequence=sequence,
        aggregate=fact.aggregate,
        version=fact.version,
        at=decision.at,
        writer=decision.writer,
        epoch=decision.epoch,
        cause=decision.cause,
        correlation=decision.correlation,
        attempt=decision.attempt,
        event=fact.event,
    )
