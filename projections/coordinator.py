"""The fold of one coordinator: which process has its id, which rules hold, who counts under its global cap."""

from typing import Any

import msgspec

from events.coordinator import ConfigApplied, CoordinatorEvent, GlobalSlotTaken, Started, Stopped
from events.envelope import Recorded
from events.vm import Reaped, VmEvent
from projections.vm import BrokenLog


class CoordinatorState(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator as the log has it. `version` and `sequence` are of its own aggregate."""

    version: int = 0
    sequence: int = 0
    running: bool = False
    host: str = ""
    boot_id: str = ""
    pid: int = 0
    starts: int = 0
    digest: str = ""
    global_max_agents: int = 0
    scalers: dict[str, Any] = {}
    slots: frozenset[str] = frozenset()


def evolve(state: CoordinatorState, event: CoordinatorEvent, fact: Recorded) -> CoordinatorState:
    """Return the state after a fact of the coordinator's own aggregate.

    Raises:
        BrokenLog: the version is not the next one.
    """
    if fact.version != state.version + 1:
        raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
    state = msgspec.structs.replace(state, version=fact.version, sequence=fact.sequence)
    match event:
        case Started(host=host, boot_id=boot_id, pid=pid):
            return msgspec.structs.replace(
                state, running=True, host=host, boot_id=boot_id, pid=pid, starts=state.starts + 1
            )
        case ConfigApplied(digest=digest, global_max_agents=limit, scalers=scalers):
            return msgspec.structs.replace(state, digest=digest, global_max_agents=limit, scalers=scalers)
        case GlobalSlotTaken(vm=vm):
            return msgspec.structs.replace(state, slots=state.slots | {vm})
        case Stopped():
            return msgspec.structs.replace(state, running=False)


def evolve_vm(state: CoordinatorState, event: VmEvent, fact: Recorded) -> CoordinatorState:
    """Return the state after a fact of a machine: `vm.reaped` frees its place under the global cap."""
    vm = fact.aggregate.removeprefix("vm.")
    if isinstance(event, Reaped) and vm in state.slots:
        return msgspec.structs.replace(state, slots=state.slots - {vm})
    return state
