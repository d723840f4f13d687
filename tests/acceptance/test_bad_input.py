"""Bad input: each has one clear error that names the place and the way out, an exit code, and leaves nothing half done."""

from __future__ import annotations

import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from events import subjects
from infra.credentials import ACCOUNT, new_seed
from infra.journal.jetstream import call
from infra.journal.wire import Wire
from infra.postgres.database import schema_of
from tests.acceptance.host import processes_of, wait_until
from tests.acceptance.place import Place
from tests.conftest import NatsServer

USAGE, REFUSED, UNREACHABLE = 2, 3, 4
CHECK_FAILED = 1


def refused(place: Place, status: int, *said: str, options: tuple[str, ...] = ()) -> str:
    """Require that `fleetlog up` ends with this status, says all of this, and leaves nothing behind."""
    coordinator = place.launch(*options)
    assert coordinator.wait_dead(30) == status, coordinator.said()
    text = coordinator.said()
    assert "Traceback" not in text
    for part in said:
        assert part in text, text
    assert processes_of(place.root) == {}
    assert not (place.data / "runtime.json").exists()
    return text


FLEET = """version: 1
scalers:
  - name: metal
    backend: bare-metal
    max_agents: 2
    label_sets:
      - labels: [linux]
        binary_path: /bin/true
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FLEET.replace("max_agents", "max_agnets"), ["fleet.yaml:5", "max_agnets", "max_agents"]),
        (FLEET.replace("max_agents: 2", "max_agents: two"), ["fleet.yaml:5", '"two"', "whole number"]),
        (
            FLEET + "        resources: {limits: {memory: 4 gigs}}\n",
            ["fleet.yaml:9", '"4 gigs"', "512m"],
        ),
        (
            FLEET + FLEET.partition("scalers:\n")[2],
            ["fleet.yaml:9", "scaler metal is already at", "fleet.yaml:3"],
        ),
        ("version: 1\nscalers: [\n", ["fleet.yaml:3", "YAML"]),
        ("version: 1\nscalers: \xff\n", ["fleet.yaml", "UTF-8"]),
        (None, ["fleet.yaml", "No such file"]),
    ],
    ids=["unknown-key", "wrong-type", "bad-memory", "duplicate-name", "no-yaml", "no-text", "no-file"],
)
def test_a_bad_fleet_file_is_refused_with_its_line_and_what_is_accepted(
    place: Place, text: str | None, said: list[str]
) -> None:
    if text is None:
        place.config.unlink()
    else:
        place.config.write_bytes(text.encode("latin-1"))
    refused(place, CHECK_FAILED, *said)
    assert not place.data.exists(), "nothing is made for a file that cannot be used"
    checked = place.run("config", "validate", str(place.config))
    assert checked.returncode == CHECK_FAILED
    assert all(part in checked.stdout + checked.stderr for part in said)


@pytest.mark.usefixtures("root")
def test_a_fleet_file_that_may_not_be_read_is_refused(place: Place) -> None:
    place.config.chmod(0o600)
    for folder in (place.root, *place.root.parents[:2]):
        folder.chmod(0o755)
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            *place.command("up", "--config", str(place.config)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    assert done.returncode == USAGE, done.stderr
    assert str(place.config) in done.stderr
    assert "not readable" in done.stderr
    assert not place.data.exists()


def test_a_second_coordinator_on_a_data_directory_is_refused_and_the_first_goes_on(place: Place) -> None:
    first = place.start()
    second = place.launch()
    assert second.wait_dead() == UNREACHABLE
    assert f"pid {first.pid}" in second.said()
    assert "--data-dir" in second.said()
    assert "Traceback" not in second.said()
    vm = place.demand("quick")
    place.wait_phase(vm, "reaped")
    place.settle()


def test_nats_that_is_not_there_is_named(quick_place: Place) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{closed.getsockname()[1]}"
        assert quick_place.servers is not None
        quick_place.servers = replace(quick_place.servers, nats=url)
        refused(quick_place, UNREACHABLE, url, "--nats")


def test_wrong_nats_credentials_are_refused_and_named(
    quick_place: Place, own_nats_server: NatsServer, tmp_path: Path
) -> None:
    assert quick_place.servers is not None
    stranger = replace(quick_place.servers, creds=own_nats_server.creds_path)
    quick_place.servers = stranger
    refused(quick_place, UNREACHABLE, stranger.nats, str(stranger.creds))
    garbage = tmp_path / "garbage.creds"
    garbage.write_text("no creds at all\n")
    quick_place.servers = replace(stranger, creds=garbage)
    refused(quick_place, UNREACHABLE, "--nats-creds", "not a NATS creds file")


def test_a_signing_key_the_server_does_not_know_is_refused_and_not_first_by_every_agent(
    quick_place: Place, tmp_path: Path
) -> None:
    assert quick_place.servers is not None
    strange = tmp_path / "strange.nk"
    strange.write_text(new_seed(ACCOUNT) + "\n", encoding="ascii")
    quick_place.servers = replace(quick_place.servers, signing_key=strange)
    refused(quick_place, UNREACHABLE, str(strange), "refuses agents signed with it")


def test_a_file_that_holds_no_signing_key_is_refused_and_named(quick_place: Place, tmp_path: Path) -> None:
    assert quick_place.servers is not None
    user_seed = tmp_path / "user.nk"
    user_seed.write_text("SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4\n")
    quick_place.servers = replace(quick_place.servers, signing_key=user_seed)
    refused(quick_place, UNREACHABLE, str(user_seed), "signing key")


def test_options_that_contradict_each_other_are_refused(place: Place, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    refused(
        place,
        USAGE,
        "--agent-signing-key without --nats",
        options=("--agent-signing-key", str(key)),
    )
    refused(place, USAGE, "'often'", "`always`", options=("--durability", "often"))
    assert not place.data.exists()


def test_a_stream_with_foreign_settings_is_refused_and_left_as_it_is(quick_place: Place) -> None:
    name = subjects.stream(quick_place.cluster)
    config = {
        "name": name,
        "subjects": [subjects.whole_log(quick_place.cluster)],
        "max_bytes": 1 << 20,
        "max_age": 3600 * 10**9,
        "discard": "old",
        "storage": "memory",
    }
    with Wire(quick_place.address(), name="acceptance test", timeout_s=5) as wire:
        before = call(wire, f"STREAM.CREATE.{name}", config, 5)["config"]
        refused(quick_place, CHECK_FAILED, name, "max_age", "discard", "storage", "another cluster name")
        after = call(wire, f"STREAM.INFO.{name}", None, 5)
    assert after["config"] == before
    assert after["state"]["messages"] == 0


def test_tables_of_a_newer_fleetlog_are_refused_and_left_as_they_are(quick_place: Place) -> None:
    assert quick_place.servers is not None
    quick_place.start().stop()
    before = len(quick_place.facts())
    schema = sql.Identifier(schema_of(quick_place.cluster))
    with psycopg.connect(quick_place.servers.postgres, autocommit=True) as connection:
        insert = sql.SQL("insert into {}.schema_version (version, name) values (999, 'later')")
        connection.execute(insert.format(schema))
        refused(quick_place, UNREACHABLE, schema_of(quick_place.cluster), "999", "install that version")
        rows = connection.execute(sql.SQL("select max(version) from {}.schema_version").format(schema))
        assert rows.fetchone() == (999,)
    assert len(quick_place.facts()) == before, "it never started, so the log has no start of it"


class _OldPostgres(socketserver.BaseRequestHandler):
    """As much of PostgreSQL 13 as it takes to be asked for its version."""

    def handle(self) -> None:
        while (length := self._number()) and self._number() == 80877103:  # asks for TLS
            del length
            self.request.sendall(b"N")
        self.request.recv(65536)
        self._say(b"R", struct.pack("!i", 0))
        for name, value in (("server_version", "13.4"), ("client_encoding", "UTF8")):
            self._say(b"S", f"{name}\0{value}\0".encode())
        self._say(b"Z", b"I")
        while self.request.recv(65536):
            self._say(b"C", b"SET\0")
            self._say(b"Z", b"I")

    def _number(self) -> int:
        found: int = struct.unpack("!i", self.request.recv(4))[0]
        return found

    def _say(self, kind: bytes, body: bytes) -> None:
        self.request.sendall(kind + struct.pack("!i", len(body) + 4) + body)


@contextmanager
def old_postgres() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldPostgres) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"postgresql://someone@127.0.0.1:{server.server_address[1]}/fleet"
        finally:
            server.shutdown()
            thread.join()


def test_a_postgres_that_is_too_old_is_refused_and_named(quick_place: Place) -> None:
    assert quick_place.servers is not None
    with old_postgres() as dsn:
        quick_place.servers = replace(quick_place.servers, postgres=dsn)
        refused(quick_place, UNREACHABLE, "version 13", "14 or later", dsn.rpartition("@")[2])


def test_a_port_that_is_taken_is_named(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(place, UNREACHABLE, address, "another port", options=("--http", address))
        refused(place, UNREACHABLE, address, options=("--nats-port", address.rpartition(":")[2]))
    place.start().stop()


@pytest.fixture
def small_disk(tmp_path: Path, root: None) -> Iterator[Path]:
    """A file system of 320 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320m,mode=755", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_refuses_the_start_and_nothing_is_made(quick_place: Place, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb") as filler:
        filler.truncate(0)
        filler.write(b"x" * (100 << 20))
    quick_place.data = small_disk / "data"
    refused(quick_place, UNREACHABLE, str(small_disk), "MiB free", "--data-dir")
    assert not quick_place.data.exists()


def test_a_disk_that_runs_full_refuses_demand_and_the_fleet_goes_on_when_there_is_room(
    place: Place, small_disk: Path
) -> None:
    place.data = small_disk / "data"
    filler = small_disk / "filler"
    coordinator = place.start("--log-limit", "16m")
    held = place.demand("held")
    place.wait_phase(held, "registered")
    with filler.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    error = place.ask("demand", "-l", "quick", "--job", "one", expect=UNREACHABLE)["error"]
    assert error["code"] == "log-unavailable"
    assert "disk" in error["message"]
    assert coordinator.process.poll() is None
    assert place.processes(), "the agent works on"
    filler.unlink()
    wait_until(
        lambda: place.run("demand", "-l", "quick", "--job", "one").returncode == 0,
        "demand is taken again",
        40,
    )
    place.open_gate()
    place.wait_all_reaped()
    assert {state.reason for state in place.lives().values()} == {"job-complete"}
    place.settle()
