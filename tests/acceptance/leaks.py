"""Leaks of every kind, made as a crash or a lost log would leave them, and things of others that look much alike."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from actors.decisions.addresses import lease_of, tap_of
from infra.config.microvm_network import MicrovmNetwork
from infra.drivers.firecracker import limits
from infra.drivers.firecracker.chroot import Chroot, Mark
from infra.drivers.firecracker.paths import Paths
from infra.host_process import process
from infra.network.host import HostNetwork
from infra.network.policy import Policy, elements
from tests.acceptance.host import wait_until
from tests.acceptance.microvm_place import UID, MicrovmPlace
from tests.network_site import run


class Leaks:
    """What is leaked on the host of a place, under the name of its coordinator unless another is given."""

    def __init__(self, place: MicrovmPlace) -> None:
        self.place = place

    def chroot(
        self, vm: str, owner: str | None = "", address: str = "10.44.0.240", scaler: str = "vms"
    ) -> Path:
        """Make the directory of a machine that does not run; `owner` None: without a mark."""
        paths = Paths(self.place.base, vm)
        if owner is None:
            (paths.directory / "root").mkdir(parents=True)
            return paths.directory
        placement = {
            "version": 1,
            "boot_id": process.boot_id(),
            "chroot_base": str(self.place.base),
            "directory": str(paths.directory),
            "uid": UID,
            "gid": UID,
            "lease": {"address": address},
            "cgroups": [],
            "logs": str(self.place.data / "machines" / "microvms" / "logs"),
        }
        mark = Mark(vm=vm, owner=owner or self.place.id, scaler=scaler, placement=placement)
        Chroot(paths, UID, UID, sudo=False).create(mark)
        paths.serial_log.write_text(f"last words of {vm}\n")
        return paths.directory

    def tap(self, address: str) -> str:
        """Have the TAP of an address up and ready for a machine, as one has it that is just being started."""
        with self._network() as network:
            lease = lease_of(network.pool("leak"), address)
            network.links.attach(lease, UID, UID)
        return lease.tap

    def foreign_tap(self, address: str, bridge: str | None, *, up: bool = True) -> str:
        """Make a TAP that has a name as ours have them, on this bridge or on none."""
        name, inside = tap_of(address), self.place.site.host
        run("ip", "tuntap", "add", "dev", name, "mode", "tap", inside=inside)
        if bridge is not None:
            run("ip", "link", "set", name, "master", bridge, inside=inside)
        if up:
            run("ip", "link", "set", name, "up", inside=inside)
        return name

    def rules(self, address: str) -> str:
        """Have rules in force for an address."""
        with self._network() as network:
            network.sets.put(address, elements(lease_of(network.pool("leak"), address), Policy()))
        return address

    def _network(self) -> HostNetwork:
        return HostNetwork(MicrovmNetwork(**self.place.network), namespace=self.place.site.host)

    def cgroups(self, vm: str, owner: str = "") -> list[str]:
        """Make the cgroups of a machine that does not run, one per hierarchy; none where the host has none."""
        found = limits.directories(limits.detect(), owner or self.place.id, vm)
        for directory in found:
            Path(directory).mkdir(parents=True)
        return found

    def one_of_each(self, number: int) -> dict[str, str]:
        """Leak one of each kind and return their kinds by name. Addresses are from the upper end of the network."""
        address = f"10.44.0.{200 + number}"
        made = {str(self.chroot(f"leaked-{number}", address=address)): "chroot"}
        made[self.tap(address)] = "tap"
        made[self.rules(address)] = "rules"
        return made | dict.fromkeys(self.cgroups(f"cgroup-{number}"), "cgroup")


def end_process(pid: int) -> None:
    """Kill a process that is nobody's child here, and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _lives(pid), f"process {pid} is gone")


def _lives(pid: int) -> bool:
    with suppress(OSError):
        stat = process.stat(pid)
        return stat is not None and not stat.ended
    return False
