"""A thread that runs callbacks one after another, from a bounded queue; what a callback raises is said, never lost."""

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("fleetlog.nats")


class Delivery:
    """Runs what is put, in order, in one daemon thread. A full queue drops the newest, counts it and says so once.

    An exception is logged with `what` it happened in, and the next call is made all the same.
    """

    def __init__(self, what: str, *, limit: int) -> None:
        self.what = what
        self.dropped = 0
        self._limit = limit
        self._queue: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name=f"nats {what}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> bool:
        """Queue a call; False when it was dropped."""
        with self._changed:
            if self._closed:
                return False
            if len(self._queue) >= self._limit:
                self.dropped += 1
                first = self.dropped == 1
            else:
                self._queue.append(call)
                self._changed.notify_all()
                return True
        if first:
            _log.error(
                "%s: its callback is too slow, messages are dropped (limit %d)", self.what, self._limit
            )
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Make no further call; wait for the running one, unless it is the caller itself. Repeatable."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def drain(self, timeout_s: float = 5.0) -> None:
        """Let the waiting calls be made, within a bound, then close."""
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)
        self.close(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._queue:
                    self._changed.notify_all()
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._queue.popleft()
                self._busy = True
            try:
                call()
            except Exception:  # noqa: BLE001 - whatever the callback raises must not end the thread
                _log.exception("%s: its callback raised; the subscription goes on", self.what)


def report_stopped_follow(after: int, error: BaseException) -> None:
    """Say loudly that a follow of the log has stopped, and where: a fact is never skipped."""
    _log.critical(
        "the follow of the log stopped after sequence %d: %s: %s; nothing after it is seen until a restart",
        after,
        type(error).__name__,
        error,
        exc_info=error,
    )
