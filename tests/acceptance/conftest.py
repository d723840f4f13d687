"""Places for acceptance tests: with servers of their own, or on the session's servers, which start faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.place import Place, Servers
from tests.conftest import NatsServer


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place whose coordinators run their own NATS and PostgreSQL."""
    made = Place(tmp_path)
    yield made
    made.clean()


def servers_of(nats: NatsServer, postgres: str) -> Servers:
    """Return how a user names these servers."""
    signing_key = nats.directory / "keys" / "agents.nk"
    return Servers(nats=nats.url, creds=nats.creds_path, signing_key=signing_key, postgres=postgres)


@pytest.fixture
def quick_place(tmp_path: Path, nats_server: NatsServer, postgres_dsn: str) -> Iterator[Place]:
    """A place on the session's servers, its log a cluster of its own."""
    made = Place(tmp_path / "place", servers_of(nats_server, postgres_dsn))
    yield made
    made.clean()
