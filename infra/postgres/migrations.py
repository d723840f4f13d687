"""Brings the tables to the form this fleetlog knows, and refuses servers and schemas it does not."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql

from actors.errors import RowsRefused

OLDEST_SERVER = 14


@cache
def migrations() -> tuple[tuple[str, str], ...]:
    """Return every migration's name and SQL, in their order; the n-th makes schema version n."""
    folder = files("projections") / "schema"
    found = sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".sql"))
    for number, (name, _) in enumerate(found, start=1):
        assert name.startswith(f"{number:04}_"), f"{name} is not migration number {number}"
    return tuple(found)


def check_server(version: int, place: str) -> None:
    """Refuse a server that is too old; `version` as libpq gives it, 140005 for 14.5.

    Raises:
        RowsRefused: it is.
    """
    if version < OLDEST_SERVER * 10_000:
        raise RowsRefused(
            f"PostgreSQL at {place} is version {version // 10_000}; fleetlog needs {OLDEST_SERVER} or later: "
            "upgrade that server or name another one"
        )


def migrate(connection: psycopg.Connection[Any], schema: str, place: str) -> int:
    """Bring `schema` to this fleetlog's version, alone among all who try; return how many steps that took.

    Raises:
        RowsRefused: the server is too old, the schema is newer, or the user lacks a right.
    """
    check_server(connection.info.server_version, place)
    try:
        with connection.transaction():
            return _migrate(connection, schema, place)
    except psycopg.errors.InsufficientPrivilege as error:
        raise RowsRefused(
            f"PostgreSQL at {place}: user {connection.info.user} may not make the tables ({_first_line(error)}). "
            f'Run as its administrator: create schema "{schema}" authorization "{connection.info.user}"'
        ) from error


def _migrate(connection: psycopg.Connection[Any], schema: str, place: str) -> int:
    connection.execute("set local lock_timeout = '30s'")
    # Tables stay made, whatever becomes of their last rows.
    connection.execute("set local synchronous_commit = on")
    connection.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"fleetlog {schema}"])
    there = connection.execute(
        "select exists (select from pg_namespace where nspname = %s)", [schema]
    ).fetchone()
    if not (there and there[0]):
        connection.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    connection.execute(sql.SQL("set local search_path to {}").format(sql.Identifier(schema)))
    connection.execute(
        "create table if not exists schema_version ("
        "version integer primary key, name text not null, applied_at timestamptz not null default now())"
    )
    row = connection.execute("select coalesce(max(version), 0) from schema_version").fetchone()
    have = int(row[0]) if row else 0
    steps = migrations()
    if have > len(steps):
        raise RowsRefused(
            f'PostgreSQL at {place}: schema "{schema}" has version {have}, this fleetlog knows {len(steps)}. '
            "A newer fleetlog made it: install that version here too, or drop the schema and run `fleetlog rebuild`"
        )
    for number, (name, text) in enumerate(steps[have:], start=have + 1):
        connection.execute(text.encode())
        connection.execute("insert into schema_version (version, name) values (%s, %s)", [number, name])
    return len(steps) - have


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
