"""Port to a host's links: one bridge of ours, a TAP per address on it. What adapters promise, and what they report."""

import ipaddress
from typing import Protocol

import msgspec

from actors.decisions.addresses import Lease, address_of
from actors.errors import DriverError

BRIDGE_PORTS_MOST = 1023
"""What the kernel lets a bridge have (BR_MAX_PORTS is 1024, port 0 is not given out)."""

ALIAS_PREFIX = "fleetlog "
"""With the name of the nft table: how a bridge says whose it is."""


class Bridge(msgspec.Struct, frozen=True, kw_only=True):
    """The bridge as it should be. Its MAC is fixed, so that guests' ARP entries hold when ports come and go."""

    name: str
    gateway: str
    prefix_length: int
    mac: str
    alias: str


class BridgeState(msgspec.Struct, frozen=True, kw_only=True):
    """What the host has under the bridge's name."""

    kind: str
    alias: str
    up: bool
    mac: str
    addresses: tuple[str, ...]


class TapState(msgspec.Struct, frozen=True, kw_only=True):
    """One TAP of ours (by its name) and how it stands; `bridge` is None when it hangs on none.

    `carrier`: a process has it open, which shows only while it is up.
    """

    name: str
    up: bool
    carrier: bool
    bridge: str | None
    isolated: bool
    learning: bool
    flooding: bool
    uid: int | None = None

    @property
    def address(self) -> str:
        """The address it belongs to."""
        address = address_of(self.name)
        assert address is not None, f"{self.name} is no TAP of ours"
        return address


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address or route of the host: the network it claims, and by which interface."""

    interface: str
    network: str
    route: bool = False


class Links(Protocol):
    """Every call either does all it says or raises `DriverError` with what to do next. Safe from several threads."""

    def ensure_bridge(self, bridge: Bridge) -> None:
        """Make the bridge, or what is missing of it: its address, its MAC, up. Running ports are not disturbed.

        Raises:
            DriverError: kind "refused" if an interface of that name is not ours (no alias of ours on it).
        """

    def bridge(self, name: str) -> BridgeState | None:
        """Return how the interface of this name stands, None if there is none. Changes nothing."""

    def remove_bridge(self, bridge: Bridge) -> None:
        """Remove the bridge; one that is not there is fine, one that is not ours is refused."""

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """Make the address's TAP ready for one open by uid:gid: on the bridge, isolated, its MAC and address fixed, up.

        A parked TAP is taken up again with its new owner. Isolation is a step of its own before the TAP is up; if
        any step fails, a TAP that was new is removed and one that was parked stays down.

        Raises:
            DriverError: "exhausted" if the bridge has no port left; "still-there" if a process has the TAP open;
                "refused" if the kernel cannot isolate ports or we lack the right.
        """

    def restore(self, lease: Lease) -> None:
        """Put a TAP that a machine has open back as `attach` left it. One that is so already is not disturbed.

        Raises:
            DriverError: it is not there, or as `attach`; a TAP that could not be isolated stays down.
        """

    def park(self, tap: str) -> None:
        """Take the TAP down and keep it. One that is not there is fine."""

    def delete(self, tap: str) -> None:
        """Remove the TAP (about 17 ms). One that is not there is fine; refused for names that are not a TAP's of ours."""

    def taps(self) -> list[TapState]:
        """Return every TAP of ours, on whichever bridge. Changes nothing."""

    def ports(self, bridge: str) -> int:
        """Return how many ports the bridge has, ours or not."""

    def claims(self) -> list[HostAddress]:
        """Return the addresses and the more special routes of the host."""

    def egress(self) -> str | None:
        """Return the interface of the default route, None without one."""

    def close(self) -> None:
        """Let go of sockets. Repeatable."""


def no_bridge(name: str) -> DriverError:
    """Return what it means that the bridge is not there."""
    return DriverError(
        "missing", f"bridge {name} is not there: run `fleetlog host provision`", transient=False
    )


def no_tap(tap: str) -> DriverError:
    """Return what it means that a TAP in use is not there."""
    return DriverError(
        "missing", f"TAP {tap} is not there: its machine has no network any more", transient=False
    )


def checked_tap(tap: str) -> str:
    """Return the name if it is a TAP's of ours: nothing else is ever taken down or removed, no bridge above all.

    Raises:
        DriverError: it is not.
    """
    if address_of(tap) is None:
        raise DriverError("refused", f"{tap} does not have the name of a TAP of ours", transient=False)
    return tap


def check_owned(name: str, found: BridgeState, alias: str) -> None:
    """Refuse a bridge that is not ours.

    Raises:
        DriverError: it is no bridge, or has not our alias.
    """
    if found.kind == "bridge" and found.alias == alias:
        return
    owner = found.alias.removeprefix(ALIAS_PREFIX) if found.alias.startswith(ALIAS_PREFIX) else ""
    whose = (
        f"serves nft table {owner}" if owner else f"is a {found.kind or 'link'} that fleetlog did not make"
    )
    message = (
        f"interface {name} {whose}: choose another name in microvm_network.bridge, or remove it with "
        f"`ip link del {name}` if nobody needs it"
    )
    raise DriverError("refused", message, transient=False)


def bridge_full(bridge: str) -> DriverError:
    """Return what it means that the kernel gave the bridge no port."""
    message = f"bridge {bridge} has all {BRIDGE_PORTS_MOST} ports it can have: end machines, or add a host"
    return DriverError("exhausted", message, transient=True)


def not_isolated(tap: str, reason: str) -> DriverError:
    """Return what it means that a port cannot be isolated: machines would see each other, so none is started."""
    message = (
        f"the kernel will not isolate port {tap} ({reason}): machines on one bridge could reach each other; "
        "use a kernel with bridge port isolation (4.18 or later)"
    )
    return DriverError("refused", message, transient=False)


def overlaps(claims: list[HostAddress], network: ipaddress.IPv4Network, bridge: str) -> list[HostAddress]:
    """Return who else claims part of the network: addresses that share any of it, routes that lie within it."""
    return [
        claim
        for claim in claims
        if claim.interface != bridge
        and (
            ipaddress.IPv4Network(claim.network, strict=False).subnet_of(network)
            if claim.route
            else ipaddress.IPv4Network(claim.network, strict=False).overlaps(network)
        )
    ]
