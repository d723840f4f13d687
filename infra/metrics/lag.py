"""How far views are behind the log, also when their projectors have stopped and say nothing new."""

from collections.abc import Callable, Iterable

import msgspec

from actors.projector import ProjectorStatus, Stage


class ViewLag(msgspec.Struct, frozen=True, kw_only=True):
    """One view. `lag_s` is how long it has been behind, 0 when level; `reason` says why it waits or is parked."""

    view: str
    stage: Stage
    sequence: int
    lag_facts: int
    lag_s: float
    reason: str = ""
    parked_at: int | None = None


class ProjectionLag:
    """Measures lag against the log's own end and our own clock.

    A parked or waiting projector hears of no new facts, so that what it says of itself stands still while the log
    goes on. Called by one thread.
    """

    def __init__(
        self,
        statuses: Callable[[], Iterable[ProjectorStatus]],
        last_sequence: Callable[[], int],
        monotonic_s: Callable[[], float],
    ) -> None:
        """Take where projectors and the log are asked; both may raise, and the look then fails as a whole."""
        self._statuses = statuses
        self._last_sequence = last_sequence
        self._monotonic_s = monotonic_s
        self._level_at_s: dict[str, float] = {}  # when the view was last seen level with the log

    def look(self) -> tuple[ViewLag, ...]:
        """Return every view as of now."""
        # The end of the log first: a fact that is appended and projected in between is no lag.
        end = self._last_sequence()
        now_s = self._monotonic_s()
        return tuple(self._lag(status, end, now_s) for status in self._statuses())

    def _lag(self, status: ProjectorStatus, end: int, now_s: float) -> ViewLag:
        lag_facts = max(0, max(end, status.head) - status.sequence)
        if lag_facts == 0:
            self._level_at_s[status.view] = now_s
        behind_s = now_s - self._level_at_s.setdefault(status.view, now_s)
        return ViewLag(
            view=status.view,
            stage=status.stage,
            sequence=status.sequence,
            lag_facts=lag_facts,
            lag_s=round(max(behind_s, status.lag_s), 3) if lag_facts else 0.0,
            reason=status.reason,
            parked_at=status.parked_at,
        )
