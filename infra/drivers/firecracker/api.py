"""Firecracker's HTTP API over its Unix socket: one connection, kept; every wait bounded and abortable."""

from __future__ import annotations

import platform
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.driver import Abort

PAYLOAD_BYTES_MOST = 51_200
"""Firecracker reads the rest of a longer body as requests, and closing then can kill it: it is never sent."""

ANSWER_TIMEOUT_S = 30.0
WAIT_S = 5.0
WAIT_INTERVAL_S = 0.1
_SLICE_S = 0.02
_ANSWER_BYTES_MOST = 1 << 20
_READ_BYTES = 65_536
_SHOWN_CHARACTERS = 1_000


class ApiError(Exception):
    """A request that did not succeed. `status` None: no answer came; `body` is what Firecracker said."""

    def __init__(
        self, method: str, path: str, *, status: int | None = None, body: str = "", why: str = ""
    ) -> None:
        said = f"{status} {body[:_SHOWN_CHARACTERS]}".strip() if status is not None else why
        super().__init__(f"{method} {path}: {said}")
        self.method = method
        self.path = path
        self.status = status
        self.body = body


class Request(NamedTuple):
    """One request; `document` None: no body."""

    method: str
    path: str
    document: Any = None


class Answer(NamedTuple):
    """Status and body."""

    status: int
    body: bytes


def encode(request: Request) -> bytes:
    """Return the request as it is sent; the length counts bytes.

    Raises:
        ApiError: its body is over the limit.
    """
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if request.document is None:
        return f"{head}\r\n".encode()
    body = msgspec.json.encode(request.document)
    if len(body) > PAYLOAD_BYTES_MOST:
        why = f"not sent: {len(body)} bytes, Firecracker takes {PAYLOAD_BYTES_MOST}"
        raise ApiError(request.method, request.path, why=why)
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Api:
    """One machine's API. Thread-safe. An `abort` that is set ends the request under way and refuses later ones."""

    def __init__(
        self, path: Path, abort: Abort | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._path = str(path)
        self._timeout_s = timeout_s
        self._abort = abort
        self._connection: socket.socket | None = None
        self._unread = b""
        self._lock = threading.Lock()

    def heed(self, abort: Abort | None) -> None:
        """Go by another abort from now on."""
        self._abort = abort

    def wait(
        self,
        timeout_s: float = WAIT_S,
        interval_s: float = WAIT_INTERVAL_S,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until the socket takes connections; False after the time, an abort, or when it is hopeless.

        Looks again at once at first and then ever less often, at least every `interval_s`. Never raises.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = min(0.0003, interval_s)
        while not self._aborted():
            with self._lock, suppress(OSError):
                self._connect()
                return True
            if hopeless() or time.monotonic() >= deadline:
                return False
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(pause_s * 1.1, interval_s)
        return False

    def call(self, *requests: Request) -> list[Answer]:
        """Send the requests in one go and return their answers.

        Raises:
            ApiError: the first that did not succeed; all of them were answered, or the connection is gone.
        """
        encoded = [encode(request) for request in requests]
        with self._lock:
            answers = self._exchange(requests, b"".join(encoded))
        for request, answer in zip(requests, answers, strict=True):
            if not 200 <= answer.status < 300:  # noqa: PLR2004
                body = answer.body.decode(errors="replace")
                raise ApiError(request.method, request.path, status=answer.status, body=body)
        return answers

    def instance(self) -> dict[str, Any]:
        """Return what Firecracker says of itself; `state` is `Not started`, `Running` or `Paused`."""
        (answer,) = self.call(Request("GET", "/"))
        try:
            return msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ApiError("GET", "/", status=answer.status, body=str(error)) from error

    def start(self) -> None:
        """Start the machine as it was configured."""
        self.call(Request("PUT", "/actions", {"action_type": "InstanceStart"}))

    def put_metadata(self, document: dict[str, Any]) -> None:
        """Replace what the guest can read of MMDS."""
        self.call(Request("PUT", "/mmds", document))

    def clear_metadata(self) -> None:
        """Leave nothing for the guest to read."""
        self.put_metadata({"latest": {"meta-data": {}}})

    def ctrl_alt_del(self, machine: str | None = None) -> bool:
        """Press the keys; False where there is no keyboard: only x86 has one.

        Raises:
            ApiError: refused, which it is before the start.
        """
        if (machine or platform.machine()) != "x86_64":
            return False
        self.call(Request("PUT", "/actions", {"action_type": "SendCtrlAltDel"}))
        return True

    def close(self) -> None:
        """Let go of the connection. Repeatable; a later call connects again."""
        with self._lock:
            self._drop()

    def _connect(self) -> socket.socket:
        if self._connection is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.settimeout(self._timeout_s)
                made.connect(self._path)
            except OSError:
                made.close()
                raise
            self._connection = made
            self._unread = b""
        return self._connection

    def _exchange(self, requests: Sequence[Request], encoded: bytes) -> list[Answer]:
        method, path, _ = requests[0]
        if self._aborted():
            raise ApiError(method, path, why="aborted")
        try:
            connection = self._connect()
            connection.sendall(encoded)
        except OSError as error:
            self._drop()
            raise ApiError(method, path, why=f"{self._path}: {error.strerror or error}") from error
        answers: list[Answer] = []
        deadline = time.monotonic() + self._timeout_s
        for method, path, _ in requests:
            try:
                answers.append(self._answer(connection, deadline))
            except (OSError, ValueError) as error:
                self._drop()
                raise ApiError(method, path, why=str(error)) from error
        return answers

    def _answer(self, connection: socket.socket, deadline: float) -> Answer:
        while b"\r\n\r\n" not in self._unread:
            self._unread += self._read(connection, deadline)
        head, _, rest = self._unread.partition(b"\r\n\r\n")
        status, length = _head(head)
        while len(rest) < length:
            rest += self._read(connection, deadline)
        self._unread = rest[length:]
        return Answer(status, rest[:length])

    def _read(self, connection: socket.socket, deadline: float) -> bytes:
        waiter = select.poll()
        waiter.register(connection, select.POLLIN)
        while not waiter.poll(_SLICE_S * 1000):
            if self._aborted():
                raise TimeoutError("aborted")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        piece = connection.recv(_READ_BYTES)
        if not piece:
            raise ConnectionError("Firecracker closed the connection before it answered")
        if len(self._unread) + len(piece) > _ANSWER_BYTES_MOST:
            raise ValueError(f"an answer of more than {_ANSWER_BYTES_MOST} bytes")
        return piece

    def _aborted(self) -> bool:
        return self._abort is not None and self._abort.is_set()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._unread = b""


def _head(head: bytes) -> tuple[int, int]:
    """Return status and body length."""
    first, *fields = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():  # noqa: PLR2004
        raise ValueError(f"not an HTTP answer: {first[:_SHOWN_CHARACTERS]!r}")
    length = 0
    for field in fields:
        name, _, value = field.partition(":")
        if name.strip().lower() == "content-length":
            length = int(value.strip())
    if not 0 <= length <= _ANSWER_BYTES_MOST:
        raise ValueError(f"an answer of {length} bytes")
    return int(words[1]), length
