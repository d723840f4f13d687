"""CPU and memory limits through the jailer's cgroup options, by whichever cgroup version has the controllers here.

A microVM's vCPUs and memory bound it already; the cgroup adds fractions of a CPU and bounds what Firecracker itself
takes. So there is one only where the machine has declared limits: joining one can cost the start 10 ms.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from events.envelope import Resources
from infra.drivers.firecracker.machine import MIB, Size
from infra.host_process.cgroup import Mount, mounts

PARENT = "fleetlog-firecracker"
PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000
OVERHEAD_BYTES = 96 * MIB
"""What Firecracker may take besides the guest's memory: its own, page tables, and the page cache of its drives."""

PROCESSES_MOST = 64
"""Threads besides the vCPUs: Firecracker has a handful."""


class Cgroups(NamedTuple):
    """Which controllers there are and where. `version` 0: none, and `reason` says why."""

    version: int
    places: dict[str, str]  # controller to the mount it is in
    reason: str = ""


def detect(v2: Sequence[Mount] | None = None, v1: Sequence[Mount] | None = None) -> Cgroups:
    """Return the version that has CPU and memory controllers we may use; the second where it has both, else the first."""
    for mount in mounts("cgroup2") if v2 is None else v2:
        with suppress(OSError):
            controllers = (mount.point / "cgroup.controllers").read_text().split()
            if {"cpu", "memory"} <= set(controllers) and os.access(mount.point, os.W_OK):
                names = [name for name in ("cpu", "memory", "pids") if name in controllers]
                return Cgroups(2, dict.fromkeys(names, str(mount.point)))
    places: dict[str, str] = {}
    for mount in mounts("cgroup") if v1 is None else v1:
        for name in ("cpu", "memory", "pids"):
            if name in mount.controllers and name not in places and os.access(mount.point, os.W_OK):
                places[name] = str(mount.point)
    if {"cpu", "memory"} <= set(places):
        return Cgroups(1, places)
    return Cgroups(0, {}, "no cgroup hierarchy here has CPU and memory controllers that we may use")


def parent(owner: str) -> str:
    """Return the jailer's parent cgroup for all machines of a coordinator."""
    return f"{PARENT}/{owner}"


def directories(cgroups: Cgroups, owner: str, vm: str) -> list[str]:
    """Return the directories the jailer makes for a machine, and never removes."""
    return sorted({f"{place}/{parent(owner)}/{vm}" for place in cgroups.places.values()})


def options(cgroups: Cgroups, owner: str, limits: Resources, size: Size) -> list[str]:
    """Return the jailer's options for these limits; none where none are declared or nothing can hold them."""
    wanted = values(cgroups, limits, size)
    if not wanted:
        return []
    made = ["--cgroup-version", str(cgroups.version), "--parent-cgroup", parent(owner)]
    for value in wanted:
        made += ["--cgroup", value]
    return made


def values(cgroups: Cgroups, limits: Resources, size: Size) -> list[str]:
    """Return `file=value` for each limit."""
    made: list[str] = []
    second = cgroups.version == 2  # noqa: PLR2004
    if cgroups.version == 0 or (limits.cpus <= 0 and limits.memory_bytes <= 0):
        return made
    if limits.cpus > 0:
        quota = max(LEAST_QUOTA_US, round(limits.cpus * PERIOD_US))
        made += (
            [f"cpu.max={quota} {PERIOD_US}"]
            if second
            else [f"cpu.cfs_period_us={PERIOD_US}", f"cpu.cfs_quota_us={quota}"]
        )
    if limits.memory_bytes > 0:
        most = size.mem_mib * MIB + OVERHEAD_BYTES
        made.append(f"memory.max={most}" if second else f"memory.limit_in_bytes={most}")
    if "pids" in cgroups.places:
        made.append(f"pids.max={PROCESSES_MOST + size.vcpus}")
    return made


def remove_parents(cgroups: Cgroups, owner: str) -> None:
    """Remove our levels, as far as they are empty."""
    for place in set(cgroups.places.values()):
        for level in (Path(place) / parent(owner), Path(place) / PARENT):
            with suppress(OSError):
                level.rmdir()


def listing(cgroups: Cgroups) -> list[tuple[str, str, str]]:
    """Return (owner, vm, directory) of every machine's cgroups on this host, whoever made them.

    Raises:
        OSError: the listing failed.
    """
    return [
        (owner.name, vm.name, str(vm))
        for place in sorted(set(cgroups.places.values()))
        if (Path(place) / PARENT).exists()
        for owner in sorted((Path(place) / PARENT).iterdir())
        if owner.is_dir()
        for vm in sorted(owner.iterdir())
        if vm.is_dir()
    ]
