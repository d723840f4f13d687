"""The directory of one running machine: whose it is, which process it is, what it wrote, and where it works.

    runs/<vm>/mark.json     whose it is; there from the directory's first moment on
              live/pid      its process number, written by the process itself before it becomes the agent
              process.json  number, start time and boot of the proven process
              output        what it writes; offset: how far that was passed on
              work/         its working directory
    logs/<vm>.log           the end of what it wrote, kept when all of the above is gone

`live` is renamed to `ended` as the first step of a teardown: a process that has not yet become the agent finds its
number's place gone and ends itself, so that none can appear behind a teardown's back.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from infra.host_process.files import mounts_below, replace_file

MARK = "mark.json"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Whose directory this is. The cookie is in the environment of all processes started for it."""

    vm: str
    owner: str
    boot_id: str
    cookie: str
    version: int = 1


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which process it is; start time in clock ticks since boot."""

    pid: int
    start_ticks: int
    boot_id: str
    executable: str


class RunDirectory:
    """One machine's directory; any part of it may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.live = path / "live"
        self.output = path / "output"
        self.offset = path / "offset"
        self.work = path / "work"

    @property
    def _unborn(self) -> Path:
        return self.path.with_name(f".new-{self.path.name}")

    def create(self, mark: Mark) -> None:
        """Make it, complete with its mark or not at all.

        Raises:
            FileExistsError: it is there; ids are never reused, so somebody else is at work.
            OSError: no room, no right.
        """
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self._unborn, self._unborn / "live", self._unborn / "work"):
            directory.mkdir(mode=0o700)
        (self._unborn / MARK).write_bytes(msgspec.json.encode(mark))
        self._unborn.rename(self.path)

    def exists(self) -> bool:
        """Tell whether any trace of it is there."""
        return self.path.exists() or self._unborn.exists()

    def mark(self) -> Mark | None:
        """Return whose it is, None when it does not say."""
        for directory in (self.path, self._unborn):
            with suppress(OSError, msgspec.MsgspecError):
                return msgspec.json.decode((directory / MARK).read_bytes(), type=Mark)
        return None

    def record(self, record: ProcessRecord) -> None:
        """Write down which process it is, whole or not at all."""
        replace_file(self.path / "process.json", msgspec.json.encode(record))

    def recorded(self) -> ProcessRecord | None:
        """Return which process it is, None when nobody came to write that down."""
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.path / "process.json").read_bytes(), type=ProcessRecord)
        return None

    def claimed_pid(self) -> int | None:
        """Return the number the process wrote down itself; no proof by itself, and None unless a positive integer."""
        for directory in (self.live, self.path / "ended"):
            with suppress(OSError, ValueError):
                pid = int((directory / "pid").read_text())
                return pid if pid > 0 else None
        return None

    def close_to_newcomers(self) -> None:
        """Make sure that no process becomes the agent from now on."""
        with suppress(FileNotFoundError):
            self.live.rename(self.path / "ended")

    def remove(self) -> None:
        """Take it all away.

        Raises:
            OSError: something of it is left; the message says what.
        """
        for directory in (self._unborn, self.path):
            if directory.exists():
                inside = mounts_below(directory)
                if inside:
                    raise OSError(
                        f"{inside[0]} is still mounted there; unmount it, it is not deleted through"
                    )
                shutil.rmtree(directory)
