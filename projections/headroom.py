"""How full each scaler is: the counts and sums of its live set, its gate, and how its last launches went."""

from datetime import datetime

import msgspec

from events.backend import BackendEvent
from events.envelope import Recorded
from events.vm import Draining, Failed, Reaped, Registered, Requested, Spawned, SpawnStarted, VmEvent
from projections import backend
from projections.backend import BackendState, Gate, Slot
from projections.vm import VmState


class HeadroomRow(msgspec.Struct, frozen=True, kw_only=True):
    """One scaler, by the aggregate whose slots its agents hold. Counts and sums are of the live set."""

    slot: str
    scaler: str
    version: int = 0
    sequence: int = 0
    gate: Gate = "open"
    taken: int = 0
    starting: int = 0
    registered: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    failures: int = 0
    failed_at: datetime | None = None
    last_failure: str = ""


def fresh(slot: str) -> HeadroomRow:
    """Return the row of a scaler nothing has happened to yet."""
    return HeadroomRow(slot=slot, scaler=slot.rpartition(".")[2])


def own_state(row: HeadroomRow, slots: dict[str, Slot]) -> BackendState:
    """Return the actor's state of this scaler, given who holds its slots."""
    return BackendState(
        version=row.version,
        sequence=row.sequence,
        gate=row.gate,
        slots=slots,
        failures=row.failures,
        failed_at=row.failed_at,
        last_failure=row.last_failure,
    )


def evolve(row: HeadroomRow, event: BackendEvent, fact: Recorded) -> HeadroomRow:
    """Return the row after a fact of the scaler's own aggregate. Slots count from `vm.requested` on.

    Raises:
        BrokenLog: the version is not the next one.
    """
    state = backend.evolve(own_state(row, {}), event, fact)
    return msgspec.structs.replace(row, version=state.version, sequence=state.sequence, gate=state.gate)


_CONCERNED = frozenset({Requested, SpawnStarted, Spawned, Registered, Draining, Failed, Reaped})


def concerned(event: object) -> bool:
    """Tell whether such a fact of a machine can change its scaler's row."""
    return type(event) in _CONCERNED


def evolve_vm(
    row: HeadroomRow, before: VmState | None, after: VmState, event: VmEvent, fact: Recorded
) -> HeadroomRow:
    """Return the row after a fact of one of its machines, which was `before` and is `after`."""
    held = None if before is None else slot_of(before)
    if held is None:
        return _moved(row, None, slot_of(after))
    state = backend.evolve_vm(own_state(row, {after.id: held}), event, fact)
    row = _moved(row, held, state.slots.get(after.id))
    return msgspec.structs.replace(
        row, failures=state.failures, failed_at=state.failed_at, last_failure=state.last_failure
    )


def slot_of(vm: VmState) -> Slot | None:
    """Return the slot a machine holds, as the scaler's fold has it; None once it is reaped."""
    if not vm.live:
        return None
    return Slot(
        vm=vm.id,
        requests=vm.requests,
        taken_at=vm.requested_at,
        waiting=vm.phase == "requested",
        starting=vm.phase == "starting" and vm.registered_at is None,
        registered=vm.registered_at is not None,
        ended=vm.ended_at is not None,
    )


def _moved(row: HeadroomRow, old: Slot | None, new: Slot | None) -> HeadroomRow:
    def share(slot: Slot | None) -> tuple[int, int, int, float, int]:
        if slot is None:
            return 0, 0, 0, 0.0, 0
        return 1, slot.starting, slot.registered, slot.requests.cpus, slot.requests.memory_bytes

    before, after = share(old), share(new)
    return msgspec.structs.replace(
        row,
        taken=row.taken + after[0] - before[0],
        starting=row.starting + after[1] - before[1],
        registered=row.registered + after[2] - before[2],
        # Rounded, so that a million additions and subtractions of 0.1 end at the sum of the live set.
        cpus=round(row.cpus + after[3] - before[3], 6),
        memory_bytes=row.memory_bytes + after[4] - before[4],
    )
