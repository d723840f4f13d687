"""Start one process that is in its cgroup and on record before it becomes the agent."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.bare_metal.rundir import RunDirectory
from infra.host_process import process

# The process writes its own number down, joins its cgroups, sees that nobody tears it down already, and becomes the
# agent. It stays the same process throughout. Only builtins: a fork here would be a process of its own.
LAUNCHER = (
    'echo $$ >"$0/live/pid" || exit 125; '
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit 125; shift; done; shift; '
    '[ -e "$0/live/pid" ] || exit 125; exec "$@"'
)
TITLE = "fleetlog-bare-metal-nursery"
_MARKS = (LAUNCHER.encode(), TITLE.encode())
_LOOK_AGAIN_S = 0.0002
_HEAD_BYTES = 256  # as much as the kernel looks at
_NOT_JOINED = 125
_NOT_EXECUTED = (126, 127)


class Started(NamedTuple):
    """A process just started: its number, a pidfd that is the caller's to close, its start in ticks since boot."""

    pid: int
    pidfd: int
    start_ticks: int


def executable(path: str) -> str:
    """Return the resolved path of a program the kernel would run.

    Raises:
        DriverError: missing or refused, in the words of what to correct; not transient.
    """
    if not Path(path).is_absolute():
        raise DriverError(
            "refused", f"binary_path {path!r} is not absolute: give the whole path", transient=False
        )
    try:
        head = _head(path)
    except PermissionError:
        head = b"\x7fELF" if os.access(path, os.X_OK) else b""  # executable without being readable
    except OSError as error:
        raise DriverError("missing", f"{path} cannot be read: {error.strerror}", transient=False) from error
    if head is None:
        what = "is not a file" if Path(path).exists() else "does not exist"
        raise DriverError("missing", f"{path} {what}: correct binary_path or install it", transient=False)
    if not os.access(path, os.X_OK):
        raise DriverError("refused", f"{path} is not executable for us: chmod +x it", transient=False)
    if head.startswith(b"#!"):
        interpreter = head[2:].split(b"\n")[0].split()
        if not interpreter or shutil.which(os.fsdecode(interpreter[0])) is None:
            raise DriverError("missing", f"the interpreter of {path} does not exist", transient=False)
    elif not head.startswith(b"\x7fELF"):
        raise DriverError("refused", f"{path} is neither a program nor a script with #!", transient=False)
    return path


def _head(path: str) -> bytes | None:
    """Return how the file begins, None when it is no file."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return file.read(_HEAD_BYTES)


def start(
    shell: str,
    run: RunDirectory,
    *,
    joins: Sequence[Path],
    command: Sequence[str],
    environment: Mapping[str, str],
    working_dir: str,
) -> Started:
    """Start it in a session of its own, without input, writing to the run's output.

    Raises:
        DriverError: it could not be started.
    """
    arguments = [shell, "-c", LAUNCHER, str(run.path), *map(str, joins), "--", *command]
    output = os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=working_dir,
            env=dict(environment),
            start_new_session=True,
            close_fds=True,
        )
    except FileNotFoundError as error:
        raise DriverError("missing", f"{error.filename or shell} does not exist", transient=False) from error
    except (PermissionError, NotADirectoryError) as error:
        raise DriverError(
            "refused", f"cannot start in {working_dir}: {error.strerror}", transient=False
        ) from error
    except OSError as error:
        raise DriverError(
            "exhausted", f"no process could be started: {error.strerror}", transient=True
        ) from error
    finally:
        os.close(output)
    # Ours to collect, through the pidfd: the end of a Popen object says nothing about its process.
    child.returncode = 0
    return started(child.pid)


def started(pid: int) -> Started:
    """Return what is to be known of a child of ours that nobody has collected: the number is its own, ended or not.

    Raises:
        DriverError: somebody else collected it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise DriverError(
            "unknown", "somebody else collected the process we started", transient=True
        ) from error
    stat = process.stat(pid)
    if stat is None:
        os.close(pidfd)
        raise DriverError("unknown", "somebody else collected the process we started", transient=True)
    return Started(pid, pidfd, stat.start_ticks)


def await_agent(pid: int, over: threading.Event, timeout_s: float, abort: Abort) -> bool:
    """Wait until the process has become the agent; False when it ended without having been seen as the agent.

    Raises:
        DriverError: aborted, or it did not come that far in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if abort.is_set():
            raise DriverError("aborted", "called off while the process was starting", transient=True)
        line = process.command_line(pid)
        if over.is_set():
            return False
        if line and not any(mark in line for mark in _MARKS):
            return True
        if time.monotonic() >= deadline:
            raise DriverError("timeout", f"not running {timeout_s} s after its start", transient=True)
        time.sleep(_LOOK_AGAIN_S)


def launching(pid: int) -> bool:
    """Tell whether the process has not yet become the agent."""
    line = process.command_line(pid)
    return any(mark in line for mark in _MARKS)


def refusal(exit_code: int | None, command: str) -> DriverError | None:
    """Return why a process that was never seen as the agent did not become it, None when it may have been."""
    if exit_code == _NOT_JOINED:
        return DriverError(
            "refused", "the process could not join its cgroup or find its directory", transient=True
        )
    if exit_code in _NOT_EXECUTED:
        return DriverError(
            "refused", f"{command} could not be executed (exit code {exit_code})", transient=False
        )
    return None
