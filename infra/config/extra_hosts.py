"""The grammar of `extra_hosts` entries: names that a guest's /etc/hosts gets. They open no way through the network."""

import ipaddress
import re

ENTRY_FORM = (
    "host:address, the host of letters, digits, dashes and dots, the address an IP address or host-gateway"
)
GATEWAY = "host-gateway"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_NAME_MOST = 253


def parse_entry(text: str) -> tuple[str, str]:
    """Return host and address; the address may be `host-gateway`, which becomes the bridge's own.

    Raises:
        ValueError: it has another form.
    """
    host, colon, address = text.partition(":")
    if not colon:
        raise ValueError(f'"{text}" has no colon between host and address')
    if len(host) > _NAME_MOST or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError(f'"{host}" is not a host name')
    if address != GATEWAY:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ValueError(f'"{address}" is neither an IP address nor {GATEWAY}') from None
        if "%" in address:
            raise ValueError(f'"{address}" has a zone, which means nothing in a guest')
    return host, address
