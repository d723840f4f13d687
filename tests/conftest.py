"""Real servers for tests: one NATS and one PostgreSQL per session, and a NATS of one's own to kill."""

import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from infra.credentials import AccountSigner, Credential
from infra.embedded.keys import Keys
from infra.embedded.nats_server import EmbeddedNats, NatsOptions
from infra.embedded.postgres_server import EmbeddedPostgres
from tests.needed import need_root

_databases = itertools.count(1)


def wall_time(offset_s: float = 0) -> datetime:
    """Now, for what a real server compares with its own clock."""
    return datetime.fromtimestamp(time.clock_gettime(time.CLOCK_REALTIME), UTC) + timedelta(seconds=offset_s)


class NatsServer:
    """A real nats-server in operator mode, every write synced. It comes back only when a test says so."""

    def __init__(self, directory: Path, options: NatsOptions | None = None) -> None:
        self._embedded = EmbeddedNats(directory, issued_at=wall_time(), options=options, supervised=False)
        self._embedded.start()

    @property
    def url(self) -> str:
        """The address, `nats://127.0.0.1:PORT`; the same after a restart."""
        return self._embedded.url

    @property
    def port(self) -> int:
        """The port of `url`."""
        return self._embedded.port

    @property
    def pid(self) -> int | None:
        """The server process, None while it does not run."""
        return self._embedded.pid

    @property
    def directory(self) -> Path:
        """Everything the server keeps."""
        return self._embedded.directory

    @property
    def creds_path(self) -> Path:
        """The coordinator's creds file: all of the account."""
        return self._embedded.coordinator_creds

    @property
    def operator_creds_path(self) -> Path:
        """The command line's creds file: all of the account except removing streams and messages."""
        return self._embedded.operator_creds

    @property
    def keys(self) -> Keys:
        """All seeds of the server."""
        return self._embedded.keys

    @property
    def account_seed(self) -> str:
        """The account's own seed."""
        return self.keys.account

    @property
    def account_public(self) -> str:
        """The account's identity."""
        return self.keys.account_public

    @property
    def agent_signer(self) -> AccountSigner:
        """Mints agents' credentials with the account's signing key."""
        return self.keys.agent_signer

    def mint(self, name: str = "test", *, lifetime_s: float = 3600, **rights: object) -> Credential:
        """Mint a user that lives for a while; `rights` as in `infra.credentials.mint_user`."""
        now = wall_time()
        return self.agent_signer.mint(
            name=name,
            issued_at=now,
            expires_at=now + timedelta(seconds=lifetime_s),
            **rights,  # type: ignore[arg-type]
        )

    def start(self) -> None:
        """Start again after `kill` or `stop`; returns when it answers."""
        self._embedded.start()

    def restart(self) -> None:
        """Stop if it runs, then start on the same data and port; returns when it answers."""
        self._embedded.restart()

    def kill(self) -> None:
        """SIGKILL; it stays dead until `start` or `restart`."""
        self._embedded.kill()

    def stop(self) -> None:
        """Stop in good order."""
        self._embedded.stop()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The session's NATS: use stream names of your own, never stop it."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS for this test alone, to be killed, stopped and restarted (0.1 s)."""
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """The session's PostgreSQL: take a database of your own with `postgres_dsn`, never stop it."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), supervised=False)
    with server:
        yield server


@pytest.fixture
def postgres_dsn(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    """The connection string of a fresh, empty database (0.05 s)."""
    name = f"test_{next(_databases)}"
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgres_server.dsn_of(name)
    with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def own_postgres_server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL for this test alone, to be killed, stopped and restarted (0.6 s); it comes back only then."""
    with EmbeddedPostgres(tmp_path / "postgres", supervised=False) as server:
        yield server


@pytest.fixture
def root() -> None:
    """The test needs root: without it, skipped, or failed where FLEETLOG_REQUIRE names root."""
    need_root()
