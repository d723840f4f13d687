"""Reads what only its owner knows, every few seconds, each source on a thread of its own, and publishes it or says it is down."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from infra.metrics.fleet_metrics import STALE_AFTER_S
from infra.metrics.readings import Reading

_log = logging.getLogger("fleetlog.metrics")

PERIOD_S = 2.0

FIRST_S = 2.0
"""A health check that comes before the first answers would call a sound coordinator degraded."""

T = TypeVar("T")


class Publisher(Protocol):
    """Where figures go; `FleetMetrics` is one."""

    def publish(self, source: str, readings: Iterable[Reading] | None) -> None:
        """Replace the figures of a source; None: it cannot be read."""
        ...


class Source(Generic[T]):
    """Something to read, what it says in figures, and what it said last.

    `read` may block and may raise; a thread of its own waits for it.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        readings: Callable[[T], Iterable[Reading]],
        *,
        stale_after_s: float = STALE_AFTER_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._read = read
        self._readings = readings
        self._stale_after_s = stale_after_s
        self._monotonic_s = monotonic_s
        self._last: tuple[float, T] | None = None
        self._down = False

    def latest(self) -> T | None:
        """Return what it said last, without waiting; None when it could not be read, or not for a while."""
        last = self._last
        if last is None or self._monotonic_s() - last[0] > self._stale_after_s:
            return None
        return last[1]

    def sample(self, publisher: Publisher) -> None:
        """Read and publish; what goes wrong takes this source's figures away, and is said once per outage."""
        try:
            value = self._read()
            readings = list(self._readings(value))
            publisher.publish(self.name, readings)
        except Exception as error:  # noqa: BLE001 - whatever it is, stale figures must not stand
            self._last = None
            publisher.publish(self.name, None)
            if not self._down:
                _log.warning("no figures from %s: %s: %s", self.name, type(error).__name__, error)
            self._down = True
            return
        self._last = (self._monotonic_s(), value)
        if self._down:
            _log.info("figures from %s are back", self.name)
        self._down = False


class Sampler:
    """Samples its sources until stopped. One that hangs holds up no other, and its figures go stale and away."""

    def __init__(
        self, publisher: Publisher, sources: Sequence[Source[Any]], *, period_s: float = PERIOD_S
    ) -> None:
        assert len({source.name for source in sources}) == len(sources), "two sources have the same name"
        self._publisher = publisher
        self._period_s = period_s
        self._stopping = threading.Event()
        self._asked = threading.Semaphore(0)  # released once by each source
        self._sources = tuple(sources)
        self._threads = [
            threading.Thread(target=self._run, args=(source,), name=f"sample {source.name}", daemon=True)
            for source in sources
        ]

    def start(self, first_s: float = FIRST_S) -> None:
        """Begin, once, and return when every source has answered or failed, at most after `first_s` seconds.

        Until its first answer a source is down.
        """
        for source in self._sources:
            self._publisher.publish(source.name, None)
        for thread in self._threads:
            thread.start()
        deadline_s = time.monotonic() + first_s
        for _ in self._sources:
            self._asked.acquire(timeout=max(0.0, deadline_s - time.monotonic()))

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End; return whether all threads did within `timeout_s`. One that waits for its source dies with the process.

        Repeatable.
        """
        self._stopping.set()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, source: Source[Any]) -> None:
        source.sample(self._publisher)
        self._asked.release()
        while not self._stopping.wait(self._period_s):
            source.sample(self._publisher)
