"""One thing at a time with each machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from actors.driver import Abort
from actors.errors import DriverError

_SLICE_S = 0.02


class CalledOff:
    """An abort that somebody else can set as well."""

    def __init__(self, outer: Abort) -> None:
        self._outer = outer
        self._own = threading.Event()

    def set(self) -> None:
        """Call it off."""
        self._own.set()

    def is_set(self) -> bool:
        """Tell whether either was."""
        return self._own.is_set() or self._outer.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until either is called off; return whether."""
        left_s = float("inf") if timeout is None else timeout
        while not self.is_set() and left_s > 0:
            self._own.wait(min(_SLICE_S, left_s))
            left_s -= _SLICE_S
        return self.is_set()


class _Turn:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.spawn: CalledOff | None = None


class Turns:
    """A lock per machine, there only while somebody wants it. A teardown calls a spawn off and waits for its end."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._lock = threading.Lock()

    @contextmanager
    def spawning(self, vm: str, abort: Abort) -> Iterator[CalledOff]:
        """Have the machine for a spawn; yields the abort to go by."""
        called_off = CalledOff(abort)
        with self._taken(vm, timeout_s=60.0) as turn:
            turn.spawn = called_off
            try:
                yield called_off
            finally:
                turn.spawn = None

    @contextmanager
    def ending(self, vm: str, timeout_s: float = 60.0) -> Iterator[None]:
        """Have the machine for its teardown, calling off a spawn that is under way.

        Raises:
            DriverError: whoever has it did not let go in time.
        """
        with self._taken(vm, timeout_s):
            yield

    @contextmanager
    def _taken(self, vm: str, timeout_s: float) -> Iterator[_Turn]:
        with self._lock:
            turn = self._turns.setdefault(vm, _Turn())
            turn.users += 1
            if turn.spawn is not None:
                turn.spawn.set()
        try:
            if not turn.lock.acquire(timeout=timeout_s):
                raise DriverError("still-there", f"{vm} is still being worked on", transient=True)
            try:
                yield turn
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.users -= 1
                if turn.users == 0:
                    self._turns.pop(vm, None)
