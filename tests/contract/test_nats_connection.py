"""The shared NATS connection: blocking calls, kept alive over restarts, refusals told apart and said once."""

import contextlib
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.errors import LogUnavailable
from infra.embedded.nats_server import find_binary
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.journal.connection import Message, NatsConnection, NobodyAnswers
from infra.journal.wire import Wire
from tests.conftest import NatsServer
from tests.contract.nats_tools import address_of, eventually, proxy_before


@contextlib.contextmanager
def connected(address: NatsAddress, **options: float) -> Iterator[NatsConnection]:
    connection = NatsConnection(address, name="test", **options)  # type: ignore[arg-type]
    try:
        yield connection
    finally:
        connection.close()


def test_a_request_is_answered_by_a_callback_that_uses_the_same_connection(nats_server: NatsServer) -> None:
    with connected(address_of(nats_server)) as connection:

        def answer(message: Message) -> None:
            connection.publish(message.reply, message.payload.upper())

        connection.subscribe("echo.one", answer)
        assert connection.request("echo.one", b"hello", 5) == b"HELLO"


def test_many_threads_may_ask_at_once(nats_server: NatsServer) -> None:
    with connected(address_of(nats_server)) as connection:
        connection.subscribe("echo.many", lambda m: connection.publish(m.reply, m.payload))
        wrong: list[object] = []

        def ask(number: int) -> None:
            for turn in range(20):
                payload = f"{number}.{turn}".encode()
                if connection.request("echo.many", payload, 10) != payload:
                    wrong.append((number, turn))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_request_nobody_serves_says_so_at_once(nats_server: NatsServer) -> None:
    with connected(address_of(nats_server)) as connection:
        started = time.monotonic()
        with pytest.raises(NobodyAnswers, match=r"nobody serves nobody\.there"):
            connection.request("nobody.there", b"", 30)
        assert time.monotonic() - started < 5


def test_a_request_without_an_answer_in_time_says_so(nats_server: NatsServer) -> None:
    with connected(address_of(nats_server)) as connection:
        connection.subscribe("silent", lambda _: None)
        with pytest.raises(NobodyAnswers, match=r"no answer on silent within 0\.2 s"):
            connection.request("silent", b"", 0.2)


def test_a_callback_that_raises_is_said_and_the_next_message_comes(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[bytes] = []

    def fussy(message: Message) -> None:
        if message.payload == b"bad":
            raise ValueError("not this one")
        got.append(message.payload)

    with connected(address_of(nats_server)) as connection, caplog.at_level(logging.ERROR):
        connection.subscribe("fussy", fussy)
        connection.publish("fussy", b"bad")
        connection.publish("fussy", b"good")
        eventually(lambda: got == [b"good"], "the message after the bad one")
    assert "not this one" in caplog.text


def test_a_callback_too_slow_for_its_limit_drops_loudly_and_blocks_nobody_else(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    other: list[bytes] = []
    with connected(address_of(nats_server)) as connection, caplog.at_level(logging.ERROR):
        slow = connection.subscribe("slow", lambda _: release.wait(30), limit=3)
        connection.subscribe("other", lambda m: other.append(m.payload))
        for _ in range(10):
            connection.publish("slow", b"")
        connection.publish("other", b"here")
        eventually(lambda: other == [b"here"], "another subscription is served")
        eventually(lambda: slow.dropped >= 6, "what does not fit is counted")
        release.set()
    assert "too slow" in caplog.text


def test_a_queue_gives_each_message_to_one_member(nats_server: NatsServer) -> None:
    got: list[bytes] = []
    with connected(address_of(nats_server)) as one, connected(address_of(nats_server)) as two:
        one.subscribe("shared", lambda m: got.append(m.payload), queue="all")
        two.subscribe("shared", lambda m: got.append(m.payload), queue="all")
        for number in range(50):
            one.publish("shared", str(number).encode())
        eventually(lambda: len(got) >= 50, "all came")
        assert sorted(got) == sorted(str(number).encode() for number in range(50))


def test_a_stopped_subscription_calls_no_more(nats_server: NatsServer) -> None:
    got: list[bytes] = []
    with connected(address_of(nats_server)) as connection:
        subscription = connection.subscribe("stopped", lambda m: got.append(m.payload))
        subscription.stop()
        subscription.stop()
        connection.publish("stopped", b"late")
        with pytest.raises(NobodyAnswers):
            connection.request("stopped", b"", 1)
    assert got == []


def test_a_killed_server_is_noticed_and_its_return_brings_subscriptions_back(
    own_nats_server: NatsServer,
) -> None:
    states: list[bool] = []
    got: list[bytes] = []
    with connected(address_of(own_nats_server)) as connection:
        connection.on_state(states.append)
        connection.subscribe("after", lambda m: got.append(m.payload))
        own_nats_server.kill()
        eventually(lambda: states == [True, False], "the loss is told")
        own_nats_server.start()
        eventually(lambda: states == [True, False, True], "the return is told")
        connection.publish("after", b"again")
        eventually(lambda: got == [b"again"], "the subscription lives")


def test_what_is_published_while_disconnected_fails_at_once_and_never_arrives(
    own_nats_server: NatsServer,
) -> None:
    got: list[bytes] = []
    with connected(address_of(own_nats_server)) as connection:
        connection.subscribe("phantom", lambda m: got.append(m.payload))
        own_nats_server.kill()
        eventually(lambda: not connection.connected, "the loss is noticed")
        started = time.monotonic()
        with pytest.raises(LogUnavailable, match="not connected"):
            connection.publish("phantom", b"phantom")
        assert time.monotonic() - started < 1
        own_nats_server.start()
        eventually(lambda: connection.connected, "the return is noticed")
        connection.publish("phantom", b"real")
        eventually(lambda: got, "what was sent after it")
        assert got == [b"real"]


def test_a_credential_that_ends_is_replaced_by_the_renewed_file(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    creds = tmp_path / "renewed.creds"
    creds.write_text(own_nats_server.mint("short", lifetime_s=2).creds_text())
    got: list[bytes] = []
    states: list[bool] = []
    with connected(NatsAddress(url=own_nats_server.url, creds=creds)) as connection:
        connection.on_state(states.append)
        connection.subscribe("renewed", lambda m: got.append(m.payload))
        creds.write_text(own_nats_server.mint("long").creds_text())
        eventually(
            lambda: states == [True, False, True], "cut at the end of the first, back with the second", 20
        )
        connection.publish("renewed", b"still")
        eventually(lambda: got == [b"still"], "the subscription was made again")


def test_nobody_there_is_one_sentence_with_the_place_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LogUnavailable, match=rf"nats://127\.0\.0\.1:{port}: .*refused.*--nats") as raised:
        NatsConnection(NatsAddress(url=f"nats://127.0.0.1:{port}"), name="test", timeout_s=1)
    assert "\n" not in str(raised.value)


def test_a_server_that_never_greets_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started = time.monotonic()
        with pytest.raises(LogUnavailable, match="no NATS server answers"):
            NatsConnection(
                NatsAddress(url=f"nats://127.0.0.1:{mute.getsockname()[1]}"), name="test", timeout_s=0.5
            )
        assert time.monotonic() - started < 5


def test_no_credentials_are_refused_with_the_way_out(nats_server: NatsServer) -> None:
    with pytest.raises(
        ConnectionRefusedByServer, match=r"client without credentials: Authorization.*--nats-creds"
    ):
        NatsConnection(NatsAddress(url=nats_server.url), name="test")


def test_foreign_credentials_are_refused_naming_their_file(nats_server: NatsServer, tmp_path: Path) -> None:
    other = NatsServer(tmp_path / "other")
    try:
        address = NatsAddress(url=nats_server.url, creds=other.creds_path)
        with pytest.raises(ConnectionRefusedByServer, match=rf"{other.creds_path}: Authorization Violation"):
            NatsConnection(address, name="test")
    finally:
        other.stop()


def test_a_missing_creds_file_is_named(nats_server: NatsServer, tmp_path: Path) -> None:
    address = NatsAddress(url=nats_server.url, creds=tmp_path / "none.creds")
    with pytest.raises(
        ConnectionRefusedByServer, match=r"none\.creds.*No such file.*name a readable creds file"
    ):
        NatsConnection(address, name="test")


@pytest.mark.parametrize("url", ["http://x", "nats://", "nats://h:99999", "nats://h/path"])
def test_a_url_that_is_none_is_refused_with_the_form(url: str) -> None:
    with pytest.raises(ValueError, match="write nats://host:port or tls://host:port"):
        NatsAddress(url=url)


def test_a_password_is_in_no_repr_and_no_message() -> None:
    address = NatsAddress(url="nats://me:secret@127.0.0.1:1")
    assert "secret" not in repr(address) + str(address) + repr(address.servers)
    with pytest.raises(LogUnavailable) as raised:
        Wire(address, name="test", timeout_s=1)
    assert "secret" not in str(raised.value)


def test_a_dead_member_of_a_cluster_is_passed_over(nats_server: NatsServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = NatsAddress(url=f"nats://127.0.0.1:{port}, {nats_server.url}", creds=nats_server.creds_path)
    with connected(both) as connection:
        connection.publish("x", b"")


def test_a_half_open_connection_is_noticed_by_pings(nats_server: NatsServer) -> None:
    with proxy_before(nats_server) as proxy:
        address = NatsAddress(url=f"nats://127.0.0.1:{proxy.port}", creds=nats_server.creds_path)
        with connected(address, ping_interval_s=0.3) as connection:
            proxy.swallowing.set()
            eventually(lambda: not connection.connected, "silence is noticed", 20)
            proxy.swallowing.clear()
            eventually(lambda: connection.connected, "and it comes back", 10)


def test_closing_ends_every_thread_and_later_calls_say_so(nats_server: NatsServer) -> None:
    before = set(threading.enumerate())
    connection = NatsConnection(address_of(nats_server), name="test")
    connection.subscribe("x", lambda _: None)
    connection.close()
    connection.close()
    eventually(lambda: set(threading.enumerate()) <= before, "no thread is left")
    with pytest.raises(LogUnavailable, match="closed"):
        connection.publish("x", b"")


class Tls:
    """A plain-account server with TLS and a user, and the files to speak to it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.ca, key = directory / "cert.pem", directory / "key.pem"
        subprocess.run(
            [
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                ),
                *(
                    "-days",
                    "2",
                    "-subj",
                    "/CN=localhost",
                    "-addext",
                    "subjectAltName=DNS:localhost,IP:127.0.0.1",
                ),
                *("-keyout", key, "-out", self.ca),
            ],
            check=True,
            capture_output=True,
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        config = directory / "nats.conf"
        config.write_text(
            f"host: 127.0.0.1\nport: {self.port}\n"
            f'tls {{ cert_file: "{self.ca}", key_file: "{key}" }}\n'
            "authorization { user: me, password: pass }\n"
        )
        self._process = subprocess.Popen([find_binary(), "-c", config], stderr=subprocess.DEVNULL)
        eventually(self._answers, "the TLS server listens")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[Tls]:
    server = Tls(tmp_path / "tls")
    yield server
    server.stop()


def test_tls_with_a_ca_and_a_password_works_both_ways(tls_server: Tls) -> None:
    address = NatsAddress(url=f"tls://me:pass@127.0.0.1:{tls_server.port}", ca=tls_server.ca)
    with connected(address) as connection, Wire(address, name="test") as wire:
        connection.subscribe("secure", lambda m: connection.publish(m.reply, b"yes"))
        assert connection.request("secure", b"", 5) == b"yes"
        assert wire.request("secure", b"", 5) == b"yes"


def test_a_certificate_nobody_vouches_for_is_refused(tls_server: Tls) -> None:
    with pytest.raises(
        ConnectionRefusedByServer, match=r"TLS failed: .*certificate verify failed.*check the CA"
    ):
        NatsConnection(NatsAddress(url=f"tls://me:pass@127.0.0.1:{tls_server.port}"), name="test")


def test_a_wrong_password_over_tls_names_the_user(tls_server: Tls) -> None:
    address = NatsAddress(url=f"tls://me:wrong@127.0.0.1:{tls_server.port}", ca=tls_server.ca)
    with pytest.raises(ConnectionRefusedByServer, match="refuses user 'me': Authorization Violation"):
        NatsConnection(address, name="test")


def test_a_server_without_tls_is_refused_when_tls_was_asked_for(nats_server: NatsServer) -> None:
    address = NatsAddress(url=nats_server.url.replace("nats://", "tls://"), creds=nats_server.creds_path)
    with pytest.raises(ConnectionRefusedByServer, match="speaks no TLS"):
        NatsConnection(address, name="test")


def test_a_ca_file_that_is_none_is_named(tmp_path: Path, nats_server: NatsServer) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("not a certificate")
    with pytest.raises(ConnectionRefusedByServer, match=r"ca\.pem.*name readable PEM files"):
        NatsAddress(url=nats_server.url, ca=ca).ssl_context()
    assert issubclass(ssl.SSLError, OSError)
