"""Whole lives of real jailed microVMs under a real coordinator: one, thirty-two at once, and what each may reach and read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from infra.drivers.firecracker.api import Api, Request
from infra.drivers.firecracker.paths import Paths
from infra.network.namespace import entered
from tests.acceptance.host import wait_until
from tests.acceptance.microvm_place import MicrovmPlace
from tests.network_site import NetworkSite, network_site, run

AT_ONCE = 32
LIFE = [
    "vm.requested",
    "vm.spawn_started",
    "vm.spawned",
    "vm.registered",
    "vm.config_acked",
    "vm.draining",
    "vm.reaped",
]


@pytest.fixture(scope="module")
def site() -> Iterator[NetworkSite]:
    with network_site() as made:
        yield made


@pytest.fixture(scope="module")
def place(site: NetworkSite) -> Iterator[MicrovmPlace]:
    """One coordinator for this module; every test leaves it as it was."""
    made = MicrovmPlace(site, tables=True)
    try:
        made.start("--agent-lines")
        yield made
        made.settle()
        assert made.secret.encode() not in everything_written(made)
    finally:
        made.clean()


def everything_written(place: MicrovmPlace) -> bytes:
    """Return every file of the place besides the fleet file, which is where the secret comes from."""
    paths = [path for path in place.root.rglob("*") if path.is_file() and path != place.config]
    return b"\n".join(path.read_bytes() for path in paths)


def test_one_whole_life_is_told_fact_by_fact_and_leaves_nothing(place: MicrovmPlace) -> None:
    (vm,) = place.ask_for("quick", memory_bytes=64 << 20)
    place.wait_phase(vm, "reaped")
    assert [fact.tag for fact in place.facts() if fact.aggregate == f"vm.{vm}"] == LIFE
    state = place.lives()[vm]
    assert (state.reason, state.exit_code) == ("job-complete", 0)
    stages = [
        state.requested_at,
        state.started_at,
        state.spawned_at,
        state.registered_at,
        state.ended_at,
        state.reaped_at,
    ]
    assert stages == sorted(stages, key=lambda at: (at is None, at)), (
        "each after the one before, none missing"
    )
    assert None not in stages
    assert "guest: off" in place.console(vm), "its console is kept"
    told = json.dumps(place.ask("agent", "describe", vm))
    assert all(tag in told for tag in LIFE)
    assert place.ask("agent", "logs", vm)["lines"]
    place.assert_nothing_is_left()


def test_a_machine_that_lives_has_exactly_one_of_everything(place: MicrovmPlace) -> None:
    (vm,) = place.ask_for("held", memory_bytes=64 << 20)
    place.wait_phase(vm, "registered")
    assert list(place.microvms().values()) == [vm]
    assert place.chroots() == [vm]
    (address,) = place.leases()
    assert place.taps() == ["flt-" + socket.inet_aton(address).hex()]
    assert {policy.split()[0] for policy in place.policies()} == {"known", "bound", "host_ports"}
    assert all(address in policy for policy in place.policies())
    assert sum(what.startswith("cgroup") for what in place.left()) == sum(
        Path(path).exists() for path in place.lives()[vm].placement["cgroups"]
    )
    place.verify()
    place.tell(vm, "exit 7")
    place.wait_phase(vm, "reaped")
    assert place.lives()[vm].exit_code == 7
    place.assert_nothing_is_left()


def test_thirty_two_at_once_all_register_and_all_are_gone_again(place: MicrovmPlace) -> None:
    vms = place.ask_for("held", AT_ONCE)
    place.wait_phases(vms, "registered", 40)
    leases = place.leases()
    assert len(leases) == len(place.taps()) == len(place.microvms()) == AT_ONCE
    assert sorted(leases.values()) == sorted(vms)
    assert {place.lives()[vm].address for vm in vms} == set(leases)
    place.verify()
    for vm in vms:
        place.tell(vm, "exit 0")
    place.wait_phases(vms, "reaped", 40)
    assert {place.lives()[vm].reason for vm in vms} == {"job-complete"}
    place.assert_nothing_is_left()
    idle = run("ip", "-o", "link", "show", "type", "tun", inside=place.site.host).splitlines()
    assert len(idle) == AT_ONCE, "their TAPs are kept for the next ones: down, and on the bridge"


def test_a_machine_told_to_stop_ends_its_job_and_a_busy_one_only_by_force(place: MicrovmPlace) -> None:
    (vm,) = place.ask_for("held")
    place.wait_phase(vm, "registered")
    place.ask("agent", "rm", vm, expect=3)
    place.ask("agent", "rm", vm, "--force")
    place.wait_phase(vm, "reaped")
    assert place.lives()[vm].exit_code in (-15, None)
    place.assert_nothing_is_left()


def test_what_a_machine_was_started_with_is_read_by_it_alone_and_by_nobody_once_it_works(
    place: MicrovmPlace,
) -> None:
    (mute,) = place.ask_for("mute")
    place.wait_phase(mute, "spawned")
    secrets = [place.secret, metadata(place, mute)["FLEETLOG_AGENT_CREDENTIAL"]]
    (held,) = place.ask_for("held")
    place.wait_for(lambda lives: lives[held].config_acked, "it works")
    wait_until(lambda: not metadata(place, held), "the metadata is cleared")
    place.ask("agent", "rm", mute, "--force")
    place.tell(held, "exit 0")
    place.wait_phases((mute, held), "reaped")
    written = everything_written(place)
    log = b"".join(msgspec.json.encode(fact) for fact in place.facts())
    for secret in secrets:
        assert len(secret) > 10
        assert secret.encode() not in written
        assert secret.encode() not in log
    place.assert_nothing_is_left()


def metadata(place: MicrovmPlace, vm: str) -> dict[str, Any]:
    """Return what the machine's metadata service has, as its guest would read it."""
    api = Api(Paths(place.base, vm).socket)
    try:
        (answer,) = api.call(Request("GET", "/mmds"))
    finally:
        api.close()
    found = json.loads(answer.body) or {}
    return dict(found.get("latest", {}).get("meta-data", {}))


def test_a_guest_reaches_nats_at_its_gateway_and_nothing_else_of_its_host(place: MicrovmPlace) -> None:
    port = urlsplit(place.address().url).port
    assert port is not None
    gateway = "10.44.0.1"
    place.site.serve(place.site.host, (gateway, 7001))
    (vm,) = place.ask_for("held")
    place.wait_phase(vm, "registered")
    place.tell(
        vm, f"connect {gateway} {port}; connect {gateway} 7001; connect 198.51.100.2 7001; print looked"
    )
    place.wait_console(vm, "looked")
    console = place.console(vm)
    assert f"connect {gateway}:{port} open" in console
    assert f"connect {gateway}:7001 timeout" in console
    assert "connect 198.51.100.2:7001 timeout" in console
    run("ip", "route", "add", "10.44.0.0/24", "via", "198.51.100.2", inside=place.site.outside)
    for address in ("198.51.100.2", gateway):
        with entered(place.site.outside), pytest.raises(TimeoutError):
            socket.create_connection((address, port), timeout=1).close()
    with entered(place.site.host):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    place.tell(vm, "exit 0")
    place.wait_phase(vm, "reaped")
