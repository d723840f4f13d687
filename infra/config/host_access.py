"""The grammar of `host_access` entries: what of its host an agent may reach."""

import ipaddress
import re

import msgspec

ENTRY_FORM = "an IPv4 address, IPv4 network or *, optionally with :port or :*, or a port alone; no host names"
PORT_MOST = 65_535

_PORT = re.compile(r"[0-9]{1,5}")
_ADDRESS = re.compile(r"[0-9.]{7,15}(/[0-9]{1,2})?")


class HostAccessEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One permission, for TCP and UDP. `network` None: any address of the host; `port` None: every port."""

    network: str | None
    port: int | None


def parse_entry(text: str) -> HostAccessEntry:
    """Return what an entry permits.

    Raises:
        ValueError: it has another form. Host names are refused: what they stand for changes.
    """
    if _PORT.fullmatch(text):
        return HostAccessEntry(network=None, port=_port(text, text))
    address, colon, port_text = text.partition(":")
    port = None if not colon or port_text == "*" else _port(port_text, text)
    if address == "*":
        return HostAccessEntry(network=None, port=port)
    wrong = f'"{text}" does not name an IPv4 address or network'
    if not _ADDRESS.fullmatch(address):  # the library would also take a netmask behind the slash
        raise ValueError(wrong)
    try:
        network = ipaddress.IPv4Network(address, strict=False)
    except ValueError:
        raise ValueError(wrong) from None
    return HostAccessEntry(network=str(network), port=port)


def _port(port_text: str, text: str) -> int:
    if not _PORT.fullmatch(port_text) or not 1 <= int(port_text) <= PORT_MOST:
        raise ValueError(f'"{text}" has no port from 1 to {PORT_MOST}')
    return int(port_text)
