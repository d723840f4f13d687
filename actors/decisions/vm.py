"""What becomes of one machine when something is asked of it or noticed about it. Pure."""

from datetime import datetime
from typing import assert_never

import msgspec

from actors.commands import AgentDone, RegisterAgent, RemoveAgent, ReportProvision
from actors.decisions.provision import note_provision
from actors.decisions.scale import BACKEND, HANDLE, Last
from actors.errors import DriverError, FailureKind, Refused
from events.vm import (
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Handle,
    Reaped,
    Reason,
    Registered,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownFailed,
    VmEvent,
)
from projections.vm import VmState, deadline

DETAIL_CHARACTERS = 500
"""How much of an error's text a fact keeps; the rest is in the logs."""

TEARDOWN_RETRY_FIRST_S = 1.0
TEARDOWN_RETRY_MOST_S = 60.0
"""A failed teardown is tried again after 1, 2, 4 ... at most 60 seconds, without end: it is never forgotten."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Something asked of a machine or noticed about it."""


class StartSpawn(Command, frozen=True, kw_only=True):
    """Its turn in the throttle came."""


class NoteSpawned(Command, frozen=True, kw_only=True):
    """The driver brought it up."""

    handle: Handle


class NoteSpawnFailed(Command, frozen=True, kw_only=True):
    """The driver did not bring it up."""

    kind: FailureKind
    detail: str
    transient: bool

    @classmethod
    def of(cls, error: DriverError) -> "NoteSpawnFailed":
        """Return the command for a driver's error."""
        return cls(kind=error.kind, detail=str(error), transient=error.transient)


class NoteConfigAcked(Command, frozen=True, kw_only=True):
    """Its agent has the configuration."""

    session: str


class NoteExit(Command, frozen=True, kw_only=True):
    """It ended by itself."""

    exit_code: int | None
    detail: str = ""


class NoteDeadline(Command, frozen=True, kw_only=True):
    """A timer went off; `now` decides, not the timer."""

    now: datetime


class NoteSilence(Command, frozen=True, kw_only=True):
    """Its agent has not beaten for `silent_s` by the coordinator's own clock, beyond the grace."""

    silent_s: float
    grace_s: float


class NoteGone(Command, frozen=True, kw_only=True):
    """The host was asked after a restart: the machine is not there, or not as it should be."""

    reason: Reason
    detail: str


class TakeUp(Command, frozen=True, kw_only=True):
    """The host was asked after a restart: it runs, and it is ours."""

    coordinator: str
    handle: Handle | None
    evidence: str


class NoteTornDown(Command, frozen=True, kw_only=True):
    """The driver confirmed that nothing is left."""

    evidence: str


class NoteTeardownFailed(Command, frozen=True, kw_only=True):
    """The driver could not take it down, or could not confirm it."""

    detail: str


class NoteUnanswered(Command, frozen=True, kw_only=True):
    """A cloud machine's provisioners have not confirmed its end in time; `offered` is what each was told last."""

    detail: str
    offered: dict[str, Last]
    retry_in_s: float


class End(Command, frozen=True, kw_only=True):
    """The scaler or coordinator is being emptied, or supervision gave up on its actor."""

    reason: Reason
    detail: str
    failed: bool = False


VmCommand = (
    StartSpawn
    | NoteSpawned
    | NoteSpawnFailed
    | NoteConfigAcked
    | NoteExit
    | NoteDeadline
    | NoteSilence
    | NoteGone
    | TakeUp
    | NoteTornDown
    | NoteTeardownFailed
    | NoteUnanswered
    | End
    | RegisterAgent
    | AgentDone
    | RemoveAgent
    | ReportProvision
)


def decide(state: VmState, command: VmCommand) -> tuple[VmEvent, ...]:
    """Return what happens; an empty tuple when the command came too late to matter.

    Raises:
        Refused: an agent or operator asked for what must not be, with a code and the reason.
    """
    match command:
        case StartSpawn():
            return (SpawnStarted(),) if state.phase == "requested" else ()
        case NoteSpawned(handle=handle):
            return (Spawned(handle=handle),) if state.phase == "starting" else ()
        case NoteSpawnFailed():
            return _spawn_failed(state, command)
        case NoteDeadline(now=now):
            return _deadline(state, now)
        case RegisterAgent():
            return _register(state, command)
        case NoteConfigAcked(session=session):
            fresh = state.phase == "registered" and state.session == session and not state.config_acked
            return (ConfigAcked(),) if fresh else ()
        case AgentDone():
            return _done(state, command)
        case NoteExit():
            return _exit(state, command)
        case NoteSilence(silent_s=silent_s, grace_s=grace_s):
            if state.phase != "registered":
                return ()
            detail = f"no beat for {silent_s:.1f} s, grace {grace_s:.0f} s"
            return (Failed(reason="heartbeat-timeout", detail=detail),)
        case NoteGone(reason=reason, detail=detail):
            return () if state.ended else (Failed(reason=reason, detail=_cut(detail)),)
        case TakeUp():
            return _take_up(state, command)
        case End(reason=reason, detail=detail, failed=failed):
            if state.ended:
                return ()
            end = Failed if failed else Draining
            return (end(reason=reason, detail=_cut(detail)),)
        case RemoveAgent():
            return _remove(state, command)
        case NoteTornDown(evidence=evidence):
            if state.phase not in ("draining", "failed"):
                return ()
            return (Reaped(reason=state.reason or "operator", slot=state.slot, evidence=_cut(evidence)),)
        case NoteTeardownFailed(detail=detail):
            return _teardown_failed(state, detail)
        case NoteUnanswered(detail=detail, retry_in_s=retry_in_s):
            return _teardown_failed(state, detail, retry_in_s)
        case ReportProvision():
            return note_provision(state, command)
    assert_never(command)


def _spawn_failed(state: VmState, command: NoteSpawnFailed) -> tuple[VmEvent, ...]:
    if state.phase != "starting":
        return ()
    reason: Reason = "launch-failed" if command.transient else "launch-refused"
    return (Failed(reason=reason, detail=_cut(f"{command.kind}: {command.detail}")),)


def _deadline(state: VmState, now: datetime) -> tuple[VmEvent, ...]:
    due = deadline(state)
    if due is None or now < due:
        return ()
    match state.phase:
        case "starting":
            return (Failed(reason="spawn-timeout", detail=f"not up within {state.spawn_timeout_s:g} s"),)
        case "spawned":
            detail = f"no agent registered within {state.register_timeout_s:g} s"
            return (Failed(reason="register-timeout", detail=detail),)
        case _:
            return ()


def _register(state: VmState, command: RegisterAgent) -> tuple[VmEvent, ...]:
    registered = Registered(
        session=command.session, agent_version=command.agent_version[:64], facts=command.facts
    )
    match state.phase:
        case "spawned":
            return (registered,)
        case "starting" if state.backend == BACKEND:  # it is there, whatever its provisioner has said so far
            return (Spawned(handle=Handle(driver=HANDLE, version=1, data={})), registered)
        case "registered" if state.session == command.session:
            return ()
        case "registered":
            raise Refused(
                "already-registered", f"agent {state.id} is registered by another session: an id is used once"
            )
        case "requested" | "starting":
            raise Refused("not-started", f"agent {state.id} has not been started yet")
        case "draining" | "failed" | "reaped":
            raise Refused(
                "ended", f"agent {state.id} is {state.phase} ({state.reason}): its one life is over"
            )


def _done(state: VmState, command: AgentDone) -> tuple[VmEvent, ...]:
    if state.session != command.session:
        raise Refused("not-registered", f"agent {state.id} is not registered by this session")
    if state.phase != "registered":
        return ()
    return (Draining(reason="job-complete", detail=_cut(command.detail), exit_code=command.exit_code),)


def _exit(state: VmState, command: NoteExit) -> tuple[VmEvent, ...]:
    code = "unknown" if command.exit_code is None else str(command.exit_code)
    detail = _cut(command.detail or f"ended with exit code {code}")
    match state.phase:
        case "starting" | "spawned":
            return (Failed(reason="exited-early", detail=detail, exit_code=command.exit_code),)
        case "registered":
            return (Failed(reason="exited", detail=detail, exit_code=command.exit_code),)
        case _:
            return ()


def _take_up(state: VmState, command: TakeUp) -> tuple[VmEvent, ...]:
    taken = TakenUp(coordinator=command.coordinator, evidence=_cut(command.evidence))
    match state.phase:
        case "starting":
            assert command.handle is not None, "a running machine is found with its handle"
            return (Spawned(handle=command.handle), taken)
        case "spawned" | "registered":
            return (taken,)
        case _:
            return ()


def _remove(state: VmState, command: RemoveAgent) -> tuple[VmEvent, ...]:
    verdict = Condemned(
        reason="operator", evidence=f"asked by {command.by}" + (" with force" if command.force else "")
    )
    match state.phase:
        case "reaped":
            raise Refused("ended", f"agent {state.id} is reaped already: nothing is left of it")
        case "registered" if not command.force:
            raise Refused(
                "busy", f"agent {state.id} is registered and may be working: use --force to end it anyway"
            )
        case "draining" | "failed":
            return ()
        case _:
            return (verdict, Draining(reason="operator", detail=f"removed by {command.by}"))


def _teardown_failed(state: VmState, detail: str, retry_in_s: float | None = None) -> tuple[VmEvent, ...]:
    if state.phase not in ("draining", "failed"):
        return ()
    tries = state.teardown_tries + 1
    if retry_in_s is None:
        retry_in_s = teardown_retry_s(tries)
    return (TeardownFailed(detail=_cut(detail), tries=tries, retry_in_s=retry_in_s),)


def teardown_retry_s(tries: int) -> float:
    """Return how long to wait after the n-th failed teardown; safe for any n."""
    return min(TEARDOWN_RETRY_MOST_S, TEARDOWN_RETRY_FIRST_S * 2.0 ** min(tries - 1, 16))


def _cut(text: str) -> str:
    return text if len(text) <= DETAIL_CHARACTERS else text[: DETAIL_CHARACTERS - 1] + "…"
