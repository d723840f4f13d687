"""Tables mirror their row types; servers and schemas that do not fit are refused with the way out."""

import threading

import psycopg
import pytest

from actors.errors import RowsRefused, RowsUnavailable
from infra.postgres.columns import codec_of
from infra.postgres.database import IDENTIFIER_BYTES_MAX, Database, place_of, schema_of
from infra.postgres.migrations import check_server, migrate, migrations
from infra.postgres.queries import AgentFilter, Queries
from infra.postgres.rows import PostgresRows
from projections.catalogue import FLEET, VIEWS
from projections.view import AnyTable

TABLES = [table for view in VIEWS for table in view.tables]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table.name))
def test_every_row_type_matches_its_table(postgres_dsn: str, table: AnyTable) -> None:
    database = Database(postgres_dsn, "house")
    with database.connection() as connection:
        found = connection.execute(
            "select a.attname, format_type(a.atttypid, a.atttypmod), not a.attnotnull "
            "from pg_attribute a where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped "
            "order by a.attnum",
            [table.name],
        ).fetchall()
        key = connection.execute(
            "select a.attname from pg_index i join pg_attribute a on a.attrelid = i.indrelid "
            "and a.attnum = any(i.indkey) where i.indrelid = %s::regclass and i.indisprimary",
            [table.name],
        ).fetchall()
    database.close()
    assert found == [(c.name, c.sql_type, c.nullable) for c in codec_of(table).columns]
    assert key == [(table.key,)]


def test_no_table_is_without_a_row_type(postgres_dsn: str) -> None:
    database = Database(postgres_dsn, "house")
    with database.connection() as connection:
        found = connection.execute(
            "select tablename from pg_tables where schemaname = %s", [database.schema]
        ).fetchall()
    database.close()
    assert {name for (name,) in found} == {table.name for table in TABLES} | {"checkpoints", "schema_version"}


def test_many_who_start_at_once_migrate_once(postgres_dsn: str) -> None:
    errors: list[BaseException] = []
    steps: list[int] = []

    def start() -> None:
        try:
            with psycopg.connect(postgres_dsn, autocommit=True) as connection:
                steps.append(migrate(connection, "fleetlog_crowd", "here"))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert sorted(steps) == [0] * 7 + [len(migrations())]


def test_a_newer_schema_is_refused_with_the_place_and_the_way_out(postgres_dsn: str) -> None:
    first = Database(postgres_dsn, "new")
    with first.connection() as connection:
        connection.execute("insert into schema_version (version, name) values (99, '0099_future.sql')")
    first.close()
    second = Database(postgres_dsn, "new")
    with pytest.raises(RowsRefused) as refused, second.connection():
        pass
    second.close()
    text = str(refused.value)
    assert place_of(postgres_dsn) in text
    assert "version 99" in text
    assert "install that version" in text


def test_an_old_server_is_refused_with_the_place_and_the_way_out() -> None:
    check_server(140000, "db:5432/fleet")
    with pytest.raises(RowsRefused, match=r"db:5432/fleet is version 13.*needs 14 or later: upgrade"):
        check_server(130022, "db:5432/fleet")


def test_a_user_without_rights_is_told_what_to_run(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("drop role if exists fleetlog_poor")
        connection.execute("create role fleetlog_poor login")
    try:
        database = Database(psycopg.conninfo.make_conninfo(postgres_dsn, user="fleetlog_poor"), "poor")
        with pytest.raises(RowsRefused, match='create schema "fleetlog_poor" authorization "fleetlog_poor"'):
            PostgresRows(database).checkpoint(FLEET)
        database.close()
    finally:
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute("drop role fleetlog_poor")


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    database = Database("postgresql://fleet:s3cret@127.0.0.1:1/fleet", "away", wait_s=1)
    with pytest.raises(RowsUnavailable) as unavailable, database.connection():
        pass
    database.close()
    assert "127.0.0.1:1/fleet" in str(unavailable.value)
    assert "s3cret" not in str(unavailable.value)


def test_clusters_share_a_database_and_nothing_else(postgres_dsn: str) -> None:
    one, two = Database(postgres_dsn, "one"), Database(postgres_dsn, "two")
    PostgresRows(one).checkpoint(FLEET)
    PostgresRows(one).save(FLEET, 0, 7, {})
    assert PostgresRows(two).checkpoint(FLEET) == 0
    assert Queries(two).agents(AgentFilter()) == []
    one.close()
    two.close()


def test_no_two_clusters_have_one_schema() -> None:
    long = "a" * 62
    names = {schema_of(name) for name in ("a-b", "ab", long + "a", long + "b", long[:-1])}
    assert len(names) == 5
    assert max(map(len, names)) <= IDENTIFIER_BYTES_MAX


def test_dropped_tables_are_made_again_at_the_next_use(postgres_dsn: str) -> None:
    database = Database(postgres_dsn, "gone")
    rows = PostgresRows(database)
    rows.checkpoint(FLEET)
    rows.save(FLEET, 0, 7, {})
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("drop schema fleetlog_gone cascade")
    with pytest.raises(RowsUnavailable, match="tables are gone"):
        rows.checkpoint(FLEET)
    assert rows.checkpoint(FLEET) == 0
    database.close()
