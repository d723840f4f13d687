"""What failed lately, by scaler: a bounded ring of failures and what it says about a window of time."""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec

from events.envelope import Recorded
from events.vm import Failed
from projections.vm import VmState

RING_RECORDS = 256
"""How many failures a window looks at; the oldest make room."""


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One `vm.failed`. `bound`: a job was waiting for this very machine."""

    sequence: int
    at: datetime
    vm: str
    scaler: str
    backend: str
    bound: bool
    reason: str
    detail: str


class ScalerFailures(msgspec.Struct, frozen=True, kw_only=True):
    """A scaler's failures within a window; backend, detail and time are those of the latest."""

    scaler: str
    backend: str
    bound: int
    unbound: int
    last_detail: str
    last_at: datetime


def failure(vm: VmState, event: Failed, fact: Recorded) -> FailureRow:
    """Return the record of one failed machine."""
    return FailureRow(
        sequence=fact.sequence,
        at=fact.at,
        vm=vm.id,
        scaler=vm.scaler,
        backend=vm.backend,
        bound=vm.job is not None,
        reason=event.reason,
        detail=event.detail,
    )


def evolve(ring: tuple[FailureRow, ...], row: FailureRow) -> tuple[FailureRow, ...]:
    """Return the ring with one more record, without its oldest when it is full."""
    return (*ring[-(RING_RECORDS - 1) :], row)


def window(ring: Iterable[FailureRow], now: datetime, length: timedelta) -> dict[str, ScalerFailures]:
    """Return the failures of the last `length`, by scaler; a record exactly that old still counts.

    The latest is by time, of equal ones the one recorded later.
    """
    found: dict[str, ScalerFailures] = {}
    for row in ring:
        if row.at < now - length:
            continue
        seen = found.get(row.scaler)
        bound, unbound = (seen.bound, seen.unbound) if seen else (0, 0)
        latest = seen is None or row.at >= seen.last_at
        found[row.scaler] = ScalerFailures(
            scaler=row.scaler,
            backend=row.backend if seen is None or latest else seen.backend,
            bound=bound + row.bound,
            unbound=unbound + (not row.bound),
            last_detail=row.detail if seen is None or latest else seen.last_detail,
            last_at=row.at if seen is None or latest else seen.last_at,
        )
    return found
