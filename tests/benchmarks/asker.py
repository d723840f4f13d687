"""Somebody who asks for agents over NATS, at a steady rate, in a process of its own; prints who was promised when."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from infra.api.client import ApiClient
from infra.api.messages import DemandRequest
from infra.journal.address import NatsAddress
from infra.journal.connection import NatsConnection
from tests.benchmarks.pace import paced
from tests.benchmarks.stage import CLUSTER, LABELS


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told."""

    url: str
    creds: str
    rate: int
    count: int


def main() -> None:
    """Ask, and print a JSON list of [machine, when it was asked for]; the monotonic clock is the host's."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    connection = NatsConnection(
        NatsAddress(url=order.url, creds=Path(order.creds)), name="asker", timeout_s=10
    )
    client = ApiClient(connection, CLUSTER)

    def ask() -> str | None:
        return client.demand(DemandRequest(labels=LABELS), timeout_s=30).answers[0].vm

    try:
        answers = paced(order.rate, order.count, ask)
    finally:
        connection.close()
    sys.stdout.write(msgspec.json.encode(answers).decode())


if __name__ == "__main__":
    main()
