"""Take one machine down: ask, wait, end, confirm, and only then remove its traces."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.bare_metal.rundir import RunDirectory
from infra.drivers.bare_metal.sighting import Sighting, held
from infra.host_process import process
from infra.host_process.cgroup import Cgroup

_SLICE_S = 0.05
_LOOK_AGAIN_S = 0.01
_REMOVE_WAIT_S = 2.0


class Bounds(NamedTuple):
    """How long to wait after asking, and after ending."""

    grace_s: float
    kill_wait_s: float


class Prey:
    """The processes of one machine, each proven anew before each signal.

    With a cgroup: its members. The main process too when it got out of it, and its group. Without: the main
    process's group and whoever bears the machine's cookie.
    """

    def __init__(self, sighting: Sighting, cgroup: Cgroup | None, cookie: str | None) -> None:
        self._cgroup = cgroup
        self._cookie = cookie
        self._main = sighting.pid if sighting.main in ("alive", "launching") else None
        self._asked: set[int] = set()
        self._start_ticks = sighting.start_ticks
        outside = self._main is not None and self._main not in sighting.members
        self.scans = cgroup is None or outside

    def left(self) -> frozenset[int]:
        """Return the numbers of those still alive."""
        found: set[int] = set()
        if self._cgroup is not None and self._cgroup.populated():
            found |= self._cgroup.members()
        if self.scans:
            main_lives = self._main_lives()
            found |= {pid for pid in process.all_pids() if self._proven(pid, main_lives=main_lives)}
        return frozenset(found)

    def ask(self) -> None:
        """Ask each to end that was not asked yet: one that was just being forked is met the next time."""
        for pid in self.left() - self._asked:
            self._send(pid, signal.SIGTERM)
            self._send(pid, signal.SIGCONT)  # a stopped process would hear the question only then
            self._asked.add(pid)

    def end(self) -> list[str]:
        """Kill each that is left, one by one, and return why some could not be."""
        return [reason for pid in self.left() if (reason := self._send(pid, signal.SIGKILL))]

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is left; return whether."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if self._cgroup is not None and not self._cgroup.wait_empty(max(0.0, left_s)):
                return False
            if not self.scans or not self.left():
                return True
            if left_s <= 0:
                return False
            time.sleep(min(_LOOK_AGAIN_S, left_s))

    def _send(self, pid: int, number: signal.Signals) -> str:
        with held(pid) as pidfd:
            # Proven after the pidfd was opened: from here on the number cannot become another's.
            member = self._cgroup is not None and pid in self._cgroup.members()
            if pidfd is None or not (member or self._proven(pid, main_lives=self._main_lives())):
                return ""
            try:
                process.send(pidfd, number)
            except PermissionError:
                return f"process {pid} lives and may not be signalled by us: run as root or as its user"
        return ""

    def _main_lives(self) -> bool:
        if self._main is None:
            return False
        stat = process.stat(self._main)
        return stat is not None and not stat.ended and stat.start_ticks == self._start_ticks

    def _proven(self, pid: int, *, main_lives: bool) -> bool:
        try:
            stat = process.stat(pid)
        except OSError:
            return False
        if stat is None or stat.ended:
            return False
        if main_lives and self._main in (pid, stat.group):
            return True
        return self._cookie is not None and process.bears(pid, self._cookie)


def end_all(
    sighting: Sighting, cgroup: Cgroup | None, cookie: str | None, bounds: Bounds, abort: Abort
) -> str:
    """End every process of the machine and return what it took.

    Raises:
        DriverError: some are left, or `abort` was set while they were given time.
    """
    prey = Prey(sighting, cgroup, cookie)
    if not prey.left():
        return "no process was left"
    began = time.monotonic()
    prey.ask()
    while not prey.wait(_SLICE_S):
        if abort.is_set():
            raise DriverError("aborted", "called off while it was given time to end", transient=True)
        if time.monotonic() - began >= bounds.grace_s:
            _kill(prey, cgroup, bounds.kill_wait_s)
            return f"all processes ended, SIGKILL {bounds.grace_s:g} s after SIGTERM"
        prey.ask()
    return f"all processes ended {time.monotonic() - began:.2f} s after SIGTERM"


def _kill(prey: Prey, cgroup: Cgroup | None, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    reasons: list[str] = []
    while True:
        if cgroup is None or not cgroup.kill():
            if cgroup is not None:
                cgroup.freeze()
            reasons = prey.end()
        elif prey.scans:
            reasons = prey.end()
        if prey.wait(_SLICE_S):
            return
        if time.monotonic() >= deadline:
            left = sorted(prey.left())
            why = (
                "; ".join(reasons) or "they may be stuck in the kernel: see their state in /proc/<pid>/stack"
            )
            raise DriverError("still-there", f"processes {left} outlive SIGKILL: {why}", transient=True)


def remove_traces(
    run: RunDirectory, cgroup: Cgroup | None, v1: Iterable[str], keep_output: Callable[[], None]
) -> None:
    """Remove cgroups and the directory; the directory last, as it is what a repeated teardown goes by.

    Raises:
        DriverError: some of it is left.
    """
    for directory in [*([cgroup] if cgroup is not None else []), *(Cgroup(Path(path)) for path in v1)]:
        if not directory.remove(_REMOVE_WAIT_S):
            raise DriverError(
                "still-there", f"{directory.path} cannot be removed: a process is in it", transient=True
            )
    try:
        keep_output()
        run.remove()
    except OSError as error:
        raise DriverError("still-there", f"{run.path} cannot be removed: {error}", transient=True) from error
