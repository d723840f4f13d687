"""The fold of one network's addresses: who holds which, until nothing of the holder is left."""

import msgspec

from events.allocator import AddressLeased, AllocatorEvent
from events.envelope import Recorded
from events.vm import Reaped, VmEvent
from projections.vm import BrokenLog


class AllocatorState(msgspec.Struct, frozen=True, kw_only=True):
    """One network as the log has it. `version` and `sequence` are of its own aggregate."""

    version: int = 0
    sequence: int = 0
    leases: dict[str, str] = {}  # address -> vm


def evolve(state: AllocatorState, event: AllocatorEvent, fact: Recorded) -> AllocatorState:
    """Return the state after a fact of the network's own aggregate.

    Raises:
        BrokenLog: the version is not the next one, or an address is leased that is held.
    """
    if fact.version != state.version + 1:
        raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
    match event:
        case AddressLeased(vm=vm, address=address):
            return msgspec.structs.replace(
                state,
                version=fact.version,
                sequence=fact.sequence,
                leases={**state.leases, address: vm},
            )


def evolve_vm(state: AllocatorState, event: VmEvent, fact: Recorded) -> AllocatorState:
    """Return the state after a fact of a machine: only `vm.reaped` frees an address.

    A lease is guarded by the expected version; its end is only observed. Seeing it late refuses an address
    that is free, and never hands out one that is held.
    """
    if not isinstance(event, Reaped):
        return state
    vm = fact.aggregate.removeprefix("vm.")
    if vm not in state.leases.values():
        return state
    return msgspec.structs.replace(
        state, leases={address: holder for address, holder in state.leases.items() if holder != vm}
    )
