"""The projector over the journal's own adapter: what a writer appends comes into the rows."""

from actors.ports import Appended, Decision, NewFact, Outcome
from actors.projector import Projector
from infra.boot import boot
from infra.journal.memory import MemoryJournal
from infra.postgres.memory import MemoryRows
from infra.verify import verify_tables
from projections.boot import fold_fleet
from projections.catalogue import FLEET
from tests.contract.projector_rig import QUICK, StillClock, until
from tests.fleet_log import Story


def decisions_of(story: Story) -> list[Decision]:
    """Return the story as a writer appends it."""
    last: dict[str, int] = {}
    found: list[Decision] = []
    for begin, end in zip([0, *story.decisions], story.decisions, strict=False):
        facts = story.facts[begin:end]
        new: list[NewFact] = []
        for fact in facts:
            first = fact.aggregate not in {earlier.aggregate for earlier in new}
            new.append(
                NewFact(
                    aggregate=fact.aggregate,
                    version=fact.version,
                    expected_sequence=last.get(fact.aggregate, 0) if first else None,
                    event=fact.event,
                )
            )
        last.update((fact.aggregate, fact.sequence) for fact in facts)
        one = facts[0]
        found.append(
            Decision(
                attempt=one.attempt,
                at=one.at,
                writer=one.writer,
                cause=one.cause,
                correlation=one.correlation,
                facts=tuple(new),
            )
        )
    return found


def test_what_is_appended_while_a_projector_runs_comes_into_its_rows() -> None:
    story = Story(12).run(400)
    journal, rows = MemoryJournal(StillClock()), MemoryRows()
    decisions = decisions_of(story)
    outcomes: list[Outcome] = []
    for decision in decisions[:100]:
        journal.append(decision, outcomes.append)
    projector = Projector(journal, rows, FLEET, StillClock(), options=QUICK)
    projector.start()
    until(projector, lambda status: status.stage == "live")
    for decision in decisions[100:]:
        journal.append(decision, outcomes.append)
    until(projector, lambda status: status.sequence == len(story.facts))
    assert projector.stop()
    assert all(isinstance(outcome, Appended) for outcome in outcomes)
    assert verify_tables(journal, rows, FLEET) == []
    assert boot(journal, None).state.vms.keys() == fold_fleet(story.facts).vms.keys()
    journal.close()


def test_a_hole_in_the_log_parks_the_projector_in_front_of_it() -> None:
    story = Story(12).run(100)
    journal, rows = MemoryJournal(StillClock()), MemoryRows()
    for decision in decisions_of(story):
        journal.append(decision, lambda _: None)
    journal.drop(50)
    projector = Projector(journal, rows, FLEET, StillClock(), options=QUICK)
    projector.start()
    status = until(projector, lambda status: status.stage == "parked")
    assert (status.sequence, status.parked_at) == (49, 50)
    projector.stop()
    journal.close()
