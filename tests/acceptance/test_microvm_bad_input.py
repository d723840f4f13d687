"""What is wrong with a microVM's host or file is said where somebody looks, and nothing is left behind by any of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from projections.vm import VmState
from tests.acceptance.microvm_place import MicrovmPlace
from tests.network_site import NetworkSite, network_site, run

SOAK = "FLEETLOG_SOAK" in os.environ
AT_ONCE = 100
ROUNDS = 20 if SOAK else 1
"""A scaler that fails backs off, so each round of failures has one of its own."""

Flaw = Callable[[MicrovmPlace, Path], dict[str, Any]]


def kernel_no_elf(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    (here / "bzImage").write_bytes(b"MZ" + bytes(4096))
    return {"kernel_path": str(here / "bzImage")}


def kernel_cut_off(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    """It begins as it should: only Firecracker finds out, when all else is there already."""
    (here / "vmlinux").write_bytes(b"\x7fELF" + bytes(60))
    return {"kernel_path": str(here / "vmlinux")}


def kernel_missing(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    return {"kernel_path": str(here / "nowhere")}


def rootfs_missing(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    return {"rootfs": here / "nowhere.ext4"}


def rootfs_cut_off(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    (here / "half.ext4").write_bytes(place.rootfs.read_bytes()[: 1 << 19])
    return {"rootfs": here / "half.ext4"}


def rootfs_unreadable(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    (here / "secret.ext4").write_bytes(place.rootfs.read_bytes())
    (here / "secret.ext4").chmod(0o600)
    return {"rootfs": here / "secret.ext4"}


def jailer_missing(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    return {"jailer_path": str(here / "jailer")}


def firecracker_not_executable(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    (here / "firecracker").write_bytes(b"#!/bin/sh\n")
    return {"firecracker_path": str(here / "firecracker")}


def firecracker_is_none(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    (here / "firecracker").write_bytes(b"#!/nowhere\n")
    (here / "firecracker").chmod(0o755)
    return {"firecracker_path": str(here / "firecracker")}


def devices_closed(place: MicrovmPlace, here: Path) -> dict[str, Any]:
    """Devices made on this file system open for nobody: for the jailed Firecracker the host has no KVM."""
    base = place.root / "nodev"
    base.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nodev,size=64m", "none", base], check=True)
    return {"chroot_base": str(base)}


FLAWS: dict[Flaw, tuple[str, ...]] = {
    kernel_no_elf: ("launch-refused", "kernel_path", "bzImage is no ELF file", "uncompressed vmlinux"),
    kernel_cut_off: ("launch-refused", "Firecracker refused", "/actions"),
    kernel_missing: ("launch-refused", "kernel_path", "no such file", "install it"),
    rootfs_missing: ("launch-refused", "rootfs_path", "no such file"),
    rootfs_cut_off: ("launch-refused", "rootfs_path", "truncated"),
    rootfs_unreadable: ("launch-refused", "rootfs_path", "cannot be read by uid 30000", "chmod a+r"),
    jailer_missing: ("launch-refused", "jailer_path", "no such file"),
    firecracker_not_executable: ("launch-refused", "firecracker_path", "chmod +x"),
    firecracker_is_none: ("launch-refused", "the jailer or Firecracker", "no such file"),
    devices_closed: ("launch-refused", "/dev/net/tun", "permission denied"),
}
"""What is wrong, with which reason the life ends, and what the fact says of it."""


class Ends:
    """One coordinator with a scaler for each flaw, all asked at once beside one that is well."""

    def __init__(self, place: MicrovmPlace) -> None:
        self.place = place
        scalers = [place.scaler(name="well", kinds={"well": "wait"})]
        for flaw in FLAWS:
            here = place.root / flaw.__name__
            here.mkdir()
            changes = flaw(place, here)
            kind = name_of(flaw)
            rootfs = changes.pop("rootfs", place.rootfs)
            sets = {kind: {"rootfs_path": str(rootfs)}}
            scalers.append(place.scaler(name=kind, kinds={kind: "wait"}, sets=sets, **changes))
        place.write(*scalers)
        place.start()
        self.vms = {flaw: place.ask_for(name_of(flaw))[0] for flaw in FLAWS}

    def of(self, flaw: Flaw) -> VmState:
        """Return how the life ended."""
        self.place.wait_phase(self.vms[flaw], "reaped")
        return self.place.lives()[self.vms[flaw]]


def name_of(flaw: Flaw) -> str:
    return flaw.__name__.replace("_", "-")


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with network_site() as site, ExitStack() as stack:
        place = MicrovmPlace(site)
        stack.callback(place.clean)
        stack.callback(lambda: subprocess.run(["umount", place.root / "nodev"], check=False, stderr=-3))
        made = Ends(place)
        yield made
        (vm,) = place.ask_for("well")
        place.wait_phase(vm, "registered")
        place.tell(vm, "exit 0")
        place.settle()
        nodev = place.root / "nodev" / "firecracker"
        assert [path.name for path in nodev.iterdir()] == [".overlay-templates"]


@pytest.mark.parametrize("flaw", FLAWS, ids=name_of)
def test_what_is_wrong_is_said_in_the_fact_and_leaves_nothing(ends: Ends, flaw: Flaw) -> None:
    state = ends.of(flaw)
    reason, *words = FLAWS[flaw]
    assert state.reason == reason
    for word in words:
        assert word.lower() in state.detail.lower()
    assert state.id not in ends.place.chroots()
    told = [line for line in ends.place.policies() if state.address in line]
    assert told == []


def test_a_misnamed_firecracker_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with network_site() as site:
        place = MicrovmPlace(site, firecracker_path=str(tmp_path / "firecracker-v1.12"))
        try:
            first = place.launch()
            assert first.wait_dead() == 1
            assert "firecracker_path" in first.said()
            assert "a path that ends in /firecracker" in first.said()
        finally:
            place.clean()


def overlapping(site: NetworkSite) -> tuple[dict[str, str], str]:
    return {"cidr": "198.51.100.0/24"}, "network 198.51.100.0/24 is taken on this host: up0"


def bridge_of_others(site: NetworkSite) -> tuple[dict[str, str], str]:
    run("ip", "link", "add", "flt-br0", "type", "bridge", inside=site.host)
    return {}, "flt-br0"


def table_of_others(site: NetworkSite) -> tuple[dict[str, str], str]:
    script = 'table inet fleetlog { set bridge_name { type ifname; elements = { "flt-br9" }; }; }'
    run("nft", script, inside=site.host)
    return {}, "nft table fleetlog serves bridge flt-br9"


def no_way_out(site: NetworkSite) -> tuple[dict[str, str], str]:
    run("ip", "route", "del", "default", inside=site.host)
    return {}, "no default route"


@pytest.mark.parametrize("wrong", [overlapping, bridge_of_others, table_of_others, no_way_out])
def test_a_network_that_cannot_be_is_said_at_the_start_and_in_the_fact_and_changes_nothing(
    wrong: Callable[[NetworkSite], tuple[dict[str, str], str]],
) -> None:
    with network_site() as site:
        network, words = wrong(site)
        before = host_network(site)
        place = MicrovmPlace(site, network=network, kinds={"held": "wait"})
        try:
            coordinator = place.start()
            assert words in coordinator.said()
            (vm,) = place.ask_for("held")
            place.wait_phase(vm, "reaped")
            state = place.lives()[vm]
            assert state.reason == "launch-failed"
            assert words in state.detail
            assert place.chroots() == []
            assert place.microvms() == {}
            assert host_network(site) == before
            coordinator.stop()
        finally:
            place.clean()


def host_network(site: NetworkSite) -> tuple[str, str, str]:
    """Return links, addresses and rules of the host, without what changes by itself."""
    links = run("ip", "-br", "link", inside=site.host)
    return links, run("ip", "-br", "-4", "addr", inside=site.host), site.rules()


def test_a_hundred_spawns_that_fail_at_their_last_step_leave_nothing_of_anything() -> None:
    with network_site() as site:
        place = MicrovmPlace(site, network={"cidr": "10.44.0.0/24"})
        try:
            flaw = kernel_cut_off(place, place.root)
            names = [f"round-{number}" for number in range(ROUNDS)]
            place.write(
                *(
                    place.scaler(name=name, kinds={name: "wait"}, max_agents=AT_ONCE, **flaw)
                    for name in names
                ),
                global_max_agents=AT_ONCE,
            )
            coordinator = place.start()
            descriptors = psutil.Process(coordinator.pid).num_fds()
            for name in names:
                vms = place.ask_for(name, AT_ONCE)
                place.wait_phases(vms, "reaped", 55)
                lives = place.lives()
                assert {lives[vm].reason for vm in vms} == {"launch-refused"}
                place.assert_nothing_is_left()
            assert psutil.Process(coordinator.pid).num_fds() <= descriptors + 16
            place.settle()
        finally:
            place.clean()
