"""What a host network works with: its settings, the links, the sets, and the host's programs."""

import ipaddress
from pathlib import Path

import msgspec

from actors.decisions.addresses import mac_of
from infra.config.microvm_network import MicrovmNetwork
from infra.network.command_links import CommandLinks
from infra.network.command_sets import CommandSets
from infra.network.commands import Commands
from infra.network.links import ALIAS_PREFIX, Bridge, Links, TapState
from infra.network.netlink_links import NetlinkLinks
from infra.network.netlink_sets import NetlinkSets
from infra.network.nft import Nft
from infra.network.policy_sets import PolicySets
from infra.network.rules import Site


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one host network. `etc` is where the host's settings are."""

    config: MicrovmNetwork
    commands: Commands
    nft: Nft
    links: Links
    sets: PolicySets
    etc: Path

    @property
    def bridge(self) -> Bridge:
        """The bridge as it should be."""
        return Bridge(
            name=self.config.bridge,
            gateway=self.config.gateway,
            prefix_length=self.config.prefix_length,
            mac=mac_of(self.config.gateway),
            alias=f"{ALIAS_PREFIX}{self.config.nft_table}",
        )

    def site(self) -> Site:
        """Return what the rules depend on, as it is on this host now."""
        config = self.config
        return Site(
            table=config.nft_table,
            bridge=config.bridge,
            subnet=config.cidr,
            gateway=config.gateway,
            egress=config.egress_interface or self.links.egress(),
        )


def open_parts(config: MicrovmNetwork, *, sudo: bool, namespace: Path | None, etc: Path) -> Parts:
    """Return the parts: in process where we hold the privilege, by commands through sudo where not."""
    commands = Commands(sudo=sudo, namespace=namespace)
    nft = Nft(commands=commands)
    table = config.nft_table
    return Parts(
        config=config,
        commands=commands,
        nft=nft,
        links=CommandLinks(commands) if sudo else NetlinkLinks(namespace),
        sets=CommandSets(nft, table) if sudo else NetlinkSets(table, namespace),
        etc=etc,
    )


def taps_of(parts: Parts) -> list[TapState]:
    """Return the TAPs of this network's addresses, idle ones included."""
    network = parts.config.network
    return [tap for tap in parts.links.taps() if ipaddress.IPv4Address(tap.address) in network]
