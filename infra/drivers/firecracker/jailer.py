"""Starts Firecracker through its jailer, as our own child that becomes Firecracker.

Without `--new-pid-ns` the jailer executes Firecracker in place: the process we start is the machine, so its pidfd is
held from its first moment, no number can be recycled before we have one, its exit code is ours to collect, and an end
before the API answers is noticed at once. With it there would be a grandchild, known only by a file that can appear
after the API does. What a process namespace of its own would add, not seeing or signalling other processes, the
chroot (no /proc in it) and Firecracker's seccomp filter (no kill) give already. The machine is configured through the
API and not by `--config-file`: equally fast, and the credential never is in a file.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from actors.errors import DriverError
from infra.drivers.firecracker.config import FirecrackerConfig
from infra.drivers.firecracker.paths import API_SOCKET, Paths
from infra.host_process import process

_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


class Started(NamedTuple):
    """A child just started: its number, a pidfd that is the caller's to close, its start in ticks since boot."""

    pid: int
    pidfd: int
    start_ticks: int


def command(config: FirecrackerConfig, vm: str, cgroup_options: Sequence[str]) -> list[str]:
    """Return the jailer's command line; behind `--` Firecracker's own, paths as in the chroot."""
    jail = ["--id", vm, "--exec-file", os.path.realpath(config.firecracker_path)]
    jail += ["--uid", str(config.uid), "--gid", str(config.gid), "--chroot-base-dir", config.chroot_base]
    if config.netns is not None:
        jail += ["--netns", config.netns]
    own = ["--api-sock", f"/{API_SOCKET}", "--log-path", "/vmm.log", "--level", "Warning"]
    return [config.jailer_path, *jail, *cgroup_options, "--", *own]


def start(arguments: Sequence[str], paths: Paths) -> Started:
    """Start it in a session of its own with no input, an empty environment and its output in files.

    Raises:
        DriverError: it could not be started.
    """
    append = os.O_WRONLY | os.O_APPEND
    try:
        pid = os.posix_spawn(
            arguments[0],
            list(arguments),
            {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(paths.serial_log), append, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(paths.stderr_log), append, 0),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )
    except FileNotFoundError as error:
        raise DriverError("missing", f"jailer_path {arguments[0]} does not exist", transient=False) from error
    except PermissionError as error:
        message = f"jailer_path {arguments[0]} cannot be executed: chmod +x it"
        raise DriverError("refused", message, transient=False) from error
    except OSError as error:
        message = f"the jailer could not be started: {error.strerror}"
        raise DriverError("exhausted", message, transient=True) from error
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise DriverError(
            "unknown", "somebody else collected the jailer we started", transient=True
        ) from error
    stat = process.stat(pid)
    if stat is None:
        os.close(pidfd)
        raise DriverError("unknown", "somebody else collected the jailer we started", transient=True)
    return Started(pid, pidfd, stat.start_ticks)


def is_launching(arguments: bytes, vm: str, chroot_base: str) -> bool:
    """Tell whether this is the command line of a jailer that is about to become this machine."""
    words = arguments.split(b"\0")
    pairs = set(pairwise(words))
    return {(b"--id", vm.encode()), (b"--chroot-base-dir", os.fsencode(chroot_base))} <= pairs
