"""Reading the log: replays at full speed, one aggregate, the sequence at a time. Gaps are found, never skipped."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar

from actors.errors import LogUnavailable
from events import subjects
from events.codec import Malformed, decode
from events.envelope import Recorded
from infra.journal.address import ConnectionRefusedByServer
from infra.journal.jetstream import ApiError, stored
from infra.journal.pull import Pull, sequence_before
from infra.journal.stream import LogRefused, StreamState, stream_state
from infra.journal.wire import Wire, WireLost
from projections.vm import BrokenLog

_BATCH = 10_000
_HEARTBEAT_S = 1.0
_IDLE_WIRES_MAX = 4
_PAUSE_S = 0.1
_TRIES = 3
"""Within the time for a read: a wire that turns out dead must leave time for a new one."""

T = TypeVar("T")
UNANSWERED = (WireLost, LogUnavailable, ConnectionRefusedByServer, ApiError, LogRefused)


class Wires:
    """A few open wires for reads; each is used by one reader at a time.

    A read ends `timeout_s` after its last progress at the latest; one answer is waited for `answer_s`.
    """

    def __init__(self, connect: Callable[[float], Wire], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.answer_s = timeout_s / _TRIES
        self._connect = connect
        self._idle: list[Wire] = []
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[Wire]:
        """Lend a wire; after an exception it is closed, and the idle ones with it: they are as old."""
        wire = self._take()
        try:
            yield wire
        except BaseException:
            wire.close()
            self.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE_WIRES_MAX:
                self._idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        """Close the idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def _take(self) -> Wire:
        while True:
            with self._lock:
                if not self._idle:
                    break
                wire = self._idle.pop()
            with suppress(WireLost, ConnectionRefusedByServer):
                wire.receive_many(0.0005)  # leftovers, pings, and whether it is still there
                return wire
        return self._connect(self.answer_s)


class Reader:
    """Reads one cluster's log. Thread-safe; every read ends `timeout_s` after its last progress at the latest."""

    def __init__(self, wires: Wires, cluster: str) -> None:
        self._wires = wires
        self._prefix = subjects.log_prefix(cluster)
        self._stream = subjects.stream(cluster)
        self._cluster = cluster

    def state(self) -> StreamState:
        """Return where the log ends and how full it is.

        Raises:
            LogUnavailable: no answer, or no such stream any more.
        """
        return self._asked(lambda wire: stream_state(wire, self._cluster, self._wires.answer_s))

    def sequence_at(self, at: datetime) -> int:
        """Return the sequence of the last fact stored at or before `at`."""
        utc = at.astimezone(UTC)
        just_after = f"{utc:%Y-%m-%dT%H:%M:%S}.{utc.microsecond:06}001Z"
        return self._asked(
            lambda wire: sequence_before(wire, self._stream, just_after, self._wires.timeout_s)
        )

    def read(self, aggregate: str, after_version: int) -> tuple[Recorded, ...]:
        """Return the aggregate's facts after a version; up to the last one the stream's leader has now."""
        subject = self._prefix + aggregate
        last = self._last(subject)
        if last == 0:
            return ()
        facts = []
        for version, fact in enumerate(self._replayed(0, last, last, subject), 1):
            if fact.version != version:
                raise BrokenLog(
                    f"{aggregate}: sequence {fact.sequence} has version {fact.version}, not {version}"
                )
            if version > after_version:
                facts.append(fact)
        return tuple(facts)

    def replay(self, after: int, until: int | None, aggregates: str | None) -> Iterator[Recorded]:
        """Yield facts; see the port."""
        end = self.state().last_sequence
        if after > end:
            raise BrokenLog(f"the log ends at {end}, and {after} was read before: it lost its tail")
        until = end if until is None else min(until, end)
        if aggregates is None:
            yield from self._replayed(after, until, until, None)
            return
        subject = self._prefix + aggregates
        yield from self._replayed(after, until, self._last(subject), subject)

    def _replayed(self, after: int, until: int, last: int, subject: str | None) -> Iterator[Recorded]:
        """Yield facts of a subject up to `until`; `last` is the last there is of it."""
        end = min(until, last)
        progress = time.monotonic()
        while after < end:
            try:
                with self._wires.one() as wire:
                    pull = self._pull(wire, after, subject)
                    while after < end:
                        for sequence, stands_on, payload in pull.facts():
                            if sequence > until:
                                after = sequence
                                break
                            if subject is None and sequence != after + 1:
                                raise BrokenLog(_gap(after, sequence))
                            after = sequence
                            yield decoded(payload, sequence, stands_on, self._prefix)
                            if after >= end:
                                break
                        progress = time.monotonic()
                    pull.end()
            except UNANSWERED as error:
                if time.monotonic() - progress > self._wires.timeout_s:
                    raise LogUnavailable(f"the log cannot be read after {after}: {error}") from error
                time.sleep(_PAUSE_S)

    def _pull(self, wire: Wire, after: int, subject: str | None) -> Pull:
        return Pull(
            wire,
            self._stream,
            after=after,
            subject=subject,
            batch=_BATCH,
            heartbeat_s=_HEARTBEAT_S,
            timeout_s=self._wires.answer_s,
        )

    def _last(self, subject: str) -> int:
        """Return the sequence of a subject's last fact, as the stream's leader has it; 0 if there is none."""
        which = {"last_by_subj": subject}
        message = self._asked(lambda wire: stored(wire, self._stream, which, self._wires.answer_s))
        return 0 if message is None else message.sequence

    def _asked(self, ask: Callable[[Wire], T]) -> T:
        deadline = time.monotonic() + self._wires.timeout_s
        while True:
            try:
                with self._wires.one() as wire:
                    return ask(wire)
            except UNANSWERED as error:
                if time.monotonic() >= deadline:
                    raise LogUnavailable(f"the log does not answer: {error}") from error
                time.sleep(_PAUSE_S)


def decoded(payload: bytes, sequence: int, subject: bytes, prefix: str) -> Recorded:
    """Return the fact of a message.

    Raises:
        BrokenLog: it is no fact, or stands on the subject of another aggregate.
    """
    try:
        fact = decode(payload, sequence)
    except Malformed as error:
        raise BrokenLog(f"the log has something that is no fact: {error}") from error
    if subject != (prefix + fact.aggregate).encode():
        raise BrokenLog(f"sequence {sequence} says {fact.aggregate} and stands on {subject.decode()}")
    return fact


def _gap(after: int, sequence: int) -> str:
    return f"the log goes from sequence {after} to {sequence}: facts are missing; restore the server's store from a backup"
