"""One host for the Firecracker driver: a network namespace, a chroot base, images, and what must not be left of it."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import msgspec

from actors.decisions.addresses import Lease, mac_of, tap_of
from actors.driver import SpawnOrder
from events.envelope import Resources
from events.vm import Handle
from infra.drivers.firecracker import identity, limits
from infra.drivers.firecracker.config import FirecrackerConfig, LabelSet
from infra.drivers.firecracker.driver import FirecrackerDriver
from infra.drivers.firecracker.gate import Gate
from infra.drivers.firecracker.paths import is_vm
from infra.host_process import process
from infra.network.policy import Policy
from tests.guest.binaries import fetch_binaries
from tests.guest.halting import write_halting_kernel
from tests.guest.rootfs import make_rootfs
from tests.guest.segment import Segment
from tests.needed import need_firecracker_host

LABELS = ("linux", "contract")
UID = 30_000
NEVER = threading.Event()
OVERLAY_MIB = 8


class SegmentNet:
    """The driver's network, by `ip` in a test's own namespace; keeps count of what was asked."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.taps: set[str] = set()
        self.policies: dict[str, Policy] = {}
        self.released: list[str] = []
        self.fail_attach: Exception | None = None

    def attach(self, lease: Lease, policy: Policy, uid: int, gid: int) -> None:
        if self.fail_attach is not None:
            raise self.fail_attach
        self.policies[lease.address] = policy
        if lease.tap in self.taps:
            return
        self.segment.ip_batch(
            f"tuntap add dev {lease.tap} mode tap user {uid} group {gid}",
            f"link set {lease.tap} master br0",
            f"link set {lease.tap} up",
        )
        self.taps.add(lease.tap)

    def release(self, lease: Lease) -> None:
        self.released.append(lease.address)
        self.policies.pop(lease.address, None)
        self.taps.discard(lease.tap)
        if lease.tap in self.there():  # another process may have made it
            self.segment.ip_batch(f"link del {lease.tap}")

    def there(self) -> list[str]:
        """Return the TAPs there are."""
        listing = self.segment.run("ip", "-o", "link", "show", "type", "tun")
        return [line.split(":")[1].strip() for line in listing.splitlines()]


class Site:
    """Everything of one test. `close` asserts that the driver left nothing."""

    def __init__(self, owner: str | None = None, segment: Segment | None = None) -> None:
        need_firecracker_host()
        self.owner = owner or f"site-{os.getpid()}"
        # Short: a Unix socket's path has 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="flt"))
        self.root.chmod(0o755)
        self.base = self.root / "j"
        self.base.mkdir()
        self._own_segment = segment is None
        self.segment = Segment() if segment is None else segment
        if self._own_segment:
            self.segment.__enter__()
        self.net = SegmentNet(self.segment)
        self.kernel = write_halting_kernel(self.root / "halt.elf")
        self.rootfs = make_rootfs(self.root / "rootfs.ext4")
        self.lines: list[tuple[str, str]] = []
        self.changes: dict[str, Any] = {}
        self.label_changes: dict[str, Any] = {}
        self.drivers: list[FirecrackerDriver] = []
        self.leases: dict[str, Lease] = {}
        self._pids: list[int] = []
        self._hosts = itertools.count(int(self.segment.gateway) + 100)

    def config(self) -> FirecrackerConfig:
        binaries = fetch_binaries()
        label_set = LabelSet(labels=LABELS, rootfs_path=str(self.rootfs), overlay_mib=OVERLAY_MIB)
        config = FirecrackerConfig(
            owner=self.owner,
            state_dir=str(self.root / "state"),
            firecracker_path=str(binaries.firecracker),
            jailer_path=str(binaries.jailer),
            kernel_path=str(self.kernel),
            uid=UID,
            gid=UID,
            chroot_base=str(self.base),
            vcpus=1,
            mem_mib=32,
            netns=str(self.segment.path),
            label_sets=(msgspec.structs.replace(label_set, **self.label_changes),),
            stop_grace_s=0.3,
        )
        return msgspec.structs.replace(config, **self.changes)

    def driver(
        self, reach: Callable[[str], None] = lambda _: None, gate: Gate | None = None
    ) -> FirecrackerDriver:
        made = FirecrackerDriver(
            self.config(),
            self.net,
            gate=gate,
            lines=lambda vm, line: self.lines.append((vm, line)),
            reach=reach,
        )
        self.drivers.append(made)
        return made

    def lease(self, vm: str) -> Lease:
        """Return the machine's address, the same each time."""
        if vm not in self.leases:
            address = str(IPv4Address(next(self._hosts)))
            self.leases[vm] = Lease(
                address=address,
                gateway=str(self.segment.gateway),
                netmask="255.255.0.0",
                prefix_length=self.segment.prefix_bits,
                mac=mac_of(address),
                tap=tap_of(address),
                bridge="br0",
            )
        return self.leases[vm]

    def plan(self, driver: FirecrackerDriver, vm: str) -> dict[str, Any]:
        return driver.plan(vm, "pool", LABELS, self.lease(vm))

    def order(
        self, vm: str, placement: dict[str, Any], limits_: Resources | None = None, **environment: str
    ) -> SpawnOrder:
        return SpawnOrder(
            vm=vm,
            scaler="pool",
            labels=LABELS,
            placement=placement,
            environment=environment,
            limits=limits_ or Resources(),
        )

    def spawn(self, driver: FirecrackerDriver, vm: str, **environment: str) -> tuple[dict[str, Any], Handle]:
        placement = self.plan(driver, vm)
        handle = driver.spawn(self.order(vm, placement, None, **environment), threading.Event())
        self._pids.append(handle.data["pid"])
        return placement, handle

    def processes(self) -> list[int]:
        """Return the jailers and Firecrackers of this site, found by their command lines and roots."""
        base, machines = os.fsencode(self.base), self.base / "firecracker"
        roots = {identity.inode(path / "root") for path in machines.iterdir()} if machines.exists() else set()
        roots -= {None}
        return [
            pid
            for pid in process.all_pids()
            if not self._ended(pid)
            and (
                base in process.command_line(pid)
                or (identity.name_of(pid) == "firecracker" and self._root(pid) in roots)
            )
        ]

    def _ended(self, pid: int) -> bool:
        stat = process.stat(pid)
        return stat is None or stat.ended

    def _root(self, pid: int) -> tuple[int, int] | None:
        return identity.inode(Path(f"/proc/{pid}/root"))

    def leftovers(self) -> list[str]:
        """Return everything a machine may leave: process, chroot, TAP, rule, cgroup."""
        found = [f"process {pid}" for pid in self.processes()]
        machines = self.base / "firecracker"
        found += (
            [str(path) for path in machines.iterdir() if is_vm(path.name.removeprefix(".new-"))]
            if machines.exists()
            else []
        )
        found += [
            f"cgroup {directory}"
            for owner, _, directory in limits.listing(limits.detect())
            if owner == self.owner
        ]
        found += [f"TAP {tap}" for tap in self.net.there()]
        found += [f"rules of {address}" for address in self.net.policies]
        return found

    def close(self) -> None:
        """End what the test left, and take the site away."""
        try:
            last = self.driver()
            for resource in last.survey():
                if resource.vm is not None and resource.owner in (self.owner, None):
                    last.destroy(resource.vm, self.plan(last, resource.vm), None, NEVER)
            for driver in self.drivers:
                driver.close()
            for pid in self._pids:  # a test may have closed the driver that would have collected it
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        finally:
            if self._own_segment:
                self.segment.__exit__(None, None, None)
            shutil.rmtree(self.root, ignore_errors=True)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
