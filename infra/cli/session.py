"""One command's connections: found through options or the data directory, opened when used, closed at its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from events import subjects
from infra.api.client import ApiClient
from infra.cli.exits import CliError, ExitCode
from infra.cli.out import Output
from infra.clock import SystemClock
from infra.embedded.data_directory import DataDirectory, Runtime
from infra.journal.address import NatsAddress
from infra.journal.connection import NatsConnection
from infra.journal.jetstream import STREAM_NOT_FOUND, ApiError, call
from infra.journal.nats import NatsJournal
from infra.journal.stream import LogRefused
from infra.journal.wire import Wire, WireLost
from infra.postgres.database import Database
from infra.postgres.queries import Queries
from infra.postgres.rows import PostgresRows

Source = Literal["auto", "log", "tables"]
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The global options as given."""

    data_directory: Path
    cluster: str = "default"
    nats: str | None = None
    nats_creds: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    postgres: str | None = None
    source: Source = "auto"


def default_data_directory() -> Path:
    """Return /var/lib/fleetlog for root, else the user's own state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/fleetlog")
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "fleetlog"


class Session:
    """What one run of the command line works with. Nothing is opened before it is used."""

    def __init__(self, settings: Settings, out: Output) -> None:
        self.settings = settings
        self.out = out
        self.clock = SystemClock()
        self._closing: list[Callable[[], None]] = []

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self.settings.cluster

    def close(self) -> None:
        """Close what was opened, the last first. Repeatable."""
        while self._closing:
            with suppress(Exception):
                self._closing.pop()()

    @cached_property
    def runtime(self) -> Runtime | None:
        """The coordinator that runs on the data directory, if any.

        Raises:
            CliError: the folder may not be read.
        """
        try:
            return DataDirectory.running(self.settings.data_directory)
        except (PermissionError, NotADirectoryError) as error:
            raise CliError(
                ExitCode.UNREACHABLE,
                "data-directory",
                f"data directory {self.settings.data_directory} cannot be read ({error.strerror}): run as its owner, "
                "choose another with --data-dir, or name the NATS server with --nats and --nats-creds",
            ) from error

    @cached_property
    def address(self) -> NatsAddress:
        """Where NATS is: `--nats`, else what the running coordinator says.

        Raises:
            CliError: neither.
        """
        given = self.settings
        tls = {"ca": given.tls_ca, "certificate": given.tls_cert, "key": given.tls_key}
        if given.nats is not None:
            try:
                return NatsAddress(url=given.nats, creds=given.nats_creds, **tls)
            except ValueError as error:
                raise CliError(ExitCode.USAGE, "usage", f"--nats: {error}") from error
        if self.runtime is None:
            raise CliError(
                ExitCode.UNREACHABLE,
                "no-coordinator",
                f"no coordinator runs on {given.data_directory}: start one with `fleetlog up`, choose another "
                "folder with --data-dir, or name the NATS server with --nats",
            )
        kept = self.runtime.nats_creds
        creds = given.nats_creds or (None if kept is None else Path(kept))
        return NatsAddress(url=self.runtime.nats_url, creds=creds, **tls)

    @cached_property
    def connection(self) -> NatsConnection:
        """NATS for requests."""
        connection = NatsConnection(self.address, name="fleetlog command line", timeout_s=_ANSWER_S)
        self._closing.append(connection.close)
        return connection

    @cached_property
    def api(self) -> ApiClient:
        """The coordinators' API."""
        return ApiClient(self.connection, self.cluster)

    def wire(self) -> Wire:
        """Return a new blocking connection; the caller closes it."""
        return Wire(self.address, name="fleetlog command line", timeout_s=_ANSWER_S)

    @cached_property
    def journal(self) -> NatsJournal:
        """The log. Unlike a coordinator, the command line never makes it.

        Raises:
            CliError: the cluster has no log there.
        """
        self._require_stream()
        journal = NatsJournal(self.address, self.cluster, name="fleetlog command line")
        self._closing.append(journal.close)
        return journal

    def _require_stream(self) -> None:
        name = subjects.stream(self.cluster)
        try:
            with self.wire() as wire:
                call(wire, f"STREAM.INFO.{name}", None, _ANSWER_S)
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise LogRefused(f"stream {name} at {self.address} cannot be read: {error}") from error
            raise CliError(
                ExitCode.UNREACHABLE,
                "no-log",
                f"NATS at {self.address} has no log of cluster {self.cluster}: no coordinator of it ever started "
                "there; is --cluster right?",
            ) from error
        except WireLost as error:
            raise CliError(
                ExitCode.UNREACHABLE,
                "log-unavailable",
                f"{error}; check that NATS runs, or name it with --nats",
            ) from error

    @cached_property
    def dsn(self) -> str | None:
        """Where PostgreSQL is, if anybody says so. `--nats` alone means: that log and no tables of this host."""
        if self.settings.postgres is not None:
            return self.settings.postgres
        if self.settings.nats is not None or self.runtime is None:
            return None
        return self.runtime.postgres_dsn

    @cached_property
    def database(self) -> Database:
        """The tables.

        Raises:
            CliError: nobody says where.
        """
        if self.dsn is None:
            raise CliError(
                ExitCode.USAGE,
                "usage",
                "no PostgreSQL is known here: give --postgres DSN, or use the data directory of a coordinator "
                "that has one with --data-dir",
            )
        database = Database(self.dsn, self.cluster)
        self._closing.append(database.close)
        return database

    @cached_property
    def queries(self) -> Queries:
        """Reads of the tables."""
        return Queries(self.database)

    @cached_property
    def rows(self) -> PostgresRows:
        """The tables as projectors use them."""
        return PostgresRows(self.database)
