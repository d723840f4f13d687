"""Facts as they come, for one reader: a bounded queue between the log's thread and the command."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from actors.ports import Subscription
from events.envelope import Recorded

_FACTS_MAX = 10_000
_LOOK_S = 0.2


class _Follow(Subscription, Protocol):
    @property
    def failure(self) -> BaseException | None:
        """What stopped it."""
        ...


Follows = Callable[[int, Callable[[Recorded], None]], _Follow]


class LiveFacts:
    """Facts after a sequence, until closed. A slow reader slows the follow; nothing is skipped."""

    def __init__(self, follow: Follows, after: int) -> None:
        self._facts: queue.Queue[Recorded] = queue.Queue(_FACTS_MAX)
        self._closed = threading.Event()
        self._follow = follow(after, self._take)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._follow.stop()

    def next(self, timeout_s: float) -> Recorded | None:
        """Return the next fact, None when none came in time.

        Raises:
            BrokenLog and the like: what stopped the follow.
        """
        try:
            return self._facts.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            if self._follow.failure is not None:
                raise self._follow.failure from None
            return None

    def _take(self, fact: Recorded) -> None:
        while not self._closed.is_set():
            try:
                self._facts.put(fact, timeout=_LOOK_S)
            except queue.Full:
                continue
            return
