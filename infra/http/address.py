"""The address an HTTP server listens on: parsed, bound, and explained when it cannot be had."""

import errno
import ipaddress
import re
import socket

_FORM = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<four>[^:\[\]]+)):(?P<port>\d{1,5})")
_PORT_MAX = 65535
_BACKLOG = 128


class AddressRefused(Exception):  # noqa: N818 - the caller's to change, not an accident
    """The server cannot listen there; the message says why and what else to give."""


def parse(address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return the IP address and the port of `127.0.0.1:9464`, `[::1]:9464` or `localhost:9464`; port 0 is any.

    Raises:
        AddressRefused: it has another form.
    """
    found = _FORM.fullmatch(address)
    if found is not None and int(found["port"]) <= _PORT_MAX:
        host = found["six"] or found["four"]
        try:
            return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), int(found["port"])
        except ValueError:
            pass
    raise AddressRefused(
        f"address {address!r}: give an IP address and a port, such as 127.0.0.1:9464 or [::1]:9464; port 0 takes a free one"
    )


def listen(address: str) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        AddressRefused: the form is wrong, somebody else has the port, or this host or user may not use it.
    """
    ip, port = parse(address)
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET  # noqa: PLR2004 - of IPv6
    # With the protocol named, asyncio turns Nagle's algorithm off; else each answer waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(ip), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressRefused(_explained(address, port, error)) from error
    listener.settimeout(0)
    return listener


def bound(listener: socket.socket) -> str:
    """Return the address it listens on, with the port it got."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


def _explained(address: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"cannot listen on {address}: another process has the port (`ss -ltnp 'sport = :{port}'` names it); "
                "stop that one or give another port, 0 takes a free one"
            )
        case errno.EACCES:
            return f"cannot listen on {address}: this user may not use port {port}; give one from 1024 up"
        case errno.EADDRNOTAVAIL:
            return (
                f"cannot listen on {address}: this host has no such address; `ip address` lists those it has"
            )
        case _:
            return f"cannot listen on {address}: {error.strerror}"
