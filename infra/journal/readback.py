"""Finding out from the log itself what became of a write."""

from collections.abc import Callable

from actors.ports import Conflicted, Decision
from events import subjects
from events.codec import Malformed, decode
from events.envelope import Recorded
from infra.journal.form import guarded, matches
from infra.journal.jetstream import Stored

Look = Callable[[dict[str, object]], Stored | None]
"""Reads one message back from the stream's leader, such as `{"seq": 7}`."""


def find(look: Look, prefix: str, decision: Decision) -> tuple[Recorded, ...] | None:
    """Return the decision's facts if an earlier try stored them, None if it did not.

    Right after the expected sequence of a guarded aggregate stands either our fact or the one of whoever was
    faster; all others of the decision stand around it.
    """
    anchor, fact = guarded(decision)[0]
    assert fact.expected_sequence is not None
    found = look({"seq": fact.expected_sequence + 1, "next_by_subj": prefix + fact.aggregate})
    if found is None or (ours := _ours(found, decision, anchor)) is None:
        return None
    facts = []
    for place in range(len(decision.facts)):
        if place == anchor:
            facts.append(ours)
            continue
        sequence = found.sequence - anchor + place
        other = look({"seq": sequence})
        mine = None if other is None else _ours(other, decision, place)
        assert mine is not None, (
            f"half of decision {decision.attempt} is stored: sequence {sequence} is not its"
        )
        facts.append(mine)
    return tuple(facts)


def moved(look: Look, prefix: str, decision: Decision) -> Conflicted | None:
    """Return which aggregate is not where the decision expects it; None when all are."""
    expected = [(fact.aggregate, fact.expected_sequence) for _, fact in guarded(decision)]
    if decision.epoch:
        expected.insert(0, (subjects.leader(), decision.epoch))
    for aggregate, sequence in expected:
        last = look({"last_by_subj": prefix + aggregate})
        last_sequence = 0 if last is None else last.sequence
        if last_sequence != sequence:
            return Conflicted(
                aggregate=aggregate,
                detail=f"{aggregate} is at sequence {last_sequence}, {sequence} was expected",
            )
    return None


def _ours(stored: Stored, decision: Decision, place: int) -> Recorded | None:
    try:
        fact = decode(stored.payload, stored.sequence)
    except Malformed:
        return None
    return fact if matches(fact, decision, decision.facts[place]) else None
