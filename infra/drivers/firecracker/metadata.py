"""What a guest reads of the metadata service at its birth: who it is, how it gets in, and its environment.

Under `latest` / `meta-data`, all values text; the guest needs a session token (MMDS version 2) to read them:

    FLEETLOG_AGENT_ID          the agent's id, which is its machine's
    FLEETLOG_CLUSTER           the cluster, first part of the subjects it speaks on
    FLEETLOG_NATS_URL          where NATS is, as the guest reaches it
    FLEETLOG_AGENT_LABELS      the labels it was started for, joined by commas
    FLEETLOG_AGENT_CREDENTIAL  a bearer JWT, which expires: the secret
    FLEETLOG_SCALER_MANAGED    1
    FLEETLOG_EXTRA_HOSTS       `host:address` joined by commas, for /etc/hosts; only when there are any
    env                        a map of what the agent's environment gets besides; only when there is any

The first six are the variables that `infra.agent.access` hands to every agent, by the same names, so an init only has
to export what it reads. The secret is nowhere else: not in a file, an argument or a fact.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from actors.errors import DriverError
from infra.drivers.firecracker.api import PAYLOAD_BYTES_MOST

log = logging.getLogger(__name__)
ADDRESS = "169.254.169.254"
EXTRA_HOSTS = "FLEETLOG_EXTRA_HOSTS"
ENV = "env"
ENV_BYTES_MOST = 32_768
ENTRY_BYTES = 2
"""What an entry costs besides its key and value."""

GATEWAY = "host-gateway"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def environment(sources: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return what fits of the sources, later ones winning; what does not is left out with a warning.

    A name must be one a shell can export, which also keeps it from being a path into the metadata. An entry costs
    its key and value in UTF-8 and 2 bytes; together they cost at most 32,768. A later small one may still fit.
    """
    merged: dict[str, str] = {}
    for source in sources:
        merged.update(source)
    kept: dict[str, str] = {}
    cost_bytes = 0
    for name, value in merged.items():
        if not _NAME.fullmatch(name):
            log.warning("the environment entry %.80r is left out: not a name that can be exported", name)
            continue
        entry_bytes = len(name.encode()) + len(value.encode(errors="surrogateescape")) + ENTRY_BYTES
        if cost_bytes + entry_bytes > ENV_BYTES_MOST:
            log.warning("the environment entry %.80s is left out: %d bytes are taken", name, cost_bytes)
            continue
        kept[name] = value
        cost_bytes += entry_bytes
    return kept


def hosts(extra_hosts: Iterable[str], gateway: str) -> str:
    """Return the entries joined by commas, with the bridge's address for `host-gateway`."""
    entries = (entry.split(":", 1) for entry in extra_hosts)
    return ",".join(f"{host}:{gateway if address == GATEWAY else address}" for host, address in entries)


def document(
    agent: Mapping[str, str], env: Mapping[str, str], extra_hosts: tuple[str, ...], gateway: str
) -> dict[str, Any]:
    """Return the whole document, known to fit.

    Raises:
        DriverError: it is over Firecracker's limit, which closes a connection, or kills, when it is passed.
    """
    keys: dict[str, Any] = dict(agent)
    if extra_hosts:
        keys[EXTRA_HOSTS] = hosts(extra_hosts, gateway)
    if env:
        keys[ENV] = dict(env)
    made = {"latest": {"meta-data": keys}}
    try:
        size_bytes = len(msgspec.json.encode(made))
    except (ValueError, UnicodeError) as error:
        raise DriverError(
            "refused", "the environment of the label set is not text", transient=False
        ) from error
    if size_bytes > PAYLOAD_BYTES_MOST:
        raise DriverError(
            "refused",
            f"its metadata is {size_bytes} bytes as JSON, Firecracker takes {PAYLOAD_BYTES_MOST}: shorten the label "
            "set's env or what is forwarded",
            transient=False,
        )
    return made
