"""What is left on a host is found, all of it and nothing else; the living are spared, whatever was lost."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from infra.api.client import ApiClient
from infra.api.host_messages import SweepFinding, SweepRequest
from infra.network.namespace import entered
from projections.vm import VmState
from tests.acceptance.leaks import Leaks, end_process
from tests.acceptance.microvm_place import MicrovmPlace
from tests.network_site import NetworkSite, network_site, run

STEPS = (
    "reclaim.listed",
    "reclaim.decided",
    "reclaim.rules",
    "reclaim.tap",
    "reclaim.cgroup",
    "firecracker.destroy.ended",
    "firecracker.destroy.network",
    "reclaim.chroot",
)


@pytest.fixture
def site() -> Iterator[NetworkSite]:
    with network_site() as made:
        yield made


@pytest.fixture
def place(site: NetworkSite) -> Iterator[MicrovmPlace]:
    made = MicrovmPlace(site)
    try:
        yield made
    finally:
        made.clean()


def pid_of(state: VmState) -> int:
    assert state.handle is not None
    return int(state.handle.data["pid"])


def names(answer: dict[str, Any], *outcomes: str) -> dict[str, str]:
    return {each["name"]: each["kind"] for each in answer["findings"] if each["outcome"] in outcomes}


def test_a_leak_of_each_kind_is_found_and_nothing_else(place: MicrovmPlace) -> None:
    place.start()
    (vm,) = place.ask_for("held", cpus=1.0)
    place.wait_phase(vm, "registered")
    of_the_living = place.policies()
    leaks = Leaks(place)
    run("ip", "link", "add", "br-other", "type", "bridge", inside=place.site.host)
    others = {
        "chroot": str(leaks.chroot("foreign", owner="somebody-else", address="10.44.0.250")),
        "unmarked": str(leaks.chroot("unmarked", owner=None)),
        "tap": leaks.foreign_tap("10.44.0.251", "br-other"),
        "idle": leaks.foreign_tap("10.44.0.252", place.network["bridge"], up=False),
        "outside": leaks.foreign_tap("10.99.0.1", None),
    }
    their_cgroups = leaks.cgroups("foreign", owner=f"not-{place.id}")
    run("nft", "add", "table", "inet", "other", inside=place.site.host)
    run("nft", "add set inet other sources { type ipv4_addr; }", inside=place.site.host)
    run("nft", "add element inet other sources { 10.44.0.201 }", inside=place.site.host)
    wanted = leaks.one_of_each(1)

    planned = place.ask("reap", "--dry-run")
    assert names(planned, "would-reap") == wanted
    assert "leaked-1" in place.chroots(), "a dry run changes nothing"
    done = place.ask("reap")
    assert names(done, "reaped") == wanted
    assert names(done, "spared") == {others["unmarked"]: "chroot"}
    assert done["counts"] == Counter(wanted.values())
    assert place.ask("reap")["total"] == 0

    assert not [name for name in wanted if Path(name).exists()]
    assert all(Path(name).exists() for name in (others["chroot"], others["unmarked"], *their_cgroups))
    links = run("ip", "-o", "link", "show", inside=place.site.host)
    assert not [name for name, kind in wanted.items() if kind == "tap" and name in links]
    assert all(others[kind] in links for kind in ("tap", "idle", "outside"))
    assert "10.44.0.201" in run("nft", "list", "table", "inet", "other", inside=place.site.host)
    assert place.policies() == of_the_living
    assert (place.base / "firecracker" / ".overlay-templates").exists()
    assert list(place.microvms().values()) == [vm]
    assert place.ask("orphans")["machines"] == []
    (tracked,) = place.ask("orphans", "--all")["machines"]
    assert (tracked["vm"], tracked["status"]) == (vm, "tracked")
    kept = place.data / "machines" / "microvms" / "logs" / "leaked-1.log"
    assert kept.read_text() == "last words of leaked-1\n"
    for name in ("foreign", "unmarked"):
        shutil.rmtree(place.base / "firecracker" / name)
    for directory in their_cgroups:
        Path(directory).rmdir()
        Path(directory).parent.rmdir()
    for kind in ("tap", "idle", "outside"):
        run("ip", "link", "del", others[kind], inside=place.site.host)
    place.tell(vm, "exit 0")
    place.wait_all_reaped()
    place.settle()


def test_after_a_lost_log_the_dead_go_at_the_start_and_the_living_only_by_an_operator(
    place: MicrovmPlace,
) -> None:
    first = place.start()
    living, dead, other = place.ask_for("held", 3, cpus=1.0)
    place.wait_phases((living, dead, other), "registered")
    lives = place.lives()
    first.kill()
    end_process(pid_of(lives[dead]))
    shutil.rmtree(place.data)

    second = place.start()
    assert sorted(place.microvms().values()) == sorted((living, other))
    assert place.chroots() == sorted((living, other)), "what was dead is gone before anything is asked"
    assert not [each for each in place.policies() if lives[dead].address in each]
    assert [each for each in place.policies() if lives[living].address in each]
    machines = {each["vm"]: each for each in place.ask("orphans")["machines"]}
    assert {vm: each["status"] for vm, each in machines.items()} == {living: "orphaned", other: "orphaned"}
    assert {vm: each["pid"] for vm, each in machines.items()} == {
        vm: pid_of(lives[vm]) for vm in (living, other)
    }
    (taken_again,) = place.ask_for("held")
    place.wait_phase(taken_again, "registered")
    fresh = place.lives()[taken_again]
    assert fresh.address not in (lives[living].address, lives[other].address), "in use, so not given away"
    assert names(place.ask("reap"), "reaped") == {}

    assert place.run("orphans", "--yes").returncode == 2
    assert place.ask("orphans", "--stop", "--dry-run")["would_stop"] == sorted((living, other))
    refused = place.ask("orphans", "--stop", "--yes", "--vm", taken_again, "--vm", "x/../y", expect=1)
    assert [each["outcome"] for each in refused["results"]] == ["tracked", "not-found"]
    one = place.ask("orphans", "--stop", "--yes", "--vm", other)
    assert [each["outcome"] for each in one["results"]] == ["stopped"]
    assert sorted(place.microvms().values()) == sorted((living, taken_again))
    rest = place.ask("orphans", "--stop", "--yes")
    assert [(each["vm"], each["outcome"]) for each in rest["results"]] == [(living, "stopped")]
    assert list(place.microvms().values()) == [taken_again]
    assert all(fresh.address in each for each in place.policies())
    with entered(place.site.host):
        assert second.health()["status"] == "ok"
    place.tell(taken_again, "exit 0")
    place.wait_all_reaped()
    place.settle()


def test_a_coordinator_killed_between_any_two_steps_of_a_sweep_leaves_the_rest_to_the_next(
    place: MicrovmPlace,
) -> None:
    place.start().kill()  # which makes the network
    leaks = Leaks(place)
    for number, step in enumerate(STEPS, 1):
        leaked = leaks.one_of_each(number)
        dying = place.launch(crash_at=step)
        if "cgroup" not in leaked.values() and step == "reclaim.cgroup":
            dying.wait_up().kill()  # a host without the controllers has none of these
        else:
            assert dying.wait_dead() == -signal.SIGKILL, step
        place.start().kill()
        assert place.left() == [], (step, place.coordinators[-1].said())
    place.start()
    assert place.ask("reap")["findings"] == []
    place.settle()


def test_two_coordinators_on_one_host_never_touch_each_others(site: NetworkSite) -> None:
    one = MicrovmPlace(site)
    two = MicrovmPlace(
        site, base=one.base, network={"cidr": "10.45.0.0/24", "bridge": "flt-br1", "nft_table": "fleetlog1"}
    )
    try:
        first, second = one.start(), two.start()
        (mine,), (theirs,) = one.ask_for("held"), two.ask_for("held")
        one.wait_phase(mine, "registered")
        two.wait_phase(theirs, "registered")
        Leaks(one).chroot("dead-of-one")
        Leaks(two).chroot("dead-of-two")
        assert names(one.ask("reap"), "reaped") == {str(one.base / "firecracker" / "dead-of-one"): "chroot"}
        assert (one.base / "firecracker" / "dead-of-two").exists()
        assert one.ask("orphans")["machines"] == []
        seen = {each["vm"]: each["why"] for each in one.ask("orphans", "--all")["machines"]}
        assert seen[theirs] == f"it belongs to coordinator {two.id}"
        refused = one.ask("orphans", "--stop", "--yes", "--vm", theirs, expect=1)
        assert [each["outcome"] for each in refused["results"]] == ["tracked"]
        first.kill()
        shutil.rmtree(one.data)
        one.start()
        assert {each["vm"] for each in one.ask("orphans")["machines"]} == {mine}
        assert one.ask("orphans", "--stop", "--yes")["results"][0]["outcome"] == "stopped"
        assert two.lives()[theirs].phase == "registered"
        assert names(two.ask("reap"), "reaped") == {str(one.base / "firecracker" / "dead-of-two"): "chroot"}
        assert second.process.poll() is None
        two.tell(theirs, "exit 0")
        two.wait_all_reaped()
    finally:
        two.clean()
        one.clean()


def test_reap_offline_goes_by_the_host_alone_and_never_beside_a_coordinator(place: MicrovmPlace) -> None:
    offline = ("reap", "--offline", "--config", str(place.config), "--id", place.id)
    coordinator = place.start()
    living, dead = place.ask_for("held", 2)
    place.wait_phases((living, dead), "registered")
    lives = place.lives()
    leaks = Leaks(place)
    leaked = leaks.one_of_each(1)
    skipped = place.ask(*offline)
    assert skipped["skipped"] is True
    forced = place.ask(*offline, "--force", expect=1)
    assert (forced["total"], bool(forced["unlisted"])) == (0, True), "the coordinator holds the host"
    assert all(Path(name).exists() for name, kind in leaked.items() if kind in ("chroot", "cgroup"))

    coordinator.kill()
    end_process(pid_of(lives[dead]))
    planned = place.ask(*offline, "--dry-run")
    assert names(planned, "would-reap").items() >= leaked.items()
    done = place.ask(*offline)
    gone = names(done, "reaped")
    assert str(place.base / "firecracker" / dead) in gone
    assert lives[dead].address in gone
    assert gone.items() >= leaked.items()
    assert place.chroots() == [living]
    assert list(place.microvms().values()) == [living]
    assert {each.split()[-1] for each in place.taps()} == {place.taps()[0]}
    assert [each for each in place.policies() if lives[living].address in each]

    place.start()
    place.wait_phase(dead, "reaped")
    assert place.lives()[living].phase == "registered", "taken up again, as if nothing had been"
    place.tell(living, "exit 0")
    place.wait_all_reaped()
    place.settle()


@contextmanager
def sweeping(place: MicrovmPlace) -> Iterator[list[SweepFinding]]:
    """Have one sweep after the other while the block runs; all that they found is in the list."""
    found: list[SweepFinding] = []
    over = Event()

    def sweep() -> None:
        with place.connected() as connection:
            client = ApiClient(connection, place.cluster)
            while not over.is_set():
                found.extend(client.sweep(place.id, SweepRequest()).findings)

    with ThreadPoolExecutor(1) as pool:
        sweeps = pool.submit(sweep)
        try:
            yield found
        finally:
            over.set()
        sweeps.result()


def test_sweeps_without_end_take_nothing_of_what_starts_and_ends_meanwhile(place: MicrovmPlace) -> None:
    place.start("--sweep-every", "1s")
    leaked = Leaks(place).one_of_each(1)
    with sweeping(place) as found:
        vms = place.ask_for("quick", 16, cpus=0.5) + place.ask_for("held", 4)
        place.wait_for(
            lambda lives: all(vm in lives and lives[vm].registered_at is not None for vm in vms),
            "all came up",
            40,
        )
        for vm in vms[16:]:
            place.tell(vm, "exit 0")
        place.wait_all_reaped(40)
    assert {each.name: each.kind for each in found} == leaked, "and nothing else, not even spared"
    assert Counter(state.reason for state in place.lives().values()) == {"job-complete": 20}
    status = place.ask("doctor", "--config", str(place.config))
    (sweeps,) = (each for each in status["checks"] if each["name"].startswith("sweeps of"))
    assert sweeps["status"] == "pass", sweeps
    place.settle()


def test_a_scaler_whose_host_lacks_something_is_degraded_with_the_reason_and_the_others_work(
    place: MicrovmPlace,
) -> None:
    broken = place.scaler(name="broken", kinds={"never": "wait"}) | {"kernel_path": "/no/such/kernel"}
    place.write(place.scaler(), broken)
    coordinator = place.start()
    (vm,) = place.ask_for("held")
    place.wait_phase(vm, "registered")
    with entered(place.site.host):
        health = coordinator.health()
    said = [each["what"] for each in health["warnings"]]
    assert [("broken" in each, "/no/such/kernel" in each) for each in said] == [(True, True)]
    checks = place.ask("doctor", "--config", str(place.config), expect=1)["checks"]
    by_name = {each["name"]: each for each in checks}
    assert by_name["microVMs of vms"]["status"] == "pass"
    assert by_name["microVMs of broken"]["status"] == "fail"
    assert "/no/such/kernel" in by_name["microVMs of broken"]["detail"]
    (note,) = (each for each in checks if each["detail"].startswith("scaler broken is degraded"))
    assert note["status"] == "warn"
    place.tell(vm, "exit 0")
    place.wait_all_reaped()
    place.settle()
