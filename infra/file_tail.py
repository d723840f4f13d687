"""Follow a file that somebody untrusted appends to, within bounds, from an offset that survives a restart."""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

LINE_BYTES = 65_536
SLICE_BYTES = 1_048_576
QUEUE_LINES = 10_000
POLL_S = 0.1
CUT_MARKER = " [line cut]"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on: after the last line that was taken. `inside_cut`: within the rest of a line that was cut."""

    offset: int = 0
    inside_cut: bool = False


class FileTail:
    """Complete, non-empty lines of an append-only file, a slice at a time. Not thread-safe.

    Bounds: a line is cut at `line_bytes` with a marker and its rest discarded; one `poll` reads at most
    `slice_bytes`; at most `queue_lines` lines wait, the oldest are dropped and one marker at the front says how many
    were so far. Memory is bounded by these whatever the file holds. A part of the file that was punched out is
    skipped with a marker. Truncation and rotation are not followed.
    """

    def __init__(
        self,
        path: Path,
        position: Position | None = None,
        *,
        line_bytes: int = LINE_BYTES,
        slice_bytes: int = SLICE_BYTES,
        queue_lines: int = QUEUE_LINES,
    ) -> None:
        start = position or Position()
        self._path = path
        self._line_bytes = line_bytes
        self._slice_bytes = slice_bytes
        self._queue_lines = queue_lines
        self._descriptor: int | None = None
        self._offset = start.offset
        self._cutting = start.inside_cut
        self._partial = bytearray()
        self._queue: deque[tuple[str, Position]] = deque()
        self._taken = start
        self._dropped = 0
        self._marker_due = False

    @property
    def offset(self) -> int:
        """Bytes of the file that were read, holes included."""
        return self._offset

    @property
    def position(self) -> Position:
        """Where a new tail must start so that no line that was not taken is missed."""
        return self._taken

    @property
    def dropped(self) -> int:
        """Lines dropped so far because nobody took them in time."""
        return self._dropped

    def poll(self) -> int:
        """Read one slice; return its bytes, 0 when there is nothing new, no file, or it cannot be read just now."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            piece = os.pread(self._descriptor, self._slice_bytes, self._offset)
            if piece.startswith(b"\0"):
                piece = self._skip_hole(self._descriptor, piece)
        except OSError:
            return 0
        self._offset += len(piece)
        self._split(piece)
        return len(piece)

    def take(self, limit: int = QUEUE_LINES) -> list[str]:
        """Return the oldest waiting lines, at most `limit`, and move the position past them."""
        lines: list[str] = []
        if self._marker_due and limit > 0:
            lines.append(self._drop_marker())
            self._marker_due = False
        while self._queue and len(lines) < limit:
            line, self._taken = self._queue.popleft()
            lines.append(line)
        return lines

    def flush(self) -> None:
        """Let the unfinished last line count as a line; for the end of the writer."""
        if self._partial:
            self._push(bytes(self._partial), self._offset)
            self._partial.clear()

    def close(self) -> None:
        """Let go of the file. Repeatable."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _split(self, piece: bytes) -> None:
        start = self._offset - len(piece)
        *complete, rest = piece.split(b"\n")
        for line in complete:
            start += len(line) + 1
            if self._cutting:
                self._cutting = False
                self._advance(start)
            else:
                whole = bytes(self._partial) + line if self._partial else line
                self._push(whole, start)
            self._partial.clear()
        if rest and not self._cutting:
            self._partial += rest[: self._line_bytes + 1 - len(self._partial)]
            if len(self._partial) > self._line_bytes:
                self._cutting = True
                self._push(bytes(self._partial), self._offset)
                self._partial.clear()
        elif self._cutting and not self._queue:
            self._taken = Position(offset=self._offset, inside_cut=True)

    def _push(self, line: bytes, end: int) -> None:
        if not line:
            self._advance(end)
            return
        if len(line) > self._line_bytes:
            text = whole_characters(line[: self._line_bytes]).decode(errors="replace") + CUT_MARKER
        else:
            text = line.decode(errors="replace")
        self._wait(text, Position(offset=end, inside_cut=self._cutting))

    def _wait(self, text: str, end: Position) -> None:
        """Let a line wait to be taken; too many, and the oldest go."""
        self._queue.append((text, end))
        while len(self._queue) + self._marker_due > self._queue_lines:
            _, self._taken = self._queue.popleft()
            self._dropped += 1
            self._marker_due = True

    def _advance(self, end: int) -> None:
        """Move past bytes that made no line: with the last waiting line, or at once when none waits."""
        if self._queue:
            text, _ = self._queue[-1]
            self._queue[-1] = (text, Position(offset=end))
        else:
            self._taken = Position(offset=end)

    def _skip_hole(self, descriptor: int, piece: bytes) -> bytes:
        """Move past a part that was punched out, if the zeros are one."""
        try:
            data = os.lseek(descriptor, self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return piece
            data = os.fstat(descriptor).st_size
        if data <= self._offset:
            return piece
        lost = data - self._offset
        self._offset = data
        self._partial.clear()
        self._cutting = True  # what follows is the rest of a line that began in the hole
        self._wait(f"[{lost} bytes discarded to save disk]", Position(offset=data, inside_cut=True))
        return os.pread(descriptor, self._slice_bytes, data)

    def _drop_marker(self) -> str:
        return f"[{self._dropped} lines dropped: they came faster than they were taken]"


def whole_characters(piece: bytes) -> bytes:
    """Return the bytes without a UTF-8 character that was cut off at their end."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte & 0xC0 != 0x80:  # noqa: PLR2004 - not a continuation byte
            width = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4  # noqa: PLR2004
            return piece[:-back] if width > back else piece
    return piece


def last_lines(path: Path, lines: int, limit_bytes: int = SLICE_BYTES) -> tuple[str, ...]:
    """Return the last non-empty lines of a file, at most `lines` and from at most its last `limit_bytes`."""
    if lines <= 0:
        return ()
    with suppress(OSError), path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - limit_bytes))
        tail = file.read(limit_bytes).lstrip(b"\0")
        whole = [line for line in tail.split(b"\n") if line][-lines:]
        return tuple(
            line.decode(errors="replace")
            if len(line) <= LINE_BYTES
            else whole_characters(line[:LINE_BYTES]).decode(errors="replace") + CUT_MARKER
            for line in whole
        )
    return ()
