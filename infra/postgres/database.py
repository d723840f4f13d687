"""The way to PostgreSQL: a bounded pool that survives outages, and errors that name the place and the way out."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import TextLoader
from psycopg_pool import ConnectionPool, PoolTimeout

from actors.errors import RowRejected, RowsRefused, RowsUnavailable
from events.subjects import checked
from infra.postgres.migrations import migrate

logger = logging.getLogger(__name__)

IDENTIFIER_BYTES_MAX = 63

Connection = psycopg.Connection[tuple[Any, ...]]


def schema_of(cluster: str) -> str:
    """Return the schema of a cluster's tables; one database serves any number of clusters."""
    name = f"fleetlog_{checked(cluster, 'cluster').replace('-', '_')}"
    if len(name) <= IDENTIFIER_BYTES_MAX:
        return name
    # PostgreSQL cuts long names silently, and two clusters would share their tables.
    return f"{name[:50]}_{hashlib.sha256(cluster.encode()).hexdigest()[:12]}"


def place_of(dsn: str) -> str:
    """Return where a connection string leads, without its password."""
    parts = conninfo_to_dict(dsn)
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    return f"{host}:{parts.get('port') or 5432}/{parts.get('dbname') or parts.get('user') or ''}"


class Database:
    """The tables of one cluster. Opens nothing until used; migrates when first reached.

    `wait_s` bounds how long anything waits for a connection, `statement_s` how long a statement may run.
    """

    def __init__(
        self, dsn: str, cluster: str, *, connections: int = 4, wait_s: float = 5.0, statement_s: float = 60.0
    ) -> None:
        self.schema = schema_of(cluster)
        try:
            self.place = place_of(dsn)
        except psycopg.ProgrammingError as error:
            raise RowsRefused(f"not a PostgreSQL connection string: {error}") from error
        self._dsn = dsn
        self._connections = connections
        self._wait_s = wait_s
        self._statement_s = statement_s
        self._lock = threading.Lock()
        self._pool: ConnectionPool[Connection] | None = None
        self._lent = 0
        self._ready = False
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection in autocommit mode, its search path the cluster's schema.

        Raises:
            RowsUnavailable: no answer in time, or the connection broke; what was under way may be done or not.
            RowsRefused: this database is not for this fleetlog.
            RowRejected: a value can never be stored.
        """
        with self.errors():
            pool = self._opened()
            try:
                connection = pool.getconn(timeout=self._wait_s)
            except PoolTimeout as error:
                raise self._why_not(pool, error) from error
            with self._lock:
                self._lent += 1
            try:
                yield connection
            finally:
                with self._lock:
                    self._lent -= 1
                pool.putconn(connection)

    @contextmanager
    def dedicated(self) -> Iterator[Connection]:
        """Lend a connection of one's own, for what outlives a statement: a held lock, a long read."""
        with self.errors():
            self._opened()
            with self._connect(limited=False) as connection:
                yield connection

    def close(self) -> None:
        """Close every connection. Repeatable."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the database's errors into the port's."""
        try:
            yield
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise RowRejected(f"PostgreSQL at {self.place} refuses a row: {_line(error)}") from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise RowsRefused(
                f"PostgreSQL at {self.place}: {_line(error)}. Give the user all rights on schema {self.schema}"
            ) from error
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            # Somebody dropped the tables, which is allowed at any moment: the next use makes them again.
            with self._lock:
                self._ready = False
            raise RowsUnavailable(
                f"PostgreSQL at {self.place}: the tables are gone: {_line(error)}"
            ) from error
        except psycopg.Error as error:
            raise RowsUnavailable(f"PostgreSQL at {self.place}: {_line(error)}") from error

    def _opened(self) -> ConnectionPool[Connection]:
        with self._lock:
            if self._closed:
                raise RowsUnavailable(f"the connection to PostgreSQL at {self.place} was closed by us")
            if not self._ready:
                with self._connect(limited=True) as connection:
                    steps = migrate(connection, self.schema, self.place)
                if steps:
                    logger.info("PostgreSQL at %s: %d migrations applied", self.place, steps)
                self._ready = True
            if self._pool is None:
                self._pool = self._new_pool()
            return self._pool

    def _new_pool(self) -> ConnectionPool[Connection]:
        # After `reconnect_timeout` the pool gives the place free and whoever asks next connects anew. A longer
        # one doubles its delay without a bound, and after a long outage would sleep long past its end.
        return ConnectionPool(
            self._dsn,
            kwargs=self._arguments(limited=True),
            min_size=0,
            max_size=self._connections,
            configure=self._configure,
            check=ConnectionPool.check_connection,
            timeout=self._wait_s,
            reconnect_timeout=1.0,
            max_idle=300.0,
            name=f"fleetlog {self.schema}",
            open=True,
        )

    def _why_not(self, pool: ConnectionPool[Connection], timeout: PoolTimeout) -> Exception:
        """Find out why the pool gave no connection; replace it when the server is there after all."""
        try:
            with self._connect(limited=True):
                pass
        except psycopg.Error as error:
            return RowsUnavailable(f"PostgreSQL at {self.place} does not answer: {_line(error)}")
        with self._lock:
            if self._lent >= self._connections:
                return RowsUnavailable(
                    f"PostgreSQL at {self.place}: all {self._connections} connections are busy: {timeout}"
                )
            if self._pool is pool:
                self._pool = None
        pool.close()
        logger.warning("PostgreSQL at %s answers but the pool did not recover: replaced it", self.place)
        return RowsUnavailable(f"PostgreSQL at {self.place} is back; try again")

    def _arguments(self, *, limited: bool) -> dict[str, Any]:
        statement_ms = int(self._statement_s * 1000) if limited else 0
        return {
            "autocommit": True,
            "application_name": "fleetlog",
            "connect_timeout": max(1, int(self._wait_s)),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 30_000,
            # A crash of the database may take its last rows, but then their checkpoint with them: the log gives them
            # again. Waiting for its disk would make the log wait, whose own writes go to the same one.
            "options": f"-c statement_timeout={statement_ms} -c timezone=UTC -c client_min_messages=warning"
            " -c synchronous_commit=off",
        }

    def _connect(self, *, limited: bool) -> Connection:
        connection = psycopg.connect(self._dsn, **self._arguments(limited=limited))
        try:
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: Connection) -> None:
        connection.execute(sql.SQL("set search_path to {}").format(sql.Identifier(self.schema)))
        connection.adapters.register_loader("json", TextLoader)


def literal(text: LiteralString, **names: sql.Composable) -> sql.Composed:
    """Return SQL with identifiers filled in; values are always parameters."""
    return sql.SQL(text).format(**names)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
