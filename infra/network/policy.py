"""What one address may reach, and the set elements that say so. Pure."""

import ipaddress
import struct
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from actors.decisions.addresses import Lease
from infra.config.host_access import HostAccessEntry, parse_entry

IPv4Network = ipaddress.IPv4Network
Family = Literal["inet", "bridge"]

ANYWHERE = IPv4Network("0.0.0.0/0")
ADDRESS_BYTES = 4
_TCP, _UDP = 6, 17
_DNS_PORT, _NATS_PORT = 53, 4222
_IFNAME_BYTES = 16


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine may reach. Networks of `allowlist` go before every prohibition, `host_access` is for the host.

    `deny_all`: nothing else through the host. `host_access` are entries as in the fleet file; empty: nothing on it.
    """

    allowlist: tuple[str, ...] = ()
    deny_all: bool = False
    host_access: tuple[str, ...] = ()


def default_host_access(gateway: str, nats_url: str) -> tuple[str, ...]:
    """Return what of its host a machine may reach where its label set says nothing: DNS and the way to NATS.

    NATS counts on any address of the host; an address without a port means NATS' own, and one that cannot be read
    adds nothing.
    """
    try:
        parts = urlsplit(nats_url)
        port = parts.port or _NATS_PORT
    except ValueError:
        return (f"{gateway}:{_DNS_PORT}",)
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        return (f"{gateway}:{_DNS_PORT}",)
    return f"{gateway}:{_DNS_PORT}", f"*:{port}"


class NftSet(msgspec.Struct, frozen=True, kw_only=True):
    """One set of ours: its table's family, its nft type, and where in a key the owning address stands."""

    family: Family
    name: str
    type: str
    owner_at: int = 0
    ranges: bool = False

    def owner(self, key: bytes) -> str:
        """Return the address an element belongs to."""
        return str(ipaddress.IPv4Address(key[self.owner_at : self.owner_at + ADDRESS_BYTES]))


KNOWN = NftSet(family="inet", name="known", type="ipv4_addr")
DENIED = NftSet(family="inet", name="denied", type="ipv4_addr")
ALLOWED = NftSet(family="inet", name="allowed", type="ipv4_addr . ipv4_addr", ranges=True)
HOST = NftSet(family="inet", name="host", type="ipv4_addr . ipv4_addr", ranges=True)
HOST_PORTS = NftSet(
    family="inet", name="host_ports", type="ipv4_addr . ipv4_addr . inet_proto . inet_service", ranges=True
)
BOUND = NftSet(
    family="bridge", name="bound", type="ifname . ether_addr . ipv4_addr", owner_at=_IFNAME_BYTES + 8
)
SETS = (KNOWN, DENIED, ALLOWED, HOST, HOST_PORTS, BOUND)
"""Every set that holds what belongs to an address. All of an address is in these and nowhere else."""


class Element(msgspec.Struct, frozen=True, order=True):
    """One element of a set, as the kernel has it: every field padded to four bytes; `last` ends a range."""

    set: str
    first: bytes
    last: bytes = b""


def elements(lease: Lease, policy: Policy) -> frozenset[Element]:
    """Return everything that stands for this policy of this address.

    Raises:
        ValueError: an entry of the policy has another form.
    """
    source = ipaddress.IPv4Address(lease.address).packed
    found = {Element(KNOWN.name, source), Element(BOUND.name, _bound(lease))}
    if policy.deny_all:
        found.add(Element(DENIED.name, source))
    for network in _disjoint(IPv4Network(text) for text in policy.allowlist):
        found.add(_range(ALLOWED, source, network))
    entries = [parse_entry(text) for text in policy.host_access]
    for network in _disjoint(_network(each) for each in entries if each.port is None):
        found.add(_range(HOST, source, network))
    for port in {each.port for each in entries if each.port is not None}:
        tail = struct.pack("!H2x", port)
        for network in _disjoint(_network(each) for each in entries if each.port == port):
            for protocol in (_TCP, _UDP):
                found.add(_range(HOST_PORTS, source, network, bytes([protocol, 0, 0, 0]) + tail))
    return frozenset(found)


def owner(element: Element) -> str:
    """Return the address the element belongs to."""
    return BY_NAME[element.set].owner(element.first)


def element_text(element: Element) -> str:
    """Return the element in nft's own words."""
    fields = BY_NAME[element.set].type.split(" . ")
    return " . ".join(_field_text(kind, *part) for kind, part in zip(fields, _parts(element), strict=True))


def parse_address(text: str) -> bytes:
    """Return an address's bytes."""
    return ipaddress.IPv4Address(text).packed


BY_NAME = {each.name: each for each in SETS}
_WIDTHS = {"ipv4_addr": 4, "inet_proto": 4, "inet_service": 4, "ifname": _IFNAME_BYTES, "ether_addr": 8}


def _parts(element: Element) -> list[tuple[bytes, bytes]]:
    place, found = 0, []
    last = element.last or element.first
    for kind in BY_NAME[element.set].type.split(" . "):
        width = _WIDTHS[kind]
        found.append((element.first[place : place + width], last[place : place + width]))
        place += width
    return found


def _field_text(kind: str, first: bytes, last: bytes) -> str:
    match kind:
        case "ipv4_addr":
            low, high = ipaddress.IPv4Address(first), ipaddress.IPv4Address(last)
            return str(low) if low == high else f"{low}-{high}"
        case "inet_proto":
            return str(first[0])
        case "inet_service":
            return str(int.from_bytes(first[:2], "big"))
        case "ifname":
            return '"' + first.rstrip(b"\0").decode() + '"'
        case "ether_addr":
            return first[:6].hex(":")
        case _:
            raise AssertionError(f"no set of ours has a field of type {kind}")


def _bound(lease: Lease) -> bytes:
    mac = bytes.fromhex(lease.mac.replace(":", ""))
    return lease.tap.encode().ljust(_IFNAME_BYTES, b"\0") + mac + b"\0\0" + parse_address(lease.address)


def _range(where: NftSet, source: bytes, network: IPv4Network, tail: bytes = b"") -> Element:
    first, last = network.network_address.packed, network.broadcast_address.packed
    return Element(where.name, source + first + tail, source + last + tail)


def _network(entry: HostAccessEntry) -> IPv4Network:
    return ANYWHERE if entry.network is None else IPv4Network(entry.network)


def _disjoint(networks: Iterable[IPv4Network]) -> Sequence[IPv4Network]:
    # The kernel refuses a range that overlaps another one of the same source.
    return list(ipaddress.collapse_addresses(networks))
