"""CPU and memory limits through whichever cgroup version has the controllers here."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from events.envelope import Resources
from infra.drivers.bare_metal.hierarchy import PARENT
from infra.host_process.cgroup import Cgroup, mounts

log = logging.getLogger(__name__)
PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000  # the kernel's own minimum, and 1 % of one CPU


def quota_us(cpus: float) -> int:
    """Return the microseconds of CPU time per period, at least 1 % of one CPU."""
    return max(LEAST_QUOTA_US, round(cpus * PERIOD_US))


def v1_directories(owner: str, vm: str) -> dict[str, str]:
    """Return the directories a machine's limits need in v1 hierarchies, by controller."""
    found: dict[str, str] = {}
    for mount in mounts("cgroup"):
        for controller in ("memory", "cpu"):
            if (
                controller in mount.controllers
                and controller not in found
                and os.access(mount.point, os.W_OK)
            ):
                found[controller] = str(mount.point / PARENT / owner / vm)
    return found


def remove_parents(owner: str) -> None:
    """Remove our levels in v1 hierarchies, as far as they are empty."""
    for directory in v1_directories(owner, ".").values():
        for level in (Path(directory), Path(directory).parent):
            with suppress(OSError):
                level.rmdir()


def apply(limits: Resources, cgroup: Cgroup | None, v1: dict[str, str]) -> tuple[list[Path], list[str]]:
    """Set the limits; return the further files a process must write itself into, and what could not be limited."""
    join: list[Path] = []
    unmet: list[str] = []
    for controller, (v2_file, v2_value), v1_files in _wanted(limits):
        if cgroup is not None and _apply_v2(cgroup, controller, v2_file, v2_value):
            continue
        procs = _apply_v1(v1.get(controller), v1_files)
        if procs is None:
            unmet.append(controller)
        else:
            join.append(procs)
    return join, unmet


def _wanted(limits: Resources) -> list[tuple[str, tuple[str, str], list[tuple[str, str]]]]:
    """Return (controller, v2 file and value, v1 files and values) for each limit that is set."""
    wanted = []
    if limits.memory_bytes > 0:
        value = str(limits.memory_bytes)
        wanted.append(("memory", ("memory.max", value), [("memory.limit_in_bytes", value)]))
    if limits.cpus > 0:
        quota, period = str(quota_us(limits.cpus)), str(PERIOD_US)
        v1_files = [("cpu.cfs_period_us", period), ("cpu.cfs_quota_us", quota)]
        wanted.append(("cpu", ("cpu.max", f"{quota} {period}"), v1_files))
    return wanted


def _apply_v2(cgroup: Cgroup, controller: str, name: str, value: str) -> bool:
    """Hand the controller down to our levels and set the limit; False where it is not to be had."""
    owner_level = cgroup.path.parent
    try:
        for level in (owner_level.parent.parent, owner_level.parent, owner_level):
            if controller not in (level / "cgroup.controllers").read_text().split():
                return False
            if controller not in (level / "cgroup.subtree_control").read_text().split():
                (level / "cgroup.subtree_control").write_text(f"+{controller}")
        (cgroup.path / name).write_text(value)
    except OSError as error:
        log.debug("cgroup v2 cannot limit %s: %s", controller, error)
        return False
    return True


def _apply_v1(directory: str | None, files: list[tuple[str, str]]) -> Path | None:
    """Make the v1 directory and set the limit; None where it is not to be had."""
    if directory is None:
        return None
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, value in files:
            (path / name).write_text(value)
    except OSError as error:
        log.debug("cgroup v1 cannot limit at %s: %s", directory, error)
        return None
    return path / "cgroup.procs"
