"""What passes the host network and what does not, by real packets, honest and forged."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from actors.decisions.addresses import Lease, lease_of, mac_of
from infra.network.host import HostNetwork
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
    strange, gateway, to = mac_bytes("02:00:00:00:00:99"), packed(GATEWAY), guest.gateway_mac
    learned = run("bridge", "fdb", "show", "br", "flt-br0", inside=site.host)
    assert guest.arp(GATEWAY)
    assert guest.ask(UDP, OUTSIDE, OPEN_PORT)

    def packet(mac: bytes, source: bytes) -> bytes:
        return ethernet(to, mac, 0x0800) + datagram(UDP, source, packed(OUTSIDE), 5000, OPEN_PORT)

    forged = {
        "another's address": packet(guest.mac, victim.address),
        "an address of nobody here": packet(guest.mac, packed("198.51.100.9")),
        "the gateway's address": packet(guest.mac, gateway),
        "another's MAC": packet(victim.mac, guest.address),
        "a MAC of nobody": packet(strange, guest.address),
        "another's MAC and address": packet(victim.mac, victim.address),
        "ARP with another's address": arp_frame(1, guest.mac, guest.mac, victim.address, gateway),
        "an answer nobody asked for": arp_frame(2, guest.mac, guest.mac, victim.address, gateway),
        "ARP as the gateway": arp_frame(2, guest.mac, guest.mac, gateway, victim.address),
        "ARP from another's MAC": arp_frame(1, victim.mac, guest.mac, guest.address, gateway),
        "ARP with another's MAC inside": arp_frame(1, guest.mac, victim.mac, guest.address, gateway),
        "IPv6": ethernet(b"\xff" * 6, guest.mac, 0x86DD) + b"\x60" + b"\0" * 60,
        "a VLAN": ethernet(to, guest.mac, 0x8100) + b"\0\1" + packet(guest.mac, guest.address)[12:],
    }
    for count, (what, frame) in enumerate(forged.items(), 1):
        guest.send(frame)
        deadline = time.monotonic() + 2
        while dropped(site) < count:
            assert time.monotonic() < deadline, f"passed: {what}"
    assert dropped(site) == len(forged)
    assert victim.ask(UDP, OUTSIDE, OPEN_PORT), "the victim's traffic still comes to the victim"
    assert guest.ask(UDP, OUTSIDE, OPEN_PORT)
    assert run("bridge", "fdb", "show", "br", "flt-br0", inside=site.host) == learned


def dropped(site: NetworkSite) -> int:
    chain = run("nft", "list", "chain", "bridge", "fleetlog", "port", inside=site.host)
    (count,) = re.findall(r"counter packets (\d+)", chain)
    return int(count)


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
