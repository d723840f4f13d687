"""Machines and leftovers that nothing tracks: listed, stopped by an operator, swept. One at a time on a host.

A sweep removes only what is provably this owner's, tracked by nobody and dead. What runs is never ended by it: only an
operator, who names one machine, or a caller who has proven that nobody owns it, may do that.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from actors.errors import DriverError
from events.vm import Handle
from infra.drivers.firecracker import identity, paths, sighting, teardown
from infra.drivers.firecracker.chroot import Chroot, Mark
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from infra.host_process.watcher import Watched

_LOCK_WAIT_S = 60.0
_LOOK_AGAIN_S = 0.02
_NEVER = threading.Event()
Trackers = Callable[[str], tuple[str, ...]]
"""Names whoever tracks a machine: a log's live record, an actor, a spawn under way. Must be quick: see `stop`."""

Outcome = Literal["stopped", "not-found", "tracked", "not-live", "unverified", "error"]


class LiveVm(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs in a machine's place."""

    vm: str
    owner: str | None
    scaler: str | None
    pid: int | None
    start_ticks: int | None
    chroot: str
    confirmed: bool
    detail: str


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a stop."""

    outcome: Outcome
    detail: str
    pid: int | None = None


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep removed, what it left because it lives or is somebody else's, and what it could not remove."""

    removed: tuple[str, ...]
    spared: tuple[str, ...]
    failed: tuple[str, ...]


class Leftovers(Protocol):
    """What of the network is in force, by address, and how one address is freed of it."""

    def in_force(self) -> frozenset[str]:
        """Return every address of ours with a TAP that is up or with rules.

        Raises:
            DriverError: it could not be told: then nothing may be concluded.
        """
        ...

    def drop(self, address: str) -> None:
        """Take TAP and rules of the address away."""
        ...


class Reclaim:
    """The untracked machines of one driver's chroot base and owner.

    `leases` returns the addresses that are held now: what is left of a machine that nobody tracks never takes the
    network of an address's next holder away. `net` None: only chroots are swept.
    """

    def __init__(
        self,
        driver: FirecrackerDriver,
        leases: Callable[[], frozenset[str]] = frozenset,
        net: Leftovers | None = None,
    ) -> None:
        self._driver = driver
        self._leases = leases
        self._net = net
        self._base = driver.config.chroot_base

    def live(self) -> tuple[LiveVm, ...]:
        """Return every running process in a machine's place, whoever owns it."""
        return tuple(found for vm in self._machines() if (found := self._live(vm)) is not None)

    def stop(self, vm: str, trackers: Trackers) -> Stopped:
        """Kill one machine that nobody tracks, and take it down. For operators, who name it."""
        if not paths.is_vm(vm):
            return Stopped(outcome="not-found", detail=f"{vm!r} is no VM id")
        with self._alone():
            return self._stop(vm, trackers)

    def reap_unowned(self, vm: str, trackers: Trackers) -> bool:
        """Take a machine down that the caller has proven to be nobody's, running or not; return whether it is gone.

        Needs a chroot of this owner on this host: a record alone may speak of another host's live machine.
        """
        if not paths.is_vm(vm):
            return False
        with self._alone():
            mark = self._mark(vm)
            if mark is None or mark.owner != self._driver.config.owner or trackers(vm):
                return False
            live = self._live(vm)
            if live is not None:
                return self._stop(vm, trackers).outcome == "stopped"
            return not self._destroy(vm, mark.placement)

    def sweep(self, trackers: Trackers) -> Swept:
        """Remove chroots, then TAPs and rules, of this owner's machines that nobody tracks and that do not run."""
        removed: list[str] = []
        spared: list[str] = []
        failed: list[str] = []
        with self._alone():
            for vm in self._machines():
                mark = self._mark(vm)
                if mark is None or mark.owner != self._driver.config.owner:
                    spared.append(f"{vm}: {'no mark' if mark is None else f'of {mark.owner}'}")
                    continue
                live = self._live(vm)
                tracked = trackers(vm)
                if live is not None or tracked:
                    spared.append(f"{vm}: {live.detail if live is not None else f'tracked by {tracked[0]}'}")
                    continue
                problem = self._destroy(vm, mark.placement)
                (failed if problem else removed).append(f"{vm}: {problem}" if problem else vm)
            if self._net is not None:
                self._sweep_network(self._net, removed, failed)
        return Swept(removed=tuple(removed), spared=tuple(spared), failed=tuple(failed))

    def _sweep_network(self, net: Leftovers, removed: list[str], failed: list[str]) -> None:
        try:
            listed = net.in_force()
        except DriverError as error:
            failed.append(f"network: {error}")
            return
        # Asked after the listing: a machine has its address before its TAP.
        kept = self._leases() | self._addresses(set(self._machines()))
        for address in sorted(listed - kept):
            try:
                net.drop(address)
                removed.append(f"network of {address}")
            except DriverError as error:
                failed.append(f"network of {address}: {error}")

    def _addresses(self, vms: set[str]) -> frozenset[str]:
        """Return the addresses of these directories, whosever they are."""
        marks = (self._mark(vm) for vm in vms)
        return frozenset(mark.placement["lease"]["address"] for mark in marks if mark is not None)

    def _stop(self, vm: str, trackers: Trackers) -> Stopped:
        mark = self._mark(vm)
        found = Paths(self._base, vm)
        if not found.directory.exists():
            return Stopped(outcome="not-found", detail=f"no {found.directory} on this host")
        if held := trackers(vm):
            return Stopped(outcome="tracked", detail=f"tracked by {', '.join(held)}")
        live = self._live(vm)
        if live is None:
            return Stopped(outcome="not-live", detail="it does not run")
        if not live.confirmed or live.pid is None or live.start_ticks is None or mark is None:
            return Stopped(outcome="unverified", detail=live.detail, pid=live.pid)
        if mark.owner != self._driver.config.owner:
            return Stopped(
                outcome="tracked", detail=f"of coordinator {mark.owner}: stop it there", pid=live.pid
            )
        problem = self._kill(vm, live, trackers)
        if problem is not None:
            return problem
        left = self._destroy(vm, mark.placement)
        if left:
            return Stopped(outcome="error", detail=left, pid=live.pid)
        return Stopped(outcome="stopped", detail="killed and taken down", pid=live.pid)

    def _kill(self, vm: str, live: LiveVm, trackers: Trackers) -> Stopped | None:
        """Kill it if still nobody tracks it; return what went wrong."""
        config = self._driver.config
        pid, ticks = live.pid, live.start_ticks
        assert pid is not None
        assert ticks is not None
        with identity.held(pid) as pidfd:
            probe = identity.look(pid, Path(live.chroot), recorded_ticks=ticks)
            if pidfd is None or not identity.may_signal(probe):
                return Stopped(outcome="not-live", detail=probe.detail, pid=pid)
            bounds = teardown.Bounds(0, config.kill_wait_s, config.use_sudo, config.uid)
            prey = Watched(vm=vm, pid=pid, start_ticks=ticks, pidfd=pidfd)
            # Between this question and the signal nothing waits: a registration cannot come in between.
            if held := trackers(vm):
                return Stopped(outcome="tracked", detail=f"tracked by {', '.join(held)}", pid=pid)
            try:
                teardown.kill(prey, bounds)
            except DriverError as error:
                return Stopped(outcome="error", detail=str(error), pid=pid)
            if not _ended(pidfd, config.kill_wait_s):
                return Stopped(
                    outcome="error", detail=f"process {pid} outlives SIGKILL; chroot kept", pid=pid
                )
        return None

    def _destroy(self, vm: str, placement: dict[str, Any]) -> str:
        """Take a dead machine's traces away, but not the network of whoever has its address by now."""
        others = self._leases() | self._addresses(set(self._machines()) - {vm})
        if placement["lease"]["address"] in others:
            placement = {**placement, "lease": None}
        try:
            self._driver.destroy(vm, placement, None, _NEVER)
        except DriverError as error:
            return str(error)
        return ""

    def _machines(self) -> list[str]:
        top = paths.machines(self._base)
        names = (path.name.removeprefix(".new-") for path in top.iterdir()) if top.exists() else iter(())
        return sorted({name for name in names if paths.is_vm(name)})

    def _mark(self, vm: str) -> Mark | None:
        config = self._driver.config
        return Chroot(Paths(self._base, vm), config.uid, config.gid, sudo=config.use_sudo).mark()

    def _live(self, vm: str) -> LiveVm | None:
        found, mark = Paths(self._base, vm), self._mark(vm)
        placement = mark.placement if mark is not None else {"boot_id": process.boot_id()}
        handle: Handle | None = None
        try:
            probe = sighting.look(found, placement, handle, None).probe
        except OSError as error:
            probe = identity.Probe("unconfirmed", None, None, f"it could not be looked at: {error}")
        if identity.may_delete(probe):
            return None
        return LiveVm(
            vm=vm,
            owner=mark.owner if mark is not None else None,
            scaler=mark.scaler if mark is not None else None,
            pid=probe.pid,
            start_ticks=probe.start_ticks,
            chroot=str(found.chroot),
            confirmed=probe.state == "confirmed",
            detail=probe.detail,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the host to ourselves; the kernel lets go for a holder that died.

        Raises:
            DriverError: somebody else has it for too long.
        """
        top = paths.machines(self._base)
        top.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(top / ".reclaim.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_WAIT_S
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise DriverError(
                            "timeout",
                            f"another reclaim has worked on {top} for {_LOCK_WAIT_S:g} s",
                            transient=True,
                        ) from error
                    time.sleep(_LOOK_AGAIN_S)
            yield
        finally:
            os.close(descriptor)


def _ended(pidfd: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not process.pidfd_ended(pidfd):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_AGAIN_S / 10)
    return True
