"""What this host is: its name as the log knows it, its boot, its platform, and how much disk it has left."""

import os
import platform
import re
import socket
from pathlib import Path

from actors.decisions.labels import Host, host_of
from events.subjects import checked

FREE_BYTES_LEAST = 256 * 1024 * 1024
"""Below this a coordinator does not start: the log, the tables and every agent's output need room to say anything."""


class DiskFull(Exception):  # noqa: N818 - a state of the host
    """There is no room to begin with; the message names the folder and what frees some."""


def host_name(given: str | None = None) -> str:
    """Return the host's name as one subject token: `given`, or the kernel's, made legal.

    Raises:
        ValueError: the given one is not legal, or nothing of the kernel's is.
    """
    if given is not None:
        return checked(given, "host")
    short = socket.gethostname().partition(".")[0].lower()
    return checked(re.sub(r"[^a-z0-9-]+", "-", short).strip("-")[:63] or "localhost", "host")


def boot_id() -> str:
    """Return the kernel's id of this boot: what ran under another one is gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def platform_labels() -> Host:
    """Return the host's system and machine, as labels name them."""
    return host_of(platform.system(), platform.machine())


def check_disk(directory: Path, least_bytes: int = FREE_BYTES_LEAST) -> int:
    """Return the free bytes where `directory` is or will be.

    Raises:
        DiskFull: fewer than `least_bytes`.
    """
    existing = directory
    while not existing.exists():
        existing = existing.parent
    found = os.statvfs(existing)
    free = found.f_bavail * found.f_frsize
    if free < least_bytes:
        raise DiskFull(
            f"{existing} has {free // 2**20} MiB free, a coordinator needs {least_bytes // 2**20}: free some "
            f"(agents' logs are in {directory}/machines/logs), or choose another folder with --data-dir"
        )
    return free
