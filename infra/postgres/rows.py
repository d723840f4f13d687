"""Rows in PostgreSQL: a batch and its checkpoint in one transaction, or nothing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from psycopg import sql

from actors.errors import RowsRefused, StaleProjector, ViewHeld
from infra.postgres.columns import codec_of
from infra.postgres.database import Connection, Database, literal
from projections.view import AnyTable, Changes, Key, View

FEW_ROWS = 4
"""Up to so many rows go one by one; more go through COPY into a temporary table, which costs three statements."""


class PostgresRows:
    """The `Rows` port over PostgreSQL 14 or later."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def checkpoint(self, view: View) -> int:
        """Return the last sequence saved; see the port."""
        with self._database.connection() as connection:
            connection.execute(
                "insert into checkpoints (view, view_version, sequence) values (%s, %s, 0) on conflict do nothing",
                [view.name, view.version],
            )
            version, sequence = _one(
                connection, "select view_version, sequence from checkpoints where view = %s", view.name
            )
        if version > view.version:
            raise RowsRefused(
                f"PostgreSQL at {self._database.place}: view {view.name} was made by a newer fleetlog "
                f"(version {version}, here {view.version}): install that version here too"
            )
        if version < view.version:
            self.reset(view)
            return 0
        return int(sequence)

    def load(self, table: AnyTable, keys: Iterable[Key]) -> Mapping[Any, msgspec.Struct]:
        """Return the rows that exist for these keys; see the port."""
        codec = codec_of(table)
        query = literal(
            "select {columns} from {table} where {key} = any(%s)",
            columns=_names(table.columns),
            table=sql.Identifier(table.name),
            key=sql.Identifier(table.key),
        )
        with self._database.connection() as connection:
            found = connection.execute(query, [list(keys)]).fetchall()
        return {values[0]: codec.decode(values) for values in found}

    def save(self, view: View, previous: int, sequence: int, changes: Changes) -> None:
        """Save rows and checkpoint; see the port."""
        with self._database.connection() as connection, connection.transaction():
            # First, because it makes any other projector wait, and then find the checkpoint moved.
            moved = connection.execute(
                "update checkpoints set sequence = %s, saved_at = now() "
                "where view = %s and view_version = %s and sequence = %s",
                [sequence, view.name, view.version, previous],
            )
            if moved.rowcount != 1:
                raise StaleProjector(
                    f"view {view.name} is not at {previous} any more: another projector moved it"
                )
            for table, rows in changes.items():
                _write(connection, table, rows)

    def reset(self, view: View) -> None:
        """Empty the view; see the port."""
        with self._database.connection() as connection, connection.transaction():
            connection.execute(
                "insert into checkpoints (view, view_version, sequence) values (%s, %s, 0) "
                "on conflict (view) do update "
                "set view_version = excluded.view_version, sequence = 0, saved_at = now()",
                [view.name, view.version],
            )
            tables = sql.SQL(", ").join(sql.Identifier(table.name) for table in view.tables)
            connection.execute(literal("truncate {tables}", tables=tables))

    @contextmanager
    def lock(self, view: View) -> Iterator[None]:
        """Hold the view; the lock ends with its connection, so a dead holder holds nothing."""
        with self._database.dedicated() as connection:
            name = f"fleetlog {self._database.schema} {view.name}"
            (got,) = _one(connection, "select pg_try_advisory_lock(hashtextextended(%s, 0))", name)
            if not got:
                raise ViewHeld(f"view {view.name} is held by another projector")
            yield

    @contextmanager
    def snapshot(self, view: View) -> Iterator[PostgresSnapshot]:
        """Look at the view's tables as they are now, however long it takes and whatever is saved meanwhile."""
        with self._database.dedicated() as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            # TRUNCATE is not seen through a snapshot: it must wait for us.
            names = sql.SQL(", ").join(
                sql.Identifier(name) for name in ("checkpoints", *(table.name for table in view.tables))
            )
            connection.execute(literal("lock table {names} in access share mode", names=names))
            row = connection.execute(
                "select sequence from checkpoints where view = %s and view_version = %s",
                [view.name, view.version],
            ).fetchone()
            yield PostgresSnapshot(connection, int(row[0]) if row else None)


class PostgresSnapshot:
    """A view's tables at one moment; `sequence` None: they are not of this view's version."""

    def __init__(self, connection: Connection, sequence: int | None) -> None:
        self._connection = connection
        self.sequence = sequence

    def scan(self, table: AnyTable) -> Iterator[msgspec.Struct]:
        """Yield every row, in the order of the key, a few thousand in memory at a time."""
        codec = codec_of(table)
        query = literal(
            "select {columns} from {table} order by {key}",
            columns=_names(table.columns),
            table=sql.Identifier(table.name),
            key=sql.Identifier(table.key),
        )
        with self._connection.cursor(name=f"scan_{table.name}") as cursor:
            cursor.itersize = 5000
            cursor.execute(query)
            for values in cursor:
                yield codec.decode(values)


def _write(connection: Connection, table: AnyTable, rows: Mapping[Key, msgspec.Struct | None]) -> None:
    gone = [key for key, row in rows.items() if row is None]
    if gone:
        query = literal(
            "delete from {table} where {key} = any(%s)",
            table=sql.Identifier(table.name),
            key=sql.Identifier(table.key),
        )
        connection.execute(query, [gone])
    codec = codec_of(table)
    values = [codec.encode(row) for row in rows.values() if row is not None]
    if table.insert_only:
        _copy(connection, table.name, table.columns, values)
    elif len(values) <= FEW_ROWS:
        for row in values:
            connection.execute(_upsert(table), row)
    else:
        batch = f"batch_{table.name}"
        connection.execute(
            literal(
                "create temporary table if not exists {batch} (like {table}) on commit delete rows",
                batch=sql.Identifier(batch),
                table=sql.Identifier(table.name),
            )
        )
        _copy(connection, batch, table.columns, values)
        connection.execute(_merge(table, batch))


def _copy(connection: Connection, name: str, columns: tuple[str, ...], rows: list[list[Any]]) -> None:
    if not rows:
        return
    query = literal("copy {name} ({columns}) from stdin", name=sql.Identifier(name), columns=_names(columns))
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        for row in rows:
            copy.write_row(row)


def _upsert(table: AnyTable) -> sql.Composed:
    values = sql.SQL(", ").join(sql.Placeholder() for _ in table.columns)
    return literal(
        "insert into {table} ({columns}) values ({values}) ", **_parts(table), values=values
    ) + _on_conflict(table)


def _merge(table: AnyTable, batch: str) -> sql.Composed:
    return literal(
        "insert into {table} ({columns}) select {columns} from {batch} ",
        **_parts(table),
        batch=sql.Identifier(batch),
    ) + _on_conflict(table)


def _on_conflict(table: AnyTable) -> sql.Composed:
    assignments = sql.SQL(", ").join(
        literal("{name} = excluded.{name}", name=sql.Identifier(name)) for name in table.columns[1:]
    )
    return literal(
        "on conflict ({key}) do update set {assignments}",
        key=sql.Identifier(table.key),
        assignments=assignments,
    )


def _parts(table: AnyTable) -> dict[str, sql.Composable]:
    return {"table": sql.Identifier(table.name), "columns": _names(table.columns)}


def _names(columns: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in columns)


def _one(connection: Connection, query: str, value: object) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), [value]).fetchone()
    assert row is not None
    return row
