"""Microvms that nothing tracks: what a sweep takes and spares, what an operator may stop, and what a host lacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from actors.decisions.reclaim import Standing
from actors.errors import DriverError
from actors.sweep import Sweeper
from events.vm import Handle
from infra.config.firecracker import FirecrackerLabelSet, FirecrackerScaler
from infra.config.fleet import FleetConfig
from infra.drivers.firecracker import limits, overlay, paths, preflight
from infra.drivers.firecracker.disk_guard import FREE_BYTES_LEAST
from infra.drivers.firecracker.leftovers import FirecrackerLeftovers
from infra.drivers.firecracker.paths import Paths
from infra.host import DiskFull
from infra.host_process import process
from infra.microvm_disk import make_room
from tests.contract.driver_rigs import wait_until
from tests.integration.firecracker_site import NEVER, Site


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class Ledger:
    """What the log says, by machine; unheard-of ones are absent. `asked` counts the questions."""

    def __init__(
        self, standing: Mapping[str, Standing] | None = None, leased: frozenset[str] = frozenset()
    ) -> None:
        self._standing = dict(standing or {})
        self._leased = leased
        self.asked: list[str] = []
        self.then: Standing | None = None

    def standing(self, vm: str) -> Standing:
        self.asked.append(vm)
        if self.then is not None and len(self.asked) > 1:
            return self.then
        return self._standing.get(vm, "absent")

    @contextmanager
    def withholding(self, addresses: frozenset[str]) -> Iterator[frozenset[str] | None]:
        yield self._leased


def sweeper(site: Site) -> Sweeper:
    return Sweeper(site.owner, [FirecrackerLeftovers(site.driver())])


def machine(site: Site, vm: str) -> Handle:
    """Have a machine that no driver watches any more."""
    driver = site.driver()
    _, handle = site.spawn(driver, vm)
    driver.close()
    return handle


def die(handle: Handle) -> None:
    os.kill(handle.data["pid"], signal.SIGKILL)
    wait_until(lambda: (stat := process.stat(handle.data["pid"])) is None or stat.ended, "it is dead")


def lives(handle: Handle) -> bool:
    stat = process.stat(handle.data["pid"])
    return stat is not None and not stat.ended


def outcomes(site: Site, ledger: Ledger) -> dict[str, str]:
    return {Path(each.leftover.name).name: each.outcome for each in sweeper(site).sweep(ledger).findings}


def test_a_sweep_takes_the_dead_and_spares_the_living_the_tracked_and_what_is_somebody_elses(
    site: Site,
) -> None:
    dead, tracked, living = (machine(site, vm) for vm in ("dead", "tracked", "living"))
    die(dead)
    die(tracked)
    ours, site.changes["owner"] = site.owner, "somebody-else"
    foreign = machine(site, "foreign")
    die(foreign)
    site.changes["owner"] = ours
    (paths.machines(site.base) / "unmarked").mkdir()
    (paths.machines(site.base) / ".new-half").mkdir()
    found = outcomes(site, Ledger({"tracked": "live", "unread": "unread"}))
    assert found == {"dead": "reaped", "living": "spared", "unmarked": "spared", ".new-half": "spared"}
    assert lives(living)
    assert Paths(site.base, "tracked").chroot.exists()
    assert Paths(site.base, "foreign").chroot.exists()
    assert not Paths(site.base, "dead").directory.exists()
    assert overlay.valid(paths.template(site.base, 8), 8), "templates are never swept"
    assert site.net.released == [], "whose the address is by now is the network's to know"
    site.net.release(site.lease("dead"))


def test_a_sweep_without_a_log_takes_nothing(site: Site) -> None:
    dead = machine(site, "dead")
    die(dead)
    assert outcomes(site, Ledger({"dead": "unread"})) == {"dead": "spared"}
    assert Paths(site.base, "dead").chroot.exists()


def test_what_came_to_life_after_the_listing_is_not_taken_away(site: Site) -> None:
    reclaiming = FirecrackerLeftovers(site.driver())
    living = machine(site, "living")
    (listed,) = [each for each in reclaiming.leftovers() if each.owner == site.owner]
    with pytest.raises(DriverError, match="it is not dead"):
        reclaiming.reclaim(msgspec.structs.replace(listed, life="dead"))
    assert lives(living)
    assert Paths(site.base, "living").chroot.exists()


def test_a_cgroup_that_was_left_is_taken_away(site: Site) -> None:
    found = limits.detect()
    if found.version == 0:
        pytest.skip("no cgroup controllers on this host")
    directory = Path(limits.directories(found, site.owner, "left")[0])
    directory.mkdir(parents=True)
    assert outcomes(site, Ledger()) == {"left": "reaped"}
    assert not directory.exists()


def test_leftovers_say_what_is_proven_of_them(site: Site) -> None:
    living, doubtful, dead = (machine(site, vm) for vm in ("living", "doubtful", "dead"))
    die(dead)
    die(doubtful)
    Paths(site.base, "doubtful").pid_file.write_text(str(os.getpid()))
    found = {
        each.vm: each for each in FirecrackerLeftovers(site.driver()).leftovers() if each.owner == site.owner
    }
    assert {vm: each.life for vm, each in found.items()} == {
        "living": "alive",
        "doubtful": "doubt",
        "dead": "dead",
    }
    assert (found["living"].pid, found["living"].scaler) == (living.data["pid"], "pool")
    assert found["living"].address == site.lease("living").address
    age_s = found["living"].age_s
    assert age_s is not None
    assert 0 <= age_s < 60
    Paths(site.base, "doubtful").pid_file.write_text("0")


def test_an_operator_stops_a_machine_that_nobody_tracks(site: Site) -> None:
    handle = machine(site, "orphan")
    stopped = sweeper(site).stop("orphan", Ledger())
    assert stopped.outcome == "stopped"
    assert f"process {handle.data['pid']} was killed" in stopped.detail
    assert not lives(handle)
    assert not Paths(site.base, "orphan").directory.exists()
    site.net.release(site.lease("orphan"))


def test_what_may_not_be_stopped_says_why_and_lives(site: Site) -> None:
    handle = machine(site, "living")
    made = sweeper(site)
    assert made.stop("living", Ledger({"living": "live"})).outcome == "tracked"
    assert made.stop("living", Ledger({"living": "unread"})).outcome == "unverified"
    assert made.stop("x/../living", Ledger()).outcome == "not-found"
    assert (
        Sweeper("somebody-else", [FirecrackerLeftovers(site.driver())]).stop("living", Ledger()).outcome
        == "tracked"
    )
    assert lives(handle)
    die(handle)
    assert made.stop("living", Ledger()).outcome == "not-live"
    Paths(site.base, "living").pid_file.write_text(str(os.getpid()))
    assert made.stop("living", Ledger()).outcome == "unverified"
    Paths(site.base, "living").pid_file.write_text("0")


def test_a_registration_that_lands_while_it_is_looked_at_saves_the_machine(site: Site) -> None:
    handle = machine(site, "living")
    ledger = Ledger()
    ledger.then = "live"
    assert sweeper(site).stop("living", ledger).outcome == "tracked"
    assert len(ledger.asked) == 2
    assert lives(handle)


def test_a_machine_that_may_not_be_signalled_is_an_error_and_keeps_its_chroot(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(site, "living")

    def refuse(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(process, "send", refuse)
    assert sweeper(site).stop("living", Ledger()).outcome == "error"
    assert not sweeper(site).reap_unowned("living", Ledger())
    assert Paths(site.base, "living").chroot.exists()
    monkeypatch.undo()


def test_a_reap_of_what_is_nobodys_needs_it_here_and_ends_it_alive_or_dead(site: Site) -> None:
    living, dead = machine(site, "living"), machine(site, "dead")
    die(dead)
    made = sweeper(site)
    assert not made.reap_unowned("elsewhere", Ledger())
    assert not made.reap_unowned("living", Ledger({"living": "live"}))
    assert lives(living)
    assert made.reap_unowned("living", Ledger())
    assert made.reap_unowned("dead", Ledger())
    assert not lives(living)
    assert [path for path in paths.machines(site.base).iterdir() if paths.is_vm(path.name)] == []
    for vm in ("living", "dead"):
        site.net.release(site.lease(vm))


def scaler_of(site: Site) -> FirecrackerScaler:
    config = site.config()
    return FirecrackerScaler(
        name="pool",
        backend="firecracker",
        max_agents=1,
        label_sets=(FirecrackerLabelSet(labels=("linux",), rootfs_path=config.label_sets[0].rootfs_path),),
        firecracker_path=config.firecracker_path,
        jailer_path=config.jailer_path,
        kernel_path=config.kernel_path,
        uid=config.uid,
        gid=config.gid,
        chroot_base=config.chroot_base,
    )


def test_a_full_disk_is_freed_of_our_dead_before_anything_starts(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    living, dead = machine(site, "living"), machine(site, "dead")
    die(dead)
    config = FleetConfig(version=1, scalers=(scaler_of(site),))
    measured = [0, FREE_BYTES_LEAST]
    make_room(config, owner=site.owner, state=site.root, measure=lambda _: measured.pop(0))
    assert "are wanted: removing leftovers" in capfd.readouterr().err
    assert lives(living)
    assert [path.name for path in paths.machines(site.base).iterdir() if paths.is_vm(path.name)] == ["living"]
    with pytest.raises(DiskFull, match="has 0 MiB free, microVMs need 1024, and 0 leftovers"):
        make_room(config, owner=site.owner, state=site.root, measure=lambda _: 0)
    make_room(FleetConfig(version=1), owner=site.owner, state=site.root, measure=lambda _: 0)
    site.net.release(site.lease("dead"))


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


def test_a_mark_is_enough_for_a_teardown_where_no_log_can_be_asked(site: Site) -> None:
    handle = machine(site, "orphan")
    die(handle)
    placement = msgspec.json.decode(Paths(site.base, "orphan").mark.read_bytes())["placement"]
    assert placement["lease"]["address"] == site.lease("orphan").address
    site.driver().destroy("orphan", placement, None, NEVER)
    assert site.leftovers() == []
