"""Threads beside the NATS thread: a fixed number of them over one bounded queue, and no message waits unseen."""

import logging
import queue
import threading
from collections.abc import Callable

_LOG = logging.getLogger("fleetlog.doors")
_STOP_WAIT_S = 5.0

Work = Callable[[], None]


class Workers:
    """Runs work on `threads` threads, in order of arrival; refuses when `waiting_max` pieces wait already."""

    def __init__(self, name: str, *, threads: int, waiting_max: int) -> None:
        self._waiting: queue.Queue[Work | None] = queue.Queue(waiting_max)
        self._stopping = threading.Event()
        self._threads = tuple(
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        )
        for thread in self._threads:
            thread.start()

    def offer(self, work: Work) -> bool:
        """Take the work and return at once; False when there is no room, or when stopping."""
        if self._stopping.is_set():
            return False
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Drop what waits and let the threads end after what they are at, waiting for them a few seconds."""
        self._stopping.set()
        for _ in self._threads:
            # Room may be short; the threads look at `_stopping` after each piece, so no mark is needed then.
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                break
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            work = self._waiting.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # noqa: BLE001 - logged with its trace, and the thread lives on
                # The thread serves every agent: one message that hits a bug of ours must not take it away.
                _LOG.exception("a message of an agent could not be handled: this is a bug in fleetlog")
