"""The fast fold of a boot and the rows of a projector come to the states of the plain folds."""

from datetime import timedelta
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.backend import BackendEvent
from events.codec import EVENT_TYPES
from events.coordinator import CoordinatorEvent
from events.envelope import Recorded
from events.vm import VmEvent
from projections import backend, coordinator, failures, vm
from projections.backend import BackendState
from projections.boot import FleetState, fold_fleet
from projections.catalogue import FLEET
from projections.coordinator import CoordinatorState
from projections.failures import FailureRow
from projections.fleet import AGENTS, FAILURES, FOLDS, HEADROOM
from projections.headroom import slot_of
from projections.view import AnyTable, Key, RowSet, UnknownFact
from projections.vm import BrokenLog, VmState
from tests.fleet_log import BEGIN, Story, unknown_fact


def plain_fold(facts: list[Recorded]) -> FleetState:
    """Fold every machine, scaler and coordinator with `evolve`, as actors do."""
    vms: dict[str, VmState] = {}
    backends: dict[str, BackendState] = {}
    coordinators: dict[str, CoordinatorState] = {}
    for fact in facts:
        event = fact.event
        _, _, key = fact.aggregate.partition(".")
        if isinstance(event, VmEvent):
            vms[key] = vm.evolve(vms.get(key), event, fact)
            backends = {name: backend.evolve_vm(state, event, fact) for name, state in backends.items()}
            coordinators = {
                name: coordinator.evolve_vm(state, event, fact) for name, state in coordinators.items()
            }
        elif isinstance(event, BackendEvent):
            state = backends.get(fact.aggregate, BackendState())
            backends[fact.aggregate] = backend.evolve(state, event, fact)
        elif isinstance(event, CoordinatorEvent):
            coordinators[key] = coordinator.evolve(coordinators.get(key, CoordinatorState()), event, fact)
    return FleetState(
        vms={key: state for key, state in vms.items() if state.live},
        backends=backends,
        coordinators=coordinators,
        last_sequence=len(facts),
    )


stories = st.builds(lambda seed, steps: Story(seed).run(steps), st.integers(0, 10**6), st.integers(0, 250))


@settings(max_examples=60, deadline=None)
@given(stories)
def test_the_fast_fold_comes_to_the_states_of_the_plain_one(story: Story) -> None:
    assert fold_fleet(story.facts) == plain_fold(story.facts)


@settings(max_examples=60, deadline=None)
@given(stories, st.integers(0, 10**6))
def test_a_fold_may_be_interrupted_anywhere_and_go_on(story: Story, cut: int) -> None:
    cut %= len(story.facts) + 1
    base = fold_fleet(story.facts[:cut])
    assert fold_fleet(story.facts[cut:], base) == plain_fold(story.facts)


def rows_of(facts: list[Recorded]) -> dict[AnyTable, dict[Key, msgspec.Struct]]:
    """Fold facts through the fleet view."""
    tables: dict[AnyTable, dict[Key, msgspec.Struct]] = {table: {} for table in FLEET.tables}
    rows = RowSet(lambda _table, _keys: {})
    for fact in facts:
        FLEET.apply(rows, fact)
    for table, changed in rows.changes().items():
        tables[table] = {key: row for key, row in changed.items() if row is not None}
    return tables


@settings(max_examples=60, deadline=None)
@given(stories)
def test_headroom_rows_are_the_sums_of_the_live_set(story: Story) -> None:
    tables, plain = rows_of(story.facts), plain_fold(story.facts)
    for slot, state in plain.backends.items():
        row = tables[HEADROOM][slot]
        held = state.slots.values()
        assert (row.taken, row.starting, row.registered, row.memory_bytes) == (  # type: ignore[attr-defined]
            len(held),
            sum(slot.starting for slot in held),
            sum(slot.registered for slot in held),
            state.memory_bytes,
        )
        assert row.cpus == pytest.approx(state.cpus)  # type: ignore[attr-defined]
        assert (row.gate, row.failures, row.failed_at, row.last_failure) == (  # type: ignore[attr-defined]
            state.gate,
            state.failures,
            state.failed_at,
            state.last_failure,
        )
        live = [s for s in plain.vms.values() if s.slot == slot]
        assert {s.id: slot_of(s) for s in live} == dict(state.slots)


@settings(max_examples=30, deadline=None)
@given(stories)
def test_agent_rows_hold_the_state_the_actor_would_have(story: Story) -> None:
    live = {
        key: row.state  # type: ignore[attr-defined]
        for key, row in rows_of(story.facts)[AGENTS].items()
        if row.state.live  # type: ignore[attr-defined]
    }
    assert live == plain_fold(story.facts).vms


@settings(max_examples=30, deadline=None)
@given(stories)
def test_the_failure_ring_is_the_newest_failure_rows(story: Story) -> None:
    ring: tuple[FailureRow, ...] = ()
    rows = list(rows_of(story.facts)[FAILURES].values())
    for row in rows:
        assert isinstance(row, FailureRow)
        ring = failures.evolve(ring, row)
    assert list(ring) == rows[-failures.RING_RECORDS :]


def test_every_released_event_is_known_to_the_fleet_view() -> None:
    assert set(FOLDS) == set(EVENT_TYPES)
    assert set(get_args(VmEvent)) < set(FOLDS)


@pytest.mark.parametrize("place", [5, 20, 60])
def test_a_missing_fact_stops_the_fast_fold(place: int) -> None:
    facts = Story(3).run(100).facts
    with pytest.raises(BrokenLog, match=f"sequence {place + 2} follows {place}"):
        fold_fleet([*facts[:place], *facts[place + 1 :]])


def test_a_version_that_is_not_the_next_stops_the_fast_fold() -> None:
    facts = Story(3).run(100).facts
    place = next(i for i, fact in enumerate(facts) if fact.tag == "vm.spawned")
    facts[place] = msgspec.structs.replace(facts[place], version=9)
    with pytest.raises(BrokenLog, match="follows version"):
        fold_fleet(facts)


def test_a_fact_of_a_reaped_machine_stops_the_fast_fold() -> None:
    story = Story(3)
    machine = story.begin(straight=True)
    story.finish(machine)
    reaped = story.facts[-1]
    story.facts.append(
        msgspec.structs.replace(reaped, sequence=reaped.sequence + 1, version=reaped.version + 1)
    )
    with pytest.raises(BrokenLog, match="reaped or never was"):
        fold_fleet(story.facts)


def test_an_unknown_tag_stops_the_fast_fold_and_names_itself() -> None:
    with pytest.raises(UnknownFact, match=r"vm\.teleported.*install the version"):
        fold_fleet([unknown_fact(1)])


def _failure(ago: timedelta, sequence: int = 1, scaler: str = "small", **changes: object) -> FailureRow:
    row = FailureRow(
        sequence=sequence,
        at=BEGIN - ago,
        vm="v",
        scaler=scaler,
        backend="bare-metal",
        bound=False,
        reason="exited",
        detail="x",
    )
    return msgspec.structs.replace(row, **changes)


def test_a_failure_exactly_as_old_as_the_window_counts_and_one_a_millisecond_older_does_not() -> None:
    minute = timedelta(minutes=1)
    assert "small" in failures.window([_failure(minute)], BEGIN, minute)
    assert not failures.window([_failure(minute + timedelta(milliseconds=1))], BEGIN, minute)


def test_the_latest_failure_wins_and_of_equal_times_the_later_record() -> None:
    ring = [
        _failure(timedelta(0), 1, detail="first", bound=True),
        _failure(timedelta(0), 2, detail="second", backend="container"),
        _failure(timedelta(seconds=1), 3, detail="older"),
    ]
    found = failures.window(ring, BEGIN, timedelta(minutes=1))["small"]
    assert (found.bound, found.unbound, found.last_detail, found.backend) == (1, 2, "second", "container")


def test_the_ring_forgets_the_oldest_of_257() -> None:
    ring: tuple[FailureRow, ...] = ()
    for number in range(257):
        ring = failures.evolve(ring, _failure(timedelta(0), number))
    assert (len(ring), ring[0].sequence, ring[-1].sequence) == (256, 1, 256)
