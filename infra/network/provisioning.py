"""Brings the host's part of the network into being, and takes it away; each step repeatable."""

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from actors.errors import DriverError
from infra.network.commands import CommandFailed
from infra.network.installed import owner_of, read_installed
from infra.network.links import check_owned, overlaps
from infra.network.namespace import entered
from infra.network.parts import Parts, taps_of
from infra.network.rules import GUARD_SET, provision_script
from infra.network.settings_files import write_network_manager_file

logger = logging.getLogger(__name__)

_GONE = "No such file or directory"
_TRIES = 5
_FORWARDING = "/proc/sys/net/ipv4/ip_forward"


def provision(parts: Parts) -> None:
    """Do all of it; see `HostNetwork.provision`.

    Raises:
        DriverError: nothing is changed before every refusal is ruled out.
    """
    _refuse_what_is_not_ours(parts)
    if parts.site().egress is None:
        message = (
            "this host has no default route, so machines would have no way out: add one, or name the interface in "
            "microvm_network.egress_interface"
        )
        raise DriverError("missing", message, transient=True)
    write_network_manager_file(parts)
    # Rules before the bridge: there is no moment at which it is up and open.
    _put_rules(parts)
    parts.links.ensure_bridge(parts.bridge)
    _forward(parts)
    _let_docker_forward(parts)


def ensure_rules(parts: Parts) -> None:
    """Put the rules in force if the table is not there, without bridge and without a way out.

    Raises:
        DriverError: the table is somebody else's, or nft failed.
    """
    _refuse_table(parts)
    if "inet" not in read_installed(parts.nft, parts.config.nft_table).tables:
        _put_rules(parts)


def guard(parts: Parts, ports: Iterable[int]) -> None:
    """Make these the guarded ports.

    Raises:
        DriverError: the rules are not there.
    """
    place = f"inet {parts.config.nft_table} {GUARD_SET}"
    script = [f"flush set {place}", *(f"add element {place} {{ {port} }}" for port in sorted(set(ports)))]
    try:
        parts.nft.apply("\n".join(script))
    except CommandFailed as error:
        if _GONE not in error.stderr:
            raise
        message = (
            f"nft table {parts.config.nft_table} is not there to guard a port: run `fleetlog host provision`"
        )
        raise DriverError("missing", message, transient=False) from error


def teardown(parts: Parts, *, force: bool) -> None:
    """Remove TAPs, bridge and table of ours.

    Raises:
        DriverError: TAPs are in use, or the bridge or table is somebody else's.
    """
    parts.nft.check()
    state = parts.links.bridge(parts.config.bridge)
    if state is not None:
        check_owned(parts.config.bridge, state, parts.bridge.alias)
    _refuse_table(parts)
    taps = taps_of(parts)
    used = [tap.name for tap in taps if tap.up]
    if used and not force:
        shown = ", ".join(used[:5]) + (f" and {len(used) - 5} more" if len(used) > 5 else "")  # noqa: PLR2004
        message = f"{len(used)} machines use this network ({shown}): drain them first, or give --force"
        raise DriverError("refused", message, transient=True)
    # TAPs and bridge before the rules: what has no rules any more must have no way either.
    for tap in taps:
        parts.links.delete(tap.name)
    parts.links.remove_bridge(parts.bridge)
    for family in ("inet", "bridge"):
        try:
            parts.commands.run("nft", "delete", "table", family, parts.config.nft_table)
        except CommandFailed as error:
            if _GONE not in error.stderr:
                raise


def _refuse_what_is_not_ours(parts: Parts) -> None:
    config = parts.config
    parts.nft.check()
    state = parts.links.bridge(config.bridge)
    if state is not None:
        check_owned(config.bridge, state, parts.bridge.alias)
    _refuse_table(parts)
    claims = overlaps(parts.links.claims(), config.network, config.bridge)
    if claims:
        what = "a route to" if claims[0].route else "the address"
        message = (
            f"network {config.cidr} is taken on this host: {claims[0].interface} has {what} {claims[0].network}; "
            "choose another network in microvm_network.cidr"
        )
        raise DriverError("refused", message, transient=False)


def _refuse_table(parts: Parts) -> None:
    config = parts.config
    serves = owner_of(parts.nft, config.nft_table)
    if serves is not None and serves != config.bridge:
        message = (
            f"nft table {config.nft_table} serves bridge {serves}: every bridge needs a table of its own, choose "
            "another name in microvm_network.nft_table"
        )
        raise DriverError("refused", message, transient=False)


def _put_rules(parts: Parts) -> None:
    for tries_left in reversed(range(_TRIES)):
        # If the table cannot be read, nothing is replaced: nft's error ends it here.
        found = read_installed(parts.nft, parts.config.nft_table)
        bases = {place for place, hook in found.hooks.items() if hook}
        replaced = [rule for rule in found.ours() if rule[:2] in bases]
        try:
            parts.nft.apply(provision_script(parts.site(), replaced))
        except CommandFailed as error:
            # A rule that was to be replaced went between the listing and the transaction.
            if _GONE not in error.stderr or not tries_left:
                raise
        else:
            return


def _forward(parts: Parts) -> None:
    if parts.commands.sudo:
        parts.commands.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        return
    try:
        with entered(parts.commands.namespace):
            Path(_FORWARDING).write_bytes(b"1")
    except OSError as error:
        message = f"{_FORWARDING} cannot be set: {error.strerror}; run as root or set use_sudo"
        raise DriverError("refused", message, transient=False) from error


def _let_docker_forward(parts: Parts) -> None:
    # Docker drops what it does not know on its way through the host; DOCKER-USER is where others may be let through.
    if shutil.which("iptables") is None:
        return
    try:
        parts.commands.run("iptables", "-w", "-n", "-L", "DOCKER-USER")
    except CommandFailed:
        return
    for side in ("-s", "-d"):
        rule = ("DOCKER-USER", side, parts.config.cidr, "-j", "ACCEPT")
        with suppress(CommandFailed):
            parts.commands.run("iptables", "-w", "-D", *rule)
        parts.commands.run("iptables", "-w", "-I", *rule)
