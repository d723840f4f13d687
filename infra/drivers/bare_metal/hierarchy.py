"""Where on this host agents get their cgroups: an existing v2 mount, or one of our own, or nowhere, said loudly."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path

from infra.host_process.cgroup import Cgroup, Mount, mounts, own_path

log = logging.getLogger(__name__)
PARENT = "fleetlog"
_UNMOUNT_DETACH = 2
_PROBE_TIMEOUT_S = 10


class Hierarchy:
    """The v2 hierarchy, as `<base>/fleetlog/<owner>/<vm>`.

    As root `<base>` is the top of the hierarchy; else it is the cgroup we run in, which must have been delegated to
    us (systemd: `Delegate=yes`). Found by trying: a process must be able to put itself in.
    """

    def __init__(self, mount: Mount, parent: str) -> None:
        self._mount = mount
        self.parent = parent

    def path_of(self, vm: str) -> str:
        """Return the machine's place in the hierarchy, the same whatever the mount."""
        return f"{self.parent}/{vm}"

    def cgroup(self, path: str) -> Cgroup:
        """Return the cgroup at this place of the hierarchy."""
        at = self._mount.at(path)
        return Cgroup(at if at is not None else self._mount.point / path.lstrip("/"))

    def listing(self) -> list[tuple[str, str, int]]:
        """Return (owner, vm, processes) of every agent's cgroup on this host, whoever made it.

        Raises:
            OSError: the listing failed.
        """
        top = self.cgroup(self.parent).path.parent
        if not top.exists():
            return []
        return [
            (owner.name, vm.name, len(Cgroup(vm).members()))
            for owner in sorted(top.iterdir())
            if owner.is_dir()
            for vm in sorted(owner.iterdir())
            if vm.is_dir() and not vm.name.startswith(".")
        ]

    def remove_parents(self) -> None:
        """Remove our level and, when no other owner is left, the one above."""
        ours = self.cgroup(self.parent).path
        for directory in (ours, ours.parent):
            with suppress(OSError):
                directory.rmdir()


def private_mount_point(state_dir: Path) -> Path:
    """Return where we mount a hierarchy of our own when the host has none."""
    return state_dir / "cgroup2"


def find(owner: str, state_dir: Path, shell: str) -> tuple[Hierarchy | None, str]:
    """Return a hierarchy that works, or None and why not. May mount one under `state_dir` when we are root."""
    reasons = []
    for mount in mounts("cgroup2"):
        made, reason = _try(mount, owner, shell)
        if made is not None:
            return made, reason
        reasons.append(f"{mount.point}: {reason}")
    if os.geteuid() == 0:
        point = private_mount_point(state_dir)
        point.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _mount(point)
        if not reason:
            made, reason = _try(Mount(point=point, root="/", kind="cgroup2"), owner, shell)
            if made is not None:
                return made, reason
            unmount(state_dir)
        reasons.append(f"{point}: {reason}")
    return None, "; ".join(reasons) or "no cgroup2 is mounted, and only root can mount one"


def _try(mount: Mount, owner: str, shell: str) -> tuple[Hierarchy | None, str]:
    """Make our level in this mount and let a process put itself into a cgroup there."""
    own = own_path()
    base = mount.root if os.geteuid() == 0 else own
    if base is None or mount.at(base) is None:
        return None, "our own cgroup is not below this mount"
    made = Hierarchy(mount, f"{base.rstrip('/')}/{PARENT}/{owner}")
    probe = made.cgroup(f"{made.parent}/.probe-{secrets.token_hex(4)}")
    try:
        probe.path.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [shell, "-c", 'echo 0 >"$0"', str(probe.procs)],
            check=True,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        made.remove_parents()
        return None, f"{error}"
    finally:
        probe.remove(1)
    return made, f"cgroup v2 at {mount.point}"


def _mount(point: Path) -> str:
    """Mount the v2 hierarchy; return why not, empty when it is mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(point), b"cgroup2", 0, None) == 0:
        log.info("mounted cgroup2 at %s; `fleetlog host teardown` unmounts it", point)
        return ""
    return f"mount failed: {os.strerror(ctypes.get_errno())}"


def unmount(state_dir: Path) -> bool:
    """Unmount what we mounted, if we did; return whether a mount was there."""
    point = private_mount_point(state_dir)
    there = any(mount.point == point for mount in mounts("cgroup2"))
    if there:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.umount2(os.fsencode(point), _UNMOUNT_DETACH)
    with suppress(OSError):
        point.rmdir()
    return there
