"""The lives in progress as far as metrics need them: states, reservations, and when each step was taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from events.envelope import Resources
from events.vm import Draining, Failed, Reaped, Registered, Spawned, SpawnStarted
from projections.vm import Phase

LIVES_MAX = 200_000
"""As many as a scaler's mailbox takes; further lives are counted when they begin and not followed."""

PHASES: dict[type, Phase] = {
    SpawnStarted: "starting",
    Spawned: "spawned",
    Registered: "registered",
    Draining: "draining",
    Failed: "failed",
    Reaped: "reaped",
}
"""The phase each fact leads to, without the fold's proof that no fact is missing; a test holds it against the fold."""

LIVE_PHASES: tuple[Phase, ...] = ("requested", "starting", "spawned", "registered", "draining", "failed")


@dataclass(slots=True)
class Life:
    """One machine whose life is not over; `scaler` and `backend` are label values."""

    scaler: str
    backend: str
    phase: Phase
    version: int
    bound: bool
    requests: Resources
    requested_at: datetime
    started_at: datetime | None = None


@dataclass(slots=True)
class Reserved:
    """What the lives of one scaler have requested, in all."""

    agents: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0

    def add(self, requests: Resources, sign: int) -> None:
        """Count one life in (1) or out (-1)."""
        self.agents += sign
        # Rounded, so that a million additions and subtractions of 0.1 end at the sum of the live set.
        self.cpus = round(self.cpus + sign * requests.cpus, 6)
        self.memory_bytes += sign * requests.memory_bytes


class Lives:
    """The lives in progress, bounded, with their counts kept up as they change. Not thread safe."""

    def __init__(self, lives_max: int = LIVES_MAX) -> None:
        self._lives_max = lives_max
        self._lives: dict[str, Life] = {}
        self._states: dict[tuple[str, str, Phase], int] = {}
        self._reserved: dict[tuple[str, str], Reserved] = {}

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, vm: str) -> Life | None:
        """Return the life, None if it is over, too many or was never told."""
        return self._lives.get(vm)

    def begin(self, vm: str, life: Life) -> bool:
        """Follow one more life; False when there are too many."""
        if len(self._lives) >= self._lives_max:
            return False
        self._lives[vm] = life
        self._count(life, 1)
        self._reserved.setdefault((life.scaler, life.backend), Reserved()).add(life.requests, 1)
        return True

    def move(self, vm: str, life: Life, phase: Phase) -> None:
        """Bring the life into another phase; `reaped` forgets it."""
        self._count(life, -1)
        life.phase = phase
        if phase != "reaped":
            self._count(life, 1)
            return
        del self._lives[vm]
        key = (life.scaler, life.backend)
        reserved = self._reserved[key]
        reserved.add(life.requests, -1)
        if not reserved.agents:
            del self._reserved[key]  # a scaler that is configured no more leaves nothing behind

    def clear(self) -> None:
        """Forget all of them."""
        self._lives.clear()
        self._states.clear()
        self._reserved.clear()

    def states(self) -> Iterator[tuple[tuple[str, str, Phase], int]]:
        """Yield (scaler, backend, phase) and how many lives are there."""
        yield from self._states.items()

    def reserved(self) -> Iterator[tuple[tuple[str, str], Reserved]]:
        """Yield (scaler, backend) and what its lives have requested."""
        yield from self._reserved.items()

    def _count(self, life: Life, by: int) -> None:
        key = (life.scaler, life.backend, life.phase)
        count = self._states.get(key, 0) + by
        if count:
            self._states[key] = count
        else:
            self._states.pop(key, None)
