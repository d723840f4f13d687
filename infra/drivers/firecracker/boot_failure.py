"""What a guest's console says of a boot that failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from infra.file_tail import last_lines

Class = Literal["kernel-panic", "init-failure", "rootfs-mount-failure", "unknown"]
_CLASSES: tuple[tuple[Class, re.Pattern[str]], ...] = (
    ("rootfs-mount-failure", re.compile(r"unable to mount root fs|cannot open root device", re.IGNORECASE)),
    (
        "init-failure",
        re.compile(
            r"failed to execute /init|no working init found|requested init \S+ failed|attempted to kill init",
            re.IGNORECASE,
        ),
    ),
    ("kernel-panic", re.compile(r"kernel panic|not syncing", re.IGNORECASE)),
)
_FAILURE = re.compile(
    r"kernel panic|failed to execute /init|failed to start|systemd\[1\].*failed|unable to mount root fs"
    r"|cannot mount root|not syncing",
    re.IGNORECASE,
)
_LOOKED_AT_LINES = 400
Level = Literal["debug", "error"]


def level(line: str) -> Level:
    """Return how loud a console line is that says nothing of it itself."""
    return "error" if _FAILURE.search(line) else "debug"


def classify(console: str) -> Class:
    """Return the class of a failed boot.

    The more telling comes first: a kernel without root file system, or without init, panics as well.
    """
    for name, pattern in _CLASSES:
        if pattern.search(console):
            return name
    return "unknown"


def classify_file(path: Path) -> Class:
    """Return the class by the end of a console's file."""
    return classify("\n".join(last_lines(path, _LOOKED_AT_LINES)))
