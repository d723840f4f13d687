"""Machines that nothing tracks: what a sweep takes and spares, what an operator may stop, and what a host lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.decisions.addresses import Lease
from actors.errors import DriverError
from events.vm import Handle
from infra.drivers.firecracker import overlay, paths, preflight
from infra.drivers.firecracker.paths import Paths
from infra.drivers.firecracker.reclaim import Reclaim
from infra.host_process import process
from tests.contract.driver_rigs import wait_until
from tests.integration.firecracker_site import NEVER, Site


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def nobody(_: str) -> tuple[str, ...]:
    return ()


def somebody(_: str) -> tuple[str, ...]:
    return ("the log",)


def machine(site: Site, vm: str) -> Handle:
    """Have a machine that no driver watches any more."""
    driver = site.driver()
    _, handle = site.spawn(driver, vm)
    driver.close()
    return handle


def die(handle: Handle) -> None:
    os.kill(handle.data["pid"], signal.SIGKILL)
    wait_until(lambda: (stat := process.stat(handle.data["pid"])) is None or stat.ended, "it is dead")


class Network:
    """What a site has in force, by address."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.dropped: list[str] = []
        self.broken = False

    def in_force(self) -> frozenset[str]:
        if self.broken:
            raise DriverError("unknown", "netlink says no", transient=True)
        return frozenset(self.site.net.policies)

    def drop(self, address: str) -> None:
        self.dropped.append(address)
        for lease in self.site.leases.values():
            if lease.address == address:
                self.site.net.release(lease)


def test_a_sweep_takes_the_dead_and_spares_the_living_the_tracked_and_what_is_somebody_elses(
    site: Site,
) -> None:
    dead, tracked, living = (machine(site, vm) for vm in ("dead", "tracked", "living"))
    die(dead)
    die(tracked)
    other_owner = site.owner
    site.changes["owner"] = "somebody-else"
    die(machine(site, "foreign"))
    site.changes["owner"] = other_owner
    (paths.machines(site.base) / "unmarked").mkdir()
    (paths.machines(site.base) / ".new-half").mkdir()
    swept = Reclaim(site.driver()).sweep(lambda vm: ("spawning",) if vm == "tracked" else ())
    assert swept.removed == ("dead",)
    assert swept.failed == ()
    assert [each.partition(":")[0] for each in swept.spared] == [
        "foreign",
        "half",
        "living",
        "tracked",
        "unmarked",
    ]
    assert process.stat(living.data["pid"]) is not None
    assert overlay.valid(paths.template(site.base, 8), 8), "templates are never swept"
    assert site.net.released == [site.lease("dead").address]


def test_a_sweep_frees_addresses_that_nobody_holds_and_reads_the_leases_after_the_network(site: Site) -> None:
    driver = site.driver()
    leaked, fresh = site.lease("leaked"), site.lease("fresh")
    site.net.attach(leaked, driver.config.label_sets[0].policy, 1, 1)
    living = machine(site, "living")
    network = Network(site)
    asked: list[str] = []

    def leases() -> frozenset[str]:
        asked.append("leases")
        return frozenset({fresh.address})

    def in_force() -> frozenset[str]:
        asked.append("network")
        return frozenset({*site.net.policies, fresh.address})

    network.in_force = in_force  # type: ignore[method-assign]
    swept = Reclaim(driver, leases, network).sweep(nobody)
    assert swept.removed == (f"network of {leaked.address}",)
    assert asked == ["network", "leases"]
    assert site.net.there() == [site.lease("living").tap]
    assert process.stat(living.data["pid"]) is not None


def test_a_network_that_cannot_be_listed_concludes_nothing(site: Site) -> None:
    driver = site.driver()
    site.net.attach(site.lease("leaked"), driver.config.label_sets[0].policy, 1, 1)
    network = Network(site)
    network.broken = True
    swept = Reclaim(driver, net=network).sweep(nobody)
    assert (swept.removed, network.dropped) == ((), [])
    assert swept.failed == ("network: netlink says no",)
    site.net.release(site.lease("leaked"))


def test_leftovers_of_the_dead_do_not_take_the_network_of_their_addresss_next_holder(site: Site) -> None:
    dead = machine(site, "dead")
    die(dead)
    address = site.lease("dead").address
    swept = Reclaim(site.driver(), lambda: frozenset({address})).sweep(nobody)
    assert swept.removed == ("dead",)
    assert site.net.released == []
    site.net.release(site.lease("dead"))


def test_a_sweep_without_a_log_spares_the_living(site: Site) -> None:
    handle = machine(site, "living")
    assert Reclaim(site.driver()).sweep(nobody).removed == ()
    assert process.stat(handle.data["pid"]) is not None
    assert Paths(site.base, "living").chroot.exists()


def test_living_machines_are_listed_with_what_is_proven_of_them(site: Site) -> None:
    living, doubtful, dead = (machine(site, vm) for vm in ("living", "doubtful", "dead"))
    die(dead)
    die(doubtful)
    Paths(site.base, "doubtful").pid_file.write_text(str(os.getpid()))
    found = {each.vm: each for each in Reclaim(site.driver()).live()}
    assert set(found) == {"living", "doubtful"}
    assert (found["living"].pid, found["living"].confirmed, found["living"].scaler) == (
        living.data["pid"],
        True,
        "pool",
    )
    assert (found["doubtful"].pid, found["doubtful"].confirmed) == (os.getpid(), False)
    Paths(site.base, "doubtful").pid_file.write_text("0")


def test_an_operator_stops_a_machine_that_nobody_tracks(site: Site) -> None:
    handle = machine(site, "orphan")
    stopped = Reclaim(site.driver()).stop("orphan", nobody)
    assert (stopped.outcome, stopped.pid) == ("stopped", handle.data["pid"])
    assert site.leftovers() == []


def test_what_may_not_be_stopped_says_why_and_lives(site: Site) -> None:
    handle = machine(site, "living")
    reclaim = Reclaim(site.driver())
    assert reclaim.stop("living", somebody).outcome == "tracked"
    assert reclaim.stop("x/../living", nobody).outcome == "not-found"
    assert reclaim.stop("nothing", nobody).outcome == "not-found"
    site.changes["owner"] = "somebody-else"
    assert Reclaim(site.driver()).stop("living", nobody).outcome == "tracked"
    del site.changes["owner"]
    assert process.stat(handle.data["pid"]) is not None
    die(handle)
    assert reclaim.stop("living", nobody).outcome == "not-live"
    Paths(site.base, "living").pid_file.write_text(str(os.getpid()))
    assert reclaim.stop("living", nobody).outcome == "unverified"
    Paths(site.base, "living").pid_file.write_text("0")


def test_a_registration_that_lands_while_it_is_looked_at_saves_the_machine(site: Site) -> None:
    handle = machine(site, "living")
    answers: list[tuple[str, ...]] = [(), ("registered",)]
    stopped = Reclaim(site.driver()).stop("living", lambda _: answers.pop(0))
    assert (stopped.outcome, answers) == ("tracked", [])
    assert process.stat(handle.data["pid"]) is not None


def test_a_machine_that_may_not_be_signalled_is_an_error_and_keeps_its_chroot(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(site, "living")

    def refuse(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process, "send", refuse)
    reclaim = Reclaim(site.driver())
    assert reclaim.stop("living", nobody).outcome == "error"
    assert not reclaim.reap_unowned("living", nobody)
    assert Paths(site.base, "living").chroot.exists()
    assert site.net.released == []
    monkeypatch.undo()


def test_a_reap_needs_a_chroot_of_ours_on_this_host(site: Site) -> None:
    living, dead = machine(site, "living"), machine(site, "dead")
    die(dead)
    reclaim = Reclaim(site.driver())
    assert not reclaim.reap_unowned("elsewhere", nobody)
    assert not reclaim.reap_unowned("living", somebody)
    assert not reclaim.reap_unowned("x/../living", nobody)
    site.changes["owner"] = "somebody-else"
    assert not Reclaim(site.driver()).reap_unowned("living", nobody)
    del site.changes["owner"]
    assert process.stat(living.data["pid"]) is not None
    assert reclaim.reap_unowned("living", nobody)
    assert reclaim.reap_unowned("dead", nobody)
    assert site.leftovers() == []


def test_reclaims_take_turns_on_a_host_and_a_holder_that_died_blocks_nobody(site: Site) -> None:
    reclaim = Reclaim(site.driver())
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()
    die(machine(site, "dead"))

    def slow(_: str) -> tuple[str, ...]:
        inside.set()
        assert go_on.wait(20)
        order.append("first")
        return ()

    first = threading.Thread(target=reclaim.sweep, args=(slow,))
    first.start()
    assert inside.wait(20)

    def after() -> None:
        Reclaim(site.driver()).sweep(nobody)
        order.append("second")

    second = threading.Thread(target=after)
    second.start()
    go_on.set()
    first.join(20)
    second.join(20)
    assert order == ["first", "second"]
    lock = paths.machines(site.base) / ".reclaim.lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; f = open('{lock}'); fcntl.flock(f, 2); print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
    assert reclaim.sweep(nobody).failed == ()


def test_what_a_host_lacks_is_said_all_at_once(site: Site, tmp_path: Path) -> None:
    assert preflight.missing(site.config()) == ()
    link = tmp_path / "firecracker"
    link.symlink_to(site.kernel)
    config = msgspec.structs.replace(
        site.config(), firecracker_path=str(link), jailer_path="/no/jailer", kernel_path="/no/kernel"
    )
    said = preflight.missing(config, {"/dev/no-kvm": "load the kvm module"})
    assert [
        any(word in line for line in said) for word in ("halt.elf", "/no/jailer", "/no/kernel", "/dev/no-kvm")
    ] == [True] * 4


def lease_of(placement: dict[str, Any]) -> Lease:
    return msgspec.convert(placement["lease"], Lease)


def test_a_mark_is_enough_for_a_teardown_where_no_log_can_be_asked(site: Site) -> None:
    handle = machine(site, "orphan")
    die(handle)
    mark = msgspec.json.decode(Paths(site.base, "orphan").mark.read_bytes())
    assert lease_of(mark["placement"]) == site.lease("orphan")
    site.driver().destroy("orphan", mark["placement"], None, NEVER)
    assert site.leftovers() == []
