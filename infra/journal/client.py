"""What a nats-py client is told and not told: the options that its defaults get wrong, and its leaks."""

import asyncio
import contextlib
from typing import Any

from nats.aio.client import Client

from infra.journal.address import ConnectionRefusedByServer, NatsAddress

RECONNECT_WAIT_S = 0.2
_CLOSE_S = 1.0


def client_options(
    address: NatsAddress, name: str, inbox_prefix: str, ping_interval_s: float
) -> dict[str, Any]:
    """Return the options for `Client.connect`, without callbacks.

    Nothing is buffered while disconnected (it would be sent long after its sender gave up), reconnecting never
    ends, and a silent server is noticed after two pings.
    """
    first = address.servers[0]
    options: dict[str, Any] = {
        "servers": [str(server).replace("tls://", "nats://") for server in address.servers],
        "name": name,
        "inbox_prefix": inbox_prefix,
        "user": first.user,
        "password": first.password,
        "token": first.token,
        "pending_size": -1,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_WAIT_S,
        "ping_interval": ping_interval_s,
        "max_outstanding_pings": 2,
        "connect_timeout": 2,
    }
    if address.creds is not None:
        options["user_credentials"] = address.creds
    if address.tls:
        options["tls"] = address.ssl_context()
    return options


def refuse_plain_text(client: Client, address: NatsAddress) -> None:
    """Refuse a server that does not ask for TLS: nats-py would go on in plain text."""
    if address.tls and not client._server_info.get("tls_required"):  # noqa: SLF001 - no public way
        raise ConnectionRefusedByServer(f"NATS at {address} does not insist on TLS, which was asked for")


def close_leaked_socket(client: Client) -> None:
    """Close the socket of a failed attempt to connect, which nats-py replaces without closing it."""
    if not client.is_connected and client._transport:  # noqa: SLF001
        client._transport.close()  # type: ignore[no-untyped-call]  # noqa: SLF001


async def discard(client: Client) -> None:
    """Close a client, within a second, whatever state it is in."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(client.close(), _CLOSE_S)
