"""What a fact says, in a few words for people: one line of a timeline."""

import msgspec

from events.allocator import AddressLeased
from events.backend import DrainStarted, Paused, Resumed, SlotTaken
from events.claim import ClaimRedeemed, ClaimRegistered
from events.codec import AnyEvent, public
from events.coordinator import ConfigApplied, GlobalSlotTaken, Started, Stopped
from events.demand import Placed
from events.envelope import Recorded, Unknown
from events.scale import Down, Up
from events.vm import (
    Adopted,
    Condemned,
    ConfigAcked,
    Draining,
    Failed,
    Reaped,
    Registered,
    Requested,
    Spared,
    Spawned,
    SpawnStarted,
    TakenUp,
    TeardownConfirmed,
    TeardownFailed,
)


def said(fact: Recorded) -> str:
    """Return what the fact says; a fact of a newer fleetlog only that it is one."""
    if isinstance(fact.event, Unknown):
        return "a fact of a newer fleetlog"
    return _said(fact.event)


def fact_json(fact: Recorded) -> dict[str, object]:
    """Return the fact as one JSON object: the envelope, and the event's fields under `event`."""
    if isinstance(fact.event, Unknown):
        event = msgspec.json.decode(fact.event.raw)
    else:
        event = msgspec.to_builtins(public(fact.event))
    return {
        "sequence": fact.sequence,
        "id": fact.id,
        "aggregate": fact.aggregate,
        "version": fact.version,
        "at": msgspec.to_builtins(fact.at),
        "tag": fact.tag,
        "writer": fact.writer,
        "epoch": fact.epoch,
        "cause": fact.cause,
        "correlation": fact.correlation,
        "event": event,
    }


def _said(event: AnyEvent) -> str:
    match event:
        case Requested(scaler=scaler, labels=labels, owner=owner, job=job):
            wanted = f"{scaler} [{', '.join(labels)}] on {owner}"
            return f"{wanted} for job {job}" if job else wanted
        case SpawnStarted():
            return "its turn came"
        case Spawned(handle=handle):
            return f"runs ({handle.driver})"
        case Registered(agent_version=version, facts=facts):
            known = ", ".join(part for part in (version, facts.get("os", ""), facts.get("arch", "")) if part)
            return f"its agent came ({known})" if known else "its agent came"
        case ConfigAcked():
            return "has its configuration"
        case (
            Draining(reason=reason, detail=detail, exit_code=code)
            | Failed(reason=reason, detail=detail, exit_code=code)
        ):
            return _ending(reason, detail, code)
        case TeardownFailed(detail=detail, tries=tries, retry_in_s=wait_s):
            return f"try {tries}: {detail}; again in {wait_s:g} s"
        case TeardownConfirmed(target=target, evidence=evidence):
            return f"{target}: {evidence}" if evidence else target
        case Reaped(reason=reason, evidence=evidence):
            return f"{reason}; {evidence}" if evidence else reason
        case TakenUp(coordinator=by, evidence=evidence):
            return f"by {by}: {evidence}"
        case Adopted(owner=owner):
            return f"now by {owner}"
        case Condemned(reason=reason, evidence=evidence):
            return f"{reason}: {evidence}"
        case Spared(evidence=evidence):
            return evidence
        case _:
            return _said_of_others(event)


def _said_of_others(
    event: SlotTaken
    | Paused
    | DrainStarted
    | Resumed
    | AddressLeased
    | Started
    | ConfigApplied
    | GlobalSlotTaken
    | Stopped
    | Placed
    | ClaimRegistered
    | ClaimRedeemed
    | Up
    | Down,
) -> str:
    match event:
        case SlotTaken(vm=vm) | GlobalSlotTaken(vm=vm):
            return f"for {vm}"
        case AddressLeased(vm=vm, address=address):
            return f"{address} for {vm}"
        case Paused(by=by) | DrainStarted(by=by) | Resumed(by=by):
            return f"by {by}"
        case Started(host=host, pid=pid, version=version):
            return f"on {host}, pid {pid}, version {version}"
        case ConfigApplied(digest=digest, global_max_agents=most, scalers=scalers):
            return f"{len(scalers)} scalers, at most {most} agents, digest {digest[:12]}"
        case Stopped(reason=reason):
            return reason
        case Placed(vms=vms, labels=labels, job=job):
            placed = f"[{', '.join(labels)}] -> {', '.join(vms)}"
            return f"job {job}: {placed}" if job else placed
        case ClaimRegistered(vm=vm):
            return f"for {vm}"
        case ClaimRedeemed(vm=vm, public_key=key):
            return f"by {vm}, for the key {key}"
        case Up(target=target, scaler=scaler, labels=labels):
            return f"{target} is to start one for {scaler} [{', '.join(labels)}]"
        case Down(target=target, reason=reason, offer=offer):
            return f"{target} is to end it: {reason}" + (f", asked {offer} times" if offer > 1 else "")


def _ending(reason: str, detail: str, code: int | None) -> str:
    parts = [reason]
    if code is not None:
        parts.append(f"exit code {code}" if code >= 0 else f"signal {-code}")
    if detail:
        parts.append(detail)
    return "; ".join(parts)
