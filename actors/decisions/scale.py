"""What provisioners are told with each step of a cloud machine's life: facts of the same batch. Pure."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from typing import NamedTuple

import msgspec

from actors.ports import NewFact
from events import subjects
from events.claim import ClaimRegistered
from events.envelope import Resources
from events.scale import Down, Up
from events.vm import Draining, Failed, Reaped, Reason, Requested, TeardownConfirmed, VmEvent
from projections.vm import VmState

BACKEND = "event"
"""The backend type whose machines only their provisioners can see."""

TARGETS_MOST = 4
"""Targets of one scaler: nine facts for each of a hundred agents stay under the 1,000 of an atomic batch."""

HANDLE = "event"
"""The driver's name in handles of accepted machines."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What an offer says beside the request: where the machine finds us, and for how long each side waits."""

    cluster: str
    nats_url: str
    claim_ttl_s: float = 300.0
    teardown_timeout_s: float = 600.0


class Last(NamedTuple):
    """The last fact of an aggregate."""

    version: int
    sequence: int


def claim_digest(code: str) -> str:
    """Return what a claim code is known by everywhere but in `scale.up`."""
    return sha256(code.encode()).hexdigest()


def offer(vm: str, life: Requested | VmState, terms: Terms, code: str, now: datetime) -> tuple[NewFact, ...]:
    """Return the facts that ask every target for a machine; they belong into the batch of `vm.spawn_started`.

    All targets get the same claim code: whichever machine shows it first becomes the agent.
    """
    labels = life.agent_labels or life.labels
    claim = ClaimRegistered(
        vm=vm,
        scaler=life.scaler,
        labels=labels,
        nats_url=terms.nats_url,
        expires_at=now + timedelta(seconds=terms.claim_ttl_s),
    )
    ups = [
        NewFact(
            aggregate=subjects.scale_up(target, life.scaler, vm),
            version=1,
            expected_sequence=0,
            event=Up(
                request_id=f"{vm}.up",
                agent=vm,
                scaler=life.scaler,
                target=target,
                cluster=terms.cluster,
                labels=labels,
                mandatory_labels=life.gate,
                resources=life.requests if life.limits == Resources() else life.limits,
                nats_url=terms.nats_url,
                claim_code=code,
                claim_expires_at=claim.expires_at,
                answer_by=now + timedelta(seconds=life.spawn_timeout_s),
                job=life.job,
                run=life.run,
            ),
        )
        for target in life.targets
    ]
    first = NewFact(aggregate=subjects.claim(claim_digest(code)), version=1, expected_sequence=0, event=claim)
    return (first, *ups)


def withdraw(state: VmState, events: tuple[VmEvent, ...], terms: Terms, now: datetime) -> tuple[NewFact, ...]:
    """Return the facts that tell the targets to end a machine, for the batch in which its life ends.

    None where nothing ends, where no target was ever asked for it, and for the target that has said by itself that
    nothing is left.
    """
    reason = next((event.reason for event in events if isinstance(event, Draining | Failed)), None)
    if reason is None or state.started_at is None or state.ended:
        return ()
    if any(isinstance(event, Reaped) for event in events):
        return ()
    confirmed = {event.target for event in events if isinstance(event, TeardownConfirmed)}
    left = [target for target in unconfirmed(state) if target not in confirmed]
    return tuple(_down(state, target, reason, terms, now, last=Last(0, 0)) for target in left)


def withdraw_again(
    state: VmState, offered: Mapping[str, Last], terms: Terms, now: datetime
) -> tuple[NewFact, ...]:
    """Return the facts that tell once more those targets that have not confirmed; `offered` is what each was told last."""
    reason = state.reason or "operator"
    return tuple(
        _down(state, target, reason, terms, now, last=offered.get(target, Last(0, 0)))
        for target in unconfirmed(state)
    )


def unconfirmed(state: VmState) -> tuple[str, ...]:
    """Return the targets that have yet to say that nothing is left."""
    return tuple(target for target in state.targets if target not in state.confirmed)


def answer_by(state: VmState, terms: Terms) -> datetime:
    """Return until when the last `scale.down` of a machine whose life is over is to be answered."""
    assert state.ended_at is not None, "only what has ended is withdrawn"
    return state.teardown_retry_at or state.ended_at + timedelta(seconds=terms.teardown_timeout_s)


def _down(state: VmState, target: str, reason: Reason, terms: Terms, now: datetime, *, last: Last) -> NewFact:
    accepted = state.handle.data if state.handle is not None else {}
    return NewFact(
        aggregate=subjects.scale_down(target, state.scaler, state.id),
        version=last.version + 1,
        expected_sequence=last.sequence,
        event=Down(
            request_id=f"{state.id}.down",
            agent=state.id,
            scaler=state.scaler,
            target=target,
            cluster=terms.cluster,
            reason=reason,
            offer=last.version + 1,
            answer_by=now + timedelta(seconds=terms.teardown_timeout_s),
            reference=str(accepted.get("reference", "")) if accepted.get("target") == target else "",
        ),
    )
