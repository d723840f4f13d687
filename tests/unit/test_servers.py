"""Servers that were told of: nothing is started, what cannot be read is refused by name, durability is stated."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.clock import SystemClock
from infra.embedded.data_directory import DataDirectory
from infra.embedded.nats_server import Durability
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.servers import NO_TABLES, ServerOptions, Servers

EXTERNAL = NatsAddress(url="nats://127.0.0.1:4222")


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory(tmp_path / "data") as data:
        yield data


def servers(data: DataDirectory, options: ServerOptions) -> Servers:
    return Servers(options, data, SystemClock())


def test_servers_that_were_told_of_are_used_and_none_is_started(data: DataDirectory) -> None:
    told = servers(data, ServerOptions(nats=EXTERNAL, postgres="postgresql://127.0.0.1/fleet"))
    told.start()
    assert told.address == EXTERNAL
    assert told.dsn == "postgresql://127.0.0.1/fleet"
    assert told.signer is None
    assert told.embedded == {}
    assert not (data.path / "nats").exists()
    told.close()
    told.close()


def test_without_tables_there_is_no_dsn_and_no_server(data: DataDirectory) -> None:
    told = servers(data, ServerOptions(nats=EXTERNAL, postgres=NO_TABLES))
    told.start()
    assert told.dsn is None
    assert told.embedded == {}


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"not a seed", b"SUAM"])
def test_a_signing_key_that_cannot_be_used_names_its_file_and_the_way_out(
    tmp_path: Path, data: DataDirectory, content: bytes | None
) -> None:
    key = tmp_path / "agents.nk"
    if content is not None:
        key.write_bytes(content)
    told = servers(data, ServerOptions(nats=EXTERNAL, postgres=NO_TABLES, agent_signing_key=key))
    with pytest.raises(
        ConnectionRefusedByServer, match=rf"--agent-signing-key {key}: .*seed of a signing key"
    ):
        told.start()


def test_creds_that_are_not_there_are_named_beside_the_signing_key(
    tmp_path: Path, data: DataDirectory
) -> None:
    key = tmp_path / "agents.nk"
    key.write_text("SAAG")
    address = NatsAddress(url=EXTERNAL.url, creds=tmp_path / "gone.creds")
    told = servers(data, ServerOptions(nats=address, postgres=NO_TABLES, agent_signing_key=key))
    with pytest.raises(ConnectionRefusedByServer, match=r"gone\.creds"):
        told.start()


def test_durability_is_stated_for_our_server_and_left_to_the_owner_of_another(data: DataDirectory) -> None:
    ours = servers(data, ServerOptions())
    assert "synced to disk first" in ours.durability
    assert "a power cut (if the drive keeps what it says it wrote)" in ours.durability
    late = servers(data, ServerOptions(durability=Durability("2m")))
    assert "a power cut loses up to the last 2m" in late.durability
    assert "as the NATS server at hand" in servers(data, ServerOptions(nats=EXTERNAL)).durability


@pytest.mark.parametrize("interval", ["never", "0s", "1h", "10", ""])
def test_a_sync_interval_that_means_nothing_is_refused_with_the_form(interval: str) -> None:
    with pytest.raises(ValueError, match="neither `always` nor a time such as 100ms, 1s or 2m"):
        Durability(interval)
