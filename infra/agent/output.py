"""The job's output on its way to the coordinator: whole lines in a bounded buffer, the newest kept."""

import threading
from collections import deque

from infra.agent.protocol import LINE_CHARACTERS_MAX

_CUT = b" [cut]"
_LINE_BYTES_MAX = LINE_CHARACTERS_MAX - len(_CUT)


class LineBuffer:
    """Keeps at most `lines_max` lines and `bytes_max` bytes; what is too much pushes out the oldest, counted.

    Fed by the threads that read the job's output, emptied by the one that sends. Never blocks a feeder: a slow
    network must not slow the job.
    """

    def __init__(self, *, lines_max: int = 4000, bytes_max: int = 1024 * 1024) -> None:
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._mutex = threading.Lock()

    def add(self, lines: list[bytes]) -> None:
        """Take whole lines."""
        with self._mutex:
            if (surplus := len(lines) - self._lines_max) > 0:
                self._dropped += surplus
                lines = lines[surplus:]
            self._lines.extend(lines)
            self._size += sum(map(len, lines))
            while len(self._lines) > self._lines_max or self._size > self._bytes_max:
                self._size -= len(self._lines.popleft())
                self._dropped += 1

    def take(self, *, lines_max: int, bytes_max: int) -> tuple[tuple[str, ...], int]:
        """Return the oldest lines, within both bounds (but at least one), and how many were lost before them."""
        taken: list[bytes] = []
        with self._mutex:
            left = bytes_max
            while self._lines and len(taken) < lines_max and (not taken or len(self._lines[0]) <= left):
                raw = self._lines.popleft()
                self._size -= len(raw)
                line = _cut(raw)
                left -= len(line)
                taken.append(line)
            dropped, self._dropped = self._dropped, 0
        return tuple(line.decode(errors="replace") for line in taken), dropped

    def __len__(self) -> int:
        with self._mutex:
            return len(self._lines)


class LineSplitter:
    """Cuts one stream into lines for a buffer. A line too long is cut and the rest of it left out."""

    def __init__(self, buffer: LineBuffer) -> None:
        self._buffer = buffer
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        if lines and self._skipping:
            del lines[0]
            self._skipping = False
        if lines:
            self._buffer.add(lines)
        if self._skipping:
            rest = b""
        elif len(rest) > _LINE_BYTES_MAX:
            self._buffer.add([rest])
            self._skipping, rest = True, b""
        self._rest = rest

    def end(self) -> None:
        """The stream is over: a last line without its end is a line."""
        if self._rest:
            self._buffer.add([self._rest])
            self._rest = b""


def _cut(line: bytes) -> bytes:
    line = line.removesuffix(b"\r")
    return line if len(line) <= _LINE_BYTES_MAX else line[:_LINE_BYTES_MAX] + _CUT
