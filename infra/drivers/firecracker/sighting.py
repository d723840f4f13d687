"""What can be proven about one microVM on this host: its process, by the best record there is, and its traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from events.vm import Handle
from infra.drivers.firecracker import identity, jailer
from infra.drivers.firecracker.identity import Probe
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from infra.host_process.watcher import Watched


class Sighting(NamedTuple):
    """What was seen. `traces` are the files and cgroups that are left of it."""

    probe: Probe
    traces: tuple[str, ...]

    @property
    def evidence(self) -> str:
        """Return it in words."""
        return "; ".join([self.probe.detail, *self.traces])


def look(paths: Paths, placement: dict[str, Any], handle: Handle | None, child: Watched | None) -> Sighting:
    """Look at the host.

    Raises:
        OSError: it could not be looked at.
    """
    traces = [f"directory {path}" for path in _directories(paths) if path.exists()]
    traces += [f"cgroup {path}" for path in placement.get("cgroups", ()) if Path(path).exists()]
    return Sighting(_probe(paths, placement, handle, child), tuple(traces))


def _probe(paths: Paths, placement: dict[str, Any], handle: Handle | None, child: Watched | None) -> Probe:
    now = process.boot_id()
    if child is not None:
        return _own(child, paths)
    of_boot = placement["boot_id"] if handle is None else handle.data.get("boot_id")
    if of_boot != now:
        return Probe("gone", None, None, f"it was of another boot ({of_boot}, now {now})")
    if handle is not None and process.legal(handle.data.get("pid")):
        return _recorded(handle.data, paths)
    pid = identity.read_pid(paths.pid_file)
    with identity.held(pid) as pidfd:
        probe = identity.look(pid if pidfd is not None else None, paths.chroot, pid_file=paths.pid_file)
        if probe.state == "unconfirmed" and pid is not None and _is_launching(pid, paths):
            return identity.look(pid, paths.chroot, pid_file=paths.pid_file, launching=True)
    if probe.state == "gone" and paths.directory.exists():
        return _found_launching(paths) or probe
    return probe


def _own(child: Watched, paths: Paths) -> Probe:
    """Judge our own child: its number is its own until we collect it, whatever it is called just now."""
    if child.over.is_set():
        return Probe("gone", child.pid, child.start_ticks, f"process {child.pid} has ended")
    seen = identity.look(child.pid, paths.chroot, recorded_ticks=child.start_ticks)
    if seen.state in ("confirmed", "gone"):
        return seen
    return Probe("launching", child.pid, child.start_ticks, f"process {child.pid} is on its way to become it")


def _recorded(data: dict[str, Any], paths: Paths) -> Probe:
    pid = data["pid"]
    with identity.held(pid) as pidfd:
        if pidfd is None:
            return Probe("gone", pid, None, f"process {pid} is gone")
        root = (data.get("root_device"), data.get("root_inode"))
        return identity.look(
            pid,
            paths.chroot,
            recorded_ticks=data.get("start_ticks"),
            recorded_root=(root[0], root[1])
            if isinstance(root[0], int) and isinstance(root[1], int)
            else None,
        )


def _found_launching(paths: Paths) -> Probe | None:
    """Look for a jailer, or a Firecracker, of this machine that nobody came to put on record."""
    for pid in _candidates(paths):
        with identity.held(pid) as pidfd:
            if pidfd is None:
                continue
            if _is_launching(pid, paths):
                probe = identity.look(pid, paths.chroot, launching=True)
            elif identity.root_of(pid, paths.chroot) == "same":
                probe = identity.look(pid, paths.chroot)
            else:
                continue
            if probe.state != "gone":
                return probe
    return None


def _candidates(paths: Paths) -> Iterator[int]:
    for pid in process.all_pids():
        with suppress(OSError):
            if paths.vm.encode() in process.command_line(pid):
                yield pid


def _is_launching(pid: int, paths: Paths) -> bool:
    base = str(paths.directory.parent.parent)
    with suppress(OSError):
        return jailer.is_launching(process.command_line(pid), paths.vm, base)
    return False


def _directories(paths: Paths) -> tuple[Path, Path]:
    return paths.directory, paths.directory.with_name(f".new-{paths.vm}")
