"""A NATS connection of one blocking socket: enough to prove that a server lets a credential in and answers it.

Independent of the product's clients on purpose: what a test asks through it, no bug of theirs can answer.
"""

import base64
import json
import socket
from types import TracebackType
from typing import Self

from infra.credentials import Credential, sign
from infra.embedded.errors import ServerFailed

_LINE_BYTES_MAX = 64 * 1024
_ERROR_LINES_MAX = 16


class NatsConnection:
    """Connected and let in, or OSError (nobody there) or ServerFailed (refused, with the server's words).

    Every wait ends after `timeout_s`, with TimeoutError, an OSError.
    """

    def __init__(self, host: str, port: int, credential: Credential, *, timeout_s: float = 2.0) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._file = self._socket.makefile("rb")
        try:
            self._log_in(credential)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()

    def publish(self, subject: str, payload: bytes = b"", *, reply_to: str = "") -> None:
        """Send a message; whether it was allowed is known after the next `settle`."""
        head = " ".join(part for part in (subject, reply_to, str(len(payload))) if part)
        self._socket.sendall(f"PUB {head}\r\n".encode() + payload + b"\r\n")

    def subscribe(self, subject: str) -> None:
        """Listen to a subject; whether it was allowed is known after the next `settle`."""
        self._socket.sendall(f"SUB {subject} 1\r\n".encode())

    def settle(self) -> list[str]:
        """Return the server's errors about everything sent so far."""
        self._socket.sendall(b"PING\r\n")
        errors: list[str] = []
        while (line := self._line()) != "PONG":
            if line.startswith("-ERR"):
                errors.append(line.removeprefix("-ERR").strip().strip("'"))
                if len(errors) > _ERROR_LINES_MAX:
                    raise ServerFailed(f"the NATS server goes on refusing: {errors[-1]}")
            elif line.startswith("MSG "):
                self._payload(line)
        return errors

    def message(self) -> bytes:
        """Wait for the next message and return its payload; ServerFailed when the server complains instead."""
        while not (line := self._line()).startswith("MSG "):
            if line.startswith("-ERR"):
                raise ServerFailed(f"the NATS server refuses: {line.removeprefix('-ERR').strip()}")
        return self._payload(line)

    def request(self, subject: str, payload: bytes = b"", *, inbox: str = "_INBOX.probe") -> bytes:
        """Ask and return the answer."""
        self.subscribe(inbox)
        self.publish(subject, payload, reply_to=inbox)
        return self.message()

    def _log_in(self, credential: Credential) -> None:
        line = self._line()
        if not line.startswith("INFO "):
            raise ServerFailed(f"not a NATS server: it greets with {line[:40]!r}")
        nonce = json.loads(line.removeprefix("INFO ")).get("nonce", "")
        options = {"verbose": False, "pedantic": False, "lang": "fleetlog", "version": "1", "protocol": 1}
        options |= {"jwt": credential.jwt}
        if credential.seed is not None:
            signature = base64.urlsafe_b64encode(sign(credential.seed, nonce.encode()))
            options |= {"sig": signature.decode().rstrip("=")}
        self._socket.sendall(f"CONNECT {json.dumps(options)}\r\n".encode())
        if errors := self.settle():
            raise ServerFailed(f"the NATS server refuses the credential: {errors[0]}")

    def _line(self) -> str:
        line = self._file.readline(_LINE_BYTES_MAX)
        if not line:
            raise ConnectionResetError("the NATS server hung up")
        text = line.decode().rstrip("\r\n")
        if text == "PING":
            self._socket.sendall(b"PONG\r\n")
            return self._line()
        if text.startswith("-ERR") and "Authorization" in text:
            raise ServerFailed(f"the NATS server refuses the credential: {text}")
        return text

    def _payload(self, line: str) -> bytes:
        count = int(line.rsplit(" ", 1)[1])
        return self._file.read(count + 2)[:count]
