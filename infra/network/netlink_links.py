"""Links through the kernel's own interface, in this process: a TAP is ready in a fraction of a millisecond."""

import errno
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from actors.decisions.addresses import Lease, address_of
from actors.errors import DriverError
from infra.network import rtnetlink as rt
from infra.network.links import (
    Bridge,
    BridgeState,
    HostAddress,
    TapState,
    bridge_full,
    check_owned,
    checked_tap,
    no_bridge,
    no_tap,
    not_isolated,
)
from infra.network.namespace import entered
from infra.network.netlink import Message, Netlink, NetlinkError
from infra.network.tun import make_tap

_NETLINK_ROUTE = 0
_GONE = {errno.ENODEV, errno.ENXIO}
_FULL = {errno.EXFULL, errno.ENOSPC}
_NO_ISOLATION = {errno.EOPNOTSUPP, errno.EINVAL}
_DISABLE_IPV6 = "/proc/sys/net/ipv6/conf/{}/disable_ipv6"


class NetlinkLinks:
    """`Links` for a process with CAP_NET_ADMIN, over one kept socket."""

    def __init__(self, namespace: Path | None = None) -> None:
        self._namespace = namespace
        self._netlink = Netlink(_NETLINK_ROUTE, namespace)
        self._bridges: dict[str, int] = {}

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def ensure_bridge(self, bridge: Bridge) -> None:
        """See `Links`."""
        link = self._link(bridge.name)
        if link is None:
            self._do(f"make bridge {bridge.name}", [rt.add_bridge(bridge.name, bridge.mac, bridge.alias)])
            link = self._link(bridge.name)
            assert link is not None, "the bridge was just made"
            self._do(f"mark bridge {bridge.name}", [rt.set_alias(link.index, bridge.alias)])
        else:
            check_owned(bridge.name, self._state(link), bridge.alias)
        self._without_ipv6(bridge.name)
        steps = [
            rt.add_address(link.index, bridge.gateway, bridge.prefix_length),
            rt.set_up(link.index, up=True),
        ]
        if link.mac != bridge.mac:
            steps.insert(0, rt.set_mac(link.index, bridge.mac))
        self._do(f"set up bridge {bridge.name}", steps)
        self._bridges.pop(bridge.name, None)

    def bridge(self, name: str) -> BridgeState | None:
        """See `Links`."""
        link = self._link(name)
        return None if link is None else self._state(link)

    def remove_bridge(self, bridge: Bridge) -> None:
        """See `Links`."""
        self._bridges.pop(bridge.name, None)
        link = self._link(bridge.name)
        if link is not None:
            check_owned(bridge.name, self._state(link), bridge.alias)
            self._do(f"remove bridge {bridge.name}", [rt.delete_link(link.index)])

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """See `Links`."""
        tap = checked_tap(lease.tap)
        bridge = self._bridge_index(lease.bridge)
        known = self._link(tap)
        with entered(self._namespace):
            make_tap(tap, uid, gid)
        try:
            index = known.index if known is not None else self._index(tap)
            assert index is not None, "the TAP was just made"
            if known is None or not _guarded(known, bridge):
                self._take_down(tap, index)
                self._guard(lease, index, bridge)
            self._bring_up(lease, index, bridge)
        except DriverError:
            with suppress(DriverError):
                (self.delete if known is None else self.park)(tap)
            raise

    def restore(self, lease: Lease) -> None:
        """See `Links`."""
        tap = checked_tap(lease.tap)
        bridge = self._bridge_index(lease.bridge)
        link = self._link(tap)
        if link is None:
            raise no_tap(tap)
        if not _guarded(link, bridge):
            self._take_down(tap, link.index)
            self._guard(lease, link.index, bridge)
        self._bring_up(lease, link.index, bridge)

    def park(self, tap: str) -> None:
        """See `Links`."""
        index = self._index(checked_tap(tap))
        if index is not None:
            self._do(f"take {tap} down", [rt.set_up(index, up=False)], fine=_GONE)

    def delete(self, tap: str) -> None:
        """See `Links`."""
        link = self._link(checked_tap(tap))
        if link is None:
            return
        if link.kind != "tun":
            message = f"{tap} is a {link.kind or 'link'}, not a TAP: it is left alone"
            raise DriverError("refused", message, transient=False)
        self._do(f"remove {tap}", [rt.delete_link(link.index)], fine=_GONE)

    def taps(self) -> list[TapState]:
        """See `Links`."""
        links = [rt.read_link(body) for body in self._netlink.dump(rt.list_links())]
        names = {link.index: link.name for link in links}
        return [
            TapState(
                name=link.name,
                up=link.up,
                carrier=link.carrier,
                bridge=names.get(link.master),
                isolated=link.isolated,
                learning=link.learning,
                flooding=link.flooding,
                uid=link.owner,
            )
            for link in links
            if link.kind == "tun" and address_of(link.name) is not None
        ]

    def ports(self, bridge: str) -> int:
        """See `Links`."""
        index = self._index(bridge)
        if index is None:
            return 0
        links = map(rt.read_link, self._netlink.dump(rt.list_links(index)))
        return sum(1 for link in links if link.master == index)

    def claims(self) -> list[HostAddress]:
        """See `Links`."""
        names = self._names()
        found = [rt.read_address(body) for body in self._netlink.dump(rt.list_addresses())]
        addresses = [
            HostAddress(interface=names.get(index, "?"), network=network) for index, network in found
        ]
        routes = [
            HostAddress(interface=names.get(index, "?"), network=network, route=True)
            for index, network, _ in self._routes()
        ]
        return addresses + routes

    def egress(self) -> str | None:
        """See `Links`."""
        defaults = sorted(
            (metric, index) for index, network, metric in self._routes() if network == "0.0.0.0/0"
        )
        return self._names().get(defaults[0][1]) if defaults else None

    def _routes(self) -> list[tuple[int, str, int]]:
        found = map(rt.read_route, self._netlink.dump(rt.list_routes()))
        return [route for route in found if route is not None]

    def _names(self) -> dict[int, str]:
        links = map(rt.read_link, self._netlink.dump(rt.list_links()))
        return {link.index: link.name for link in links}

    def _take_down(self, tap: str, index: int) -> None:
        # Between being a port and being isolated nothing may pass.
        self._do(f"take {tap} down", [rt.set_up(index, up=False)])

    def _guard(self, lease: Lease, index: int, bridge: int) -> None:
        self._without_ipv6(lease.tap)
        self._enslave(lease.tap, index, lease.bridge, bridge)
        self._isolate(lease.tap, index)

    def _bring_up(self, lease: Lease, index: int, bridge: int) -> None:
        self._do(
            f"fix MAC and address of {lease.tap} and bring it up",
            [
                rt.fix_mac_to_port(index, lease.mac),
                rt.fix_address_to_mac(bridge, lease.address, lease.mac),
                rt.set_up(index, up=True),
            ],
        )

    def _enslave(self, tap: str, index: int, bridge_name: str, bridge: int) -> None:
        try:
            self._netlink.send([rt.set_master(index, bridge)])
        except NetlinkError as error:
            if error.number in _FULL:
                raise bridge_full(bridge_name) from error
            raise _failed(f"put {tap} on bridge {bridge_name}", error) from error

    def _isolate(self, tap: str, index: int) -> None:
        try:
            self._netlink.send([rt.guard_port(index)])
        except NetlinkError as error:
            if error.number in _NO_ISOLATION:
                raise not_isolated(tap, str(error)) from error
            raise _failed(f"isolate {tap}", error) from error
        # A kernel that does not know the flag ignores it in silence.
        if not rt.read_link(self._netlink.ask(rt.get_link(tap))).isolated:
            raise not_isolated(tap, "the flag was not kept")

    def _bridge_index(self, name: str) -> int:
        index = self._bridges.get(name)
        if index is None or self._index(name) != index:
            index = self._index(name)
            if index is None:
                raise no_bridge(name)
            self._bridges[name] = index
        return index

    def _index(self, name: str) -> int | None:
        with entered(self._namespace):
            try:
                return socket.if_nametoindex(name)
            except OSError:
                return None

    def _link(self, name: str) -> rt.Link | None:
        try:
            return rt.read_link(self._netlink.ask(rt.get_link(name)))
        except NetlinkError as error:
            if error.number in _GONE:
                return None
            raise _failed(f"look at interface {name}", error) from error

    def _state(self, link: rt.Link) -> BridgeState:
        addresses = [rt.read_address(body) for body in self._netlink.dump(rt.list_addresses())]
        return BridgeState(
            kind=link.kind,
            alias=link.alias,
            up=link.up,
            mac=link.mac,
            addresses=tuple(address for index, address in addresses if index == link.index),
        )

    def _without_ipv6(self, name: str) -> None:
        # Without it every interface that comes up would announce itself to all guests.
        with entered(self._namespace), suppress(FileNotFoundError):
            try:
                Path(_DISABLE_IPV6.format(name)).write_bytes(b"1")
            except PermissionError as error:
                message = (
                    f"IPv6 of {name} cannot be switched off: {error.strerror}; run as root or set use_sudo"
                )
                raise DriverError("refused", message, transient=False) from error

    def _do(
        self, what: str, messages: Sequence[Message], *, fine: frozenset[int] | set[int] = frozenset()
    ) -> None:
        try:
            self._netlink.send(messages)
        except NetlinkError as error:
            if error.number not in fine:
                raise _failed(what, error) from error


def _guarded(link: rt.Link, bridge: int) -> bool:
    return link.master == bridge and link.isolated and not link.learning and not link.flooding


def _failed(what: str, error: NetlinkError) -> DriverError:
    if error.number in {errno.EPERM, errno.EACCES}:
        message = f"could not {what}: {error}; it needs CAP_NET_ADMIN: run as root or set use_sudo"
        return DriverError("refused", message, transient=False)
    return DriverError("unknown", f"could not {what}: {error}", transient=True)
