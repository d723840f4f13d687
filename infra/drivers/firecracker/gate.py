"""How many machines of this process come up at once: the oldest waiter first, never more than the width."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from actors.driver import Abort
from actors.errors import DriverError

_SLICE_S = 0.02


class Gate:
    """A first-come, first-served bound. Four at once give nearly all of a host's throughput, and each its speed."""

    def __init__(self, width: int) -> None:
        assert width > 0
        self._free = width
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def passed(self, abort: Abort) -> Iterator[None]:
        """Hold one place, after waiting for it.

        Raises:
            DriverError: called off while waiting.
        """
        self._enter(abort)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, abort: Abort) -> None:
        turn = threading.Event()
        with self._lock:
            if self._free > 0 and not self._waiting:
                self._free -= 1
                return
            self._waiting.append(turn)
        while not turn.wait(_SLICE_S):
            if not abort.is_set():
                continue
            with self._lock:
                if not turn.is_set():
                    self._waiting.remove(turn)
                    break
            self._leave()  # its turn came in the same moment
            break
        else:
            return
        raise DriverError("aborted", "called off while others were starting", transient=True)

    def _leave(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1
