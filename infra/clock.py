"""Time for real: the only place that reads the clocks for decisions, and the thread that wakes actors."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

logger = logging.getLogger(__name__)


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall clock, UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Return seconds of a clock that never steps."""
        return time.monotonic()


class ThreadTimers:
    """Wake-ups on one thread, by a heap. A callback must be quick: it tells an actor.

    One wake-up per key; replaced and cancelled entries leave the heap when their time comes, or when they are
    more than half of it.
    """

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, int, Callable[[], object]]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="timers", daemon=True)
        self._thread.start()

    def set(self, key: str, delay_s: float, call: Callable[[], object]) -> None:
        """Call `call` once after `delay_s` seconds, unless replaced or cancelled."""
        with self._changed:
            number = next(self._count)
            at_s = time.monotonic() + max(delay_s, 0.0)
            self._due[key] = (at_s, number, call)
            heapq.heappush(self._heap, (at_s, number, key))
            if len(self._heap) > 1024 and len(self._heap) > 2 * len(self._due):  # noqa: PLR2004 - half of it is stale
                self._heap = [(at, number, key) for key, (at, number, _) in self._due.items()]
                heapq.heapify(self._heap)
            if self._heap[0][1] == number:
                self._changed.notify()

    def cancel(self, key: str) -> None:
        """Forget the key's wake-up, if any."""
        with self._changed:
            self._due.pop(key, None)

    def stop(self) -> None:
        """End the thread; what was due is forgotten. Repeatable."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            call = self._next()
            if call is None:
                return
            try:
                call()
            except Exception:
                logger.exception("a wake-up raised")

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._stopping:
                wait_s = None
                if self._heap:
                    at_s, number, key = self._heap[0]
                    due = self._due.get(key)
                    if due is None or due[1] != number:
                        heapq.heappop(self._heap)
                        continue
                    wait_s = at_s - time.monotonic()
                    if wait_s <= 0:
                        heapq.heappop(self._heap)
                        del self._due[key]
                        return due[2]
                self._changed.wait(wait_s)
        return None
