"""The ports of one simulated process: time, chance, queues and crash points that move only when they are told to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)


class Crashed(BaseException):
    """The process is gone: raised at a crash point, past every handler."""


class VirtualClock:
    """Time that moves when the simulation says so."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed_s)

    def monotonic_s(self) -> float:
        return self.elapsed_s


class VirtualTimers:
    """Wake-ups of one process, fired by the simulation."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.due: dict[str, tuple[float, Callable[[], object]]] = {}

    def set(self, key: str, delay_s: float, call: Callable[[], object]) -> None:
        self.due[key] = (self._clock.elapsed_s + delay_s, call)

    def cancel(self, key: str) -> None:
        self.due.pop(key, None)

    def next_at(self) -> float | None:
        return min((at for at, _ in self.due.values()), default=None)

    def fire(self) -> bool:
        for key, (at, call) in sorted(self.due.items(), key=lambda item: item[1][0]):
            if at <= self._clock.elapsed_s:
                del self.due[key]
                call()
                return True
        return False


class Queue:
    """Steps of one source; they stay in order among themselves."""

    def __init__(self) -> None:
        self.steps: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.steps.append(work)

    def run(self) -> bool:
        if not self.steps:
            return False
        self.steps.popleft()()
        return True


class SeededIds:
    """Ids of a seed."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._count = 0

    def vm(self, at: datetime) -> str:
        self._count += 1
        return f"a-{int(at.timestamp())}-{self._count:05d}-{self._chance.getrandbits(16):04x}"

    def random(self) -> str:
        return f"{self._chance.getrandbits(128):032x}"


class NoAccess:
    """Environment without a credential: nobody connects here."""

    def environment(self, vm: str, labels: tuple[str, ...]) -> dict[str, str]:
        return {"FLEETLOG_AGENT_ID": vm, "FLEETLOG_AGENT_LABELS": ",".join(labels)}


class NoLink:
    """Agents hear nothing; the driver's teardown reaches them."""

    def stop(self, vm: str, reason: str, grace_s: float) -> None:
        pass


class CrashingPoints:
    """Dies at the n-th pass of any point, or never."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.bugs_left: int | None = None  # raises an ordinary exception at the n-th pass: a bug in an actor
        self.died = False
        self.seen: set[str] = set()

    def reach(self, name: str) -> None:
        self.seen.add(name)
        if self.died:
            raise Crashed
        if self.bugs_left is not None and name.endswith("append"):
            self.bugs_left -= 1
            if self.bugs_left == 0:
                raise RuntimeError("a bug, injected")
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.died = True
                raise Crashed
