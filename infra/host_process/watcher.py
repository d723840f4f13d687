"""Learns of every end at once, through pidfds, in one thread; collects the exit codes of our own children."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from actors.driver import Exit
from infra.host_process import process

log = logging.getLogger(__name__)
_EVENTS = 256


@dataclass
class Watched:
    """One process we hold a pidfd of. `end` is set once, before `over`."""

    vm: str
    pid: int
    start_ticks: int
    pidfd: int
    end: Exit | None = None
    over: threading.Event = field(default_factory=threading.Event)
    tell: Callable[[Exit], None] | None = None


class Watcher:
    """One thread, called after `name`, for all processes; started with the first one. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._by_vm: dict[str, Watched] = {}
        self._by_fd: dict[int, Watched] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, vm: str, pid: int, start_ticks: int, pidfd: int) -> Watched:
        """Take the pidfd over, and watch it. An earlier one of the same machine is let go."""
        watched = Watched(vm=vm, pid=pid, start_ticks=start_ticks, pidfd=pidfd)
        with self._lock:
            if self._closed:
                os.close(pidfd)
                raise RuntimeError("the driver is closed")
            self.forget(vm)
            self._by_vm[vm] = watched
            self._by_fd[pidfd] = watched
            self._epoll.register(pidfd, select.EPOLLIN)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-watch", daemon=True)
                self._thread.start()
        return watched

    def get(self, vm: str) -> Watched | None:
        """Return what is held for this machine."""
        with self._lock:
            return self._by_vm.get(vm)

    def machines(self) -> list[str]:
        """Return the machines that are held."""
        with self._lock:
            return list(self._by_vm)

    def on_end(self, vm: str, tell: Callable[[Exit], None]) -> bool:
        """Call `tell` once when it ends, at once if it has; False when it is not held."""
        with self._lock:
            watched = self._by_vm.get(vm)
            if watched is None:
                return False
            if watched.end is None:
                watched.tell = tell
                return True
            end = watched.end
        tell(end)
        return True

    def forget(self, vm: str) -> None:
        """Let go of a machine, telling nobody any more; its process is collected if it has ended. Repeatable."""
        with self._lock:
            watched = self._by_vm.pop(vm, None)
            if watched is None:
                return
            if watched.end is None:
                collect(watched.pidfd)
            self._drop(watched)

    def close(self) -> None:
        """End the thread and let go of all; the processes run on. Repeatable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._stop, 1)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            for vm in list(self._by_vm):
                self.forget(vm)
            self._epoll.close()
            os.close(self._stop)

    def _run(self) -> None:
        while not self._closed:
            for fd, _ in self._epoll.poll(maxevents=_EVENTS):
                self._ended(fd)

    def _ended(self, fd: int) -> None:
        with self._lock:
            watched = self._by_fd.get(fd)
            # The number of a closed pidfd may be another's by now: ask it again before believing the event.
            if watched is None or not process.pidfd_ended(fd):
                return
            known, code = collect(fd)
            watched.end = Exit(
                exit_code=code, detail=describe(code) if known else "ended; it was not our child"
            )
            self._drop(watched, close=False)
            watched.over.set()
            tell, watched.tell = watched.tell, None
        if tell is not None:
            try:
                tell(watched.end)
            except Exception:
                log.exception("telling the end of %s failed", watched.vm)

    def _drop(self, watched: Watched, *, close: bool = True) -> None:
        if self._by_fd.pop(watched.pidfd, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(watched.pidfd)
        if close and watched.pidfd >= 0:
            os.close(watched.pidfd)
            watched.pidfd = -1


def collect(pidfd: int) -> tuple[bool, int | None]:
    """Collect an ended child; return whether it was ours to collect, and its exit code, negative for a signal."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return False, None
    if result is None:
        return True, None
    return True, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def describe(code: int | None) -> str:
    """Return an exit code in words."""
    if code is None:
        return "ended; the exit code could not be collected"
    return f"ended by signal {-code}" if code < 0 else f"exited with code {code}"
