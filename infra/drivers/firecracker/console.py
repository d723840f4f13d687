"""Lines of a guest's console and of Firecracker's log, as lines of ours with their source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from infra.drivers.firecracker import boot_failure
from infra.line_forwarder import Origin, forwarded

Source = Literal["firecracker-serial", "firecracker-vmm"]
Lines = Callable[[str, str], None]
"""Takes (vm, line); the line is a JSON object."""


def formed(line: str, vm: str, source: Source) -> str:
    """Return the line as one JSON object with its source.

    A console line that is JSON passes as it is; another is `debug`, or `error` where it tells of a failed boot.
    """
    origin = Origin(service="fleetlog", agent=vm, source=source)
    if source == "firecracker-serial" and not line.lstrip().startswith("{"):
        line = msgspec.json.encode({"level": boot_failure.level(line), "message": line}).decode()
    return forwarded(line, origin)


def boot_failed(vm: str, exit_code: int | None, what: boot_failure.Class) -> str:
    """Return the line that says of a machine that it never ran, and how Firecracker or its jailer ended."""
    by_signal = exit_code is not None and exit_code < 0
    fields = {
        "level": "error",
        "message": "boot failed",
        "exit_code": None if by_signal else exit_code,
        "signal": -exit_code if by_signal and exit_code is not None else None,
        "class": what,
    }
    origin = Origin(service="fleetlog", agent=vm, source="firecracker-vmm")
    return forwarded(msgspec.json.encode(fields).decode(), origin)


def key(vm: str, source: Source) -> str:
    """Return one word for both."""
    return f"{vm} {source}"


def passing(lines: Lines | None) -> Callable[[str, str], None] | None:
    """Return what takes (key, raw line) and passes the formed line on."""
    if lines is None:
        return None

    def take(named: str, line: str) -> None:
        vm, source = named.split(" ")
        lines(
            vm,
            formed(line, vm, "firecracker-serial" if source == "firecracker-serial" else "firecracker-vmm"),
        )

    return take
