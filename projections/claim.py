"""The fold of one claim code: whose it is, until when, and which key has spent it."""

from datetime import datetime

import msgspec

from events.claim import ClaimEvent, ClaimRedeemed, ClaimRegistered
from events.envelope import Recorded
from projections.vm import BrokenLog


class ClaimState(msgspec.Struct, frozen=True, kw_only=True):
    """One claim as the log has it; `redeemed_by` None: unspent."""

    version: int
    sequence: int
    vm: str
    scaler: str
    labels: tuple[str, ...]
    nats_url: str
    expires_at: datetime
    redeemed_by: str | None = None
    redeemed_at: datetime | None = None


def evolve(state: ClaimState | None, event: ClaimEvent, fact: Recorded) -> ClaimState:
    """Return the state after a fact of the claim.

    Raises:
        BrokenLog: a first fact that registers nothing, a second one that does, or a version that is not the next one.
    """
    if (state is None) != isinstance(event, ClaimRegistered) or fact.version != (
        state.version if state else 0
    ) + 1:
        raise BrokenLog(
            f"{fact.id} at sequence {fact.sequence} is {fact.tag}: a claim is registered once, and first"
        )
    match event:
        case ClaimRegistered(vm=vm, scaler=scaler, labels=labels, nats_url=nats_url, expires_at=expires_at):
            return ClaimState(
                version=fact.version,
                sequence=fact.sequence,
                vm=vm,
                scaler=scaler,
                labels=labels,
                nats_url=nats_url,
                expires_at=expires_at,
            )
        case ClaimRedeemed(public_key=public_key):
            assert state is not None, "checked above"
            return msgspec.structs.replace(
                state,
                version=fact.version,
                sequence=fact.sequence,
                redeemed_by=public_key,
                redeemed_at=fact.at,
            )


def fold(facts: tuple[Recorded, ...]) -> ClaimState | None:
    """Return the claim after all of its facts; None: there is none.

    Raises:
        BrokenLog: as `evolve`.
    """
    state: ClaimState | None = None
    for fact in facts:
        state = evolve(state, fact.event, fact)
    return state
