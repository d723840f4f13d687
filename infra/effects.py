"""Where slow work runs: threads beside the actors', bounded in number and in what may wait for them."""

import logging
import queue
import threading
from collections.abc import Callable

from actors.errors import Refused

logger = logging.getLogger(__name__)


class ThreadEffects:
    """`width` daemon threads over one queue of at most `waiting` pieces of work."""

    def __init__(self, name: str, *, width: int, waiting: int = 20_000) -> None:
        self._name = name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=waiting)
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(width)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` soon on some thread.

        Raises:
            Refused: the queue is full (code `overloaded`).
        """
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            message = f"{self._queue.maxsize} pieces of work wait for the {self._name} threads already: try again later"
            raise Refused("overloaded", message) from None

    def stop(self, timeout_s: float = 5.0) -> None:
        """Drop what waits and end the threads; one that is busy is left behind, a daemon. Repeatable."""
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._queue.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            if work is None:
                return
            try:
                work()
            except Exception:
                logger.exception("work in the %s pool raised; it should have told its outcome", self._name)
