"""What is mounted where, as this process sees it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mounted(NamedTuple):
    """One mount. `root` is the directory of the file system that appears at `point`."""

    point: str
    root: str
    file_system: str
    options: frozenset[str]


def mounted(text: str | None = None) -> list[Mounted]:
    """Return all mounts, in mount order.

    Raises:
        OSError: they could not be read.
    """
    lines = (Path("/proc/self/mountinfo").read_text() if text is None else text).splitlines()
    return [_parsed(line) for line in lines]


def _parsed(line: str) -> Mounted:
    before, _, after = line.partition(" - ")
    fields, (file_system, _, options, *_) = before.split(" "), [*after.split(" "), "", ""]
    return Mounted(_plain(fields[4]), _plain(fields[3]), file_system, frozenset(options.split(",")))


def _plain(field: str) -> str:
    """Undo the kernel's way to write spaces and backslashes."""
    return _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), field)
