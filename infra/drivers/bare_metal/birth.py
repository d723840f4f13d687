"""A small process of its own in which agents are born, each directly inside its cgroup and as the coordinator's child.

Run by `nursery.py`; standard library only. Moving a running process into a cgroup waits for all CPUs (8 to 20 ms
where nobody moved one just before); being born there does not. clone3 from Python is sound here and only here: this
process has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

CLONE_INTO_CGROUP = 0x200000000
CLONE_PARENT = 0x00008000
_SYS_CLONE3 = 435  # the same on every architecture
_ARGUMENTS = struct.Struct("11Q")
_LENGTH = struct.Struct("!I")
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps Python's lock over the call
NOT_JOINED = 125
NOT_EXECUTED = 127


def main(channel: socket.socket) -> None:
    """Serve until the coordinator is gone."""
    channel.set_inheritable(False)  # no agent may speak for us
    while (order := receive(channel)) is not None:
        send(channel, bear(order))


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Return the next message, None at the end."""
    head = _exactly(channel, _LENGTH.size)
    body = _exactly(channel, _LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else dict(json.loads(body))


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def _exactly(channel: socket.socket, length: int) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        piece = channel.recv(length - len(received))
        if not piece:
            return None
        received += piece
    return bytes(received)


def bear(order: dict[str, Any]) -> dict[str, Any]:
    """Start one agent; the answer has its `pid` if there was one, and `step` and `errno` if it did not come to run."""
    told, tell = os.pipe()
    try:
        group = os.open(order["cgroup"], os.O_RDONLY | os.O_DIRECTORY)
        try:
            pid = _clone(group)
        finally:
            os.close(group)
        if pid == 0:
            _become(order, tell)
        os.close(tell)
        tell = -1
        failure = os.read(told, 4096)
    except OSError as error:
        return {"step": "clone", "errno": error.errno}
    finally:
        os.close(told)
        if tell >= 0:
            os.close(tell)
    return {"pid": pid, **(json.loads(failure) if failure else {})}


def _clone(group: int) -> int:
    arguments = ctypes.create_string_buffer(
        _ARGUMENTS.pack(CLONE_INTO_CGROUP | CLONE_PARENT, 0, 0, 0, 0, 0, 0, 0, 0, 0, group)
    )
    pid = int(_libc.syscall(_SYS_CLONE3, arguments, _ARGUMENTS.size))
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def _become(order: dict[str, Any], tell: int) -> None:
    """Be the agent, in the steps of `launch.LAUNCHER`; never returns."""
    step, code = "join", NOT_JOINED
    try:
        os.setsid()
        claim = f"{order['run']}/live/pid"
        _write(claim, str(os.getpid()), os.O_CREAT | os.O_TRUNC)
        for procs in order["joins"]:
            _write(procs, "0", 0)
        os.close(os.open(claim, os.O_RDONLY))  # still wanted, or this raises
        step = "output"
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(output, target)
        step = "working directory"
        os.chdir(order["working_dir"])
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # Python's own choices are not the agent's
        step, code = "exec", NOT_EXECUTED
        os.execve(order["command"][0], order["command"], order["environment"])  # noqa: S606
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(tell, json.dumps({"step": step, "errno": error.errno}).encode())
    finally:
        os._exit(code)


def _write(path: str, text: str, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[2])))
