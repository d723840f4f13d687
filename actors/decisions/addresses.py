"""Which address a machine gets, and what follows from it: its MAC and the name of its TAP. Pure arithmetic."""

import ipaddress

import msgspec

from actors.errors import Refused
from projections.allocator import AllocatorState

TAP_PREFIX = "flt-"
"""With the 8 hex digits of an IPv4 address: 12 of the 15 characters an interface name may have."""


class AddressPool(msgspec.Struct, frozen=True, kw_only=True):
    """A network of one host. `aggregate` is where its leases are; `bridge` the interface its TAPs hang on."""

    aggregate: str
    cidr: str
    gateway: str
    bridge: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        """Return the network."""
        return ipaddress.IPv4Network(self.cidr, strict=False)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine gets of a network; all but the address follows from it."""

    address: str
    gateway: str
    netmask: str
    prefix_length: int
    mac: str
    tap: str
    bridge: str


def choose(pool: AddressPool, state: AllocatorState, occupied: frozenset[str]) -> Lease:
    """Return the first free address: not the network's or broadcast's own, the gateway, leased, or seen on the host.

    Raises:
        Refused: none is left (code `no-address`), naming the range and how many are held.
    """
    for host in pool.network.hosts():
        address = str(host)
        if address != pool.gateway and address not in state.leases and address not in occupied:
            return lease_of(pool, address)
    raise Refused(
        "no-address",
        f"no address left in {pool.cidr} (gateway {pool.gateway}): {len(state.leases)} leased, "
        f"{len(occupied)} seen in use on the host; give the network a wider cidr",
    )


def lease_of(pool: AddressPool, address: str) -> Lease:
    """Return what belongs to an address of this pool."""
    return Lease(
        address=address,
        gateway=pool.gateway,
        netmask=str(pool.network.netmask),
        prefix_length=pool.network.prefixlen,
        mac=mac_of(address),
        tap=tap_of(address),
        bridge=pool.bridge,
    )


def mac_of(address: str) -> str:
    """Return the address's MAC: `06:00:AC`, locally administered, and the last three octets."""
    octets = ipaddress.IPv4Address(address).packed
    return "06:00:AC:" + ":".join(f"{octet:02X}" for octet in octets[1:])


def tap_of(address: str) -> str:
    """Return the name of the address's TAP: it belongs to the address, not to the machine that has it now."""
    return TAP_PREFIX + ipaddress.IPv4Address(address).packed.hex()


def address_of(tap: str) -> str | None:
    """Return the address a TAP of ours belongs to, None for any other interface's name."""
    digits = tap.removeprefix(TAP_PREFIX)
    if not tap.startswith(TAP_PREFIX) or len(digits) != 8 or set(digits) - set("0123456789abcdef"):  # noqa: PLR2004
        return None
    return str(ipaddress.IPv4Address(bytes.fromhex(digits)))
