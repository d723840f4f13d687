"""Which process a microVM is, and the three questions about it that fail towards different sides.

The pid file outlives its process, numbers are recycled, and we may be root. So a number is believed only with the
process's start, its name and its root directory, all read while a pidfd is open: from then on the number cannot become
another's, and every signal goes through that pidfd.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from infra.drivers.firecracker.paths import BINARY
from infra.host_process import process

SLACK_S = 60.0
"""How much later than its pid file a process may have started: clocks step."""

Root = Literal["same", "other", "unreadable"]


class View(NamedTuple):
    """What was read of one process. `stat` None: there is none; "unreadable": it could not be told."""

    pid: int | None
    stat: process.Stat | Literal["unreadable"] | None = None
    name: str = ""
    root: Root = "unreadable"
    started_after_file_s: float | None = None  # None: nothing to compare with
    recorded_ticks: int | None = None
    launching: bool = False


State = Literal["gone", "unconfirmed", "launching", "confirmed"]


class Probe(NamedTuple):
    """What follows from it. `unconfirmed`: something runs there that is not provably the machine."""

    state: State
    pid: int | None
    start_ticks: int | None
    detail: str


def judge(view: View) -> Probe:
    """Return what the view proves. Pure."""
    pid, stat = view.pid, view.stat
    if pid is None:
        return Probe("gone", None, None, "no process is on record")
    if stat == "unreadable":
        return Probe("unconfirmed", pid, None, f"process {pid} cannot be read")
    if stat is None or stat.ended:
        return Probe("gone", pid, None, f"process {pid} has ended")
    ticks = stat.start_ticks
    if view.recorded_ticks not in (None, ticks):
        return Probe("gone", pid, ticks, f"number {pid} is another process now, started at tick {ticks}")
    if view.started_after_file_s is not None and view.started_after_file_s > SLACK_S:
        late = f"it started {view.started_after_file_s:.0f} s after the pid file was written"
        return Probe("gone", pid, ticks, f"number {pid} is another process now: {late}")
    if view.launching:
        return Probe("launching", pid, ticks, f"process {pid} is the jailer that becomes it")
    if view.name != BINARY:
        return Probe("unconfirmed", pid, ticks, f"process {pid} is called {view.name!r}, not {BINARY}")
    if view.root == "other":
        return Probe("unconfirmed", pid, ticks, f"process {pid} has another root directory")
    proof = "its root is the machine's chroot" if view.root == "same" else "its root cannot be read"
    return Probe("confirmed", pid, ticks, f"process {pid}, started at tick {ticks}: {proof}")


def may_signal(probe: Probe) -> bool:
    """Tell whether it may be signalled: fails towards no signal, which at worst leaves a machine running."""
    return probe.state in ("confirmed", "launching")


def may_delete(probe: Probe) -> bool:
    """Tell whether its files may go: fails towards keeping them, which at worst costs a chroot's disk space."""
    return probe.state == "gone"


def has_exited(probe: Probe, pidfd: int | None) -> bool:
    """Tell whether the machine is over: fails towards "still there". `pidfd` is of the probe's process."""
    if probe.state == "gone":
        return True
    return may_signal(probe) and pidfd is not None and process.pidfd_ended(pidfd)


def read_pid(pid_file: Path) -> int | None:
    """Return the number in a pid file, None when it is no file or no legal number: 0 is our own process group."""
    try:
        text = pid_file.read_text(errors="replace").strip()
    except OSError:
        return None
    pid = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0  # noqa: PLR2004
    return pid if process.legal(pid) else None


def look(
    pid: int | None,
    chroot: Path,
    *,
    recorded_ticks: int | None = None,
    recorded_root: tuple[int, int] | None = None,
    pid_file: Path | None = None,
    launching: bool = False,
) -> Probe:
    """Read one process and judge it. Call it while a pidfd of the number is open."""
    if pid is None:
        return judge(View(None))
    stat: process.Stat | Literal["unreadable"] | None
    try:
        stat = process.stat(pid)
    except OSError:
        stat = "unreadable"
    late = None
    if pid_file is not None and isinstance(stat, process.Stat):
        late = _started_after(stat.start_ticks, pid_file)
    view = View(
        pid=pid,
        stat=stat,
        name=name_of(pid),
        root=root_of(pid, chroot, recorded_root),
        started_after_file_s=late,
        recorded_ticks=recorded_ticks,
        launching=launching,
    )
    return judge(view)


@contextmanager
def held(pid: int | None) -> Iterator[int | None]:
    """Hold a pidfd of the process while it is looked at; None when there is no such process."""
    pidfd = process.open_pidfd(pid) if process.legal(pid) and pid is not None else None
    try:
        yield pidfd
    finally:
        if pidfd is not None:
            os.close(pidfd)


def name_of(pid: int) -> str:
    """Return the process's name, empty when it cannot be told. The name may hold parentheses."""
    with suppress(OSError):
        text = (process.PROC / str(pid) / "stat").read_text(errors="replace")
        return text[text.find("(") + 1 : text.rfind(")")]
    return ""


def root_of(pid: int, chroot: Path, recorded: tuple[int, int] | None = None) -> Root:
    """Compare the process's root directory with the chroot, by device and inode: the link's text always says `/`."""
    try:
        found = (process.PROC / str(pid) / "root").stat()
    except OSError:
        return "unreadable"
    wanted = inode(chroot) or recorded
    if wanted is None:
        return "unreadable"
    return "same" if (found.st_dev, found.st_ino) == wanted else "other"


def inode(path: Path) -> tuple[int, int] | None:
    """Return device and inode, None when they cannot be told."""
    with suppress(OSError):
        found = path.stat()
        return (found.st_dev, found.st_ino)
    return None


def _started_after(start_ticks: int, pid_file: Path) -> float | None:
    """Return how long after the file's last write the process started; negative: before it."""
    with suppress(OSError):
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
        started_at = time.clock_gettime(time.CLOCK_REALTIME) - age_s
        return started_at - pid_file.stat().st_mtime
    return None
