"""End one microVM: ask it, wait, kill it through its pidfd, and see it gone."""

from __future__ import annotations

import os
import pwd
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.firecracker.api import Api, ApiError
from infra.host_process import process
from infra.host_process.watcher import Watched
from infra.network.commands import Commands

_SLICE_S = 0.02
_CGROUP_WAIT_S = 2.0
_VANISH_WAIT_S = 0.25


class Bounds(NamedTuple):
    """How long to wait after asking, and after killing; and how to kill what is another user's."""

    grace_s: float
    kill_wait_s: float
    use_sudo: bool
    uid: int


def end(watched: Watched, api: Api | None, bounds: Bounds, abort: Abort) -> str:
    """End the process and return what it took. `api` None: it is not asked first.

    Raises:
        DriverError: it lives on, or `abort` was set while it was given time.
    """
    if watched.over.is_set():
        return "it had ended"
    began = time.monotonic()
    if api is not None and bounds.grace_s > 0 and _asked(api):
        while not watched.over.wait(_SLICE_S):
            if abort.is_set():
                raise DriverError("aborted", "called off while it was given time to end", transient=True)
            if time.monotonic() - began >= bounds.grace_s:
                break
        else:
            return f"it ended {time.monotonic() - began:.2f} s after Ctrl-Alt-Del"
    kill(watched, bounds)
    if not watched.over.wait(bounds.kill_wait_s):
        raise DriverError(
            "still-there",
            f"process {watched.pid} outlives SIGKILL: see /proc/{watched.pid}/stack; its chroot is kept",
            transient=True,
        )
    return f"killed after {time.monotonic() - began:.2f} s"


def kill(watched: Watched, bounds: Bounds) -> None:
    """Send SIGKILL to a process proven to be the machine, through the pidfd opened before the proof.

    Raises:
        DriverError: we may not, and `sudo` cannot either.
    """
    try:
        process.send(watched.pidfd, signal.SIGKILL)
    except PermissionError as error:
        pid = watched.pid
        if not bounds.use_sudo:
            raise DriverError(
                "still-there",
                f"process {pid} lives and may not be signalled by us: give the coordinator root or CAP_KILL, or set "
                "use_sudo; its chroot is kept",
                transient=True,
            ) from error
        try:
            Commands().run("sudo", "-n", "-u", f"#{bounds.uid}", "kill", "-9", str(pid))
        except DriverError as failed:
            if watched.over.wait(_VANISH_WAIT_S) or process.pidfd_ended(watched.pidfd):
                return
            raise DriverError(
                "still-there",
                f"{failed}; grant it in sudoers: {_user()} ALL=(#{bounds.uid}) NOPASSWD: /usr/bin/kill, and have a "
                f"user with uid {bounds.uid} on this host (useradd), or sudo does not know it",
                transient=True,
            ) from failed


def remove_cgroups(directories: list[str]) -> None:
    """Remove what the jailer made; a cgroup of a process just gone takes a moment.

    Raises:
        DriverError: one cannot be removed.
    """
    deadline = time.monotonic() + _CGROUP_WAIT_S
    for directory in directories:
        while True:
            try:
                Path(directory).rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise DriverError(
                        "still-there",
                        f"cgroup {directory} cannot be removed: {error.strerror}",
                        transient=True,
                    ) from error
                time.sleep(0.005)


def _asked(api: Api) -> bool:
    """Press Ctrl-Alt-Del; False where that cannot help: no keyboard, not started, no answer."""
    with suppress(ApiError):
        return api.ctrl_alt_del()
    return False


def _user() -> str:
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return f"#{os.geteuid()}"
