"""The fold of one machine's life; used by its actor and by the table, so that they cannot disagree."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from events.envelope import Recorded, Resources
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Reason,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownConfirmed,
    TeardownFailed,
    VmEvent,
)

Phase = Literal["requested", "starting", "spawned", "registered", "draining", "failed", "reaped"]
"""`requested` waits for its turn and has not touched the host; `starting` may have. `draining` and `failed` owe a
teardown; `reaped` owes nothing and is the only end."""


class VmState(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's machine as the log has it."""

    id: str
    phase: Phase
    version: int
    sequence: int
    scaler: str
    backend: str
    slot: str
    owner: str
    host: str
    boot_id: str
    labels: tuple[str, ...]
    agent_labels: tuple[str, ...]
    gate: tuple[str, ...]
    demand: str | None
    job: str | None
    run: str | None
    requests: Resources
    limits: Resources
    placement: dict[str, Any]
    spawn_timeout_s: float
    register_timeout_s: float
    requested_at: datetime
    changed_at: datetime
    targets: tuple[str, ...] = ()
    network: str = ""
    address: str = ""
    handle: Handle | None = None
    session: str | None = None
    config_acked: bool = False
    started_at: datetime | None = None
    spawned_at: datetime | None = None
    registered_at: datetime | None = None
    ended_at: datetime | None = None
    reaped_at: datetime | None = None
    reason: Reason | None = None
    detail: str = ""
    exit_code: int | None = None
    condemned: Reason | None = None
    condemned_by: str = ""
    teardown_tries: int = 0
    teardown_retry_at: datetime | None = None
    taken_up: int = 0
    confirmed: tuple[str, ...] = ()  # provisioners that said nothing of it is left

    @property
    def live(self) -> bool:
        """Tell whether anything may be left of it: every phase but `reaped`."""
        return self.phase != "reaped"

    @property
    def ended(self) -> bool:
        """Tell whether its work is over, well or not: a teardown is owed or done."""
        return self.phase in ("draining", "failed", "reaped")


class BrokenLog(Exception):  # noqa: N818 - a state of the log, not an accident
    """The facts of an aggregate do not follow one another: the log lost something or was written around us."""


def evolve(state: VmState | None, event: VmEvent, fact: Recorded) -> VmState:
    """Return the state after `fact`, whose event is `event`.

    Raises:
        BrokenLog: a first fact that is no request, or a version that is not the next one.
    """
    if state is None:
        if not isinstance(event, Requested) or fact.version != 1:
            raise BrokenLog(
                f"{fact.id} at sequence {fact.sequence} is {fact.tag}: a life begins with vm.requested as version 1"
            )
        return _begin(event, fact)
    if fact.version != state.version + 1:
        raise BrokenLog(f"{fact.id} at sequence {fact.sequence} follows version {state.version}")
    changes = _changes(state, event, fact.at, fact.writer)
    return msgspec.structs.replace(
        state, version=fact.version, sequence=fact.sequence, changed_at=fact.at, **changes
    )


def fold(facts: Iterable[Recorded]) -> VmState | None:
    """Return the state after all facts of one life, oldest first; None: there are none.

    Raises:
        BrokenLog: as `evolve`.
    """
    state: VmState | None = None
    for fact in facts:
        state = evolve(state, fact.event, fact)
    return state


def _begin(event: Requested, fact: Recorded) -> VmState:
    return VmState(
        id=fact.aggregate.removeprefix("vm."),
        phase="requested",
        version=fact.version,
        sequence=fact.sequence,
        scaler=event.scaler,
        backend=event.backend,
        slot=event.slot,
        owner=event.owner,
        host=event.host,
        boot_id=event.boot_id,
        labels=event.labels,
        agent_labels=event.agent_labels,
        gate=event.gate,
        demand=event.demand,
        job=event.job,
        run=event.run,
        requests=event.requests,
        limits=event.limits,
        targets=event.targets,
        network=event.network,
        address=event.address,
        placement=event.placement,
        spawn_timeout_s=event.spawn_timeout_s,
        register_timeout_s=event.register_timeout_s,
        requested_at=fact.at,
        changed_at=fact.at,
    )


def _changes(state: VmState, event: VmEvent, at: datetime, writer: str) -> dict[str, Any]:
    match event:
        case Requested():
            raise BrokenLog(f"vm.{state.id} is requested a second time")
        case SpawnStarted():
            return {"phase": "starting", "started_at": at}
        case Spawned(handle=handle):
            return {"phase": "spawned", "spawned_at": at, "handle": handle}
        case Registered(session=session):
            return {"phase": "registered", "registered_at": at, "session": session}
        case ConfigAcked():
            return {"config_acked": True}
        case Draining(reason=reason, detail=detail, exit_code=code):
            return {
                "phase": "draining",
                "ended_at": at,
                "reason": reason,
                "detail": detail,
                "exit_code": code,
            }
        case Failed(reason=reason, detail=detail, exit_code=code):
            return {"phase": "failed", "ended_at": at, "reason": reason, "detail": detail, "exit_code": code}
        case TeardownFailed(detail=detail, tries=tries, retry_in_s=retry_in_s):
            return {
                "teardown_tries": tries,
                "teardown_retry_at": at + timedelta(seconds=retry_in_s),
                "detail": detail,
            }
        case TeardownConfirmed(target=target):
            return {"confirmed": (*state.confirmed, target)}
        case Reaped(reason=reason):
            return {"phase": "reaped", "reaped_at": at, "reason": reason, "teardown_retry_at": None}
        case TakenUp():
            return {"taken_up": state.taken_up + 1}
        case Adopted(owner=owner):
            return {"owner": owner}
        case Condemned(reason=reason):
            return {"condemned": reason, "condemned_by": writer}
        case Spared():
            return {}


def deadline(state: VmState) -> datetime | None:
    """Return when the phase it is in runs out, or None where another clock or driver holds it.

    `requested` waits for the throttle, which always moves; `registered` is held by the agent's beats;
    `draining` and `failed` by the teardown and its retries; `reaped` by nothing.
    """
    match state.phase:
        case "starting":
            return (state.started_at or state.requested_at) + timedelta(seconds=state.spawn_timeout_s)
        case "spawned":
            return (state.spawned_at or state.requested_at) + timedelta(seconds=state.register_timeout_s)
        case "draining" | "failed":
            return state.teardown_retry_at
        case "requested" | "registered" | "reaped":
            return None
