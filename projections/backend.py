"""The fold of one scaler: who holds its slots, whether it is paused, and how its last launches went."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec
from immutables import Map

from events.backend import BackendEvent, DrainStarted, Paused, Resumed, SlotTaken
from events.envelope import Recorded, Resources
from events.vm import Draining, Failed, Reaped, Registered, Spawned, SpawnStarted, VmEvent
from projections.vm import BrokenLog

Gate = Literal["open", "paused", "draining"]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's share, held from `backend.slot_taken` until its `vm.reaped`."""

    vm: str
    requests: Resources
    taken_at: datetime
    waiting: bool = True  # for its turn in the throttle
    starting: bool = False
    registered: bool = False
    ended: bool = False  # it takes no more work; the slot stays taken until nothing is left


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler as the log has it. `version` and `sequence` are of its own aggregate, not of its machines'.

    `slots` may be given as any mapping and is kept as a persistent one: the next state shares with the one before
    all but what changed, so that a fact costs the same whether ten machines live or ten thousand. It has no order.
    """

    version: int = 0
    sequence: int = 0
    gate: Gate = "open"
    slots: Mapping[str, Slot] = Map()
    failures: int = 0  # launches failed in a row, cleared by any registration
    failed_at: datetime | None = None
    last_failure: str = ""

    def __post_init__(self) -> None:
        """Take the slots as a persistent map."""
        if not isinstance(self.slots, Map):
            msgspec.structs.force_setattr(self, "slots", Map(self.slots))

    @property
    def cpus(self) -> float:
        """Return the sum of reserved requests: always that of the live set."""
        return sum(slot.requests.cpus for slot in self.slots.values())

    @property
    def memory_bytes(self) -> int:
        """Return the sum of reserved requests, in bytes."""
        return sum(slot.requests.memory_bytes for slot in self.slots.values())


def evolve(state: BackendState, event: BackendEvent, fact: Recorded) -> BackendState:
    """Return the state after a fact of the scaler's own aggregate.

    Raises:
        BrokenLog: the version is not the next one.
    """
    if fact.version != state.version + 1:
        raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
    state = msgspec.structs.replace(state, version=fact.version, sequence=fact.sequence)
    match event:
        case SlotTaken(vm=vm, requests=requests):
            slot = Slot(vm=vm, requests=requests, taken_at=fact.at)
            return msgspec.structs.replace(state, slots=_map(state).set(vm, slot))
        case Paused():
            return msgspec.structs.replace(state, gate="paused")
        case DrainStarted():
            return msgspec.structs.replace(state, gate="draining")
        case Resumed():
            return msgspec.structs.replace(state, gate="open")


LAUNCH_FAILURES = frozenset(
    {"launch-refused", "launch-failed", "spawn-timeout", "exited-early", "register-timeout"}
)
"""Reasons that count against the scaler: the machine never gave an agent."""


def evolve_vm(state: BackendState, event: VmEvent, fact: Recorded) -> BackendState:
    """Return the state after a fact of one of the scaler's machines; facts of others change nothing.

    A taken slot is guarded by the scaler's expected version; a freed one is only observed. Seeing it late
    refuses more than needed and never less.
    """
    vm = fact.aggregate.removeprefix("vm.")
    slot = state.slots.get(vm)
    if slot is None:
        return state
    match event:
        case SpawnStarted():
            return _with(state, msgspec.structs.replace(slot, waiting=False, starting=True))
        case Spawned():
            return _with(state, msgspec.structs.replace(slot, waiting=False, starting=False))
        case Registered():
            state = msgspec.structs.replace(state, failures=0, failed_at=None, last_failure="")
            return _with(state, msgspec.structs.replace(slot, waiting=False, starting=False, registered=True))
        case Failed() if slot.ended:
            return state  # told again after an actor's restart: a failure counts once
        case Failed(reason=reason, detail=detail):
            state = _with(state, _ended(slot))
            if reason not in LAUNCH_FAILURES:
                return state
            return msgspec.structs.replace(
                state, failures=state.failures + 1, failed_at=fact.at, last_failure=detail or reason
            )
        case Draining():
            return _with(state, _ended(slot))
        case Reaped():
            return msgspec.structs.replace(state, slots=_map(state).delete(vm))
        case _:
            return state


def _ended(slot: Slot) -> Slot:
    return msgspec.structs.replace(slot, waiting=False, starting=False, ended=True)


def _with(state: BackendState, slot: Slot) -> BackendState:
    return msgspec.structs.replace(state, slots=_map(state).set(slot.vm, slot))


def _map(state: BackendState) -> Map[str, Slot]:
    assert isinstance(state.slots, Map)
    return state.slots
