"""What /proc says about processes we started, or that an earlier run of ours left behind."""

import contextlib
import fcntl
import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_START_TICKS_AFTER_NAME = 19


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone or a zombie.

    With the pid this names a process for as long as the machine runs: a recycled number has another start.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[_START_TICKS_AFTER_NAME])


def processes_marked(mark: str, user: int) -> list[int]:
    """Return the live processes of a user whose command line carries the mark.

    The command line is used because every process may read it; the open files of another user's processes need
    a right that root inside a container often lacks.
    """
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == user and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def signal_marked(pid: int, mark: str, number: signal.Signals) -> bool:
    """Signal a process if it still carries the mark.

    The pidfd is opened before the check and used after it, so the number cannot be recycled in between.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if mark.encode() not in (_PROC / str(pid) / "cmdline").read_bytes():
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, FileNotFoundError):
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Take an exclusive lock on a file and return its descriptor; None when another process has it.

    The lock lives as long as any process holds a copy of the descriptor: handed to a child, it proves that the
    child (or a child of it) still runs, whatever became of us.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
