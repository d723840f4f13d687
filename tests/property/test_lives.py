"""Any order of commands makes a legal life, and nothing else; the log's form carries it without a loss."""

from collections import Counter
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.decisions.vm import NoteTornDown, VmCommand, decide
from actors.errors import Refused
from events.codec import Form, decode, encode, recorded_as_form
from events.envelope import Recorded
from projections.vm import Phase, VmState, deadline, evolve
from tests.given import HISTORIES, REQUESTED, life, recorded
from tests.property.commands import commands

NEXT: dict[Phase, frozenset[Phase]] = {
    "requested": frozenset({"requested", "starting", "draining", "failed"}),
    "starting": frozenset({"starting", "spawned", "draining", "failed"}),
    "spawned": frozenset({"spawned", "registered", "draining", "failed"}),
    "registered": frozenset({"registered", "draining", "failed"}),
    "draining": frozenset({"draining", "reaped"}),
    "failed": frozenset({"failed", "reaped"}),
    "reaped": frozenset({"reaped"}),
}
"""The picture of a life, as far as phases go."""

ONCE = (
    "vm.requested",
    "vm.spawn_started",
    "vm.spawned",
    "vm.registered",
    "vm.config_acked",
    "vm.condemned",
    "vm.reaped",
)

orders = st.lists(commands, max_size=40)


def live(order: list[VmCommand]) -> list[Recorded]:
    """Live a life: every command is decided on the state so far, as the actor does."""
    facts = [recorded(REQUESTED, 1)]
    state = life((REQUESTED,))
    for command in order:
        try:
            events = decide(state, command)
        except Refused:
            continue
        for event in events:
            fact = recorded(event, state.version + 1)
            facts.append(fact)
            state = evolve(state, event, fact)
    return facts


def states_of(facts: list[Recorded]) -> list[VmState]:
    """Fold a life, keeping every state on the way."""
    states: list[VmState] = []
    for fact in facts:
        states.append(evolve(states[-1] if states else None, fact.event, fact))
    return states


@settings(max_examples=400, deadline=None)
@given(orders)
def test_any_order_of_commands_makes_a_legal_life(order: list[VmCommand]) -> None:
    facts = live(order)
    states = states_of(facts)
    assert [fact.version for fact in facts] == list(range(1, len(facts) + 1))
    assert all(after.phase in NEXT[before.phase] for before, after in pairwise(states))
    counts = Counter(fact.tag for fact in facts)
    assert all(counts[tag] <= 1 for tag in ONCE), counts
    assert counts["vm.draining"] + counts["vm.failed"] <= 1, "a life ends once, for one reason"


@settings(max_examples=300, deadline=None)
@given(orders)
def test_reaped_is_the_last_fact_and_comes_only_where_a_teardown_was_owed(order: list[VmCommand]) -> None:
    facts = live([*order, NoteTornDown(evidence="nothing left")])
    states = states_of(facts)
    for place, fact in enumerate(facts):
        if fact.tag == "vm.reaped":
            assert place == len(facts) - 1
            assert states[place - 1].phase in ("draining", "failed")
            assert fact.event.reason == states[place - 1].reason


@settings(max_examples=300, deadline=None)
@given(orders)
def test_only_a_machine_that_came_up_has_an_agent_and_only_one(order: list[VmCommand]) -> None:
    for state in states_of(live(order)):
        assert (state.session is None) == (state.registered_at is None)
        if state.session is not None:
            assert state.handle is not None
        if state.config_acked:
            assert state.session is not None


@settings(max_examples=300, deadline=None)
@given(orders)
def test_a_life_that_goes_on_has_a_deadline_or_somebody_who_moves_it(order: list[VmCommand]) -> None:
    """`requested` is moved by the throttle, `registered` by beats, a first teardown by its effect."""
    for state in states_of(live(order)):
        if state.phase in ("starting", "spawned") or (state.ended and state.live and state.teardown_tries):
            assert deadline(state) is not None


@settings(max_examples=300, deadline=None)
@given(orders)
def test_a_life_folds_the_same_after_a_way_over_the_wire(order: list[VmCommand]) -> None:
    facts = live(order)
    again = [
        decode(
            encode(
                Form(
                    aggregate=fact.aggregate,
                    version=fact.version,
                    at=fact.at,
                    writer=fact.writer,
                    cause=fact.cause,
                    correlation=fact.correlation,
                    attempt=fact.attempt,
                    event=fact.event,
                    epoch=fact.epoch,
                )
            ),
            fact.sequence,
        )
        for fact in facts
    ]
    assert again == facts
    assert states_of(again) == states_of(facts)
    assert [decode(recorded_as_form(fact), fact.sequence) for fact in facts] == facts


@settings(max_examples=300, deadline=None)
@given(orders, st.integers(0, 40))
def test_a_state_that_was_saved_and_loaded_goes_on_like_one_that_was_not(
    order: list[VmCommand], place: int
) -> None:
    facts = live(order)
    place = min(place, len(facts) - 1)
    state = states_of(facts)[place]
    loaded = msgspec.json.decode(msgspec.json.encode(state), type=VmState)
    for fact in facts[place + 1 :]:
        loaded = evolve(loaded, fact.event, fact)
    assert loaded == states_of(facts)[-1]


def test_the_usual_lives_are_legal_too() -> None:
    for phase, events in HISTORIES.items():
        states = states_of([recorded(event, version) for version, event in enumerate(events, 1)])
        assert states[-1].phase == phase
        assert all(after.phase in NEXT[before.phase] for before, after in pairwise(states))
