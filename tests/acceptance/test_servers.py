"""NATS and PostgreSQL go away and come back in the middle of lives: nothing is lost, no spawn is repeated."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.embedded.nats_server import find_binary
from infra.embedded.postgres_server import EmbeddedPostgres
from tests.acceptance.conftest import servers_of
from tests.acceptance.host import wait_until
from tests.acceptance.place import Coordinator, Place
from tests.conftest import NatsServer


def server_pid(coordinator: Coordinator, mark: str) -> int | None:
    """Return the process of an embedded server, None while there is none."""
    for child in psutil.Process(coordinator.pid).children():
        with suppress(psutil.NoSuchProcess):
            if any(mark in word for word in child.cmdline()):
                return child.pid
    return None


def kill_server(coordinator: Coordinator, mark: str) -> int:
    pid = server_pid(coordinator, mark)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_the_embedded_nats_is_killed_in_the_middle_of_lives(place: Place) -> None:
    coordinator = place.start()
    held = [place.demand("held"), place.demand("held")]
    for vm in held:
        place.wait_phase(vm, "registered")
    for _ in range(2):
        with place.asking("demand", "-l", "quick", "-n", "4"):
            before = len(place.lives())
            place.wait_for(lambda lives, n=before: len(lives) == n + 4, "the demand is decided")  # type: ignore[misc]
            killed = kill_server(coordinator, "fleetlog-nats-")
        wait_until(
            lambda old=killed: server_pid(coordinator, "fleetlog-nats-") not in (None, old),  # type: ignore[misc]
            "NATS is started again",
            30,
        )
        wait_until(lambda: coordinator.health()["status"] == "ok", "the coordinator is well again", 30)
    place.wait_for(
        lambda lives: all(lives[vm].phase == "reaped" for vm in lives if vm not in held),
        "the short jobs have ended",
    )
    assert all(place.lives()[vm].phase == "registered" for vm in held), "an outage of ours fails nobody"
    place.open_gate()
    place.wait_all_reaped()
    assert {state.reason for state in place.lives().values()} == {"job-complete"}
    assert len(place.starts()) == 10
    place.settle()


def test_the_embedded_postgres_is_killed_in_the_middle_of_lives(place: Place) -> None:
    coordinator = place.start()
    held = place.demand("held")
    place.wait_phase(held, "registered")
    kill_server(coordinator, "fleetlog-postgres-")
    quick = place.demand("quick")
    place.wait_phase(quick, "reaped")
    wait_until(
        lambda: not any(view["lag_facts"] for view in coordinator.health()["views"]), "it caught up", 30
    )
    place.open_gate()
    place.wait_all_reaped()
    assert {state.reason for state in place.lives().values()} == {"job-complete"}
    place.settle()


@pytest.fixture
def outside(
    tmp_path: Path, own_nats_server: NatsServer, own_postgres_server: EmbeddedPostgres
) -> Iterator[Place]:
    """A place on a NATS and a PostgreSQL of this test, which nobody starts again but the test."""
    made = Place(tmp_path / "place", servers_of(own_nats_server, own_postgres_server.dsn))
    yield made
    made.clean()


def test_outside_servers_go_and_come_back_and_the_coordinator_starts_none(
    outside: Place, own_nats_server: NatsServer, own_postgres_server: EmbeddedPostgres
) -> None:
    coordinator = outside.start()
    assert not (outside.data / "nats").exists()
    assert not (outside.data / "postgres").exists()
    held = outside.demand("held")
    outside.wait_phase(held, "registered")
    own_nats_server.kill()
    own_postgres_server.kill()
    wait_until(lambda: coordinator.health()["status"] == "degraded", "it says that it is cut off")
    outside.open_gate()  # the job ends while nobody can be told
    own_nats_server.start()
    outside.wait_all_reaped()
    (state,) = outside.lives().values()
    assert (state.reason, state.exit_code) == ("job-complete", 0)
    vm = outside.demand("quick")
    outside.wait_phase(vm, "reaped")
    own_postgres_server.start()
    wait_until(
        lambda: [view["lag_facts"] for view in coordinator.health()["views"]] == [0, 0], "it caught up", 30
    )
    assert coordinator.process.poll() is None
    assert not (outside.data / "nats").exists()
    assert not (outside.data / "postgres").exists()
    outside.settle()


@pytest.fixture
def over_tls(tmp_path: Path, own_nats_server: NatsServer, postgres_dsn: str) -> Iterator[Place]:
    """A place on a NATS that speaks TLS only, with a certificate that only our own file vouches for."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*make.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    own_nats_server.stop()
    config = json.loads((own_nats_server.directory / "nats.conf").read_text())
    config["tls"] = {"cert_file": str(certificate), "key_file": str(key)}
    path = tmp_path / "tls.conf"
    path.write_text(json.dumps(config))
    server = subprocess.Popen([find_binary(), "-c", path], stderr=subprocess.DEVNULL)
    known = servers_of(own_nats_server, postgres_dsn)
    servers = replace(known, nats=known.nats.replace("nats://", "tls://"), tls_ca=certificate)
    made = Place(tmp_path / "place", servers)
    try:
        wait_until(lambda: _listens(own_nats_server.port), "the server listens")
        yield made
    finally:
        made.clean()
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_coordinator_agents_and_commands_speak_tls(over_tls: Place) -> None:
    first = over_tls.start()
    held = over_tls.demand("held")
    over_tls.wait_phase(held, "registered")
    first.kill()
    over_tls.start()
    over_tls.open_gate()
    over_tls.wait_all_reaped()
    assert over_tls.lives()[held].reason == "job-complete"
    over_tls.settle()


def test_without_postgres_it_starts_says_so_and_catches_up_when_it_is_there(
    outside: Place, own_postgres_server: EmbeddedPostgres
) -> None:
    own_postgres_server.stop()
    coordinator = outside.start()
    assert "boot replays the whole log" in coordinator.said()
    vm = outside.demand("quick")
    outside.wait_phase(vm, "reaped")
    own_postgres_server.start()
    wait_until(
        lambda: [view["lag_facts"] for view in coordinator.health()["views"]] == [0, 0], "it caught up", 30
    )
    outside.settle()


def test_a_second_coordinator_of_the_same_id_stops_the_first_and_nothing_starts_twice(
    tmp_path: Path, outside: Place
) -> None:
    first = outside.start()
    held = outside.demand("held")
    outside.wait_phase(held, "registered")
    other = Place(tmp_path / "other", outside.servers, max_agents=20)
    other.id, other.cluster = outside.id, outside.cluster
    try:
        # Of the same place, so that it finds the machines; its folder is its own, as on another host.
        other.agents, other.config = outside.agents, outside.config
        (other.data).mkdir(mode=0o700)
        (other.data / "machines").symlink_to(outside.data / "machines")
        second = other.start()
        assert outside.lives()[held].phase == "registered"
        assert first.wait_dead(10) == 3, "without any demand that would tell it"
        assert "give each coordinator its own --id" in first.said()
        assert second.process.poll() is None
        place_of_second = other.demand("quick")
        other.wait_phase(place_of_second, "reaped")
        other.open_gate()
        other.wait_all_reaped()
        assert set(other.starts().values()) == {1}
        other.settle()
    finally:
        other.clean()
