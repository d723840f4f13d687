"""The actor of one scaler: its gate, and the throttle that gives machines their turn."""

from collections import deque
from typing import Any

from actors.aggregate import Aggregate, Proposal
from actors.commands import ScalerStatus
from actors.decisions.backend import decide
from actors.decisions.capacity import ScalerRules
from actors.decisions.vm import End, StartSpawn
from actors.ports import following
from actors.world import Call, Enlist, World
from events.backend import DrainStarted
from events.envelope import Recorded
from projections.backend import BackendState, evolve, evolve_vm


class Status:
    """Asks a scaler how it stands."""


class BackendActor(Aggregate):
    """One scaler. The throttle is derived: who starts is in the fold, who waits enlists again after a restart.

    A turn goes to the oldest waiter; it is over when the machine is up, failed or ended, so that a spawn that
    hangs past its deadline frees it too.
    """

    mailbox_limit = 200_000

    def __init__(self, world: World, rules: ScalerRules, state: BackendState) -> None:
        super().__init__(world)
        self.rules = rules
        self.state = state
        self._waiting: deque[str] = deque()
        self._granted: set[str] = set()  # told to start; no fact of it seen yet
        self._starting = {vm for vm, slot in state.slots.items() if slot.starting}

    def resolve(self, call: Call) -> Proposal | None:
        """Decide about the gate, or say how the scaler stands."""
        if isinstance(call.command, Status):
            return Proposal(result=self._status())
        events = decide(self.state, call.command)
        facts = following(self.rules.slot, self.state.version, self.state.sequence, events)
        return Proposal(facts=facts, teardown=True)

    def apply(self, facts: tuple[Recorded, ...]) -> None:
        """Evolve by facts of the scaler's own aggregate."""
        for fact in facts:
            self.state = evolve(self.state, fact.event, fact)
        self.world.router.publish(facts, self.actor_ref)
        if any(isinstance(fact.event, DrainStarted) for fact in facts):
            self._end_idle()

    def aggregates(self, call: Call) -> tuple[str, ...]:
        """Return its own."""
        del call
        return (self.rules.slot,)

    def rehydrate(self, read: dict[str, tuple[Recorded, ...]]) -> None:
        """Take up the facts of its aggregate that were missed, and act on them as on our own."""
        missed = tuple(fact for fact in read[self.rules.slot] if fact.version > self.state.version)
        if missed:
            self.apply(missed)

    def observe(self, fact: Recorded) -> None:
        """Follow the allocator's slots and the machines' lives; a life's step may free a turn."""
        if fact.aggregate == self.rules.slot:
            if fact.version == self.state.version + 1:
                self.state = evolve(self.state, fact.event, fact)
            return
        vm = fact.aggregate.removeprefix("vm.")
        self.state = evolve_vm(self.state, fact.event, fact)
        slot = self.state.slots.get(vm)
        if slot is not None and slot.starting:
            self._starting.add(vm)
        else:
            self._starting.discard(vm)
        if slot is None or slot.ended or slot.starting or slot.registered:
            self._granted.discard(vm)
        self._give_turns()

    def receive(self, message: Any) -> None:
        """Take a machine into the throttle."""
        match message:
            case Enlist(vm=vm):
                if vm in self._granted:
                    self.world.router.tell_vm(vm, self._turn())  # its turn was lost with an actor of it
                elif vm not in self._waiting:
                    self._waiting.append(vm)
                self._give_turns()
            case _:
                super().receive(message)

    def _give_turns(self) -> None:
        while self._waiting and len(self._starting | self._granted) < self.rules.max_concurrent_spawns:
            vm = self._waiting.popleft()
            slot = self.state.slots.get(vm)
            if slot is not None and slot.ended:
                continue
            if self.world.router.tell_vm(vm, self._turn()):
                self._granted.add(vm)

    def _turn(self) -> Call:
        return Call(StartSpawn(), cause=f"throttle:{self.rules.name}")

    def _end_idle(self) -> None:
        """End what has no agent yet; a registered agent has a job and finishes it."""
        for vm in sorted(self.state.slots):
            slot = self.state.slots[vm]
            if not slot.registered and not slot.ended:
                end = End(reason="drain", detail=f"scaler {self.rules.name} is draining")
                self.world.router.tell_vm(vm, Call(end, cause=f"{self.rules.slot}:{self.state.version}"))

    def _status(self) -> ScalerStatus:
        slots = self.state.slots.values()
        return ScalerStatus(
            name=self.rules.name,
            backend=self.rules.backend,
            gate=self.state.gate,
            max_agents=self.rules.max_agents,
            taken=len(self.state.slots),
            starting=sum(slot.starting for slot in slots),
            waiting=len(self._waiting),
            registered=sum(slot.registered and not slot.ended for slot in slots),
            failures=self.state.failures,
            labels=self.rules.label_sets,
            last_failure=self.state.last_failure,
        )
