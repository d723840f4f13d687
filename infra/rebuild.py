"""`fleetlog rebuild`: drops the read models and makes them again from the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic, sleep

import msgspec

from actors.ports import Clock, Journal, Rows
from actors.projector import Projector, ProjectorOptions, ProjectorStatus
from projections.view import View


class RebuildFailed(Exception):  # noqa: N818 - one of the command's outcomes
    """The read model could not be brought back; the message has the projector's reason."""


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """One view's rebuild: up to which sequence, in how many seconds."""

    view: str
    sequence: int
    took_s: float


Progress = Callable[[str, int, int], None]
"""View, facts done, facts there are."""

POLL_S = 0.1


def rebuild(
    journal: Journal,
    rows: Rows,
    clock: Clock,
    views: Iterable[View],
    *,
    progress: Progress = lambda _view, _done, _all: None,
    stall_s: float = 60.0,
) -> tuple[Rebuilt, ...]:
    """Empty each view and bring it to the end of the log as of now.

    A running coordinator's projector may do the work instead: it finds its checkpoint gone and starts over.
    Either way this returns when the view is there.

    Raises:
        RebuildFailed: the view is parked, or nothing moved for `stall_s` seconds.
        RowsUnavailable, RowsRefused, LogUnavailable: as the ports say.
    """
    return tuple(_rebuild(journal, rows, clock, view, progress=progress, stall_s=stall_s) for view in views)


def _rebuild(
    journal: Journal, rows: Rows, clock: Clock, view: View, *, progress: Progress, stall_s: float
) -> Rebuilt:
    began = moved_at = monotonic()
    rows.checkpoint(view)  # refuses rows of a newer fleetlog before anything is dropped
    rows.reset(view)
    end = journal.headroom().last_sequence
    projector = Projector(journal, rows, view, clock, options=ProjectorOptions(retry_max_s=1.0))
    projector.start()
    try:
        done = -1
        while done < end:
            status = projector.status()
            _check(status)
            now = rows.checkpoint(view)
            if now != done:
                done, moved_at = now, monotonic()
                progress(view.name, min(done, end), end)
            elif monotonic() - moved_at > stall_s:
                raise RebuildFailed(
                    f"view {view.name} stands at {done} of {end} for {stall_s:.0f} s ({status.stage}: {status.reason})"
                )
            if done < end:
                sleep(POLL_S)
    finally:
        projector.stop()
    return Rebuilt(view=view.name, sequence=done, took_s=monotonic() - began)


def _check(status: ProjectorStatus) -> None:
    if status.stage == "parked":
        where = "" if status.parked_at is None else f" at sequence {status.parked_at}"
        raise RebuildFailed(f"view {status.view} stopped{where}: {status.reason}")
