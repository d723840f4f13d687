"""The fold of one demand: which machines it got."""

import msgspec

from events.demand import DemandEvent, Placed
from events.envelope import Recorded
from projections.vm import BrokenLog


class DemandState(msgspec.Struct, frozen=True, kw_only=True):
    """One demand as the log has it; `vms` are those of its latest placement."""

    version: int = 0
    sequence: int = 0
    job: str | None = None
    run: str | None = None
    vms: tuple[str, ...] = ()


def evolve(state: DemandState, event: DemandEvent, fact: Recorded) -> DemandState:
    """Return the state after a fact of the demand's own aggregate.

    Raises:
        BrokenLog: the version is not the next one.
    """
    if fact.version != state.version + 1:
        raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
    match event:
        case Placed(job=job, run=run, vms=vms):
            return msgspec.structs.replace(
                state, version=fact.version, sequence=fact.sequence, job=job, run=run, vms=vms
            )
