"""Whether anything is left on the host, found by looking at the host and not by asking anybody."""

import fcntl
import os
import re
import socket
import struct
from pathlib import Path

from actors.decisions.addresses import address_of

_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1
_PROC = Path("/proc")
_ID = re.compile(rb"a-[0-9a-z]{26}")


def leaks(directory: Path, vms: frozenset[str]) -> tuple[str, ...]:
    """Return every process, cgroup and run directory that is left of these machines or of this folder's servers.

    Processes are found by their environment, command line, working directory and cgroup, so that one that changed
    its session or parent is found as well.
    """
    found: list[str] = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            why = _belongs(entry, str(directory).encode(), vms)
            if why is not None:
                found.append(f"process {entry.name}: {why}")
    marks = (mark for mark in directory.rglob("*") if mark.is_dir() and mark.name in vms)
    return (*found, *_taps(), *(f"directory {mark.relative_to(directory)}" for mark in marks))


def belonging(directory: Path) -> tuple[int, ...]:
    """Return the processes whose command line or environment names this folder, ours left out."""
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()) or _is_zombie(entry):
            continue
        try:
            text = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() + b"/" in text:
            found.append(int(entry.name))
    return tuple(found)


def _taps() -> tuple[str, ...]:
    """Return the TAPs of ours that are up: idle ones, kept for the next machine, are down."""
    up = []
    for interface in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name = interface.partition(":")[0].strip()
        if address_of(name) is not None and _is_up(name):
            up.append(f"TAP {name}")
    return tuple(up)


def _is_up(interface: str) -> bool:
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", interface.encode(), 0)
        flags: int = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
    return bool(flags & _IFF_UP)


def _is_zombie(process: Path) -> bool:
    """Tell whether it has ended and only waits for its parent, which for an orphan is init and not us."""
    try:
        return (process / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return True


def _belongs(process: Path, directory: bytes, vms: frozenset[str]) -> str | None:
    if _is_zombie(process):
        return None
    for name in ("cmdline", "environ", "cgroup"):
        try:
            text = (process / name).read_bytes()
        except OSError:
            continue  # it ended meanwhile, or is the kernel's
        for id_ in _ID.findall(text):
            if id_.decode() in vms:
                return f"{id_.decode()} in its {name}"
        if name == "cmdline" and directory in text:
            return "it serves the demonstration's folder"
    return None
