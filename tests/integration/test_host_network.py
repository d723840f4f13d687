"""The host network held to its words by real packets: what passes, what does not, and what survives."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from actors.decisions.addresses import Lease, lease_of, mac_of
from actors.errors import DriverError
from infra.network.host import HostNetwork
from infra.network.namespace import entered
from infra.network.policy import Policy
from infra.network.rtnetlink import mac_bytes
from tests.network_site import (
    ALLOWLISTED,
    INTERNAL,
    METADATA,
    OPEN_PORT,
    OUTSIDE,
    NetworkSite,
    network_site,
    run,
)
from tests.tap_guest import ICMP, TCP, UDP, TapGuest, arp_frame, datagram, ethernet, packed

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


def test_the_internet_is_reached_and_nothing_internal_is(site: NetworkSite, network: HostNetwork) -> None:
    guest = site.guest(network, 2, OPEN)
    assert reaches(guest, OUTSIDE) == {*ALL_PROTOCOLS}
    for closed in (INTERNAL, ALLOWLISTED, "192.168.9.9", "172.16.9.9", "100.64.9.9", METADATA):
        assert reaches(guest, closed) == set(), closed


def test_an_allowlist_opens_its_networks_also_internal_ones_and_no_others(
    site: NetworkSite, network: HostNetwork
) -> None:
    guest = site.guest(network, 2, Policy(allowlist=("10.9.0.0/24", "10.9.0.5/32", f"{METADATA}/32")))
    for target in (OUTSIDE, ALLOWLISTED, METADATA):
        assert reaches(guest, target) == {*ALL_PROTOCOLS}, target
    assert reaches(guest, INTERNAL) == set()


def test_deny_all_leaves_the_allowlist_and_nothing_else(site: NetworkSite, network: HostNetwork) -> None:
    guest = site.guest(network, 2, Policy(allowlist=("10.9.0.0/24",), deny_all=True))
    assert reaches(guest, ALLOWLISTED) == {*ALL_PROTOCOLS}
    assert reaches(guest, OUTSIDE) == set()


def test_a_policy_is_its_addresss_own_also_where_one_begins_like_another(
    site: NetworkSite, network: HostNetwork
) -> None:
    opened = site.guest(network, 20, Policy(allowlist=("10.9.0.0/24",), host_access=("7001",)))
    closed = site.guest(network, 2, Policy(deny_all=True))
    site.serve(site.host, (GATEWAY, 7001))
    assert (reaches(opened, ALLOWLISTED), reaches(closed, ALLOWLISTED)) == ({*ALL_PROTOCOLS}, set())
    assert (reaches(opened, GATEWAY, 7001), reaches(closed, GATEWAY, 7001)) == ({UDP, TCP}, set())
    network.release(closed.lease)
    assert reaches(opened, ALLOWLISTED) == {*ALL_PROTOCOLS}


def test_of_its_host_a_guest_reaches_exactly_what_is_listed(site: NetworkSite, network: HostNetwork) -> None:
    site.serve(site.host, *((address, port) for address in (GATEWAY, "198.51.100.2") for port in (53, 7001)))
    nothing = site.guest(network, 2, OPEN)
    one = site.guest(network, 3, Policy(host_access=(f"{GATEWAY}:53",)))
    any_address = site.guest(network, 4, Policy(host_access=("7001", f"{GATEWAY}:7001")))
    whole = site.guest(network, 5, Policy(host_access=(GATEWAY,)))
    everything = site.guest(network, 6, Policy(host_access=("*",)))
    assert reaches(nothing, GATEWAY, 53) == reaches(nothing, "198.51.100.2", 7001) == set()
    assert reaches(one, GATEWAY, 53) == {UDP, TCP}
    assert reaches(one, GATEWAY, 7001) == reaches(one, "198.51.100.2", 53) == set()
    assert reaches(any_address, GATEWAY, 7001) == reaches(any_address, "198.51.100.2", 7001) == {UDP, TCP}
    assert reaches(any_address, GATEWAY, 53) == set()
    assert reaches(whole, GATEWAY, 53) == reaches(whole, GATEWAY, 7001) == {*ALL_PROTOCOLS}
    assert reaches(whole, "198.51.100.2", 7001) == set()
    assert reaches(everything, "198.51.100.2", 53) == {*ALL_PROTOCOLS}


def test_what_the_host_begins_is_answered_by_a_guest_that_may_reach_nothing(
    site: NetworkSite, network: HostNetwork
) -> None:
    guest = site.guest(network, 2, Policy(deny_all=True))
    process = run_ping(site, "10.44.0.2")
    request = guest.receive(lambda frame: frame[12:14] == b"\x08\x00" and frame[23] == ICMP, 5)
    assert request is not None, "the host's own packets must reach a guest"
    reply = bytearray(request)
    reply[0:6], reply[6:12] = request[6:12], request[0:6]
    reply[26:30], reply[30:34] = request[30:34], request[26:30]
    reply[34] = 0
    checksum = int.from_bytes(reply[36:38], "big") + 0x0800
    reply[36:38] = ((checksum & 0xFFFF) + (checksum >> 16)).to_bytes(2, "big")
    guest.send(bytes(reply))
    assert process.wait(timeout=10) == 0


def run_ping(site: NetworkSite, target: str) -> Popen[bytes]:
    script = (
        "import socket,struct,sys\n"
        "s=socket.socket(socket.AF_INET,socket.SOCK_RAW,1);s.settimeout(8)\n"
        "body=struct.pack('!BBHHH',8,0,0,77,1)\n"
        "body=body[:2]+struct.pack('!H',~(0x0800+77+1)&0xffff)+body[4:]\n"
        f"s.sendto(body,('{target}',0))\n"
        "while True:\n"
        "    got=s.recv(2048)\n"
        "    if got[20]==0 and got[24:26]==struct.pack('!H',77): sys.exit(0)\n"
    )
    return Popen(["nsenter", f"--net={site.host}", sys.executable, "-c", script])


def test_guests_do_not_see_each_other_neither_directly_nor_through_the_host(
    site: NetworkSite, network: HostNetwork
) -> None:
    first = site.guest(network, 2, Policy(allowlist=("10.44.0.0/24", "0.0.0.0/0"), host_access=("*",)))
    second = site.guest(network, 3, OPEN)
    assert not first.arp("10.44.0.3")
    for to_mac in (second.mac, b"\xff" * 6, first.gateway_mac):
        packet = datagram(UDP, first.address, second.address, 5000, 5001)
        first.send(ethernet(to_mac, first.mac, 0x0800) + packet)
    assert second.receive(lambda frame: frame[26:30] == first.address) is None
    assert first.ask(UDP, OUTSIDE, OPEN_PORT), "or the test proves nothing"


def test_a_guest_may_speak_as_itself_alone(site: NetworkSite, network: HostNetwork) -> None:
    guest, victim = site.guest(network, 2, OPEN), site.guest(network, 3, OPEN)
    before = run("bridge", "fdb", "show", "br", "flt-br0", inside=site.host)
    assert guest.arp(GATEWAY)
    assert guest.ask(UDP, OUTSIDE, OPEN_PORT)
    forged_mac = mac_bytes("02:00:00:00:00:99")
    assert not guest.ask(UDP, OUTSIDE, OPEN_PORT, source="10.44.0.3")
    assert not guest.ask(UDP, OUTSIDE, OPEN_PORT, mac=victim.mac)
    assert not guest.ask(UDP, OUTSIDE, OPEN_PORT, mac=forged_mac)
    assert not guest.ask(UDP, OUTSIDE, OPEN_PORT, source="10.44.0.3", mac=victim.mac)
    assert not guest.ask(UDP, OUTSIDE, OPEN_PORT, source="198.51.100.9")
    assert not guest.arp(GATEWAY, source="10.44.0.3")
    assert not guest.arp(GATEWAY, mac=victim.mac, inner=guest.mac)
    assert not guest.arp(GATEWAY, inner=victim.mac)
    for operation in (1, 2):
        guest.send(arp_frame(operation, guest.mac, guest.mac, victim.address, packed(GATEWAY)))
    guest.send(ethernet(b"\xff" * 6, guest.mac, 0x86DD) + b"\x60" + b"\0" * 60)
    guest.send(ethernet(guest.gateway_mac, guest.mac, 0x8100) + b"\0\1\x08\0" + b"\0" * 40)
    assert victim.ask(UDP, OUTSIDE, OPEN_PORT), "the victim's traffic still comes to the victim"
    assert guest.ask(UDP, OUTSIDE, OPEN_PORT)
    assert run("bridge", "fdb", "show", "br", "flt-br0", inside=site.host) == before
    counted = run("nft", "list", "chain", "bridge", "fleetlog", "port", inside=site.host)
    assert "counter packets 0 " not in counted


def test_nothing_outside_begins_anything_with_a_guest(site: NetworkSite, network: HostNetwork) -> None:
    guest = site.guest(network, 2, OPEN)
    run("ip", "route", "add", "10.44.0.0/24", "via", "198.51.100.2", inside=site.outside)
    script = (
        "import socket; s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.sendto(b'x',('10.44.0.2',9))"
    )
    run(sys.executable, "-c", script, inside=site.outside)
    assert guest.receive(lambda frame: frame[23:24] == bytes([UDP])) is None


def test_an_address_used_again_inherits_nothing(
    site: NetworkSite, network: HostNetwork, tmp_path: Path
) -> None:
    site.serve(site.host, (GATEWAY, 7001))
    lease = first_life(site, network)
    network.release(lease)
    network.attach(lease, Policy(deny_all=True), 0, 0)
    with TapGuest(lease, site.host, mac_of(GATEWAY)) as guest:
        assert (
            reaches(guest, ALLOWLISTED) == reaches(guest, OUTSIDE) == reaches(guest, GATEWAY, 7001) == set()
        )
    # What another process or a crash left behind counts as well: nobody told us, and it goes all the same.
    network.release(lease)
    left = "{ 10.44.0.2 . 10.9.0.0/24, 10.44.0.2 . 203.0.113.0/24 }"
    run("nft", "add", "element", "inet", "fleetlog", "allowed", left, inside=site.host)
    other = site.network(tmp_path)
    for each in (network, other):
        each.attach(lease, Policy(deny_all=True), 0, 0)
        with TapGuest(lease, site.host, mac_of(GATEWAY)) as guest:
            assert reaches(guest, ALLOWLISTED) == reaches(guest, OUTSIDE) == set()
        run("nft", "add", "element", "inet", "fleetlog", "allowed", left, inside=site.host)


def first_life(site: NetworkSite, network: HostNetwork) -> Lease:
    lease = lease_of(network.pool("test"), "10.44.0.2")
    network.attach(lease, Policy(allowlist=("10.9.0.0/24",), host_access=("*",)), 0, 0)
    with TapGuest(lease, site.host, mac_of(GATEWAY)) as guest:
        assert reaches(guest, ALLOWLISTED) == reaches(guest, GATEWAY, 7001) | {ICMP} == {*ALL_PROTOCOLS}
    return lease


def test_a_flow_of_the_dead_is_not_carried_on_by_the_next(site: NetworkSite, network: HostNetwork) -> None:
    site.serve(site.host, (GATEWAY, 7001))
    lease = lease_of(network.pool("test"), "10.44.0.2")

    def say(guest: TapGuest, target: str, port: int) -> bool:
        guest.send(
            ethernet(guest.gateway_mac, guest.mac, 0x0800)
            + datagram(UDP, guest.address, packed(target), 33333, port)
        )
        return guest.receive(lambda frame: frame[23] == UDP and frame[26:30] == packed(target)) is not None

    network.attach(lease, Policy(allowlist=("10.9.0.0/24",), host_access=("7001",)), 0, 0)
    with TapGuest(lease, site.host, mac_of(GATEWAY)) as guest:
        assert say(guest, ALLOWLISTED, OPEN_PORT)
        assert say(guest, GATEWAY, 7001)
    network.release(lease)
    network.attach(lease, OPEN, 0, 0)
    with TapGuest(lease, site.host, mac_of(GATEWAY)) as guest:
        assert not say(guest, ALLOWLISTED, OPEN_PORT)
        assert not say(guest, GATEWAY, 7001)


def test_a_guest_without_a_policy_reaches_nothing(site: NetworkSite, network: HostNetwork) -> None:
    site.serve(site.host, (GATEWAY, 7001))
    guest = site.guest(network, 2, Policy(host_access=("*",)))
    assert reaches(guest, OUTSIDE)
    network.forbid("10.44.0.2")
    assert reaches(guest, OUTSIDE) == reaches(guest, GATEWAY, 7001) == set()
    assert not guest.arp(GATEWAY)


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
    network.check_room()
    monkeypatch.setattr("infra.network.host.BRIDGE_PORTS_MOST", 1)
    lease = lease_of(network.pool("t"), "10.44.0.2")
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


def test_packets_too_large_for_the_way_out_are_never_offered(site: NetworkSite, network: HostNetwork) -> None:
    guest = site.guest(network, 2, OPEN)
    run("ip", "link", "set", "up0", "mtu", "1400", inside=site.host)
    run("ip", "route", "flush", "cache", inside=site.host)
    ours = 51515
    guest.send(
        ethernet(guest.gateway_mac, guest.mac, 0x0800)
        + datagram(TCP, guest.address, packed(OUTSIDE), ours, OPEN_PORT)
    )
    answer = guest.receive(lambda frame: frame[23] == TCP and frame[26:30] == packed(OUTSIDE))
    assert answer is not None
    options = answer[54 : 34 + (answer[46] >> 4) * 4]
    assert options[:2] == b"\2\4"
    assert int.from_bytes(options[2:4], "big") <= 1460


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
