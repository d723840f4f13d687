"""Processes by proof: read what the kernel says of one, and signal only through a pidfd opened before the proof."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

PROC = Path("/proc")
PID_MAX = 2**22


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """The part of /proc/<pid>/stat that tells processes apart. Times are in clock ticks since boot."""

    state: str
    group: int
    session: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """Tell whether it only waits to be collected."""
        return self.state in "ZXx"


def boot_id() -> str:
    """Return the kernel's id of this boot: a process number means nothing under another."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def parse_stat(text: str) -> Stat | None:
    """Read a stat line; the name may hold spaces and parentheses. None when it is no such line."""
    fields = text[text.rfind(")") + 1 :].split()
    try:
        return Stat(
            state=fields[0], group=int(fields[2]), session=int(fields[3]), start_ticks=int(fields[19])
        )
    except (IndexError, ValueError):
        return None


def stat(pid: int) -> Stat | None:
    """Return what the kernel says of the process, None when there is none.

    Raises:
        OSError: it could not be read, which is no evidence of an end.
    """
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def legal(pid: object) -> bool:
    """Tell whether this is a process number that may be signalled: 0 and negatives name groups, 1 is init."""
    return isinstance(pid, int) and not isinstance(pid, bool) and 1 < pid <= PID_MAX


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, None when there is no such process."""
    assert legal(pid), f"not the number of a process we could have started: {pid!r}"
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        # EINVAL: a thread's number, which cannot be the process we started
        if error.errno == 22:  # noqa: PLR2004
            return None
        raise


def pidfd_ended(pidfd: int) -> bool:
    """Tell whether the process behind the pidfd has ended."""
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    return bool(waiter.poll(0))


def send(pidfd: int, number: signal.Signals) -> bool:
    """Signal the process behind the pidfd; False when it has ended.

    Raises:
        PermissionError: it lives and may not be signalled by us.
    """
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> bytes:
    """Return the process's arguments, empty when it has ended or is between two programs."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""


def executable(pid: int) -> str | None:
    """Return the path of the program it runs, None when that cannot be told."""
    with suppress(OSError):
        return str((PROC / str(pid) / "exe").readlink())
    return None


def bears(pid: int, cookie: str) -> bool:
    """Tell whether the process, or the one it descends from, was started with this cookie in its environment."""
    with suppress(OSError):
        return cookie.encode() in (PROC / str(pid) / "environ").read_bytes()
    return False


def all_pids() -> list[int]:
    """Return the numbers of all processes that we can see."""
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal() and legal(int(path.name))]
