"""The embedded NATS, on real servers: found again, private, fenced by credentials, survives what kills it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.credentials import ACCOUNT, USER, AccountSigner, Credential, new_seed, parse_creds, public_key
from infra.embedded.data_directory import DataDirectory
from infra.embedded.errors import DataDirectoryRefused, ServerFailed
from infra.embedded.nats_server import Durability, EmbeddedNats, NatsOptions
from infra.embedded.process import processes_marked, start_ticks
from infra.embedded.server_process import RestartPolicy
from tests.conftest import NatsServer, wall_time
from tests.raw_nats import NatsConnection

LOG = "fleetlog.test.log.vm.7"


def until(condition: Callable[[], bool], *, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def connect(server: NatsServer, credential: Credential | None = None) -> NatsConnection:
    chosen = credential or parse_creds(server.creds_path.read_text())
    return NatsConnection("127.0.0.1", server.port, chosen)


def store(server: NatsServer, payload: bytes) -> None:
    with connect(server) as connection:
        connection.request(
            "$JS.API.STREAM.CREATE.T", b'{"name":"T","subjects":["t.>"],"storage":"file","max_bytes":1000000}'
        )
        assert b'"seq"' in connection.request("t.1", payload)


def stored(server: NatsServer) -> bytes:
    with connect(server) as connection:
        return connection.request("$JS.API.STREAM.INFO.T")


def modes(path: Path) -> dict[Path, int]:
    return {parent: stat.S_IMODE(parent.stat().st_mode) for parent in (path, *path.parents)}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_acknowledged_is_found_after(end: str, own_nats_server: NatsServer) -> None:
    url = own_nats_server.url
    store(own_nats_server, b"fact")
    getattr(own_nats_server, end)()
    assert own_nats_server.pid is None
    own_nats_server.start()
    assert b'"messages":1' in stored(own_nats_server)
    assert own_nats_server.url == url


def test_a_new_coordinator_finds_data_keys_and_port_of_the_last(own_nats_server: NatsServer) -> None:
    store(own_nats_server, b"fact")
    own_nats_server.stop()
    creds = own_nats_server.creds_path.read_text()
    again = NatsServer(own_nats_server.directory)
    try:
        assert again.creds_path.read_text() == creds
        assert again.url == own_nats_server.url
        assert b'"messages":1' in stored(again)
    finally:
        again.stop()


def test_a_supervised_server_that_is_killed_comes_back_on_its_port(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path / "nats", issued_at=wall_time()) as nats:
        first = nats.pid
        for restarts in (1, 2):
            assert nats.pid is not None
            os.kill(nats.pid, signal.SIGKILL)
            until(lambda wanted=restarts: nats.status.restarts == wanted)  # type: ignore[misc]
        creds = parse_creds(nats.coordinator_creds.read_text())
        NatsConnection("127.0.0.1", nats.port, creds).close()
        assert nats.pid != first
        assert nats.status.trouble is None
    assert nats.pid is None


def test_a_server_that_cannot_come_back_is_given_up_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    binary = tmp_path / "nats-server"
    binary.symlink_to(Path(sys.prefix) / "bin" / "nats-server")
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, attempts_max=3)
    with EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), binary=binary, restart=policy) as nats:
        binary.unlink()
        nats.kill()
        until(lambda: "given up after 3 attempts" in (nats.status.trouble or ""))
        assert "killed by SIGKILL" in caplog.text
        assert not nats.status.running


def test_an_error_at_start_ends_with_the_servers_own_words(tmp_path: Path) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\necho no room for me >&2\nexit 7\n")
    binary.chmod(0o755)
    nats = EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), binary=binary)
    with pytest.raises(ServerFailed, match=r"(?s)exit status 7.*no room for me"):
        nats.start()
    assert nats.pid is None


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nats = EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), options=NatsOptions(port=port))
        with pytest.raises(ServerFailed, match=f"127.0.0.1:{port}, another process does"):
            nats.start()


_ORPHAN_MAKER = """
import os, signal, sys
from pathlib import Path
from infra.embedded.nats_server import EmbeddedNats
from tests.conftest import wall_time
nats = EmbeddedNats(Path(sys.argv[1]), issued_at=wall_time())
nats.start()
print(nats.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_left_by_a_killed_coordinator_is_replaced_and_its_data_kept(tmp_path: Path) -> None:
    directory = tmp_path / "nats"
    made = subprocess.run(
        [sys.executable, "-c", _ORPHAN_MAKER, str(directory)], capture_output=True, text=True, check=False
    )
    assert made.returncode == -signal.SIGKILL, made.stderr
    orphan = int(made.stdout)
    assert start_ticks(orphan) is not None, "it should outlive its parent"
    server = NatsServer(directory)
    try:
        assert server.pid is not None
        assert processes_marked("fleetlog-nats-", os.geteuid()).count(server.pid) == 1
        assert start_ticks(orphan) is None
        store(server, b"fact")
    finally:
        server.stop()


def test_a_frozen_server_left_behind_is_killed(tmp_path: Path) -> None:
    options = NatsOptions(stop_timeout_s=0.3)
    old = EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), options=options, supervised=False)
    old.start()
    frozen = old.pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    with EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), options=options) as new:
        assert new.status.running
        assert start_ticks(frozen) is None
    old.stop()


def test_a_lock_held_by_a_stranger_is_never_taken_by_force(tmp_path: Path) -> None:
    nats = EmbeddedNats(tmp_path / "nats", issued_at=wall_time(), options=NatsOptions(stop_timeout_s=0.1))
    lock = str(tmp_path / "nats" / "server.lock")
    with subprocess.Popen(["flock", lock, "cat"], stdin=subprocess.PIPE) as stranger:
        until(Path(lock).exists)
        until(lambda: subprocess.run(["flock", "-n", lock, "true"], check=False).returncode != 0)
        with pytest.raises(ServerFailed, match="may still run on this data"):
            nats.start()
        assert stranger.poll() is None


def test_no_credential_or_one_of_another_account_is_refused(nats_server: NatsServer) -> None:
    stranger_seed = new_seed(ACCOUNT)
    stranger = AccountSigner(seed=stranger_seed, account_public=public_key(stranger_seed))
    posing = AccountSigner(seed=stranger_seed, account_public=nats_server.account_public)
    for credential in (
        Credential(jwt="", seed=None, public_key=""),
        stranger.mint(name="stranger", issued_at=wall_time()),
        posing.mint(name="posing", issued_at=wall_time()),
    ):
        with pytest.raises(ServerFailed, match="Authorization Violation"):
            connect(nats_server, credential)


def test_a_stolen_token_without_its_key_is_refused_unless_it_is_a_bearer(nats_server: NatsServer) -> None:
    token = nats_server.mint()
    for seed in (None, new_seed(USER)):
        with pytest.raises(ServerFailed, match="Authorization Violation"):
            connect(nats_server, Credential(jwt=token.jwt, seed=seed, public_key=token.public_key))
    bearer = nats_server.mint(bearer=True, publish=["a.>"])
    with connect(nats_server, bearer) as connection:
        connection.publish("a.b")
        assert connection.settle() == []


def test_an_agent_may_speak_on_its_own_subjects_and_nowhere_else(nats_server: NatsServer) -> None:
    agent = nats_server.mint(
        "vm-1",
        publish=["fleetlog.test.agent.vm-1.>"],
        subscribe=["_INBOX_vm-1.>", "fleetlog.test.command.vm-1"],
    )
    with connect(nats_server, agent) as connection:
        connection.publish("fleetlog.test.agent.vm-1.register")
        connection.subscribe("_INBOX_vm-1.x")
        assert connection.settle() == []
        for subject in (
            "fleetlog.test.agent.vm-2.register",
            LOG,
            "$JS.API.STREAM.INFO.T",
            "$JS.API.STREAM.MSG.GET.T",
            "$SYS.REQ.SERVER.PING",
        ):
            connection.publish(subject)
            assert "Permissions Violation for Publish" in connection.settle()[0], subject
        for subject in (">", LOG, "fleetlog.test.agent.vm-2.>", "_INBOX.>", "_INBOX_vm-2.>"):
            connection.subscribe(subject)
            assert "Permissions Violation for Subscription" in connection.settle()[0], subject


def test_an_empty_list_of_rights_is_no_right(nats_server: NatsServer) -> None:
    with connect(nats_server, nats_server.mint(publish=[], subscribe=[])) as connection:
        connection.publish("anything")
        connection.subscribe("anything")
        assert len(connection.settle()) == 2


def test_an_answer_is_allowed_where_only_answers_are(nats_server: NatsServer) -> None:
    answering = nats_server.mint(publish=[], subscribe=["q"], responses_max=1, responses_ttl_s=5)
    with connect(nats_server, answering) as server, connect(nats_server) as client:
        server.subscribe("q")
        assert server.settle() == []
        client.subscribe("_INBOX.a")
        client.publish("q", b"?", reply_to="_INBOX.a")
        assert server.message() == b"?"
        server.publish("_INBOX.a", b"!")
        assert server.settle() == []
        assert client.message() == b"!"
        server.publish("_INBOX.a", b"again")
        assert "Permissions Violation" in server.settle()[0]


def test_the_operators_credential_reads_and_resizes_but_removes_nothing(own_nats_server: NatsServer) -> None:
    store(own_nats_server, b"fact")
    operator = parse_creds(own_nats_server.operator_creds_path.read_text())
    with connect(own_nats_server, operator) as connection:
        assert b'"messages":1' in connection.request("$JS.API.STREAM.INFO.T")
        for subject in ("STREAM.DELETE.T", "STREAM.PURGE.T", "STREAM.MSG.DELETE.T"):
            connection.publish(f"$JS.API.{subject}")
            assert "Permissions Violation" in connection.settle()[0]


def test_at_its_end_a_credential_is_disconnected_and_its_renewal_connects(nats_server: NatsServer) -> None:
    agent = nats_server.mint("vm-1", lifetime_s=2, publish=["a.>"])
    with connect(nats_server, agent) as connection:
        renewed = nats_server.agent_signer.renew(
            agent.jwt, issued_at=wall_time(), expires_at=wall_time(offset_s=60)
        )

        def cut() -> bool:
            try:
                return any("Expired" in error for error in connection.settle())
            except OSError:
                return True

        until(cut)

    def refused() -> bool:
        try:
            connect(nats_server, agent).close()
        except ServerFailed as error:
            return "Authorization Violation" in str(error)
        except OSError:  # let in and cut within the last second
            return False
        return False

    until(refused)  # to the server a token is good until the second of its end is over
    again = Credential(jwt=renewed, seed=agent.seed, public_key=agent.public_key)
    with connect(nats_server, again) as connection:
        connection.publish("a.b")
        assert connection.settle() == []
        connection.publish("b")
        assert connection.settle() != []


def test_an_agent_signing_key_from_a_file_mints_for_a_server_that_is_not_ours(
    nats_server: NatsServer,
) -> None:
    signer = AccountSigner.for_account_of(nats_server.keys.agents, nats_server.creds_path.read_text())
    credential = signer.mint(name="vm-1", issued_at=wall_time(), publish=["a.>"])
    with connect(nats_server, credential) as connection:
        connection.publish("a.b")
        assert connection.settle() == []


def test_keys_and_creds_are_readable_by_their_owner_alone(nats_server: NatsServer) -> None:
    files = [path for path in nats_server.directory.rglob("*") if path.is_file()]
    folders = [path for path in nats_server.directory.rglob("*") if path.is_dir()]
    assert {path.name for path in (nats_server.directory / "keys").iterdir()} >= {
        "operator.nk",
        "account.nk",
        "system.nk",
        "agents.nk",
        "coordinator.creds",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in [nats_server.directory, *folders]} == {0o700}


def test_a_key_that_others_could_read_is_refused(own_nats_server: NatsServer) -> None:
    (own_nats_server.directory / "keys" / "account.nk").chmod(0o640)
    with pytest.raises(DataDirectoryRefused, match=r"account\.nk is open to other users"):
        EmbeddedNats(own_nats_server.directory, issued_at=wall_time())


def test_no_seed_is_in_the_servers_configuration_or_log(nats_server: NatsServer) -> None:
    written = "".join((nats_server.directory / name).read_text() for name in ("nats.conf", "nats.log"))
    keys = nats_server.keys
    assert not [seed for seed in (keys.operator, keys.account, keys.system, keys.agents) if seed in written]


def test_folders_above_keep_their_modes(tmp_path: Path) -> None:
    parent = tmp_path / "private"
    parent.mkdir(mode=0o700)
    before = modes(parent)
    with DataDirectory(parent / "data") as data:
        server = NatsServer(data.path / "nats")
        server.stop()
    assert modes(parent) == before
    assert modes(parent / "data")[parent / "data"] == 0o700


def test_every_write_is_synced_by_default_and_the_promise_is_stated(nats_server: NatsServer) -> None:
    assert '"sync_interval": "always"' in (nats_server.directory / "nats.conf").read_text()
    assert "power cut" in Durability().statement
    assert "loses up to the last 2m" in Durability("2m").statement
    with pytest.raises(ValueError, match="durability"):
        Durability("sometimes")


def test_another_durability_reaches_the_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", NatsOptions(durability=Durability("100ms")))
    server.stop()
    assert '"sync_interval": "100ms"' in (tmp_path / "nats" / "nats.conf").read_text()
