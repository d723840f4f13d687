"""The NATS protocol over one blocking socket: for appends and replays, where every doubt must end in a closed socket.

nats-py serves everybody else (`connection.py`). Here it would not do: what it could not send is sent after the
next reconnect, long after the caller was told of a failure, and replaying through it is ten times slower. Here
a connection that answers late or wrongly is closed, and with it dies all that was on its way from us.
"""

import base64
import contextlib
import json
import secrets
import socket
import ssl
import time
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple, Self

from actors.errors import LogUnavailable
from infra.credentials import sign
from infra.journal.address import ConnectionRefusedByServer, NatsAddress, Server

_RECEIVE_BYTES = 1 << 18
_LINE_BYTES_MAX = 1 << 20
_TIMEOUT_SLACK_S = 0.02
"""How much longer than asked a wait may be: setting a socket's timeout is a system call, and most are alike."""
_MSG_PARTS_WITH_REPLY = 5
_HMSG_PARTS_WITH_REPLY = 6
_FIRST_H = ord("H")
_FIRST_M = ord("M")


class WireLost(LogUnavailable):
    """The connection broke, or did not answer in time, and was closed: what was sent may or may not have arrived."""


RawFrame = tuple[bytes, bytes, bytes, bytes]
"""The fields of a `Frame`, without the cost of making one: replays are counted in hundreds of thousands a second."""


class Frame(NamedTuple):
    """One message as it came: subject, reply subject, header block and payload, all undecoded."""

    subject: bytes
    reply: bytes
    header: bytes
    payload: bytes

    @property
    def status(self) -> int:
        """The status code of a header such as `NATS/1.0 503`, 0 when there is none."""
        line = self.header[8:12].strip()
        return int(line) if line.isdigit() else 0


class Wire:
    """A connection that is made at once and used by one thread at a time.

    Every answer comes on `inbox`.<anything>. Bounded: every wait has a time.

    Raises:
        LogUnavailable: no server of the address answers within `timeout_s`.
        ConnectionRefusedByServer: a server answered and will not have us.
    """

    def __init__(
        self, address: NatsAddress, *, name: str, timeout_s: float = 5.0, inbox_prefix: str = "_INBOX"
    ) -> None:
        self.address = address
        self.name = name
        self.inbox = f"{inbox_prefix}.{secrets.token_hex(9)}"
        self.info: dict[str, Any] = {}
        self._buffer = b""
        self._ready: deque[RawFrame] = deque()
        self._requests = 0
        self._waits_s = -1.0
        self._socket = self._connect(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up at once; also from another thread, whose wait then ends with WireLost. Repeatable."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, data: bytes, timeout_s: float) -> None:
        """Write protocol bytes.

        Raises:
            WireLost: not all of it went out in time.
        """
        try:
            self._wait_at_most(max(timeout_s, 0.001))
            self._socket.sendall(data)
        except OSError as error:
            self.close()
            raise WireLost(f"{self.address}: {words(error)}") from error

    def receive_many(self, timeout_s: float) -> list[RawFrame]:
        """Return the messages that have come, waiting for the first; empty when none came in time.

        Raises:
            WireLost: the connection broke.
            ConnectionRefusedByServer: the server says we lack a right.
        """
        if self._ready:
            frames = list(self._ready)
            self._ready.clear()
            return frames
        deadline = time.monotonic() + timeout_s
        frames = self._parse() if self._buffer else []
        while not frames:
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            try:
                self._wait_at_most(left)
                data = self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                return []
            except OSError as error:
                self.close()
                raise WireLost(f"{self.address}: {words(error)}") from error
            if not data:
                self.close()
                raise WireLost(f"{self.address}: the server hung up")
            self._buffer = self._buffer + data if self._buffer else data
            frames = self._parse()
        return frames

    def receive(self, timeout_s: float) -> Frame | None:
        """Return the next message, None when none came in time; raises as `receive_many`."""
        if not self._ready:
            self._ready.extend(self.receive_many(timeout_s))
        return Frame._make(self._ready.popleft()) if self._ready else None

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask and return the answer's payload; messages that belong to nobody are dropped.

        Raises:
            WireLost: no answer in time; the connection is closed.
            LogUnavailable: nobody serves the subject (JetStream is off, or not ready yet).
        """
        self._requests += 1
        reply = f"{self.inbox}.r{self._requests}"
        deadline = time.monotonic() + timeout_s
        self.send(publication(subject, reply, payload), timeout_s)
        expected = reply.encode()
        while True:
            frame = self.receive(max(deadline - time.monotonic(), 0.001))
            if frame is None:
                self.close()
                raise WireLost(f"{self.address}: no answer on {subject} within {timeout_s:g} s")
            if frame.subject == expected:
                if frame.status == 503:  # noqa: PLR2004 - the protocol's number
                    raise LogUnavailable(
                        f"{self.address}: nobody serves {subject}; is JetStream on for this account?"
                    )
                return frame.payload

    def _wait_at_most(self, seconds: float) -> None:
        """Bound the socket's waits by `seconds` and no more than the slack on top."""
        if not seconds <= self._waits_s <= seconds + _TIMEOUT_SLACK_S:
            self._socket.settimeout(seconds)
            self._waits_s = seconds

    def _parse(self) -> list[RawFrame]:
        frames: list[RawFrame] = []
        buffer, at, end = self._buffer, 0, len(self._buffer)
        while (eol := buffer.find(b"\r\n", at)) >= 0:
            first = buffer[at]
            if first == _FIRST_H:
                parts = buffer[at:eol].split(b" ")
                start = eol + 2
                body, stop = start + int(parts[-2]), start + int(parts[-1])
                if stop + 2 > end:
                    break
                reply = parts[3] if len(parts) == _HMSG_PARTS_WITH_REPLY else b""
                frames.append((parts[1], reply, buffer[start:body], buffer[body:stop]))
                at = stop + 2
            elif first == _FIRST_M:
                parts = buffer[at:eol].split(b" ")
                start = eol + 2
                stop = start + int(parts[-1])
                if stop + 2 > end:
                    break
                reply = parts[3] if len(parts) == _MSG_PARTS_WITH_REPLY else b""
                frames.append((parts[1], reply, b"", buffer[start:stop]))
                at = stop + 2
            else:
                self._control(buffer[at:eol])
                at = eol + 2
        self._buffer = buffer[at:]
        return frames

    def _control(self, line: bytes) -> None:
        if line == b"PING":
            self.send(b"PONG\r\n", 5.0)
        elif line.startswith(b"-ERR"):
            self.close()
            complaint = _complaint(line)
            if "ermissions" in complaint or "uthorization" in complaint:
                raise ConnectionRefusedByServer(
                    f"{self.address} refuses: {complaint}; {_who(self.address)} needs that right"
                )
            raise WireLost(f"{self.address}: {complaint}")

    def _connect(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        servers = self.address.servers
        failures: list[str] = []
        for index, server in enumerate(servers):
            left = max(deadline - time.monotonic(), 0.1) / (len(servers) - index)
            try:
                return self._connect_to(server, left)
            except ssl.SSLError as error:
                raise ConnectionRefusedByServer(
                    f"NATS at {server}: TLS failed: {error}; check the CA and certificate files given for NATS"
                ) from error
            except (OSError, WireLost) as error:
                failures.append(f"{server}: {words(error)}")
        raise LogUnavailable(
            f"no NATS server answers ({'; '.join(failures)}); start it, or name the right one with --nats"
        )

    def _connect_to(self, server: Server, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        raw: socket.socket = socket.create_connection((server.host, server.port), timeout=timeout_s)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.info = _greeting(raw)
            raw = self._secured(raw, server)
            raw.settimeout(max(deadline - time.monotonic(), 0.001))
            self._log_in(raw, server)
        except BaseException:
            raw.close()
            raise
        return raw

    def _log_in(self, raw: socket.socket, server: Server) -> None:
        hello = json.dumps(self._hello(server), separators=(",", ":"))
        raw.sendall(f"CONNECT {hello}\r\nPING\r\n".encode())
        while (line := _read_line(raw)) != b"PONG":
            if line.startswith(b"-ERR"):
                raise ConnectionRefusedByServer(
                    f"NATS at {server} refuses {_who(self.address)}: {_complaint(line)}; give the credentials of a "
                    "user that may use this log with --nats-creds, or in the URL"
                )
        raw.sendall(f"SUB {self.inbox}.* 1\r\n".encode())

    def _secured(self, raw: socket.socket, server: Server) -> socket.socket:
        offered = self.info.get("tls_required") or self.info.get("tls_available")
        if self.address.tls and not offered:
            raise ConnectionRefusedByServer(
                f"NATS at {server} speaks no TLS and TLS was asked for; switch it on there, or use nats:// without "
                "TLS files"
            )
        if not self.info.get("tls_required") and not self.address.tls:
            return raw
        return self.address.ssl_context().wrap_socket(raw, server_hostname=server.host)

    def _hello(self, server: Server) -> dict[str, Any]:
        hello: dict[str, Any] = {
            "verbose": False,
            "pedantic": False,
            "lang": "fleetlog",
            "version": "1",
            "name": self.name,
            "protocol": 1,
            "headers": True,
            "no_responders": True,
        }
        credential = self.address.credential()
        if credential is not None:
            hello["jwt"] = credential.jwt
            if credential.seed is not None:
                signature = base64.urlsafe_b64encode(
                    sign(credential.seed, self.info.get("nonce", "").encode())
                )
                hello["sig"] = signature.decode().rstrip("=")
        elif server.token is not None:
            hello["auth_token"] = server.token
        elif server.user is not None:
            hello |= {"user": server.user, "pass": server.password}
        return hello


def publication(subject: str, reply: str, payload: bytes, header: bytes = b"") -> bytes:
    """Return the protocol bytes of one message; `header` is a whole header block, or empty."""
    if header:
        head = f"HPUB {subject} {reply} {len(header)} {len(header) + len(payload)}\r\n"
    else:
        head = f"PUB {subject} {reply} {len(payload)}\r\n"
    return b"".join((head.encode(), header, payload, b"\r\n"))


def words(error: BaseException) -> str:
    """Return what an error says, its kind when it says nothing."""
    return str(error) or type(error).__name__


def _complaint(line: bytes) -> str:
    return line.decode(errors="replace").removeprefix("-ERR").strip().strip("'")


def _greeting(raw: socket.socket) -> dict[str, Any]:
    line = _read_line(raw)
    if not line.startswith(b"INFO "):
        raise WireLost(f"no NATS server: it greets with {line[:40]!r}")
    info: dict[str, Any] = json.loads(line[5:])
    return info


def _read_line(raw: socket.socket) -> bytes:
    """Read one line during the handshake, byte by byte: what follows may already be TLS."""
    line = bytearray()
    while not line.endswith(b"\r\n"):
        byte = raw.recv(1)
        if not byte:
            raise WireLost("the server hung up during the handshake")
        line += byte
        if len(line) > _LINE_BYTES_MAX:
            raise WireLost("no NATS server: its greeting has no end")
    return bytes(line[:-2])


def _who(address: NatsAddress) -> str:
    if address.creds is not None:
        return f"the user of {address.creds}"
    user = next((server.user for server in address.servers if server.user), None)
    if user is not None:
        return f"user {user!r}"
    return (
        "the token given"
        if any(server.token for server in address.servers)
        else "a client without credentials"
    )
