"""Netlink, as far as bridges, TAPs and nft sets need it: messages, attributes, and a socket that is asked and answers."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from actors.errors import DriverError
from infra.network.namespace import entered

F_REQUEST, F_ACK = 0x1, 0x4
F_DUMP, F_CREATE, F_REPLACE, F_EXCL = 0x300, 0x400, 0x100, 0x200
NESTED = 0x8000

_F_DUMP_INTERRUPTED = 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_BUFFER_BYTES = 1 << 18
_SOCKET_BUFFER_BYTES = 1 << 21
_ANSWER_S = 10.0
_DUMPS_MOST = 20


class NetlinkError(Exception):
    """The kernel said no to one message of a request; `number` is the errno, `index` counts the messages."""

    def __init__(self, number: int, index: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number
        self.index = index


class Message(msgspec.Struct, frozen=True):
    """One message: its type, its flags besides "request", and its body."""

    type: int
    flags: int
    body: bytes


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute, padded."""
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """Return an attribute made of attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def text(kind: int, value: str) -> bytes:
    """Return an attribute of a zero-terminated string."""
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    """Return an attribute of an unsigned 32-bit number in host order."""
    return attribute(kind, struct.pack("=I", value))


def attributes(body: bytes) -> dict[int, bytes]:
    """Return the attributes of a body by their type; of equals the last."""
    return dict(each_attribute(body))


def each_attribute(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes of a body in order."""
    place = 0
    while place + 4 <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, place)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, body[place + 4 : place + length]
        place += length + (-length % 4)


class Netlink:
    """A kept connection to the kernel of one namespace. Calls of several threads take turns."""

    def __init__(self, protocol: int, namespace: Path | None) -> None:
        with entered(namespace):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self._socket.settimeout(_ANSWER_S)
        self._socket.bind((0, 0))
        self._lock = threading.Lock()
        self._sequence = 0

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._socket.close()

    def send(self, messages: Sequence[Message], *, acknowledged: int | None = None) -> None:
        """Send all messages at once and wait until the kernel has taken the last one (or number `acknowledged`).

        They are carried out in order, each on its own: one that fails does not stop those behind it.

        Raises:
            NetlinkError: of the first message the kernel refused.
            DriverError: it did not answer.
        """
        with self._lock:
            first = self._send(messages)
            last = first + (len(messages) - 1 if acknowledged is None else acknowledged)
            failure: NetlinkError | None = None
            for kind, _, sequence, body in self._answers():
                if kind != _NLMSG_ERROR or not first <= sequence < first + len(messages):
                    continue
                code = -struct.unpack_from("=i", body)[0]
                if code and failure is None:
                    failure = NetlinkError(code, sequence - first)
                # A batch refused at its first message gets no further answer.
                if sequence == last or (code and sequence == first and acknowledged is not None):
                    break
            if failure is not None:
                raise failure

    def dump(self, message: Message) -> list[bytes]:
        """Return the bodies of everything the kernel lists, from one consistent look.

        Raises:
            NetlinkError: it has no such thing.
            DriverError: it did not answer, or what was listed changed under us again and again.
        """
        asked = Message(message.type, message.flags | F_DUMP, message.body)
        for _ in range(_DUMPS_MOST):
            with self._lock:
                found = self._dump(asked)
            if found is not None:
                return found
        raise DriverError("timeout", "the kernel's lists changed at every look: try again", transient=True)

    def ask(self, message: Message) -> bytes:
        """Return the body of the one answer.

        Raises:
            NetlinkError: there is no such thing.
            DriverError: the kernel did not answer.
        """
        with self._lock:
            sequence = self._send([message])
            for kind, _, answered, body in self._answers():
                if answered != sequence:
                    continue
                if kind == _NLMSG_ERROR:
                    raise NetlinkError(-struct.unpack_from("=i", body)[0] or errno.ENOMSG, 0)
                return body
        raise AssertionError("answers never end by themselves")

    def _dump(self, message: Message) -> list[bytes] | None:
        sequence = self._send([message])
        found: list[bytes] = []
        whole = True
        for kind, flags, answered, body in self._answers():
            if answered != sequence:
                continue
            whole = whole and not flags & _F_DUMP_INTERRUPTED
            if kind in {_NLMSG_ERROR, _NLMSG_DONE}:
                code = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 0  # noqa: PLR2004
                if code == errno.EINTR:
                    return None
                if code:
                    raise NetlinkError(code, 0)
                return found if whole else None
            found.append(body)
        raise AssertionError("answers never end by themselves")

    def _send(self, messages: Sequence[Message]) -> int:
        first = self._sequence + 1
        parts = []
        for index, message in enumerate(messages):
            size = _HEADER.size + len(message.body)
            parts.append(_HEADER.pack(size, message.type, F_REQUEST | message.flags, first + index, 0))
            parts.append(message.body + b"\0" * (-size % 4))
        self._sequence = (first + len(messages)) % (1 << 31)
        try:
            self._socket.send(b"".join(parts))
        except OSError as error:
            raise _unanswered(error) from error
        return first

    def _answers(self) -> Iterator[tuple[int, int, int, bytes]]:
        while True:
            try:
                received = self._socket.recv(_BUFFER_BYTES)
            except OSError as error:
                raise _unanswered(error) from error
            place = 0
            while place + _HEADER.size <= len(received):
                length, kind, flags, sequence, _ = _HEADER.unpack_from(received, place)
                yield kind, flags, sequence, received[place + _HEADER.size : place + length]
                place += length + (-length % 4)


def _unanswered(error: OSError) -> DriverError:
    message = f"the kernel's netlink did not answer: {error.strerror or 'no answer in time'}"
    return DriverError("timeout" if isinstance(error, TimeoutError) else "unknown", message, transient=True)
