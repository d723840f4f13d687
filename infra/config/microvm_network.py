"""The network that machines of this host share, as the fleet file has it."""

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta

from infra.config.kinds import FORMS, Network
from infra.config.walker import Form

_LONGEST_PREFIX = 30
"""The smallest network with room for a gateway and one machine."""

_SHORTEST_PREFIX = 16
"""More addresses than this no host can use: a bridge has 1,023 ports."""

DEFAULT_CIDR = "10.44.0.0/24"


def _address(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError(f'"{text}" is not an IPv4 address') from None


Address = Annotated[str, Meta(description="an IPv4 address such as 10.44.0.1", extra={"read": _address})]
InterfaceName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9-]{0,14}$",
        description="the name of an interface: 1 to 15 lowercase letters, digits and dashes, a letter first",
    ),
]
AnyInterfaceName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$",
        description="the name of an interface of this host, such as eth0",
    ),
]
TableName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z][a-z0-9_]{0,31}$",
        description="the name of an nft table: 1 to 32 lowercase letters, digits and underscores, a letter first",
    ),
]


class MicrovmNetworkForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network as it is written. Each bridge of a host needs a network and an nft table of its own."""

    cidr: Network = DEFAULT_CIDR
    bridge: InterfaceName = "flt-br0"
    gateway: Address | None = None
    netmask: Address | None = None
    nft_table: TableName = "fleetlog"
    auto_provision_host: bool = True
    egress_interface: AnyInterfaceName | None = None
    idle_taps: Annotated[int, Meta(ge=0, le=1023, description="a number from 0 to 1023")] = 128


class MicrovmNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The network: `gateway` is the host's own address in it; `egress_interface` None: that of the default route.

    `idle_taps` is how many TAPs without a machine are kept for the next one.
    """

    cidr: str = DEFAULT_CIDR
    bridge: str = "flt-br0"
    gateway: str = "10.44.0.1"
    nft_table: str = "fleetlog"
    auto_provision_host: bool = True
    egress_interface: str | None = None
    idle_taps: int = 128

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The network."""
        return ipaddress.IPv4Network(self.cidr)

    @property
    def prefix_length(self) -> int:
        """The bits of the network."""
        return self.network.prefixlen

    @property
    def netmask(self) -> str:
        """The network's mask, as guests are told."""
        return str(self.network.netmask)

    @property
    def interface_glob(self) -> str:
        """What fits the bridge and its like: the part of its name before the first dash, and `-*`."""
        return f"{self.bridge.partition('-')[0]}-*"


def read_network(form: MicrovmNetworkForm) -> MicrovmNetwork:
    """Return the network a block means.

    Raises:
        ValueError: its parts do not fit together.
    """
    network = ipaddress.IPv4Network(form.cidr)
    if not _SHORTEST_PREFIX <= network.prefixlen <= _LONGEST_PREFIX:
        raise ValueError(f"cidr {form.cidr} is not a network of /{_SHORTEST_PREFIX} to /{_LONGEST_PREFIX}")
    if form.netmask is not None and form.netmask != str(network.netmask):
        raise ValueError(
            f"netmask {form.netmask} is not that of {form.cidr}, {network.netmask}: leave it out"
        )
    gateway = network[1] if form.gateway is None else ipaddress.IPv4Address(form.gateway)
    if gateway not in network or gateway in {network.network_address, network.broadcast_address}:
        raise ValueError(f"gateway {gateway} is not an address for a host in {form.cidr}")
    return MicrovmNetwork(
        cidr=form.cidr,
        bridge=form.bridge,
        gateway=str(gateway),
        nft_table=form.nft_table,
        auto_provision_host=form.auto_provision_host,
        egress_interface=form.egress_interface,
        idle_taps=form.idle_taps,
    )


# Said here and not in `kinds`, which every block is built from.
FORMS[MicrovmNetwork] = Form(written=MicrovmNetworkForm, convert=read_network)
