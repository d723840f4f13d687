"""The messages of rtnetlink that bridges and TAPs need, and how its answers read."""

import ipaddress
import struct

import msgspec

from infra.network.netlink import (
    F_ACK,
    F_CREATE,
    F_EXCL,
    F_REPLACE,
    Message,
    attribute,
    attributes,
    nested,
    number,
    text,
)

NEWLINK, DELLINK, GETLINK, SETLINK = 16, 17, 18, 19
NEWADDR, GETADDR, NEWROUTE, GETROUTE, NEWNEIGH = 20, 22, 24, 26, 28
IFF_UP = 0x1
_IFF_LOWER_UP = 0x10000

_AF_BRIDGE, _AF_INET, _AF_UNSPEC = 7, 2, 0
_IFINFO, _IFADDR, _NDMSG, _RTMSG = (
    struct.Struct(f) for f in ("=BxHiII", "=BBBBi", "=BxxxiHBB", "=BBBBBBBBI")
)
_ADDRESS, _IFNAME, _MASTER, _PROTINFO, _LINKINFO, _IFALIAS = 1, 3, 10, 12, 18, 20
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_DATA = 1, 2, 5
_BRPORT_LEARNING, _BRPORT_UNICAST_FLOOD, _BRPORT_MCAST_FLOOD, _BRPORT_BCAST_FLOOD, _BRPORT_ISOLATED = (
    8,
    9,
    27,
    30,
    33,
)
_TUN_OWNER = 1
_NDA_DST, _NDA_LLADDR = 1, 2
_NUD_NOARP, _NUD_PERMANENT, _NTF_MASTER = 0x40, 0x80, 0x04
_RTA_DST, _RTA_OIF, _RTA_PRIORITY = 1, 4, 6
_TABLE_MAIN = 254
_UNICAST = 1
_CHANGE = F_ACK


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One interface as the kernel lists it. `port` are the flags of a bridge's port, by number."""

    index: int
    name: str
    up: bool
    carrier: bool
    kind: str
    alias: str
    mac: str
    master: int
    port: dict[int, bool]
    owner: int | None

    @property
    def isolated(self) -> bool:
        """Whether it is a port that sees no other isolated port."""
        return self.port.get(_BRPORT_ISOLATED, False)

    @property
    def learning(self) -> bool:
        """Whether the bridge believes source addresses seen here."""
        return self.port.get(_BRPORT_LEARNING, False)

    @property
    def flooding(self) -> bool:
        """Whether frames for nobody known, or for all, go out here."""
        flags = (_BRPORT_UNICAST_FLOOD, _BRPORT_MCAST_FLOOD, _BRPORT_BCAST_FLOOD)
        return any(self.port.get(flag, False) for flag in flags)


def list_links(master: int | None = None) -> Message:
    """List all interfaces, or the ports of one bridge."""
    return Message(
        GETLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + (b"" if master is None else number(_MASTER, master))
    )


def get_link(name: str) -> Message:
    """Ask for one interface by name."""
    return Message(GETLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + text(_IFNAME, name))


def add_bridge(name: str, mac: str, alias: str) -> Message:
    """Make a bridge; one that exists is an error."""
    body = text(_IFNAME, name) + attribute(_ADDRESS, mac_bytes(mac)) + text(_IFALIAS, alias)
    body += nested(_LINKINFO, text(_INFO_KIND, "bridge"))
    return Message(NEWLINK, _CHANGE | F_CREATE | F_EXCL, _IFINFO.pack(0, 0, 0, 0, 0) + body)


def set_alias(index: int, alias: str) -> Message:
    """Write the alias; the kernel ignores it when a link is made."""
    return Message(SETLINK, _CHANGE, _IFINFO.pack(0, 0, index, 0, 0) + text(_IFALIAS, alias))


def set_mac(index: int, mac: str) -> Message:
    """Give the interface its MAC."""
    return Message(SETLINK, _CHANGE, _IFINFO.pack(0, 0, index, 0, 0) + attribute(_ADDRESS, mac_bytes(mac)))


def set_up(index: int, *, up: bool) -> Message:
    """Bring the interface up or down."""
    return Message(SETLINK, _CHANGE, _IFINFO.pack(0, 0, index, IFF_UP if up else 0, IFF_UP))


def set_master(index: int, master: int) -> Message:
    """Make the interface a port of the bridge."""
    return Message(SETLINK, _CHANGE, _IFINFO.pack(0, 0, index, 0, 0) + number(_MASTER, master))


def guard_port(index: int) -> Message:
    """Isolate the port, and let it neither teach the bridge anything nor hear what is not for it."""
    off = (_BRPORT_LEARNING, _BRPORT_UNICAST_FLOOD, _BRPORT_MCAST_FLOOD, _BRPORT_BCAST_FLOOD)
    flags = [attribute(flag, b"\0") for flag in off]
    body = nested(_PROTINFO, attribute(_BRPORT_ISOLATED, b"\1"), *flags)
    return Message(SETLINK, _CHANGE, _IFINFO.pack(_AF_BRIDGE, 0, index, 0, 0) + body)


def delete_link(index: int) -> Message:
    """Remove the interface."""
    return Message(DELLINK, _CHANGE, _IFINFO.pack(0, 0, index, 0, 0))


def fix_mac_to_port(index: int, mac: str) -> Message:
    """Tell the bridge for good which port the MAC is at."""
    header = _NDMSG.pack(_AF_BRIDGE, index, _NUD_NOARP, _NTF_MASTER, 0)
    return Message(NEWNEIGH, _CHANGE | F_CREATE | F_REPLACE, header + attribute(_NDA_LLADDR, mac_bytes(mac)))


def fix_address_to_mac(bridge: int, address: str, mac: str) -> Message:
    """Tell the host for good which MAC the address has: it never asks, and cannot be told otherwise."""
    header = _NDMSG.pack(_AF_INET, bridge, _NUD_PERMANENT, 0, 0)
    body = attribute(_NDA_DST, ipaddress.IPv4Address(address).packed) + attribute(_NDA_LLADDR, mac_bytes(mac))
    return Message(NEWNEIGH, _CHANGE | F_CREATE | F_REPLACE, header + body)


def add_address(index: int, address: str, prefix_length: int) -> Message:
    """Give the interface an address; one it has already is fine."""
    packed = ipaddress.IPv4Address(address).packed
    network = ipaddress.IPv4Network(f"{address}/{prefix_length}", strict=False)
    body = attribute(2, packed) + attribute(1, packed) + attribute(4, network.broadcast_address.packed)
    header = _IFADDR.pack(_AF_INET, prefix_length, 0, 0, index)
    return Message(NEWADDR, _CHANGE | F_CREATE | F_REPLACE, header + body)


def list_addresses() -> Message:
    """List the IPv4 addresses of all interfaces."""
    return Message(GETADDR, 0, _IFADDR.pack(_AF_INET, 0, 0, 0, 0))


def list_routes() -> Message:
    """List the IPv4 routes."""
    return Message(GETROUTE, 0, _RTMSG.pack(_AF_INET, 0, 0, 0, 0, 0, 0, 0, 0))


def read_link(body: bytes) -> Link:
    """Return the interface a listing's entry describes."""
    _, _, index, flags, _ = _IFINFO.unpack_from(body)
    found = attributes(body[_IFINFO.size :])
    info = attributes(found.get(_LINKINFO, b""))
    kind = _string(info.get(_INFO_KIND, b""))
    data = attributes(info.get(_INFO_DATA, b"")) if kind == "tun" else {}
    port = attributes(info.get(_INFO_SLAVE_DATA, b""))
    return Link(
        index=index,
        name=_string(found.get(_IFNAME, b"")),
        up=bool(flags & IFF_UP),
        carrier=bool(flags & _IFF_LOWER_UP),
        kind=kind,
        alias=_string(found.get(_IFALIAS, b"")),
        mac=mac_text(found.get(_ADDRESS, b"")),
        master=_uint(found.get(_MASTER)) or 0,
        port={flag: value != b"\0" for flag, value in port.items() if len(value) == 1},
        owner=_uint(data.get(_TUN_OWNER)),
    )


def read_address(body: bytes) -> tuple[int, str]:
    """Return (interface's index, address/prefix)."""
    _, prefix_length, _, _, index = _IFADDR.unpack_from(body)
    found = attributes(body[_IFADDR.size :])
    packed = found.get(2) or found.get(1) or b"\0\0\0\0"
    return index, f"{ipaddress.IPv4Address(packed)}/{prefix_length}"


def read_route(body: bytes) -> tuple[int, str, int] | None:
    """Return (interface's index, network, metric) of an ordinary route of the main table, else None."""
    _, length, _, _, table, _, _, kind, _ = _RTMSG.unpack_from(body)
    found = attributes(body[_RTMSG.size :])
    if table != _TABLE_MAIN or kind != _UNICAST or _RTA_OIF not in found:
        return None
    network = ipaddress.IPv4Address(found.get(_RTA_DST, b"\0\0\0\0"))
    return _uint(found[_RTA_OIF]) or 0, f"{network}/{length}", _uint(found.get(_RTA_PRIORITY)) or 0


def mac_bytes(mac: str) -> bytes:
    """Return a MAC's six bytes."""
    return bytes.fromhex(mac.replace(":", ""))


def mac_text(packed: bytes) -> str:
    """Return six bytes as `06:00:AC:…`."""
    return packed.hex(":").upper()


def _string(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def _uint(value: bytes | None) -> int | None:
    return None if value is None else int(struct.unpack("=I", value)[0])
