"""The actor that admits: one decision over every limit it uses, one append. Nobody else takes a slot here."""

import msgspec

from actors.aggregate import Aggregate, Proposal
from actors.cloud import claim_code
from actors.commands import Answer
from actors.decisions.addresses import Lease, choose
from actors.decisions.capacity import Held, Place, Routed, admit, check_demand
from actors.errors import DriverError, Refused
from actors.world import Call, World
from events import subjects
from events.backend import SlotTaken
from events.coordinator import Started
from events.demand import Placed
from events.envelope import Recorded
from projections import allocator, backend, coordinator, demand
from projections.allocator import AllocatorState
from projections.backend import BackendState
from projections.coordinator import CoordinatorState
from projections.demand import DemandState
from projections.vm import VmState
from projections.vm import evolve as evolve_vm


class Leases:
    """Asks which addresses are held, over all networks; what is being decided counts."""


class Turns:
    """One scaler's throttle as admission sees it: who waits for a turn and who has one, derived from the fold."""

    def __init__(self, state: BackendState) -> None:
        self._waiting: set[str] = set()
        self._starting: set[str] = set()
        for vm in state.slots:
            self.note(vm, state)

    def note(self, vm: str, state: BackendState) -> None:
        """Take note of how a machine stands now."""
        slot = state.slots.get(vm)
        for held, there in (
            (self._waiting, slot is not None and slot.waiting),
            (self._starting, slot is not None and slot.starting),
        ):
            if there:
                held.add(vm)
            else:
                held.discard(vm)

    def free(self, width: int) -> int:
        """Return how many new machines may start at once: none past those that wait, whose turns the scaler gives.

        Whom the scaler has just given a turn still waits here, so a late view makes a turn later, never one too many.
        """
        return 0 if self._waiting else max(width - len(self._starting), 0)


class AllocatorActor(Aggregate):
    """Who gets capacity on this coordinator. Demands are served one after the other, each in one batch.

    Slots are taken under the expected version of the coordinator and the scaler; they are freed by observing
    `vm.reaped`. Another process that took our coordinator id is found by the first append that conflicts.
    """

    mailbox_limit = 200_000

    def __init__(
        self,
        world: World,
        coordinator_state: CoordinatorState,
        backends: dict[str, BackendState],
        allocators: dict[str, AllocatorState] | None = None,
    ) -> None:
        super().__init__(world)
        self.allocators = dict(allocators or {})
        self.coordinator = coordinator_state
        self.backends = dict(backends)
        self._turns = {slot: Turns(state) for slot, state in backends.items()}
        self._demand = DemandState()  # of the demand that is decided now; read only after a conflict
        self._demand_key = ""

    def resolve(self, call: Call) -> Proposal | None:
        """Admit or refuse each agent of a routed demand, or say which addresses are held."""
        if isinstance(call.command, Leases):
            return Proposal(result=frozenset(a for state in self.allocators.values() for a in state.leases))
        routed: Routed = call.command
        check_demand(routed.demand)
        if routed.demand.id != self._demand_key:
            self._demand, self._demand_key = DemandState(), routed.demand.id
        held = Held(
            coordinator=self.coordinator,
            backend=self.backends[routed.rules.slot],
            allocator=self.allocators.get(routed.rules.network, AllocatorState()),
            demand=self._demand,
            live=self._live(),
            turns=self._turns[routed.rules.slot].free(routed.rules.max_concurrent_spawns),
        )
        now = self.world.clock.now()
        try:
            places = self._places(routed)
        except DriverError as error:
            message = f"scaler {routed.rules.name} cannot start one: {error}"
            answer = Answer(kind="refused", scaler=routed.rules.name, message=message)
            return Proposal(result=(answer,) * routed.demand.count)
        admission = admit(routed, held, places, self.world.site, now)
        return Proposal(facts=admission.facts, result=admission.answers)

    def _places(self, routed: Routed) -> tuple[Place | None, ...]:
        """Return a machine that could be for each agent wanted; None where no address is left for it.

        Raises:
            DriverError: this host cannot run such a machine.
        """
        rules, now = routed.rules, self.world.clock.now()
        driver = self.world.drivers[rules.slot]
        held = self.allocators.get(rules.network, AllocatorState())
        taken = self.world.router.withheld
        if rules.network:
            taken |= self.world.occupied(rules.network)
        places: list[Place | None] = []
        for _ in range(routed.demand.count):
            vm = self.world.ids.vm(now)
            lease: Lease | None = None
            if rules.network:
                try:
                    lease = choose(self.world.pools[rules.network], held, taken)
                except Refused:
                    places.append(None)
                    continue
                held = msgspec.structs.replace(held, leases={**held.leases, lease.address: vm})
            placement = driver.plan(vm, rules.name, routed.labels, lease)
            code = "" if rules.terms is None else claim_code(self.world.ids)
            places.append(Place(vm=vm, placement=placement, lease=lease, code=code))
        return tuple(places)

    def _live(self) -> frozenset[str]:
        """Return the machines whose lives are not over; needed only where a job may have one already."""
        if not self._demand.vms:
            return frozenset()
        return frozenset(
            vm for state in self.backends.values() for vm, slot in state.slots.items() if not slot.ended
        )

    def apply(self, facts: tuple[Recorded, ...]) -> None:
        """Evolve every aggregate of the batch, tell the others, and begin the new lives."""
        begun: dict[str, VmState] = {}
        for fact in facts:
            if fact.aggregate.startswith("vm."):
                state = evolve_vm(begun.get(fact.aggregate), fact.event, fact)
                begun[fact.aggregate] = state
                self.world.router.slots[state.id] = state.slot  # by which its scaler is told of it
                self._step(state.slot, fact)
            else:
                self._evolve(fact)
        self.world.router.publish(facts, self.actor_ref)
        for state in begun.values():
            self.world.router.begin(state)

    def _evolve(self, fact: Recorded) -> None:
        kind = fact.aggregate.partition(".")[0]
        if kind == "coordinator":
            self.coordinator = coordinator.evolve(self.coordinator, fact.event, fact)
        elif kind == "backend":
            state = self.backends.get(fact.aggregate, BackendState())
            self.backends[fact.aggregate] = backend.evolve(state, fact.event, fact)
            if isinstance(fact.event, SlotTaken):
                self._turns[fact.aggregate].note(fact.event.vm, self.backends[fact.aggregate])
        elif kind == "allocator":
            held = self.allocators.get(fact.aggregate, AllocatorState())
            self.allocators[fact.aggregate] = allocator.evolve(held, fact.event, fact)

    def observe(self, fact: Recorded) -> None:
        """Follow gates, and the lives that hold or free slots."""
        if not fact.aggregate.startswith("vm."):
            known = fact.aggregate in self.backends or fact.aggregate in self.world.pools
            if known and fact.version == self._version(fact.aggregate) + 1:
                self._evolve(fact)
            return
        vm = fact.aggregate.removeprefix("vm.")
        self.coordinator = coordinator.evolve_vm(self.coordinator, fact.event, fact)
        slot = self.world.router.slots.get(vm) or getattr(fact.event, "slot", None)
        for network, state in self.allocators.items():
            self.allocators[network] = allocator.evolve_vm(state, fact.event, fact)
        if slot in self.backends:
            self._step(slot, fact)

    def _step(self, slot: str, fact: Recorded) -> None:
        """Follow a step of a machine that holds the slot."""
        self.backends[slot] = backend.evolve_vm(self.backends[slot], fact.event, fact)
        self._turns[slot].note(fact.aggregate.removeprefix("vm."), self.backends[slot])

    def aggregates(self, call: Call) -> tuple[str, ...]:
        """Return every aggregate the decision rested on."""
        routed: Routed = call.command
        own: tuple[str, ...] = (subjects.coordinator(self.world.site.coordinator), routed.rules.slot)
        if routed.rules.network:
            own = (*own, routed.rules.network)
        return own if routed.demand.job is None else (*own, subjects.demand(routed.demand.id))

    def rehydrate(self, read: dict[str, tuple[Recorded, ...]]) -> None:
        """Evolve by what was missed; find out whether we were replaced."""
        for aggregate, facts in read.items():
            if aggregate.startswith("demand."):
                self._demand = _fold_demand(facts)
                continue
            if aggregate.startswith(("vm.", "claim.", "scale.")):
                continue  # a new machine's: begun by `apply`; its own actor follows it from there
            known = self._version(aggregate)
            for fact in facts:
                if fact.version <= known:
                    continue
                if isinstance(fact.event, Started):
                    self._replaced(fact)
                self._evolve(fact)

    def _version(self, aggregate: str) -> int:
        if aggregate.startswith("coordinator."):
            return self.coordinator.version
        if aggregate.startswith("allocator."):
            return self.allocators.get(aggregate, AllocatorState()).version
        return self.backends[aggregate].version

    def _replaced(self, fact: Recorded) -> None:
        self.world.fatal(replaced(self.world.site.coordinator, fact))
        raise Refused("replaced", "this coordinator was replaced by another process with its id")


def replaced(coordinator_id: str, fact: Recorded) -> str:
    """Say that another process took our id, by its `coordinator.started`, and what to do."""
    started: Started = fact.event
    return (
        f"another process (pid {started.pid} on {started.host}) started as coordinator {coordinator_id} at "
        f"{fact.at:%H:%M:%S}: this one stops; give each coordinator its own --id"
    )


def _fold_demand(facts: tuple[Recorded, ...]) -> DemandState:
    state = DemandState()
    for fact in facts:
        event: Placed = fact.event
        state = demand.evolve(state, event, fact)
    return state
