"""Reservations are the live set: over any interleaving of demands and lives, and of facts seen late or twice."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.commands import Demand
from actors.decisions.capacity import Held, Place, Routed, ScalerRules, Site, admit
from actors.decisions.vm import VmCommand, decide
from actors.errors import Refused
from events.backend import BackendEvent
from events.codec import AnyEvent
from events.coordinator import ConfigApplied, CoordinatorEvent
from events.envelope import Recorded, Resources
from events.vm import VmEvent
from projections import backend, coordinator, vm
from projections.backend import BackendState
from projections.coordinator import CoordinatorState
from projections.vm import VmState
from tests.given import AT, recorded
from tests.property.commands import commands, forward

GIB = 1 << 30
GLOBAL_MOST = 5
SITE = Site(coordinator="alpha", host="alpha-host", boot_id="boot-1")
RULES = tuple(
    ScalerRules(
        name=name,
        backend="bare-metal",
        slot=f"backend.alpha.{name}",
        max_agents=most,
        max_cpus=4.0,
        max_memory_bytes=4 * GIB,
        backoff_first_s=0.0,
        backoff_most_s=0.0,
    )
    for name, most in (("small", 4), ("large", 3))
)

needs = st.builds(
    Resources, cpus=st.sampled_from([0.0, 0.1, 1.0, 2.5]), memory_bytes=st.sampled_from([0, GIB, 3 * GIB])
)
demands = st.tuples(st.sampled_from(RULES), st.integers(1, 3), needs)
which = st.integers(0, 5)
steps = st.lists(
    st.one_of(demands, st.tuples(which, commands), st.tuples(which, forward), st.tuples(st.just(0), forward)),
    min_size=5,
    max_size=80,
)


class Fleet:
    """A log and what it adds up to, without actors; every fact is seen by every fold, as the router has it."""

    def __init__(self) -> None:
        self.facts: list[Recorded] = []
        self.coordinator = CoordinatorState()
        self.backends = {rules.slot: BackendState() for rules in RULES}
        self.vms: dict[str, VmState] = {}
        self.append("coordinator.alpha", ConfigApplied(digest="d", global_max_agents=GLOBAL_MOST, scalers={}))

    def append(self, aggregate: str, event: AnyEvent) -> None:
        """Store a fact as its aggregate's next version, and fold it."""
        version = 1 + sum(fact.aggregate == aggregate for fact in self.facts)
        fact = recorded(event, version, aggregate=aggregate, sequence=len(self.facts) + 1)
        self.facts.append(fact)
        if isinstance(event, CoordinatorEvent):
            self.coordinator = coordinator.evolve(self.coordinator, event, fact)
        elif isinstance(event, BackendEvent):
            self.backends[aggregate] = backend.evolve(self.backends[aggregate], event, fact)
        elif isinstance(event, VmEvent):
            name = aggregate.removeprefix("vm.")
            self.vms[name] = vm.evolve(self.vms.get(name), event, fact)
            self.coordinator = coordinator.evolve_vm(self.coordinator, event, fact)
            self.backends = {
                slot: backend.evolve_vm(state, event, fact) for slot, state in self.backends.items()
            }

    def ask(self, rules: ScalerRules, count: int, need: Resources) -> None:
        """Decide a demand and store what comes of it."""
        names = [f"a-{len(self.facts)}-{n}" for n in range(count)]
        routed = Routed(
            demand=Demand(id="d", labels=(rules.name,), count=count),
            rules=rules,
            labels=(rules.name,),
            agent_labels=(),
            gate=(),
            requests=need,
        )
        held = Held(coordinator=self.coordinator, backend=self.backends[rules.slot])
        places = tuple(Place(vm=name, placement={}) for name in names)
        admission = admit(routed, held, places, SITE, AT)
        for fact in admission.facts:
            self.append(fact.aggregate, fact.event)
        spawning = [answer.vm for answer in admission.answers if answer.kind == "spawning"]
        assert all(name in self.vms for name in spawning)

    def tell(self, which: int, command: VmCommand) -> None:
        """Let one of the newest machines decide."""
        newest = list(self.vms)[-6:]
        if not newest:
            return
        name = newest[which % len(newest)]
        try:
            events = decide(self.vms[name], command)
        except Refused:
            return
        for event in events:
            self.append(f"vm.{name}", event)

    def check(self) -> None:
        """Check what must hold at every moment."""
        live = {name: state for name, state in self.vms.items() if state.live}
        assert self.coordinator.slots == frozenset(live)
        assert len(live) <= GLOBAL_MOST
        for rules in RULES:
            state = self.backends[rules.slot]
            own = {name: machine for name, machine in live.items() if machine.slot == rules.slot}
            assert set(state.slots) == set(own)
            assert state.cpus == pytest.approx(sum(machine.requests.cpus for machine in own.values()))
            assert state.memory_bytes == sum(machine.requests.memory_bytes for machine in own.values())
            assert len(own) <= rules.max_agents
            assert state.cpus <= 4.0 + 1e-9
            assert state.memory_bytes <= 4 * GIB
            for name, machine in own.items():
                slot = state.slots[name]
                assert slot.ended == machine.ended
                assert slot.waiting == (machine.phase == "requested")
                assert slot.starting == (machine.phase == "starting")
                assert slot.registered == (machine.registered_at is not None)


def run(order: Iterable[tuple[ScalerRules, int, Resources] | tuple[int, VmCommand]]) -> Fleet:
    """Run an interleaving, checking after every step."""
    fleet = Fleet()
    for step in order:
        if len(step) == 3:
            fleet.ask(*step)
        else:
            fleet.tell(*step)
        fleet.check()
    return fleet


@settings(max_examples=200, deadline=None)
@given(steps)
def test_reservations_are_the_live_set_after_every_step_and_no_cap_is_overshot(
    order: list[tuple[ScalerRules, int, Resources] | tuple[int, VmCommand]],
) -> None:
    run(order)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_a_freed_slot_that_is_seen_late_refuses_more_and_never_less(
    order: list[tuple[ScalerRules, int, Resources] | tuple[int, VmCommand]],
) -> None:
    """Whoever has not seen the lives' facts yet holds at least the slots of whoever has."""
    fleet = run(order)
    for rules in RULES:
        late = BackendState()
        for fact in fleet.facts:
            if fact.aggregate == rules.slot:
                late = backend.evolve(late, fact.event, fact)
        now = fleet.backends[rules.slot]
        assert set(late.slots) >= set(now.slots)
        assert late.memory_bytes >= now.memory_bytes


@settings(max_examples=100, deadline=None)
@given(steps)
def test_a_life_that_is_told_again_from_its_begin_changes_no_slot_and_counts_no_failure_twice(
    order: list[tuple[ScalerRules, int, Resources] | tuple[int, VmCommand]],
) -> None:
    """A restarted actor is told everything once more: what was over must stay over."""
    fleet = run(order)
    for slot, state in fleet.backends.items():
        again = state
        for name, machine in fleet.vms.items():
            if machine.slot != slot or not machine.ended:
                continue
            for fact in (fact for fact in fleet.facts if fact.aggregate == f"vm.{name}"):
                again = backend.evolve_vm(again, fact.event, fact)
        assert set(again.slots) == set(state.slots)
        assert again.memory_bytes == state.memory_bytes
        assert again.failures <= state.failures
        assert {name for name, held in again.slots.items() if held.ended} == {
            name for name, held in state.slots.items() if held.ended
        }
