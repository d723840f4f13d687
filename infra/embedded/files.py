"""Small private files: written whole or not at all, readable by their owner alone."""

import os
from pathlib import Path
from typing import BinaryIO

_TAIL_BYTES = 16_384


def write_private(path: Path, text: str) -> None:
    """Replace a file with mode 0600, atomically and durably: a reader sees the old text or the new one."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_directory(path.parent)


def open_private(path: Path, flags: int = 0) -> BinaryIO:
    """Open a file for appending with mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | flags, 0o600)
    return os.fdopen(descriptor, "ab")


def private_directory(path: Path) -> Path:
    """Make a folder with mode 0700 (the mask of the process cannot widen it); an existing one is left alone."""
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def sync_directory(path: Path) -> None:
    """Make a folder's entries durable: without it a rename can be lost at a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def log_tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log for an error message; an unreadable log is said, never raised."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or f"({path} is empty)"


def trim_log(path: Path, bytes_max: int) -> None:
    """Once a log exceeds its bound, keep its last quarter and start it again from there.

    The writer appends and knows nothing of it; a line it writes in that moment may be lost.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= bytes_max:
            return
        file.seek(size - bytes_max // 4)
        kept = file.read(bytes_max // 4)
        file.truncate(0)
        file.seek(0)
        file.write(kept[kept.find(b"\n") + 1 :])
