"""The whole fleet from a run of facts, fast: what a coordinator knows when it starts.

It comes to the same states as the plain folds, but a life that is over is only counted through, never folded:
a hundred thousand dead agents cost a version check for each of their facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

import msgspec

from events.allocator import AddressLeased
from events.backend import BackendEvent, SlotTaken
from events.claim import ClaimEvent
from events.coordinator import CoordinatorEvent, GlobalSlotTaken
from events.demand import Placed
from events.envelope import Recorded
from events.scale import ScaleEvent
from events.vm import Draining, Failed, Reaped, Registered, Requested, VmEvent
from projections import allocator, backend, coordinator, vm
from projections.allocator import AllocatorState
from projections.backend import LAUNCH_FAILURES, BackendState, Slot
from projections.coordinator import CoordinatorState
from projections.headroom import slot_of
from projections.view import unknown
from projections.vm import BrokenLog, VmState


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The live fleet as of `last_sequence`.

    `vms` by id, without the reaped ones; `backends` and
    `allocators` by their aggregate, as `VmState.slot` and `VmState.network` name them;
    `coordinators` by id, as `VmState.owner` does.
    """

    vms: dict[str, VmState] = {}
    backends: dict[str, BackendState] = {}
    coordinators: dict[str, CoordinatorState] = {}
    allocators: dict[str, AllocatorState] = {}
    last_sequence: int = 0


NOTHING: Final = FleetState()


def fold_fleet(facts: Iterable[Recorded], base: FleetState = NOTHING) -> FleetState:
    """Return the live fleet after `facts`, which follow `base` without a gap.

    Raises:
        BrokenLog: a sequence or a version is missing, or a reaped machine has another fact.
        UnknownFact: a tag is not known here.
    """
    fold = _Fold(base)
    fold.run(facts)
    return fold.result()


class _Life:
    """A machine that is not reaped yet: where its facts began, and those that came since."""

    __slots__ = ("base", "ended", "facts", "slot", "version")

    def __init__(self, base: VmState | None, slot: str, version: int) -> None:
        self.base = base
        self.slot = slot
        self.version = version
        self.ended = base is not None and base.ended_at is not None
        self.facts: list[Recorded] = []

    def state(self) -> VmState:
        state = self.base
        for fact in self.facts:
            state = vm.evolve(state, fact.event, fact)
        assert state is not None
        return state


class _Fold:
    """Mutable while it runs, so that nothing the size of the fleet is copied for a fact."""

    def __init__(self, base: FleetState) -> None:
        self.last = base.last_sequence
        self.lives = {key: _Life(state, state.slot, state.version) for key, state in base.vms.items()}
        self.backends = dict(base.backends)
        self.coordinators = dict(base.coordinators)
        self.allocators = dict(base.allocators)
        self.slots: dict[str, dict[str, Slot]] = {k: dict(s.slots) for k, s in base.backends.items()}
        self.places: dict[str, str] = {
            machine: key for key, state in base.coordinators.items() for machine in state.slots
        }
        self.folds: dict[type, Callable[[Any, Recorded], object]] = {
            **dict.fromkeys(get_args(VmEvent), self._live_on),
            **dict.fromkeys(get_args(BackendEvent), self._backend),
            **dict.fromkeys(get_args(CoordinatorEvent), self._coordinator),
            **dict.fromkeys((Placed, *get_args(ClaimEvent), *get_args(ScaleEvent)), _nothing),
            AddressLeased: self._leased,
            Requested: self._begin,
            Registered: self._registered,
            Draining: self._draining,
            Failed: self._failed,
            Reaped: self._reaped,
        }

    def run(self, facts: Iterable[Recorded]) -> None:
        folds = self.folds
        last = self.last
        for fact in facts:
            last += 1
            if fact.sequence != last:
                raise BrokenLog(f"sequence {fact.sequence} follows {last - 1}: the log lost what was between")
            event = fact.event
            fold = folds.get(type(event))
            if fold is None:
                raise unknown(fact)
            fold(event, fact)
        self.last = last

    def result(self) -> FleetState:
        vms = {key: life.state() for key, life in self.lives.items()}
        for state in vms.values():
            slots = self.slots.setdefault(state.slot, {})
            slot = slot_of(state)
            if slot is not None:
                slots[state.id] = slot
        places: dict[str, set[str]] = {}
        for machine, key in self.places.items():
            places.setdefault(key, set()).add(machine)
        replace = msgspec.structs.replace
        return FleetState(
            vms=vms,
            backends={
                key: replace(self.backends.get(key, BackendState()), slots=slots)
                for key, slots in self.slots.items()
            },
            coordinators={
                key: replace(state, slots=frozenset(places.get(key, ())))
                for key, state in self.coordinators.items()
            },
            allocators=self._allocators(vms.values()),
            last_sequence=self.last,
        )

    def _allocators(self, vms: Iterable[VmState]) -> dict[str, AllocatorState]:
        """Give each network the leases of its living machines."""
        leases: dict[str, dict[str, str]] = {key: {} for key in self.allocators}
        for state in vms:
            if state.network:
                leases.setdefault(state.network, {})[state.address] = state.id
        replace = msgspec.structs.replace
        return {
            key: replace(self.allocators.get(key, AllocatorState()), leases=held)
            for key, held in leases.items()
        }

    def _leased(self, event: AddressLeased, fact: Recorded) -> None:
        state = msgspec.structs.replace(self.allocators.get(fact.aggregate, AllocatorState()), leases={})
        self.allocators[fact.aggregate] = allocator.evolve(state, event, fact)

    def _begin(self, event: Requested, fact: Recorded) -> None:
        key = fact.aggregate[3:]
        if fact.version != 1 or key in self.lives:
            raise BrokenLog(f"{fact.id} at sequence {fact.sequence}: a life begins once, as version 1")
        life = _Life(None, event.slot, 1)
        life.facts.append(fact)
        self.lives[key] = life

    def _live_on(self, _event: VmEvent, fact: Recorded) -> _Life:
        life = self.lives.get(fact.aggregate[3:])
        if life is None:
            raise BrokenLog(
                f"{fact.id} at sequence {fact.sequence} is of a machine that is reaped or never was"
            )
        if fact.version != life.version + 1:
            raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {life.version}")
        life.version = fact.version
        life.facts.append(fact)
        return life

    def _registered(self, event: Registered, fact: Recorded) -> None:
        slot = self._live_on(event, fact).slot
        state = self.backends.get(slot)
        if state is not None and (state.failures or state.failed_at is not None):
            self.backends[slot] = msgspec.structs.replace(state, failures=0, failed_at=None, last_failure="")

    def _draining(self, event: Draining, fact: Recorded) -> None:
        self._live_on(event, fact).ended = True

    def _failed(self, event: Failed, fact: Recorded) -> None:
        life = self._live_on(event, fact)
        if life.ended:
            return  # a failure counts once
        life.ended = True
        slot = life.slot
        state = self.backends.get(slot)
        if state is not None and event.reason in LAUNCH_FAILURES:
            self.backends[slot] = msgspec.structs.replace(
                state,
                failures=state.failures + 1,
                failed_at=fact.at,
                last_failure=event.detail or event.reason,
            )

    def _reaped(self, event: Reaped, fact: Recorded) -> None:
        life = self._live_on(event, fact)
        key = fact.aggregate[3:]
        del self.lives[key]
        self.slots.get(life.slot, {}).pop(key, None)
        self.places.pop(key, None)

    def _backend(self, event: BackendEvent, fact: Recorded) -> None:
        key = fact.aggregate
        state = self.backends.get(key, BackendState())
        slots = self.slots.setdefault(key, {})
        if isinstance(event, SlotTaken):
            if fact.version != state.version + 1:
                raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
            slots[event.vm] = Slot(vm=event.vm, requests=event.requests, taken_at=fact.at)
            self.backends[key] = msgspec.structs.replace(
                state, version=fact.version, sequence=fact.sequence, slots={}
            )
        else:
            self.backends[key] = backend.evolve(msgspec.structs.replace(state, slots={}), event, fact)

    def _coordinator(self, event: CoordinatorEvent, fact: Recorded) -> None:
        key = fact.aggregate.removeprefix("coordinator.")
        state = msgspec.structs.replace(self.coordinators.get(key, CoordinatorState()), slots=frozenset())
        self.coordinators[key] = coordinator.evolve(state, event, fact)
        if isinstance(event, GlobalSlotTaken):
            self.places[event.vm] = key


def _nothing(_event: object, _fact: Recorded) -> None:
    """Pass by: a demand is looked up when its job asks again, a claim when it is shown; boot needs none."""
