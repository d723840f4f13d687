"""Room for machines before anything else is started: chroots that leaked may have filled the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

FREE_BYTES_LEAST = 1024 * 1024 * 1024


class Guarded(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands. `free_bytes` None: no scaler here has a chroot base."""

    reaped: int
    recovered: bool
    free_bytes: int | None


def free_bytes(directory: Path) -> int:
    """Return the bytes free to us where the directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def guard(
    chroot_base: str | None,
    reap: Callable[[], int],
    *,
    measure: Callable[[Path], int] = free_bytes,
    least_bytes: int = FREE_BYTES_LEAST,
    say: Callable[[str], object] | None = None,
) -> Guarded:
    """Have room, reaping what no live machine owns where there is too little. Speaks on stderr: the log may be full."""
    say = sys.stderr.write if say is None else say
    if chroot_base is None:
        return Guarded(reaped=0, recovered=True, free_bytes=None)
    free = measure(Path(chroot_base))
    if free >= least_bytes:
        return Guarded(reaped=0, recovered=True, free_bytes=free)
    say(
        f"fleetlog: {chroot_base} has {free >> 20} MiB free, {least_bytes >> 20} are wanted: removing leftovers\n"
    )
    reaped = reap()
    free = measure(Path(chroot_base))
    recovered = free >= least_bytes
    if not recovered:
        say(
            f"fleetlog: {free >> 20} MiB are free after {reaped} leftovers were removed: free some, or run "
            "`fleetlog reap --offline` and look at what it spares\n"
        )
    return Guarded(reaped=reaped, recovered=recovered, free_bytes=free)
