"""The API client against a socket that answers as told: what is sent, what is refused, what is waited for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from infra.drivers.firecracker.api import PAYLOAD_BYTES_MOST, Api, ApiError, Request, encode

NO_CONTENT = b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"


def answer(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


class Server:
    """Takes requests one by one and gives the next answer to each; None: no answer, b"": hangs up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[bytes | None] = []
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()
        for each in self._open:
            each.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                try:
                    piece = connection.recv(65536)
                except OSError:
                    return
                if not piece:
                    return
                data += piece
            head, _, data = data.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            while len(data) < length:
                data += connection.recv(65536)
            self.requests.append((head.decode(), data[:length]))
            data = data[length:]
            reply = self.answers.pop(0) if self.answers else NO_CONTENT
            if reply == b"":
                connection.close()
                return
            if reply is not None:
                connection.sendall(reply)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "api.sock")
    yield made
    made.close()


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    made = Api(server.path, timeout_s=5)
    yield made
    made.close()


def test_each_call_has_its_method_path_and_body(server: Server, api: Api) -> None:
    server.answers = [NO_CONTENT, NO_CONTENT, NO_CONTENT, NO_CONTENT, answer(200, b'{"state":"Running"}')]
    api.put_metadata({"latest": {"meta-data": {"a": "b"}}})
    api.clear_metadata()
    api.start()
    assert api.ctrl_alt_del("x86_64")
    assert api.instance()["state"] == "Running"
    firsts = [head.split("\r\n")[0] for head, _ in server.requests]
    assert firsts == [
        "PUT /mmds HTTP/1.1", "PUT /mmds HTTP/1.1", "PUT /actions HTTP/1.1", "PUT /actions HTTP/1.1", "GET / HTTP/1.1"
    ]  # fmt: skip
    bodies = [msgspec.json.decode(body) for _, body in server.requests[:4]]
    assert bodies == [
        {"latest": {"meta-data": {"a": "b"}}},
        {"latest": {"meta-data": {}}},
        {"action_type": "InstanceStart"},
        {"action_type": "SendCtrlAltDel"},
    ]
    assert server.requests[4][1] == b""
    assert "content-" not in server.requests[4][0].lower()
    assert server.connections == 1, "one connection, kept"


def test_an_arm_machine_has_no_keyboard(server: Server, api: Api) -> None:
    assert not api.ctrl_alt_del("aarch64")
    assert server.requests == []


def test_the_length_counts_bytes_and_not_characters() -> None:
    sent = encode(Request("PUT", "/mmds", {"name": "München 🚀"}))
    head, _, body = sent.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"Content-Type: application/json" in head
    assert len(body) > len(body.decode())


def test_requests_sent_in_one_go_are_answered_in_order(server: Server, api: Api) -> None:
    server.answers = [answer(200, b'{"n":1}') + answer(200, b'{"n":2}'), None]
    answers = api.call(Request("GET", "/1"), Request("GET", "/2"))
    assert [each.body for each in answers] == [b'{"n":1}', b'{"n":2}']


@pytest.mark.parametrize("status", [400, 413, 500])
def test_what_is_not_2xx_is_an_error_with_all_it_says(server: Server, api: Api, status: int) -> None:
    server.answers = [NO_CONTENT, answer(status, b'{"fault_message":"no such kernel"}'), NO_CONTENT]
    with pytest.raises(ApiError, match=rf"PUT /boot-source: {status} .*no such kernel") as caught:
        api.call(Request("PUT", "/a", {}), Request("PUT", "/boot-source", {}), Request("PUT", "/c", {}))
    assert (caught.value.path, caught.value.status) == ("/boot-source", status)
    assert caught.value.body == '{"fault_message":"no such kernel"}'
    api.start()
    assert server.connections == 1, "every answer was read, so the connection is good"


def test_a_socket_that_is_not_there_is_an_error_without_a_status(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"GET /: .*missing\.sock: No such file") as caught:
        Api(tmp_path / "missing.sock").instance()
    assert (caught.value.status, caught.value.body) == (None, "")


def test_a_connection_that_breaks_is_an_error_and_the_next_call_has_a_new_one(
    server: Server, api: Api
) -> None:
    server.answers = [b""]
    with pytest.raises(ApiError, match="closed the connection") as caught:
        api.start()
    assert caught.value.status is None
    api.start()
    assert server.connections == 2


@pytest.mark.parametrize(
    "reply", [b"nonsense\r\n\r\n", answer(200, b"[1]"), b"HTTP/1.1 200 x\r\nContent-Length: -5\r\n\r\n"]
)
def test_an_answer_that_is_none_is_an_error(server: Server, api: Api, reply: bytes) -> None:
    server.answers = [reply]
    with pytest.raises(ApiError):
        api.instance()


def test_a_body_over_the_limit_is_never_sent(server: Server, api: Api) -> None:
    with pytest.raises(ApiError, match=r"not sent: 5\d{4} bytes, Firecracker takes 51200"):
        api.put_metadata({"x": "y" * PAYLOAD_BYTES_MOST})
    api.put_metadata({"x": "y" * (PAYLOAD_BYTES_MOST - len('{"x":""}'))})
    assert [len(body) for _, body in server.requests] == [PAYLOAD_BYTES_MOST]


def test_silence_ends_at_the_deadline(server: Server) -> None:
    server.answers = [None]
    with pytest.raises(ApiError, match=r"no answer within 0\.1 s"):
        Api(server.path, timeout_s=0.1).start()


def test_an_abort_ends_the_request_under_way_and_refuses_later_ones(server: Server) -> None:
    server.answers = [None]
    abort = threading.Event()
    api = Api(server.path, abort, timeout_s=30)
    timer = threading.Timer(0.05, abort.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ApiError, match="aborted"):
        api.start()
    assert time.monotonic() - began < 5
    with pytest.raises(ApiError, match="aborted"):
        api.start()
    assert len(server.requests) == 1
    assert not api.wait(5)
    timer.join()


def test_the_wait_for_a_socket_ends_when_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "late.sock"
    api = Api(path)
    servers: list[Server] = []
    timer = threading.Timer(0.05, lambda: servers.append(Server(path)))
    timer.start()
    assert api.wait(10, 0.01)
    timer.join()
    api.close()
    servers[0].close()


def test_the_wait_for_a_socket_ends_without_one(tmp_path: Path) -> None:
    api = Api(tmp_path / "never.sock")
    assert not api.wait(0.05, 0.01)
    looks: list[float] = []

    def hopeless() -> bool:
        looks.append(time.monotonic())
        return len(looks) >= 3

    began = time.monotonic()
    assert not api.wait(60, 0.01, hopeless)
    assert time.monotonic() - began < 10
