"""What machines write: passed on line by line, and kept from filling the disk, in one thread."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from infra.file_tail import POLL_S, FileTail, Position
from infra.host_process.files import replace_file

log = logging.getLogger(__name__)
Sink = Callable[[str, str], None]
"""Takes (source, line); the source is what the file was followed as. Called from one thread; slow sinks cost the
machines lines, never us memory."""
_SAVE_EVERY_POLLS = 10
_FINAL_SLICES = 64
_BLOCK_BYTES = 4096
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


@dataclass
class _Followed:
    file: Path
    offset: Path
    tail: FileTail
    saved: Position
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while lines go to the sink
    finished: bool = False


class Output:
    """Follows the output of all running machines. The thread starts with the first one. Thread-safe."""

    def __init__(self, sink: Sink | None, live_log_bytes: int, name: str) -> None:
        self._name = name
        self._sink = sink
        self._live_log_bytes = live_log_bytes
        self._followed: dict[str, _Followed] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._unpunchable_said = False

    def follow(self, source: str, file: Path, offset: Path) -> None:
        """Follow a file from where it was left, also by a coordinator before us, as `offset` has it. Repeatable."""
        position = Position()
        with suppress(OSError, msgspec.MsgspecError):
            position = msgspec.json.decode(offset.read_bytes(), type=Position)
        with self._lock:
            if source in self._followed or self._stop.is_set():
                return
            self._followed[source] = _Followed(file, offset, FileTail(file, position), position)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-output", daemon=True)
                self._thread.start()

    def finish(self, source: str) -> None:
        """Pass on what is left, within a bound, and let go. Repeatable."""
        with self._lock:
            followed = self._followed.pop(source, None)
        if followed is None:
            return
        with followed.lock:
            followed.finished = True
            for _ in range(_FINAL_SLICES):
                if self._pass_on(source, followed) == 0:
                    break
            followed.tail.flush()
            self._deliver(source, followed)
            followed.tail.close()

    def close(self) -> None:
        """Save how far it came and end the thread. Repeatable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            left = list(self._followed.values())
            self._followed.clear()
        for followed in left:
            with followed.lock:
                self._save(followed)
                followed.tail.close()

    def _run(self) -> None:
        polls = 0
        while not self._stop.wait(POLL_S):
            polls += 1
            with self._lock:
                all_followed = list(self._followed.items())
            for source, followed in all_followed:
                with followed.lock:
                    if not followed.finished:
                        self._tend(source, followed, save=polls % _SAVE_EVERY_POLLS == 0)

    def _tend(self, source: str, followed: _Followed, *, save: bool) -> None:
        if self._sink is not None:
            self._pass_on(source, followed)
            if save:
                self._save(followed)
        self._bound(followed.file)

    def _pass_on(self, source: str, followed: _Followed) -> int:
        if self._sink is None:
            return 0
        read_bytes = followed.tail.poll()
        self._deliver(source, followed)
        return read_bytes

    def _deliver(self, source: str, followed: _Followed) -> None:
        if self._sink is None:
            return
        for line in followed.tail.take():
            try:
                self._sink(source, line)
            except Exception:
                log.exception("a line of %s could not be passed on", source)

    def _save(self, followed: _Followed) -> None:
        position = followed.tail.position
        if position != followed.saved:
            with suppress(OSError):
                replace_file(followed.offset, msgspec.json.encode(position))
                followed.saved = position

    def _bound(self, file: Path) -> None:
        """Give the disk back all but the newest half of the bound; offsets stay what they were."""
        try:
            status = file.stat()
            if status.st_blocks * 512 <= self._live_log_bytes:
                return
            length = (status.st_size - self._live_log_bytes // 2) // _BLOCK_BYTES * _BLOCK_BYTES
            if length > 0:
                punch(str(file), length)
                log.warning("%s is over %d bytes: its oldest part was discarded", file, self._live_log_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._unpunchable_said:
                self._unpunchable_said = True
                log.warning("the size of agents' output is not bounded on this file system: %s", error)


def punch(path: str, length: int) -> None:
    """Give back the first `length` bytes of a file without moving the others.

    Raises:
        OSError: the file system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, 0, length) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)
