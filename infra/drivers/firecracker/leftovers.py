"""What microVMs may have left on this host, for `actors.host`, which decides: listed, taken away, or ended by name.

The network of a dead machine is never touched from here: its address may be another's by now. TAPs and rules are
listed, and taken away, by the network itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from actors.errors import DriverError, Refused
from actors.reclaiming import Leftover, Life
from infra.drivers.firecracker import identity, limits, paths, sighting, teardown
from infra.drivers.firecracker.chroot import Chroot, Mark
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.identity import Probe
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from infra.host_process.cgroup import Cgroup
from infra.host_process.watcher import Watched

_LOOK_AGAIN_S = 0.002
_NEVER = threading.Event()


class _Seen(NamedTuple):
    """One machine's directory: where, whose it is if it says so, and which process it has."""

    paths: Paths
    mark: Mark | None
    probe: Probe

    @property
    def life(self) -> Life:
        if identity.may_delete(self.probe):
            return "dead"
        return "alive" if self.probe.state == "confirmed" else "doubt"


class FirecrackerLeftovers:
    """The leftovers below one driver's chroot base, of all owners. Implements `actors.reclaiming.Reclaiming`."""

    def __init__(self, driver: FirecrackerDriver) -> None:
        self._driver = driver
        self._base = driver.config.chroot_base

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return every directory and cgroup of a machine, the living included.

        Raises:
            DriverError: the listing failed.
        """
        try:
            return (*self._directories(), *self._cgroups())
        except OSError as error:
            raise DriverError("unknown", f"{self._base} cannot be listed: {error}", transient=True) from error

    def reclaim(self, leftover: Leftover) -> str:
        """Take a dead machine's directory, or an empty cgroup, away.

        Raises:
            DriverError: it lives, or may, or some of it is left.
        """
        if leftover.kind == "cgroup":
            teardown.remove_cgroups([leftover.name])
            return "the cgroup was empty and is removed"
        seen = self._look(leftover.vm or "")
        if seen.life != "dead":
            raise DriverError("still-there", f"it is not dead: {seen.probe.detail}", transient=True)
        return self._driver.destroy(seen.paths.vm, self._placement(seen), None, _NEVER)

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        """Kill a living machine that nobody accounts for, through a pidfd opened before the proof.

        Raises:
            Refused: somebody accounts for it (`tracked`), no proof (`unverified`), or it does not run (`not-live`).
            DriverError: it could not be signalled, lives on, or some of it is left.
        """
        seen = self._look(leftover.vm or "")
        if seen.life == "dead" or seen.probe.pid is None:
            raise Refused("not-live", seen.probe.detail)
        pid, ticks = seen.probe.pid, seen.probe.start_ticks
        with identity.held(pid) as pidfd:
            proof = identity.look(pid, seen.paths.chroot, recorded_ticks=ticks)
            if pidfd is None or identity.may_delete(proof):
                raise Refused("not-live", proof.detail)
            if proof.state != "confirmed" or ticks is None:
                raise Refused("unverified", proof.detail)
            self._kill(Watched(vm=seen.paths.vm, pid=pid, start_ticks=ticks, pidfd=pidfd), accounted)
        evidence = self._driver.destroy(seen.paths.vm, self._placement(seen), None, _NEVER)
        return f"process {pid} was killed; {evidence}"

    def _kill(self, prey: Watched, accounted: Callable[[], str]) -> None:
        config = self._driver.config
        bounds = teardown.Bounds(0, config.kill_wait_s, config.use_sudo, config.uid)
        # Between this question and the signal nothing waits: a registration cannot come in between.
        if why := accounted():
            raise Refused("tracked", why)
        teardown.kill(prey, bounds)
        deadline = time.monotonic() + config.kill_wait_s
        while not process.pidfd_ended(prey.pidfd):
            if time.monotonic() >= deadline:
                raise DriverError(
                    "still-there", f"process {prey.pid} outlives SIGKILL; its chroot is kept", transient=True
                )
            time.sleep(_LOOK_AGAIN_S)

    def _directories(self) -> Iterator[Leftover]:
        top = paths.machines(self._base)
        for path in sorted(top.iterdir()) if top.exists() else []:
            vm = path.name.removeprefix(".new-")
            if not paths.is_vm(vm):
                continue
            seen = self._look(vm)
            mark, probe = seen.mark, seen.probe
            yield Leftover(
                kind="chroot",
                name=str(path),
                vm=vm,
                owner=None if mark is None else mark.owner,
                scaler="" if mark is None else mark.scaler,
                address="" if mark is None else mark.placement["lease"]["address"],
                life=seen.life,
                evidence=probe.detail,
                pid=None if seen.life == "dead" else probe.pid,
                age_s=None if seen.life == "dead" else _age_s(probe.start_ticks),
            )

    def _cgroups(self) -> Iterator[Leftover]:
        for owner, vm, directory in limits.listing(limits.detect()):
            members = Cgroup(Path(directory)).members()
            yield Leftover(
                kind="cgroup",
                name=directory,
                vm=vm,
                owner=owner,
                life="alive" if members else "dead",
                evidence=f"{len(members)} processes",
            )

    def _look(self, vm: str) -> _Seen:
        """Look at one machine by what its directory says.

        Raises:
            DriverError: that is no machine's name.
        """
        found = paths.of(self._base, vm)
        config = self._driver.config
        mark = Chroot(found, config.uid, config.gid, sudo=config.use_sudo).mark()
        placement = mark.placement if mark is not None else {"boot_id": process.boot_id()}
        try:
            probe = sighting.look(found, placement, None, None).probe
        except OSError as error:
            probe = Probe("unconfirmed", None, None, f"it could not be looked at: {error}")
        return _Seen(found, mark, probe)

    def _placement(self, seen: _Seen) -> dict[str, Any]:
        if seen.mark is None:
            raise DriverError("unknown", f"{seen.paths.directory} does not say whose it is", transient=True)
        return {**seen.mark.placement, "lease": None}


def _age_s(start_ticks: int | None) -> float | None:
    if start_ticks is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
