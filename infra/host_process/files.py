"""Files that outlive us: replaced in one step, kept in part, never deleted through a mount."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from infra.host_process.mountinfo import mounted

_COPY_BYTES = 65_536


def mounts_below(directory: Path) -> list[str]:
    """Return the mount points in a directory: an agent may have made some, and files behind them are not ours."""
    prefix = f"{directory.resolve()}/"
    return [each.point for each in mounted() if each.point.startswith(prefix)]


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old or the new content."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    fresh.rename(path)


def keep_log(output: Path, kept: Path, limit_bytes: int) -> None:
    """Keep the last `limit_bytes` of what a machine wrote; nothing when it wrote nothing."""
    with suppress(FileNotFoundError), output.open("rb") as source:
        size_bytes = source.seek(0, os.SEEK_END)
        if size_bytes == 0:
            return
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        left_bytes = min(size_bytes, limit_bytes)
        source.seek(size_bytes - left_bytes)
        with kept.open("wb") as target:
            while left_bytes > 0 and (piece := source.read(min(_COPY_BYTES, left_bytes))):
                target.write(piece)
                left_bytes -= len(piece)


def trim_logs(logs: Path, keep: int) -> None:
    """Remove the oldest kept logs until at most `keep` are left; ids sort by time."""
    with suppress(FileNotFoundError):
        for path in sorted(logs.glob("*.log"))[:-keep] if keep > 0 else logs.glob("*.log"):
            path.unlink(missing_ok=True)
