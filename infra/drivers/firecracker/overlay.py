"""Overlay drives: one formatted template per size and host, and sparse copies of it. No spawn ever formats.

Formatting syncs, which on a busy disk waits behind everything that is still to be written: 86 ms become tens of
seconds. So a template is made in the background before it is needed, and a spawn that comes too early waits for it.
The file system has no journal: it dies with its machine.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.firecracker import paths
from infra.drivers.firecracker.images import EXT4_MAGIC, EXT4_MAGIC_OFFSET
from infra.network.commands import Commands

log = logging.getLogger(__name__)
FORMAT_TIMEOUT_S = 300.0
COPY_TIMEOUT_S = 30.0
FORMATTER = "mkfs.ext4"
_FICLONE = 0x40049409
_CHUNK_BYTES = 8 * 1024 * 1024
_WAIT_SLICE_S = 0.02
_STALE_S = 2 * FORMAT_TIMEOUT_S
_MIB = 1024 * 1024


class Templates:
    """The templates below one chroot base. Thread-safe; of several that want one at once, one builds it."""

    def __init__(self, chroot_base: str) -> None:
        self._base = chroot_base
        self._lock = threading.Lock()
        self._building: dict[int, _Build] = {}

    def prewarm(self, sizes_mib: set[int]) -> None:
        """Begin to make what is missing, in the background; a failure is logged, and tried again when needed."""
        for mib in sorted(sizes_mib):
            if not valid(paths.template(self._base, mib), mib):
                self._build(mib)

    def get(self, mib: int, abort: Abort) -> Path:
        """Return the template of this size, waiting for whoever makes it.

        Raises:
            DriverError: it could not be made, or the wait was called off.
        """
        path = paths.template(self._base, mib)
        if valid(path, mib):
            return path
        build = self._build(mib)
        while not build.done.wait(_WAIT_SLICE_S):
            if abort.is_set():
                raise DriverError("aborted", f"called off while {path} was made", transient=True)
        if build.error is not None:
            raise build.error
        return path

    def _build(self, mib: int) -> _Build:
        with self._lock:
            build = self._building.get(mib)
            if build is None:
                build = self._building[mib] = _Build()
                threading.Thread(
                    target=self._make, args=(mib, build), name=f"firecracker-overlay-{mib}", daemon=True
                ).start()
        return build

    def _make(self, mib: int, build: _Build) -> None:
        try:
            make(paths.template(self._base, mib), mib)
        except DriverError as error:
            build.error = error
        except OSError as error:
            build.error = DriverError(
                "exhausted", f"no overlay template of {mib} MiB: {error}", transient=True
            )
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            build.error = DriverError(
                "unknown", f"no overlay template of {mib} MiB: {error!r}", transient=True
            )
        if build.error is not None:
            log.warning("overlay template of %d MiB: %s", mib, build.error)
        with self._lock:
            self._building.pop(mib, None)
        build.done.set()


class _Build:
    """One making of a template."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: DriverError | None = None


def valid(path: Path, mib: int) -> bool:
    """Tell whether this is a whole template: of exactly the size, with a file system in it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != mib * _MIB:
                return False
            file.seek(EXT4_MAGIC_OFFSET)
            return file.read(2) == struct.pack("<H", EXT4_MAGIC)
    except OSError:
        return False


def make(path: Path, mib: int) -> None:
    """Make a template, whole or not at all; two processes that race both leave a whole one.

    Raises:
        DriverError: no formatter, or it failed.
        OSError: no room.
    """
    if shutil.which(FORMATTER) is None:
        raise DriverError(
            "missing", f"{FORMATTER} is not installed: apt-get install e2fsprogs", transient=False
        )
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _sweep(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with fresh.open("xb") as file:
            file.truncate(mib * _MIB)
        options = ["-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"]
        Commands().run(FORMATTER, *options, str(fresh), timeout_s=FORMAT_TIMEOUT_S)
        if not valid(fresh, mib):
            raise DriverError("unknown", f"{FORMATTER} made no file system in {fresh}", transient=True)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what builders left that were killed long ago."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            now = time.clock_gettime(time.CLOCK_REALTIME)
            if now - left.stat().st_mtime > _STALE_S:
                left.unlink()


def copy(source: Path, target: Path, abort: Abort, timeout_s: float = COPY_TIMEOUT_S) -> None:
    """Copy a file, sharing its blocks where the file system can, and leaving holes where it has some.

    Raises:
        DriverError: called off, no room, or too slow. The part that was copied is left to whoever owns `target`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            length = os.fstat(reader.fileno()).st_size
            if not _cloned(reader.fileno(), writer.fileno()):
                writer.truncate(length)
                _copy_data(reader.fileno(), writer.fileno(), length, abort, deadline)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        way_out = "; free some room, or give a smaller overlay_mib" if full else ""
        raise DriverError(
            "exhausted", f"{target} cannot be copied: {error.strerror}{way_out}", transient=True
        ) from error


def _cloned(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        return False
    return True


def _copy_data(reader: int, writer: int, length: int, abort: Abort, deadline: float) -> None:
    start = 0
    while start < length:
        try:
            start = os.lseek(reader, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        end = os.lseek(reader, start, os.SEEK_HOLE)
        while start < end:
            if abort.is_set():
                raise DriverError("aborted", "called off while its drive was copied", transient=True)
            if time.monotonic() > deadline:
                raise DriverError("timeout", "its drive took too long to copy", transient=True)
            piece = os.pread(reader, min(end - start, _CHUNK_BYTES), start)
            if not piece:
                return
            start += os.pwrite(writer, piece, start)
