"""Closed lives copied out of the log into a file that proves itself. The log keeps everything all the same."""

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from actors.ports import Journal
from events.codec import Malformed, decode, recorded_as_form
from events.envelope import Recorded, tag_of
from events.vm import Reaped

_FORMAT = 1
_PROGRESS_EVERY = 10_000
_CLOSED = tag_of(Reaped(reason="job-complete", slot="", evidence=""))
_LIVES = "vm.>"


class ArchiveRefused(Exception):  # noqa: N818
    """The file cannot be written, or is not (any more) what was archived; says which and what to do."""


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an archive. `digest` is the sha256 of its lines; `until` the sequence up to which it looked."""

    lives: int
    facts: int
    until: int
    digest: str


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    fact: msgspec.Raw


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    fleetlog_archive: int
    until: int


def archive(
    journal: Journal, path: Path, progress: Callable[[int, int], None] = lambda _done, _of: None
) -> Archived:
    """Write every life that has ended to `path`, read it back, and compare it with the log fact by fact.

    The file appears under its name only when that succeeded; an existing one is refused. gzip of JSON lines: a
    head, the facts in the log's order with their sequences, and what `Archived` says. `progress` is told how
    many facts of how many were looked at, over the three passes.

    Raises:
        ArchiveRefused: see there.
        BrokenLog, LogUnavailable: see `Journal.replay`.
    """
    if path.exists():
        raise ArchiveRefused(f"{path} exists and is not replaced: choose another name")
    until = journal.headroom().last_sequence
    watch = _Progress(progress, 3 * until)
    closed = _closed_lives(journal, until, watch)
    partial = path.with_name(path.name + ".partial")
    try:
        written = _write(partial, _facts_of(journal, closed, until, watch), len(closed), until)
        _compare(partial, _facts_of(journal, closed, until, watch), written)
        partial.rename(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise ArchiveRefused(
            f"{path} cannot be written: {error.strerror or error}; free the disk or choose another"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    watch.end()
    return written


def read_archive(path: Path) -> Iterator[Recorded]:
    """Yield the facts of an archive; what is not whole is found at the latest at its end.

    Raises:
        ArchiveRefused: it cannot be read, is cut short or was changed.
    """
    try:
        with gzip.open(path, "rb") as file:
            yield from _read(path, file)
    except (OSError, EOFError, gzip.BadGzipFile, msgspec.DecodeError, Malformed) as error:
        raise ArchiveRefused(f"{path} is not a whole archive: {error}; use another copy") from error


def verify_archive(path: Path) -> Archived:
    """Read an archive to its end and return what is in it; raises as `read_archive`."""
    facts = lives = 0
    for fact in read_archive(path):
        facts += 1
        lives += fact.tag == _CLOSED
    with gzip.open(path, "rb") as file:
        last = b""
        for line in file:
            last = line
    summary = msgspec.json.decode(last, type=Archived)
    if (summary.facts, summary.lives) != (facts, lives):
        raise ArchiveRefused(
            f"{path} has {facts} facts of {lives} lives and says {summary.facts} of {summary.lives}"
        )
    return summary


class _Progress:
    def __init__(self, tell: Callable[[int, int], None], of: int) -> None:
        self._tell, self._of, self._done = tell, of, 0

    def step(self) -> None:
        self._done += 1
        if self._done % _PROGRESS_EVERY == 0:
            self._tell(min(self._done, self._of), self._of)

    def end(self) -> None:
        self._tell(self._of, self._of)


def _closed_lives(journal: Journal, until: int, watch: _Progress) -> frozenset[str]:
    ended: dict[str, bool] = {}
    for fact in journal.replay(until=until, aggregates=_LIVES):
        ended[fact.aggregate] = fact.tag == _CLOSED
        watch.step()
    return frozenset(aggregate for aggregate, closed in ended.items() if closed)


def _facts_of(journal: Journal, closed: frozenset[str], until: int, watch: _Progress) -> Iterator[Recorded]:
    for fact in journal.replay(until=until, aggregates=_LIVES):
        watch.step()
        if fact.aggregate in closed:
            yield fact


def _write(partial: Path, facts: Iterator[Recorded], lives: int, until: int) -> Archived:
    encode = msgspec.json.Encoder().encode
    digest = hashlib.sha256()
    count = 0
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as raw:
        with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
            head = encode(_Head(fleetlog_archive=_FORMAT, until=until)) + b"\n"
            file.write(head)
            digest.update(head)
            for fact in facts:
                line = encode(_Line(sequence=fact.sequence, fact=msgspec.Raw(recorded_as_form(fact)))) + b"\n"
                file.write(line)
                digest.update(line)
                count += 1
            summary = Archived(lives=lives, facts=count, until=until, digest=digest.hexdigest())
            file.write(encode(summary) + b"\n")
        raw.flush()
        os.fsync(raw.fileno())
    return summary


def _compare(partial: Path, facts: Iterator[Recorded], written: Archived) -> None:
    kept = read_archive(partial)
    for fact in facts:
        if next(kept, None) != fact:
            raise ArchiveRefused(
                f"what was written is not what the log has at sequence {fact.sequence}: {partial}"
            )
    if next(kept, None) is not None or verify_archive(partial) != written:
        raise ArchiveRefused(f"what was written is not what the log has: {partial}")


def _read(path: Path, file: IO[bytes] | gzip.GzipFile) -> Iterator[Recorded]:
    digest = hashlib.sha256()
    first = file.readline()
    if msgspec.json.decode(first, type=_Head).fleetlog_archive != _FORMAT:
        raise ArchiveRefused(
            f"{path} is an archive of another format: read it with the version that wrote it"
        )
    digest.update(first)
    held = file.readline()
    for following in file:
        digest.update(held)
        line = msgspec.json.decode(held, type=_Line)
        yield decode(bytes(line.fact), line.sequence)
        held = following
    if msgspec.json.decode(held, type=Archived).digest != digest.hexdigest():
        raise ArchiveRefused(f"{path} was changed after it was written; use another copy")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
