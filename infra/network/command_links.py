"""Links through `ip` and `bridge`, with sudo where we lack the right: slower, the same promises."""

import grp
import pwd
from contextlib import suppress
from typing import Any

import msgspec

from actors.decisions.addresses import Lease, address_of
from actors.errors import DriverError
from infra.network.commands import CommandFailed, Commands
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
from infra.network.tun import tap_open

_GONE = ("does not exist", "Cannot find device")
_GUARDED = "isolated on learning off flood off mcast_flood off bcast_flood off"
_UNICAST = "unicast"


class CommandLinks:
    """`Links` by commands. Keeps nothing."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def close(self) -> None:
        """Do nothing: there is nothing to let go."""

    def ensure_bridge(self, bridge: Bridge) -> None:
        """See `Links`."""
        state = self.bridge(bridge.name)
        if state is None:
            self._ip(f"link add name {bridge.name} address {bridge.mac} type bridge")
            self._commands.run("ip", "link", "set", "dev", bridge.name, "alias", bridge.alias)
        else:
            check_owned(bridge.name, state, bridge.alias)
        self._without_ipv6(bridge.name)
        steps = [
            f"addr replace {bridge.gateway}/{bridge.prefix_length} brd + dev {bridge.name}",
            f"link set dev {bridge.name} up",
        ]
        if state is not None and state.mac != bridge.mac:
            steps.insert(0, f"link set dev {bridge.name} address {bridge.mac}")
        self._ip(*steps)

    def bridge(self, name: str) -> BridgeState | None:
        """See `Links`."""
        try:
            found = self._json("ip", "-d", "-j", "addr", "show", "dev", name)
        except CommandFailed as error:
            if _is_gone(error):
                return None
            raise
        link = found[0]
        return BridgeState(
            kind=_info(link).get("info_kind", ""),
            alias=link.get("ifalias", ""),
            up="UP" in link["flags"],
            mac=link.get("address", "").upper(),
            addresses=tuple(
                f"{each['local']}/{each['prefixlen']}"
                for each in link.get("addr_info", ())
                if each.get("family") == "inet"
            ),
        )

    def remove_bridge(self, bridge: Bridge) -> None:
        """See `Links`."""
        state = self.bridge(bridge.name)
        if state is not None:
            check_owned(bridge.name, state, bridge.alias)
            self._ip(f"link del dev {bridge.name}")

    def attach(self, lease: Lease, uid: int, gid: int) -> None:
        """See `Links`."""
        tap = checked_tap(lease.tap)
        known = self._link(tap)
        if known is not None and _info(known).get("info_kind") != "tun":
            message = f"{tap} is another kind of interface: remove it with `ip link del {tap}`"
            raise DriverError("refused", message, transient=False)
        if known is not None:
            self._check_idle(tap)
            if _owner(known) != (uid, gid):
                # `ip` cannot give a TAP to another owner, only make one.
                self.delete(tap)
                known = None
        if self._link(lease.bridge) is None:
            raise no_bridge(lease.bridge)
        if known is None:
            self._make_tap(tap, uid, gid)
        try:
            self._set_up(lease)
        except DriverError:
            with suppress(DriverError):
                (self.delete if known is None else self.park)(tap)
            raise

    def restore(self, lease: Lease) -> None:
        """See `Links`."""
        link = self._link(checked_tap(lease.tap))
        if link is None:
            raise no_tap(lease.tap)
        if self._link(lease.bridge) is None:
            raise no_bridge(lease.bridge)
        state = _tap_state(link)
        guarded = state.isolated and not state.learning and not state.flooding
        if not (state.up and state.bridge == lease.bridge and guarded):
            self.park(lease.tap)
        self._set_up(lease)

    def park(self, tap: str) -> None:
        """See `Links`."""
        try:
            self._ip(f"link set dev {checked_tap(tap)} down")
        except CommandFailed as error:
            if not _is_gone(error):
                raise

    def delete(self, tap: str) -> None:
        """See `Links`."""
        link = self._link(checked_tap(tap))
        if link is None:
            return
        kind = _info(link).get("info_kind")
        if kind != "tun":
            message = f"{tap} is a {kind or 'link'}, not a TAP: it is left alone"
            raise DriverError("refused", message, transient=False)
        try:
            self._ip(f"link del dev {tap}")
        except CommandFailed as error:
            if not _is_gone(error):
                raise

    def taps(self) -> list[TapState]:
        """See `Links`."""
        found = self._json("ip", "-d", "-j", "link", "show")
        return [_tap_state(link) for link in found if _is_tap(link)]

    def ports(self, bridge: str) -> int:
        """See `Links`."""
        try:
            return len(self._json("ip", "-j", "link", "show", "master", bridge))
        except CommandFailed as error:
            if _is_gone(error):
                return 0
            raise

    def claims(self) -> list[HostAddress]:
        """See `Links`."""
        claims = [
            HostAddress(interface=link["ifname"], network=f"{each['local']}/{each['prefixlen']}")
            for link in self._json("ip", "-4", "-j", "addr", "show")
            for each in link.get("addr_info", ())
        ]
        for route in self._routes():
            network = route["dst"].replace("default", "0.0.0.0/0")
            claims.append(HostAddress(interface=route["dev"], network=network, route=True))
        return claims

    def egress(self) -> str | None:
        """See `Links`."""
        defaults = [route for route in self._routes() if route["dst"] == "default"]
        defaults.sort(key=lambda route: route.get("metric", 0))
        return str(defaults[0]["dev"]) if defaults else None

    def _routes(self) -> list[dict[str, Any]]:
        found = self._json("ip", "-4", "-j", "route", "show", "table", "main")
        return [each for each in found if "dev" in each and each.get("type", _UNICAST) == _UNICAST]

    def _check_idle(self, tap: str) -> None:
        # A TAP shows only while it is up whether a process has it open: then it has a carrier.
        self._ip(f"link set dev {tap} up")
        link = self._link(tap)
        if link is not None and "LOWER_UP" in link["flags"]:
            self.park(tap)
            raise tap_open(tap)

    def _make_tap(self, tap: str, uid: int, gid: int) -> None:
        try:
            self._ip(f"tuntap add dev {tap} mode tap user {uid} group {gid}")
        except CommandFailed as error:
            if "/dev/net/tun" in error.stderr:
                message = f"{error}; load the kernel module `tun` (modprobe tun), or pass the device in"
                raise DriverError("missing", message, transient=False) from error
            raise

    def _set_up(self, lease: Lease) -> None:
        self._without_ipv6(lease.tap)
        self._enslave(lease.tap, lease.bridge)
        self._isolate(lease.tap)
        self._commands.run("bridge", "fdb", "replace", lease.mac, "dev", lease.tap, "master", "static")
        self._ip(
            f"neigh replace {lease.address} lladdr {lease.mac} dev {lease.bridge} nud permanent",
            f"link set dev {lease.tap} up",
        )

    def _enslave(self, tap: str, bridge: str) -> None:
        try:
            self._ip(f"link set dev {tap} master {bridge}")
        except CommandFailed as error:
            if "Exchange full" in error.stderr:
                raise bridge_full(bridge) from error
            raise

    def _isolate(self, tap: str) -> None:
        try:
            self._ip(f"link set dev {tap} type bridge_slave {_GUARDED}")
        except CommandFailed as error:
            if error.kind == "refused":
                raise
            raise not_isolated(tap, error.stderr or "no reason given") from error
        link = self._link(tap)
        if link is None or not _tap_state(link).isolated:
            raise not_isolated(tap, "the flag was not kept")

    def _without_ipv6(self, name: str) -> None:
        self._commands.run("sysctl", "-q", "-e", "-w", f"net.ipv6.conf.{name}.disable_ipv6=1")

    def _link(self, name: str) -> dict[str, Any] | None:
        try:
            link: dict[str, Any] = self._json("ip", "-d", "-j", "link", "show", "dev", name)[0]
        except CommandFailed as error:
            if _is_gone(error):
                return None
            raise
        return link

    def _ip(self, *steps: str) -> None:
        self._commands.run("ip", "-batch", "-", stdin="\n".join(steps) + "\n")

    def _json(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self._commands.run(*arguments) or "[]")
        return [each for each in found if each]


def _is_gone(error: CommandFailed) -> bool:
    return any(words in error.stderr for words in _GONE)


def _is_tap(link: dict[str, Any]) -> bool:
    return _info(link).get("info_kind") == "tun" and address_of(link["ifname"]) is not None


def _info(link: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = link.get("linkinfo", {})
    return found


def _tap_state(link: dict[str, Any]) -> TapState:
    port = _info(link).get("info_slave_data", {})
    data = _info(link).get("info_data", {})
    return TapState(
        name=link["ifname"],
        up="UP" in link["flags"],
        carrier="LOWER_UP" in link["flags"],
        bridge=link.get("master"),
        isolated=bool(port.get("isolated")),
        learning=bool(port.get("learning")),
        flooding=any(port.get(flag) for flag in ("flood", "mcast_flood", "bcast_flood")),
        uid=_uid(data.get("user")),
    )


def _owner(link: dict[str, Any]) -> tuple[int | None, int | None]:
    data = _info(link).get("info_data", {})
    return _uid(data.get("user")), _gid(data.get("group"))


def _uid(user: str | int | None) -> int | None:
    # iproute2 prints a name where the user has one.
    if user is None or str(user).isdigit():
        return None if user is None else int(user)
    try:
        return pwd.getpwnam(str(user)).pw_uid
    except KeyError:
        return None


def _gid(group: str | int | None) -> int | None:
    if group is None or str(group).isdigit():
        return None if group is None else int(group)
    try:
        return grp.getgrnam(str(group)).gr_gid
    except KeyError:
        return None
