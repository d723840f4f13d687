"""What microVMs left below one chroot base, dead or alive: found from the host alone, taken away without any log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from actors.errors import DriverError, Refused
from actors.reclaiming import Leftover, Life
from infra.drivers.firecracker import console, identity, limits, paths, sighting, teardown
from infra.drivers.firecracker.chroot import Chroot, Mark
from infra.drivers.firecracker.config import FirecrackerConfig
from infra.drivers.firecracker.identity import Probe
from infra.drivers.firecracker.paths import Paths
from infra.file_tail import last_lines
from infra.host_process import process
from infra.host_process.files import keep_log, trim_logs
from infra.host_process.watcher import Watched

_LAST_WORDS = 50
_LOOK_S = 0.02
_LIFE: dict[identity.State, Life] = {
    "gone": "dead",
    "unconfirmed": "doubt",
    "launching": "alive",
    "confirmed": "alive",
}


class Lock(Protocol):
    """Who holds it is the only process of its name at work in this chroot base."""

    def hold(self) -> None:
        """Take it or keep it; DriverError when another process has it."""
        ...


class MicrovmLeftovers:
    """The `Reclaiming` of one chroot base. The templates' directory is none of it: its name is no machine's.

    `lines` gets the last words of what is taken away. `reach` is called between steps.
    """

    def __init__(
        self,
        config: FirecrackerConfig,
        lock: Lock,
        *,
        lines: console.Lines | None = None,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._lock = lock
        self._lines = lines
        self._reach = reach
        self._logs = Path(config.state_dir) / "logs"
        self._cgroups = limits.detect() if config.use_cgroups else limits.Cgroups(0, {}, "switched off")

    def leftovers(self) -> tuple[Leftover, ...]:
        """List the directories and the cgroups of all owners."""
        self._lock.hold()
        try:
            top = paths.machines(self.config.chroot_base)
            names = {path.name.removeprefix(".new-") for path in top.iterdir()} if top.exists() else set()
            chroots = [self._chroot_of(vm) for vm in sorted(names) if paths.is_vm(vm)]
            cgroups = [_cgroup_of(*each) for each in limits.listing(self._cgroups)]
        except OSError as error:
            raise DriverError("unknown", f"the listing is partial: {error}", transient=True) from error
        return (*chroots, *cgroups)

    def reclaim(self, leftover: Leftover) -> str:
        """Remove the cgroup, or the chroot with its last words passed on and its log kept."""
        if leftover.kind == "cgroup":
            teardown.remove_cgroups([leftover.name])
            return "removed"
        assert leftover.vm is not None, "listed by its machine's name"
        found = Paths(self.config.chroot_base, leftover.vm)
        probe = self._probe(found, self._mark(found))
        if not identity.may_delete(probe):
            raise DriverError("still-there", f"it is kept: {probe.detail}", transient=True)
        self._remove(found)
        return f"{probe.detail}; {found.directory} removed"

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """Kill the proven process through a pidfd opened before the proof, and remove what is left."""
        assert leftover.vm is not None, "listed by its machine's name"
        found = Paths(self.config.chroot_base, leftover.vm)
        first = self._probe(found, self._mark(found))
        began = time.monotonic()
        with identity.held(first.pid) as pidfd:
            probe = self._probe(found, self._mark(found))
            if pidfd is None or probe.state == "gone":
                raise Refused("not-live", f"{leftover.vm} does not run: {probe.detail}")
            if not identity.may_signal(probe) or probe.pid != first.pid:
                raise Refused("unverified", f"{leftover.vm} is not provably the machine: {probe.detail}")
            watched = Watched(leftover.vm, probe.pid or 0, probe.start_ticks or 0, pidfd)
            bounds = teardown.Bounds(0, self.config.kill_wait_s, self.config.use_sudo, self.config.uid)
            # Nothing may come between this answer and the signal: its agent may have been let in meanwhile.
            why = accounted()
            if why:
                raise Refused("tracked", why)
            teardown.kill(watched, bounds)
            _wait_end(pidfd, probe, began + self.config.kill_wait_s)
        self._reach("firecracker.reclaim.killed")
        teardown.remove_cgroups(limits.directories(self._cgroups, self.config.owner, leftover.vm))
        self._remove(found)
        return f"process {probe.pid} killed, gone after {time.monotonic() - began:.2f} s; chroot removed"

    def _chroot_of(self, vm: str) -> Leftover:
        found = Paths(self.config.chroot_base, vm)
        mark = self._mark(found)
        probe = self._probe(found, mark)
        return Leftover(
            kind="chroot",
            name=str(found.directory),
            vm=vm,
            owner=None if mark is None else mark.owner,
            life=_LIFE[probe.state],
            evidence=probe.detail,
            scaler="" if mark is None else mark.scaler,
            address=_address(mark),
            pid=None if probe.state == "gone" else probe.pid,
            age_s=None if probe.state == "gone" else _age_s(probe.start_ticks),
        )

    def _mark(self, found: Paths) -> Mark | None:
        return Chroot(found, self.config.uid, self.config.gid, sudo=self.config.use_sudo).mark()

    def _probe(self, found: Paths, mark: Mark | None) -> Probe:
        boot_id = process.boot_id() if mark is None else mark.placement.get("boot_id", process.boot_id())
        return sighting.look(found, {"boot_id": boot_id}, None, None).probe

    def _remove(self, found: Paths) -> None:
        """Let its last words be known, and take the directory away."""
        if self._lines is not None:
            for line in last_lines(found.serial_log, _LAST_WORDS):
                self._lines(found.vm, console.formed(line, found.vm, "firecracker-serial"))
            for log in (found.vmm_log, found.stderr_log):
                for line in last_lines(log, _LAST_WORDS):
                    self._lines(found.vm, console.formed(line, found.vm, "firecracker-vmm"))
        with suppress(OSError):  # a full disk must not keep us from making room
            keep_log(found.serial_log, self._logs / f"{found.vm}.log", self.config.kept_log_bytes)
            trim_logs(self._logs, self.config.kept_logs)
        self._reach("firecracker.reclaim.chroot")
        Chroot(found, self.config.uid, self.config.gid, sudo=self.config.use_sudo).remove()


def _cgroup_of(owner: str, vm: str, directory: str) -> Leftover:
    life: Life = "dead"
    evidence = "no process is in it"
    try:
        pids = (Path(directory) / "cgroup.procs").read_text().split()
        if pids:
            life, evidence = "alive", f"process {pids[0]} is in it"
    except OSError as error:
        life, evidence = "doubt", f"its processes cannot be read: {error.strerror}"
    return Leftover(kind="cgroup", name=directory, vm=vm, owner=owner, life=life, evidence=evidence)


def _address(mark: Mark | None) -> str:
    lease: Any = None if mark is None else mark.placement.get("lease")
    return str(lease.get("address", "")) if isinstance(lease, dict) else ""


def _age_s(start_ticks: int | None) -> float | None:
    if start_ticks is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def _wait_end(pidfd: int, probe: Probe, deadline: float) -> None:
    while not process.pidfd_ended(pidfd):
        if time.monotonic() >= deadline:
            raise DriverError(
                "still-there",
                f"process {probe.pid} outlives SIGKILL: see /proc/{probe.pid}/stack; its chroot is kept",
                transient=True,
            )
        time.sleep(_LOOK_S)
