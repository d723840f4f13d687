"""A cgroup v2 per agent: membership proves whose a process is, and one write ends all of it.

Membership and `cgroup.kill` need no controllers, so this works beside v1 controllers too.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from infra.host_process.mountinfo import mounted

POLL_S = 0.05


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A mounted cgroup hierarchy. `root` is the hierarchy's directory that appears at `point`."""

    point: Path
    root: str
    kind: str
    controllers: frozenset[str] = frozenset()

    def at(self, path: str) -> Path | None:
        """Return where a directory of the hierarchy is found, None when this mount does not show it."""
        if self.root != "/" and not (path == self.root or path.startswith(self.root + "/")):
            return None
        below = path if self.root == "/" else path[len(self.root) :]
        return self.point / below.lstrip("/")


def mounts(kind: str) -> tuple[Mount, ...]:
    """Return the mounted hierarchies of this kind, `cgroup2` or `cgroup` (v1), in mount order."""
    return tuple(
        Mount(point=Path(each.point), root=each.root, kind=kind, controllers=each.options)
        for each in mounted()
        if each.file_system == kind and ".." not in each.root
    )


def own_path() -> str | None:
    """Return our own place in the v2 hierarchy, None when the kernel has none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return None


class Cgroup:
    """One directory of the v2 hierarchy and all below it. The agent may have made more below."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def procs(self) -> Path:
        """The file a process writes 0 to, to put itself in."""
        return self.path / "cgroup.procs"

    def exists(self) -> bool:
        """Tell whether it is there.

        Raises:
            OSError: that could not be told.
        """
        try:
            self.path.stat()
        except FileNotFoundError:
            return False
        return True

    def populated(self) -> bool:
        """Tell whether a process lives in it or below; False when it is not there.

        Raises:
            OSError: that could not be told.
        """
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except (FileNotFoundError, OSError) as error:
            if isinstance(error, FileNotFoundError) or error.errno == 19:  # noqa: PLR2004 - ENODEV: removed
                return False
            raise

    def members(self) -> frozenset[int]:
        """Return the numbers of its processes, those below included; the ended ones are no members."""
        found: set[int] = set()
        for directory in self._tree():
            # a threaded part has no list of its own: its processes stand in the list above it
            with suppress(OSError):
                found.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
        return frozenset(found - {0})

    def kill(self) -> bool:
        """Kill all in it and below at once; False where the kernel (before 5.14) cannot."""
        try:
            (self.path / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            return not self.exists()
        return True

    def freeze(self) -> None:
        """Stop all in it, if the kernel can, so that none forks while it is killed one by one."""
        with suppress(OSError):
            (self.path / "cgroup.freeze").write_text("1")

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no process is left in it, woken by the kernel; return whether."""
        deadline = time.monotonic() + timeout_s
        try:
            events = os.open(self.path / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            waiter = select.poll()
            waiter.register(events, select.POLLPRI)
            while self.populated():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                os.pread(events, 256, 0)
                waiter.poll(max(1, min(left, POLL_S) * 1000))
        except OSError as error:
            if error.errno != 19:  # noqa: PLR2004 - ENODEV: removed meanwhile
                raise
        finally:
            os.close(events)
        return True

    def remove(self, timeout_s: float) -> bool:
        """Remove it and all below; return whether it is gone. Refuses, by the kernel, while a process lives in it."""
        deadline = time.monotonic() + timeout_s
        while True:
            for directory in reversed(self._tree()):
                with suppress(OSError):
                    directory.rmdir()
            if not self.exists():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)

    def _tree(self) -> list[Path]:
        return [Path(directory) for directory, _, _ in os.walk(self.path)]
