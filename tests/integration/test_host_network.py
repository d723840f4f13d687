"""The host network as a whole: provisioned, damaged, healed, shared with others, torn down."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.decisions.addresses import lease_of
from actors.errors import DriverError
from infra.network.host import HostNetwork
from infra.network.namespace import entered
from infra.network.policy import Policy
from infra.network.rtnetlink import set_up
from tests.network_site import (
    ALLOWLISTED,
    OPEN_PORT,
    OUTSIDE,
    NetworkSite,
    network_site,
    run,
)
from tests.tap_guest import ICMP, TCP, UDP, TapGuest

GATEWAY = "10.44.0.1"
OPEN = Policy()
ALL_PROTOCOLS = (UDP, TCP, ICMP)


@pytest.fixture
def site() -> Iterator[NetworkSite]:
    with network_site() as lent:
        yield lent


@pytest.fixture
def network(site: NetworkSite, tmp_path: Path) -> HostNetwork:
    made = site.network(tmp_path)
    made.provision()
    return made


def reaches(guest: TapGuest, target: str, port: int = OPEN_PORT) -> set[int]:
    """Which protocols get an answer from the target."""
    return guest.ask_all(ALL_PROTOCOLS, target, port)


def test_healing_twice_duplicates_nothing_and_disturbs_no_guest(
    site: NetworkSite, network: HostNetwork
) -> None:
    policy = Policy(allowlist=("10.9.0.0/24",), deny_all=True)
    guest = site.guest(network, 2, policy)
    before = uncounted(site.rules())
    for _ in range(2):
        run("nft", "flush", "chain", "inet", "fleetlog", "leaving", inside=site.host)
        run("ip", "link", "set", "flt-br0", "down", inside=site.host)
        assert not network.verify().healthy
        assert network.ensure_ready([(guest.lease, policy)]).misses == ()
        assert uncounted(site.rules()) == before
        assert reaches(guest, ALLOWLISTED) == {*ALL_PROTOCOLS}
        assert reaches(guest, OUTSIDE) == set()
    network.provision()
    network.provision()
    assert uncounted(site.rules()) == before
    assert [tap.name for tap in network.taps()] == [guest.lease.tap], "the probe is gone"


def test_isolation_is_probed_with_a_tap_that_is_gone_afterwards(
    network: HostNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network.probe_isolation()
    assert network.links.taps() == []
    assert "was not probed" not in caplog.text
    # A kernel that takes the flag in silence and does not keep it.
    monkeypatch.setattr("infra.network.netlink_links.rt.guard_port", lambda index: set_up(index, up=False))
    with pytest.raises(DriverError, match="will not isolate port flt-0a2c0000") as caught:
        network.probe_isolation()
    assert (caught.value.kind, caught.value.transient) == ("refused", False)
    with pytest.raises(DriverError, match="will not isolate"):
        network.attach(lease_of(network.pool("t"), "10.44.0.2"), OPEN, 0, 0)
    assert network.links.taps() == []
    assert network.policies() == frozenset()


def test_after_everything_was_lost_live_guests_get_it_back(site: NetworkSite, network: HostNetwork) -> None:
    policies = {2: Policy(allowlist=("10.9.0.0/24",)), 3: Policy(deny_all=True)}
    guests = {number: site.guest(network, number, policy) for number, policy in policies.items()}
    for family in ("inet", "bridge"):
        run("nft", "delete", "table", family, "fleetlog", inside=site.host)
    run("ip", "link", "del", "flt-br0", inside=site.host)
    live = [(guests[number].lease, policy) for number, policy in policies.items()]
    assert network.ensure_ready(live).misses == ()
    assert reaches(guests[2], ALLOWLISTED) == {*ALL_PROTOCOLS}
    assert reaches(guests[3], OUTSIDE) == set()
    assert not guests[2].arp("10.44.0.3")


def test_a_policy_that_got_lost_under_sound_rules_is_put_back(
    site: NetworkSite, network: HostNetwork
) -> None:
    guest = site.guest(network, 2, OPEN)
    run("nft", "flush", "set", "inet", "fleetlog", "known", inside=site.host)
    assert reaches(guest, OUTSIDE) == set()
    assert network.ensure_ready([(guest.lease, OPEN)]).misses == ()
    assert reaches(guest, OUTSIDE) == {*ALL_PROTOCOLS}


def test_provisioning_while_a_guest_runs_takes_nothing_from_it(
    site: NetworkSite, network: HostNetwork
) -> None:
    guest = site.guest(network, 2, Policy(allowlist=("10.9.0.0/24",)))
    held = network.sets.held()
    network.provision()
    assert network.sets.held() == held
    assert reaches(guest, ALLOWLISTED) == {*ALL_PROTOCOLS}


def test_rules_of_others_survive_also_in_our_own_chains(site: NetworkSite, network: HostNetwork) -> None:
    for rule in (
        "add table ip other",
        "add chain ip other forward { type filter hook forward priority 10; }",
        "add rule ip other forward ip saddr 172.31.0.0/16 accept",
        'add rule inet fleetlog forward ip saddr 172.31.0.0/16 accept comment "agent\'s own containers"',
        "add rule inet fleetlog input iifname eth0 accept",
    ):
        run("nft", *rule.split(" "), inside=site.host) if '"' not in rule else run(
            "nft", rule, inside=site.host
        )
    before = uncounted(site.rules())
    assert network.verify().misses == ()
    network.provision()
    assert uncounted(site.rules()) == before
    network.teardown()
    after = site.rules()
    assert "table ip other" in after
    assert "fleetlog" not in after


def uncounted(rules: str) -> str:
    return re.sub(r"counter packets \d+ bytes \d+", "counter", rules)


def test_a_rule_of_others_before_ours_is_reported_and_put_behind(
    site: NetworkSite, network: HostNetwork
) -> None:
    run("nft", "insert rule inet fleetlog forward accept", inside=site.host)
    assert "rules of others before or among ours" in network.verify().detail
    assert network.ensure_ready().misses == ()
    assert "\t\taccept\n" in site.rules()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("ip link del flt-br0", "bridge flt-br0 is not there"),
        ("ip link set flt-br0 down", "bridge flt-br0 is down"),
        ("ip addr flush dev flt-br0", "has not the address 10.44.0.1/24"),
        ("nft delete table inet fleetlog", "set inet fleetlog known is not there"),
        ("nft delete table bridge fleetlog", "set bridge fleetlog bound is not there"),
        ("nft flush chain inet fleetlog postrouting", "postrouting lacks its rule 0"),
        ("nft flush chain inet fleetlog baseline", "baseline lacks its rule"),
        ("nft flush chain inet fleetlog input", "input lacks its rule 1: iifname"),
        ("nft flush chain bridge fleetlog prerouting", "prerouting lacks its rule 0"),
        ("sysctl -qw net.ipv4.ip_forward=0", "does not forward"),
        ("sysctl -qw net.ipv6.conf.flt-br0.disable_ipv6=0", "flt-br0 has IPv6"),
        ("ip route del default", "no default route"),
        ("bridge link set dev flt-0a2c0002 isolated off", "TAP flt-0a2c0002 is not isolated"),
        ("bridge link set dev flt-0a2c0002 learning on", "TAP flt-0a2c0002 may teach the bridge"),
        ("ip link set flt-0a2c0002 nomaster", "TAP flt-0a2c0002 is on no bridge"),
    ],
)
def test_each_damage_is_seen_and_healed(
    site: NetworkSite, network: HostNetwork, damage: str, told: str
) -> None:
    guest = site.guest(network, 2, OPEN)
    assert network.verify().misses == ()
    run(*damage.split(), inside=site.host)
    assert told in network.verify().detail
    if "route" in damage:
        with pytest.raises(DriverError, match="no default route"):
            network.ensure_ready()
        return
    assert network.ensure_ready([(guest.lease, OPEN)]).misses == ()
    assert reaches(guest, OUTSIDE) == {*ALL_PROTOCOLS}


def test_a_chain_that_is_missing_while_the_table_is_there_is_seen_and_made(
    site: NetworkSite, network: HostNetwork
) -> None:
    network.teardown()
    run("nft", "add", "table", "inet", "fleetlog", inside=site.host)
    assert "chain inet fleetlog leaving is not there" in network.verify().detail
    assert network.ensure_ready().misses == ()


def test_without_auto_provision_nothing_is_changed(site: NetworkSite, tmp_path: Path) -> None:
    network = site.network(tmp_path, auto_provision_host=False)
    assert not network.ensure_ready().healthy
    assert network.links.bridge("flt-br0") is None
    assert site.rules() == ""
    with pytest.raises(DriverError, match="fleetlog host provision"):
        network.guard_port(4222)


def test_a_second_bridge_with_a_table_of_its_own_leaves_the_first_ones_nat(
    site: NetworkSite, network: HostNetwork, tmp_path: Path
) -> None:
    other = site.network(
        tmp_path, cidr="10.45.0.0/24", gateway="10.45.0.1", bridge="flt-br1", nft_table="fleetlog_b"
    )
    other.provision()
    assert (network.verify().misses, other.verify().misses) == ((), ())
    first, second = site.guest(network, 2, OPEN), site.guest(other, 2, OPEN)
    assert reaches(first, OUTSIDE) == reaches(second, OUTSIDE) == {*ALL_PROTOCOLS}
    assert not first.ask(ICMP, "10.45.0.1")
    assert len(network.taps()) == len(other.taps()) == 1
    other.teardown(force=True)
    assert reaches(first, OUTSIDE) == {*ALL_PROTOCOLS}
    assert network.verify().misses == ()


def test_a_second_bridge_in_the_same_table_is_refused(
    site: NetworkSite, network: HostNetwork, tmp_path: Path
) -> None:
    before = site.rules()
    other = site.network(tmp_path, cidr="10.45.0.0/24", gateway="10.45.0.1", bridge="flt-br1")
    for call in (other.provision, other.teardown, lambda: other.guard_port(4222)):
        with pytest.raises(DriverError, match="serves bridge flt-br0"):
            call()
    assert "serves bridge flt-br0" in other.verify().detail
    assert site.rules() == before
    assert network.verify().misses == ()


@pytest.mark.parametrize(
    "taken",
    ["addr add 10.44.0.77/16 dev up0", "addr add 10.44.0.9/32 dev up0", "route add 10.44.0.0/25 dev up0"],
)
def test_a_network_that_the_host_has_already_is_refused(
    site: NetworkSite, tmp_path: Path, taken: str
) -> None:
    run("ip", *taken.split(), inside=site.host)
    network = site.network(tmp_path)
    with pytest.raises(DriverError, match="is taken on this host: up0") as caught:
        network.provision()
    assert caught.value.kind == "refused"
    assert site.rules() == ""


def test_without_a_way_out_nothing_is_provisioned(site: NetworkSite, tmp_path: Path) -> None:
    run("ip", "route", "del", "default", inside=site.host)
    with pytest.raises(DriverError, match="egress_interface"):
        site.network(tmp_path).provision()
    assert site.rules() == ""
    named = site.network(tmp_path, egress_interface="up0")
    named.provision()
    assert "the host has no default route" not in named.verify().detail


def test_a_way_out_that_moved_is_seen_and_followed(site: NetworkSite, network: HostNetwork) -> None:
    run("ip", "link", "add", "up9", "type", "veth", "peer", "name", "up8", inside=site.host)
    run("ip", "addr", "add", "192.0.2.2/24", "dev", "up9", inside=site.host)
    for name in ("up9", "up8"):
        run("ip", "link", "set", name, "up", inside=site.host)
    run("ip", "route", "replace", "default", "via", "192.0.2.1", inside=site.host)
    assert "baseline lacks its rule" in network.verify().detail
    assert network.ensure_ready().misses == ()


def test_taps_are_kept_up_to_their_bound_and_teardown_takes_them_all(
    site: NetworkSite, tmp_path: Path
) -> None:
    network = site.network(tmp_path, idle_taps=2)
    network.provision()
    leases = [lease_of(network.pool("t"), f"10.44.0.{number}") for number in range(2, 7)]
    for lease in leases:
        network.attach(lease, OPEN, 30000, 30000)
    assert network.occupied() == {lease.address for lease in leases}
    for lease in leases[:4]:
        network.release(lease)
        network.release(lease)
    assert network.idle() == {leases[0].tap, leases[1].tap}
    assert network.occupied() == {leases[4].address} == network.policies()
    network.attach(leases[0], OPEN, 30000, 30000)
    network.release(leases[2])
    assert network.idle() == {leases[1].tap}
    with pytest.raises(DriverError, match="2 machines use this network"):
        network.teardown()
    for lease in leases:
        network.release(lease)
    network.teardown()
    network.teardown()
    assert network.links.taps() == []
    assert network.links.bridge("flt-br0") is None
    assert site.rules() == ""
    assert "nft table fleetlog is not there" in network.verify().detail


def test_a_guarded_port_is_reached_from_loopback_and_the_bridge_alone(
    site: NetworkSite, tmp_path: Path
) -> None:
    network = site.network(tmp_path)
    network.guard_port(4222)
    assert network.links.bridge("flt-br0") is None, "the guard stands before there is a bridge"
    site.serve(site.host, ("127.0.0.1", 4222), ("198.51.100.2", 4222), ("198.51.100.2", 4223))
    assert connects(site.host, "127.0.0.1", 4222)
    assert connects(site.host, "198.51.100.2", 4222)
    assert not connects(site.outside, "198.51.100.2", 4222)
    assert connects(site.outside, "198.51.100.2", 4223)
    network.provision()
    site.serve(site.host, (GATEWAY, 4222))
    run("ip", "route", "add", "10.44.0.0/24", "via", "198.51.100.2", inside=site.outside)
    assert not connects(site.outside, "198.51.100.2", 4222)
    assert not connects(site.outside, GATEWAY, 4222)
    guest = site.guest(network, 2, Policy(host_access=("4222",)))
    assert TCP in reaches(guest, GATEWAY, 4222)
    network.guard_port(4223)
    assert connects(site.outside, "198.51.100.2", 4222)
    assert not connects(site.outside, "198.51.100.2", 4223)
    run("nft", "flush", "set", "inet", "fleetlog", "guarded", inside=site.host)
    assert "port 4223 is not guarded" in network.verify().detail


def connects(inside: Path, address: str, port: int) -> bool:
    with entered(inside):
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with client:
        client.settimeout(0.3)
        return client.connect_ex((address, port)) == 0


def test_when_the_bridge_is_full_a_spawn_is_refused_before_it_starts(
    network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert network.room() == 1023
    monkeypatch.setattr("infra.network.host.BRIDGE_PORTS_MOST", 1)
    lease = lease_of(network.pool("t"), "10.44.0.2")
    network.check_room()
    network.attach(lease, OPEN, 0, 0)
    with pytest.raises(DriverError, match="1023 ports") as caught:
        network.check_room()
    assert (caught.value.kind, caught.value.transient) == ("exhausted", True)
    network.release(lease)
    network.check_room()


def test_an_attach_that_fails_leaves_no_policy(network: HostNetwork, site: NetworkSite) -> None:
    guest = site.guest(network, 2, OPEN)
    lease = lease_of(network.pool("t"), "10.44.0.3")
    run("ip", "link", "add", lease.tap, "type", "bridge", inside=site.host)
    with pytest.raises(DriverError, match="another kind"):
        network.attach(lease, OPEN, 0, 0)
    assert network.policies() == {guest.lease.address}


def test_with_commands_the_same_network_comes_to_be(
    site: NetworkSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sudo that only drops its option: what is run is what a sudoers file would be asked for.
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "sudo").write_text('#!/bin/sh\n[ "$1" = -n ] || exit 9\nshift\nexec "$@"\n')
    (fake / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    network = site.network(tmp_path, sudo=True)
    network.provision()
    assert network.verify().misses == ()
    guest = site.guest(network, 2, Policy(allowlist=("10.9.0.0/24",), host_access=("*:53", "7001")))
    assert reaches(guest, ALLOWLISTED) == reaches(guest, OUTSIDE) == {*ALL_PROTOCOLS}
    in_process = site.network(tmp_path)
    assert in_process.verify().misses == ()
    assert in_process.sets.held() == network.sets.held() != {}
    network.release(guest.lease)
    assert in_process.sets.held() == {}
    network.teardown()
